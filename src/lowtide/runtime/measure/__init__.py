"""Measures the seconds and bytes of each stage, as a `Chain`."""
