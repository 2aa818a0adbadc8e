"""Whether what is asked fits the model, the mesh and the memory, before anything large is loaded.

Knows sizes; reads no tensor.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax

from jkv.config import ConfigError, DecodeConfig, Place, Problem
from jkv.decode.batch import read_prompts
from jkv.decode.configured import configured_plan
from jkv.decode.pages import CachePlan
from jkv.models.families import ModelConfig

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_tokens(
    config: DecodeConfig,
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    *,
    remedy: str,
    max_chunk: int | None = None,
) -> CachePlan:
    """Return the sizes of the prompts' cache; refuse what cannot be decoded or held in memory.

    Args:
        config: the cache and the mesh.
        model: its sizes.
        prompts: token ids.
        num_new: tokens that follow each.
        remedy: what to do about prompts that are too long.
        max_chunk: tokens of the longest step; None is the widest of a prefill.

    Raises:
        ValueError: an id is unknown, or the prompts do not fit the model, the mesh, the cache or the memory.
    """
    read_prompts(prompts, vocab_size=model.vocab_size)
    check_length(model, max(map(len, prompts)) + num_new, remedy=remedy)
    check_divides(config, model, num_sequences=len(prompts))
    # A score reads what follows the last token, as if it were one new token.
    plan = configured_plan(config, model, Counter(map(len, prompts)), max(num_new, 1), max_chunk=max_chunk)
    check_memory(config, plan)
    return plan


def check_length(model: ModelConfig, num_tokens: int, *, remedy: str) -> None:
    """Refuse sequences that are longer than the model reads; `remedy` says what to do."""
    if num_tokens > model.max_length:
        raise ValueError(f"the model reads at most {model.max_length} tokens, got {num_tokens}{remedy}")


def check_divides(config: DecodeConfig, model: ModelConfig, *, num_sequences: int) -> None:
    """Refuse mesh axes that do not divide what they split, all of them at once."""
    sizes = {
        "seq": (num_sequences, "sequences"),
        "q_head": (model.num_heads, "query heads"),
        "kv_head": (model.num_kv_heads, "key and value heads"),
        "embed": (model.embed_dim, "entries of the residual stream"),
        "mlp": (model.mlp_dim, "entries of the MLP"),
        "vocab": (model.vocab_size, "token ids"),
        "layer": (model.num_layers, "layers"),
    }
    mesh = config.mesh
    reason = "must split {} evenly, got {} over {} devices; choose another mesh{} or drop the rule"
    # More devices than KV heads may have copies of them.
    hints = {"kv_head": ", set mesh.kv_copies"}
    problems = [
        Problem(
            Place(config.model.path),
            f"mesh.rules.{axis}",
            reason.format(what, size, mesh.shards(axis), hints.get(axis, "")),
        )
        for axis, (size, what) in sizes.items()
        if size % mesh.shards(axis)
    ]
    if problems:
        raise ConfigError(problems)


def check_memory(config: DecodeConfig, plan: CachePlan) -> None:
    """Refuse a cache that is larger than the memory of the mesh's devices."""
    # Latents lie whole on every device of the KV heads' axis.
    is_split = all(group.kind == "gqa" for group in plan.spec.groups)
    ways = config.mesh.shards("kv_head") if is_split else 1
    available = _memory_bytes(config.mesh.shards("page") * ways)
    if available is None or plan.nbytes <= available:
        return
    pages = "" if plan.num_pages is None else f" from a pool of {plan.num_pages[0]:,} pages"
    raise ValueError(
        f"the cache must fit in the memory of {available:,} bytes, got {plan.nbytes:,} bytes for "
        f"{plan.num_sequences:,} sequences of {plan.capacity:,} tokens{pages}; "
        "lower the number, --capacity, --num-pages or the page"
    )


def _memory_bytes(num_shards: int) -> int | None:
    """Return the memory of so many devices, the machine's where they share it; None where it is unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] * num_shards
    if not hasattr(os, "sysconf"):
        return None
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return installed if limit == "max" else min(installed, int(limit))
