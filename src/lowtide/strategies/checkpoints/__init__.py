"""Schedules that are made of sets of checkpoints."""
