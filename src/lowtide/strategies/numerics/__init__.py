"""Compiled loops, arrays and linear programs."""
