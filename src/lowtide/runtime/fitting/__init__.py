"""Finds a schedule that keeps the budget: measure, solve, try, and accept or refuse."""
