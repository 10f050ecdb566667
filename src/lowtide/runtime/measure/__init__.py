"""Stages to a `Chain`: seconds and bytes, measured stage by stage."""
