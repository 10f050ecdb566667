"""Optimal checkpointing for heterogeneous chains: its experiments, run on a real device."""
