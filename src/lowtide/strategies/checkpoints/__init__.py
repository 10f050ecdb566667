"""Schedules made from sets of checkpoints."""
