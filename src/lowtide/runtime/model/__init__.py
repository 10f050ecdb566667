"""The model and its calls."""
