"""Records what a stage does and runs it again."""
