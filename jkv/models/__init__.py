"""Decoder models, their families, weights and tokenizers."""
