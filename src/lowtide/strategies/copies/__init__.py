"""Where copies go in a given order of computations."""
