"""The offloading paper's continuous model, and its conversion into lists of operations."""
