"""A plan attached to a model, what it prints, and its file."""
