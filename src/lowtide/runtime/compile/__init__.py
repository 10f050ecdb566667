"""Compiled blocks and their variants."""
