"""Weights, weight gradients, optimizer state and activations in one order of computations."""
