"""Conversion of a model's attention to another kind, and the training that follows it."""
