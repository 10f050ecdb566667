"""Nested persistent schedules: the class that `rotor` and `revolve` search."""
