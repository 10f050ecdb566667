"""Runs a `Schedule` inside autograd."""
