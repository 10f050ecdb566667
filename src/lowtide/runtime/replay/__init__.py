"""Records what a stage does, and recomputes it."""
