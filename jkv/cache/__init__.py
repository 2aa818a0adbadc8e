"""KV caches as values: specification, pytree."""
