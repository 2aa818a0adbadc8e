"""Flax NNX layers that run with and without a cache."""
