"""Where to cut a model into stages."""
