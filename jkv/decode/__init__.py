"""Batches, sampling and the decode loop."""
