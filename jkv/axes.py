"""The glossary of logical axis names, and the arrays that have them. Knows no mesh."""

import itertools
from collections.abc import Iterator, Mapping

AXES: dict[str, str] = {
    "seq": "rows of a batch, one sequence each",
    "time": "a row's new tokens in one step, padded to a bucket",
    "token": "all new tokens of a step, over its sequences",
    "q_head": "query heads",
    "kv_head": "key and value heads",
    "head_dim": "entries of one head",
    "latent": "entries of a compressed key-value vector",
    "rope": "rotary entries beside a latent",
    "page": "pages of a pool",
    "slot": "tokens of a page",
    "layer": "decoder layers",
    "embed": "width of the residual stream",
    "mlp": "width of a gated MLP",
    "expert": "experts of a mixture",
    "vocab": "token ids",
    "context": "stripes of one sequence's pages",
}

# No mesh axis splits them: every device has them whole.
NEVER_SPLIT = ("time", "token", "layer", "head_dim", "slot", "latent", "rope")

# The logical axes of what a model and its cache hold: a mesh axis may split one axis of each. Two of one
# dimension split it one after the other.
LOGICAL_ARRAYS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "embedding": ("vocab", "embed"),
    "query projection": ("embed", "q_head"),
    "key, value projection": ("embed", "kv_head"),
    "output projection": ("q_head", "embed"),
    "mlp in": ("embed", "mlp"),
    "mlp out": ("mlp", "embed"),
    "experts in": ("expert", "embed", "mlp"),
    "experts out": ("expert", "mlp", "embed"),
    "hidden": ("seq", "time", "embed"),
    "queries": ("seq", "time", "q_head", "head_dim"),
    "logits": ("seq", "vocab"),
    "pool": (("page", "context"), "kv_head", "slot", "head_dim"),
    "pool, latent": (("page", "context"), "slot", "latent"),
    "pool, rotary": (("page", "context"), "slot", "rope"),
}


def clashes(rules: Mapping[str, str | None]) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Find axes of one array that a mesh axis would both split.

    Args:
        rules: the mesh axis of each logical axis; None or absent is whole.

    Yields:
        The array, its axes, and the two; each two once.
    """
    seen = set()
    for array, dimensions in LOGICAL_ARRAYS.items():
        axes = tuple(axis for one in dimensions for axis in ((one,) if isinstance(one, str) else one))
        for first, second in itertools.combinations(axes, 2):
            name = rules.get(first)
            if name is not None and name == rules.get(second) and frozenset((first, second)) not in seen:
                seen.add(frozenset((first, second)))
                yield array, axes, first, second
