"""Whether what is asked fits the model, the mesh and the memory, before anything large is loaded.

Knows sizes; reads no tensor.
"""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import gcd
from pathlib import Path

import jax

from jkv.config import (
    ConfigError,
    DecodeConfig,
    MeshSection,
    Place,
    Problem,
    SizesSection,
    load_config,
)
from jkv.config.compose import section_names
from jkv.config.mesh import EQUAL_RULES
from jkv.decode.batch import read_prompts
from jkv.decode.configured import configured_plan
from jkv.decode.pages import CachePlan
from jkv.layers.quantized import check_weight_codec
from jkv.models.model_config import ModelConfig
from jkv.models.sizes import sizes_of
from jkv.plan.decoder import Stored, input_widths
from jkv.sharding import would_divide

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_tokens(
    config: DecodeConfig,
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    *,
    remedy: str,
    max_rows: int | None = None,
    max_chunk: int | None = None,
) -> CachePlan:
    """Return the sizes of the prompts' cache, or the largest one; refuse what cannot be decoded or held.

    Args:
        config: the cache and the mesh.
        model: its sizes.
        prompts: token ids.
        num_new: tokens that follow each.
        remedy: what to do about prompts that are too long.
        max_rows: prompts of a batch, where they are decoded in turns; None is all.
        max_chunk: tokens of the longest step; None is the widest of a prefill.

    Raises:
        ValueError: an id is unknown, or the prompts do not fit the model, the mesh, the cache or the memory.
    """
    read_prompts(prompts, vocab_size=model.vocab_size)
    # A score reads what follows the last token, as if it were one new token. The last new token is not read.
    num_new = max(num_new, 1)
    check_length(model, max(map(len, prompts)) + num_new - 1, remedy=remedy)
    plans = []
    for turn in itertools.batched(prompts, max_rows or len(prompts)):
        check_divides(weight_sizes(model), config.mesh, name=config.model.path, num_sequences=len(turn))
        plan = configured_plan(config, model, Counter(map(len, turn)), num_new, max_chunk=max_chunk)
        check_memory(config, plan)
        plans.append(plan)
    return max(plans, key=lambda plan: plan.nbytes)


def check_length(model: ModelConfig, num_tokens: int, *, remedy: str) -> None:
    """Refuse sequences that are longer than the model reads; `remedy` says what to do."""
    if num_tokens > model.max_length:
        raise ValueError(f"the model reads at most {model.max_length} tokens, got {num_tokens}{remedy}")


def weight_sizes(model: ModelConfig) -> SizesSection:
    """Return the sizes of the model's weights, to which its windows are nothing."""
    return sizes_of(replace(model, windows=()))


def check_divides(
    sizes: SizesSection, mesh: MeshSection, *, name: str, num_sequences: int | None = None
) -> None:
    """Refuse mesh axes that do not divide what they split, all of them at once.

    Args:
        sizes: of the model.
        mesh: the devices, and what is split over them.
        name: the model's, for the message.
        num_sequences: rows of the batch; None where a device may have one more than another.

    Raises:
        ConfigError: names each rule.
    """
    experts = sizes.experts
    widths = [sizes.mlp_dim] if sizes.num_dense_layers else []
    widths += [experts.mlp_dim] if experts else []
    counted = {
        "seq": (num_sequences or 0, "sequences"),
        "q_head": (sizes.num_heads, "query heads"),
        "kv_head": (sizes.num_kv_heads, "key and value heads"),
        "embed": (sizes.embed_dim, "entries of the residual stream"),
        "mlp": (gcd(*widths), "entries of an MLP"),
        "expert": (experts.num_experts if experts else 0, "experts"),
        "vocab": (sizes.vocab_size, "token ids"),
    }
    hints = {
        "kv_head": _copies_hint(sizes, mesh),
        "seq": f"give a multiple of {mesh.shards('seq')} sequences",
    }
    problems = [
        Problem(
            Place(name),
            f"mesh.rules.{axis}",
            f"must split {what} evenly, got {size} over {mesh.shards(axis)} devices; "
            + _either(
                f"choose {would_divide(size, mesh.shards(axis))}", hints.get(axis, ""), _drop_hint(axis, mesh)
            ),
        )
        for axis, (size, what) in counted.items()
        if size % mesh.shards(axis)
    ]
    needed = _needed_copies(sizes, mesh)
    if not problems and mesh.kv_copies > needed:
        problems.append(
            Problem(
                Place(name),
                "mesh.kv_copies",
                f"must be the copies that {sizes.num_kv_heads // mesh.kv_copies} KV heads need to split over "
                f"{mesh.shards('kv_head')} devices, got {mesh.kv_copies}; set it to {needed}",
            )
        )
    problems += [
        Problem(
            Place(name),
            "mesh.axes",
            f"must each split something of the model, got {size} devices of {axis!r} that would all do the "
            f"same; give it a rule, as context: {axis}, or choose a mesh without it",
        )
        for axis, size in mesh.axes
        if size > 1 and axis not in _used_axes(mesh, has_experts=experts is not None)
    ]
    if problems:
        raise ConfigError(problems)


def _needed_copies(sizes: SizesSection, mesh: MeshSection) -> int:
    """Return the fewest copies of each KV head that its axis splits: no two are on one device."""
    ways = mesh.shards("kv_head")
    return ways // gcd(ways, sizes.num_kv_heads // mesh.kv_copies)


def _copies_hint(sizes: SizesSection, mesh: MeshSection) -> str:
    """Say how many copies more devices than KV heads may have, where the model can be copied so."""
    needed, group = _needed_copies(sizes, mesh), sizes.num_heads * mesh.kv_copies // sizes.num_kv_heads
    can_copy = sizes.latent is None and not sizes.is_qk_norm_wide and group % needed == 0
    return f"set mesh.kv_copies to {needed}" if can_copy else ""


def _drop_hint(axis: str, mesh: MeshSection) -> str:
    """Say which rules may be dropped with that of the axis, where its mesh axis splits something else too."""
    dropped = next((pair for pair in EQUAL_RULES if axis in pair), (axis,))
    rules = asdict(mesh.rules)
    if rules[axis] not in [to for rule, to in rules.items() if rule not in dropped]:
        return ""
    return "drop the rule" if len(dropped) == 1 else f"drop the rules of {' and '.join(dropped)}"


def _either(*remedies: str) -> str:
    *others, last = filter(None, remedies)
    return f"{', '.join(others)}, or {last}" if others else last


def _used_axes(mesh: MeshSection, *, has_experts: bool) -> set[str | None]:
    """Return the mesh axes that split a model or its cache."""
    return {to for rule, to in asdict(mesh.rules).items() if rule != "expert" or has_experts}


def declared_meshes() -> Iterator[tuple[str, MeshSection]]:
    """Find the meshes in reach by their names; what is wrong with a file is told to who names it."""
    for name in section_names("mesh"):
        with contextlib.suppress(ConfigError):
            yield name, load_config("smollm2-cpu", ["--mesh", name]).mesh


def check_packs(sizes: SizesSection, weights: Stored, mesh: MeshSection) -> None:
    """Refuse weights that do not pack as they are to be stored.

    Raises:
        ValueError: as `check_weight_codec`.
    """
    if weights in ("int8", "int4"):
        check_weight_codec(
            weights,
            widths=input_widths(sizes),
            has_experts=sizes.experts is not None,
            has_mesh=mesh.num_devices > 1,
        )


def check_memory(config: DecodeConfig, plan: CachePlan) -> None:
    """Refuse a cache that is larger than the memory of the mesh's devices."""
    # Latents lie whole on every device of the KV heads' axis.
    is_split = all(group.kind == "gqa" for group in plan.spec.groups)
    ways = config.mesh.shards("kv_head") if is_split else 1
    available = _memory_bytes(config.mesh.shards("page") * plan.spec.num_stripes * ways)
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
