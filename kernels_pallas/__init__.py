"""Attention over paged caches: definitions, plain-JAX forms and kernels. Never imports jkv."""
