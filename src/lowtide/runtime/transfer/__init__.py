"""Offloads values to a lower tier and fetches them back."""
