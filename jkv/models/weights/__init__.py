"""Weights on disk, in every format that jkv reads, and their way onto a mesh."""
