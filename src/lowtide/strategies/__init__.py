"""The algorithms: one a file, each a pure function from a `Problem` to an `Answer`. `base.REGISTRY` lists them."""
