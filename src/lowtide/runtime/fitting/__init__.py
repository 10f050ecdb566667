"""Finds a schedule within the budget: measure, solve, try, and accept or refuse."""
