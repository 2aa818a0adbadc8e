"""The loader: tensors of a source onto a mesh, each shard from its own piece of the file.

Knows rules and shardings; no format and no model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jkv.models.weights.rules import TensorRule, is_derived
from jkv.models.weights.source import TensorSource

# A box: (start, stop) along each axis.
_Box = tuple[tuple[int, int], ...]
# Rows compared at a time where a checkpoint stores a tensor twice.
_COMPARED_ROWS = 1024


def load_parameters(
    source: TensorSource, rules: Iterable[TensorRule], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Load every target from its tensors, one parameter at a time.

    The host holds one parameter's shards at once. A target without a sharding goes to the first device.

    Args:
        source: the checkpoint.
        rules: what fills what; see `tensor_rules`.
        targets: shape, dtype and sharding of each parameter, by its dotted path.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape or kind, or not finite; or a place of a
            parameter is filled twice or not at all. The message lists the names.
    """
    rules = _present(source, rules)
    pieces = match_tensors(source, rules, targets)
    _check_copies(source, rules)
    parameters = {name: _load(source, pieces[name], target) for name, target in targets.items()}
    check_finite(parameters)
    return parameters


def match_tensors(
    source: TensorSource, rules: Iterable[TensorRule], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, list[TensorRule]]:
    """Return the rules that fill each target, by its dotted path; headers alone are read.

    Raises:
        ValueError: as `load_parameters`, but for what the values of tensors show.
    """
    rules = _present(source, rules)
    _check_names(source, rules, targets)
    _check_tensors(source, rules, targets)
    pieces: dict[str, list[TensorRule]] = {name: [] for name in targets}
    for rule in rules:
        if not rule.is_copy:
            pieces[rule.target].append(rule)
    for name, target in targets.items():
        _check_cover(name, target.shape, pieces[name])
    return pieces


def _present(source: TensorSource, rules: Iterable[TensorRule]) -> list[TensorRule]:
    """Return the rules without copies that the checkpoint does not have."""
    return [rule for rule in rules if not rule.is_copy or rule.source in source.tensors]


def check_finite(parameters: Mapping[str, jax.Array]) -> None:
    """Raise a ValueError that names every parameter with a NaN or an infinity."""
    # One small program a shape: a single one for all parameters compiles for seconds.
    flags = {name: _is_finite(array) for name, array in parameters.items() if _is_floating(array.dtype)}
    finite = jax.device_get(flags)
    _refuse("every parameter must be finite, got NaN or infinity in", [n for n in finite if not finite[n]])


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _is_floating(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_castable(source: np.dtype, target: np.dtype) -> bool:
    """Return whether a tensor may be read as another dtype: one floating-point dtype as another."""
    return source == target or (_is_floating(source) and _is_floating(target))


def placed(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the target with a sharding: its own, or the first device."""
    sharding = target.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)


def _refuse(sentence: str, names: Iterable[str]) -> None:
    """Raise the sentence with the names, if there are any."""
    found = sorted(names)
    if found:
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise ValueError(f"{sentence} {found[:8]}{more}")


def _check_names(
    source: TensorSource, rules: list[TensorRule], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    sources: dict[str, list[TensorRule]] = {}
    for rule in rules:
        sources.setdefault(rule.source, []).append(rule)
    filled = {rule.target for rule in rules}
    _refuse(
        "each entry of a tensor must have one rule, got several or none for",
        [name for name in sources if not _is_placed_once(sources[name])],
    )
    _refuse("the checkpoint lacks tensors:", set(sources) - set(source.tensors))
    unused = {name for name in source.tensors if not is_derived(name)} - set(sources)
    _refuse("the checkpoint has tensors that the model does not use:", unused)
    _refuse("no tensor fills the parameters", set(targets) - filled)
    _refuse("the model lacks parameters that the checkpoint fills:", filled - set(targets))


def _is_placed_once(rules: list[TensorRule]) -> bool:
    """Return whether the rules of one tensor take all of its entries, each once."""
    parts = [rule.part for rule in rules if rule.part is not None]
    if not parts:
        return len(rules) == 1
    axis = parts[0][0]
    taken = sorted(entry for part in parts for entry in range(*part[1:]))
    is_alike = len(parts) == len(rules) and all(part[0] == axis for part in parts)
    return is_alike and taken == list(range(rules[0].shape[axis]))


def _check_tensors(
    source: TensorSource, rules: list[TensorRule], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    infos = source.tensors
    _refuse(
        "tensors must have the shape that the configuration gives, got",
        (
            f"{rule.source} {infos[rule.source].shape} for {rule.shape}"
            for rule in rules
            if infos[rule.source].shape != rule.shape
        ),
    )
    _refuse(
        "tensors must be floating-point where the parameter is, and of its dtype otherwise, got",
        (
            f"{rule.source} {infos[rule.source].dtype} for {targets[rule.target].dtype}"
            for rule in rules
            if not is_castable(infos[rule.source].dtype, targets[rule.target].dtype)
        ),
    )


def _check_cover(name: str, shape: tuple[int, ...], rules: list[TensorRule]) -> None:
    whole = tuple((0, size) for size in shape)
    boxes = [_box(rule) for rule in rules]
    _refuse(
        f"the tensors of parameter {name} {shape} must fit inside it, got",
        (
            f"{rule.source} {rule.placed_shape} at {rule.index or 'its origin'}"
            for rule in rules
            if _overlap(_box(rule), whole) != _box(rule) or _sizes(_box(rule)) != rule.placed_shape
        ),
    )
    if not _fill_once(boxes, shape):
        raise ValueError(
            f"the tensors of parameter {name} {shape} must fill each place once, "
            f"got {[f'{rule.source} at {_box(rule)}' for rule in rules]}"
        )


def _fill_once(boxes: list[_Box], shape: tuple[int, ...]) -> bool:
    """Return whether each cell of the grid that the boxes' borders draw lies in one box.

    Counted in cells, because a stack of experts has too many boxes to compare each with each.
    """
    borders = [sorted({0, size, *(x for box in boxes for x in box[axis])}) for axis, size in enumerate(shape)]
    cells = [{border: cell for cell, border in enumerate(along)} for along in borders]
    count = np.zeros([len(along) - 1 for along in borders], np.int32)
    for box in boxes:
        count[tuple(slice(at[start], at[stop]) for at, (start, stop) in zip(cells, box, strict=True))] += 1
    return bool((count == 1).all())


def _check_copies(source: TensorSource, rules: list[TensorRule]) -> None:
    originals = {rule.target: rule.source for rule in rules if not rule.is_copy}
    pairs = [(rule.source, originals[rule.target]) for rule in rules if rule.is_copy]
    _refuse(
        "a second copy of a tied tensor must equal the first, got another",
        (f"{copy} (of {original})" for copy, original in pairs if not _are_equal(source, copy, original)),
    )


def _are_equal(source: TensorSource, a: str, b: str) -> bool:
    info = source.tensors[a]
    if info != source.tensors[b]:
        return False
    starts = range(0, info.shape[0], _COMPARED_ROWS)
    rows = [(slice(start, start + _COMPARED_ROWS),) for start in starts]
    return all(source.read(a, index).tobytes() == source.read(b, index).tobytes() for index in rows)


def _load(source: TensorSource, rules: list[TensorRule], target: jax.ShapeDtypeStruct) -> jax.Array:
    # Devices that hold the same shard share one block of host memory.
    blocks: dict[_Box, np.ndarray] = {}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        box = tuple(s.indices(size)[:2] for s, size in zip(index, target.shape, strict=True))
        if box not in blocks:
            blocks[box] = _read_box(source, rules, box, target.dtype)
        return blocks[box]

    return jax.make_array_from_callback(target.shape, placed(target).sharding, block)


def _read_box(source: TensorSource, rules: list[TensorRule], box: _Box, dtype: np.dtype) -> np.ndarray:
    """Read a box of a parameter from the tensors that reach into it."""
    out = np.empty(_sizes(box), dtype)
    for rule in rules:
        shared = _overlap(_box(rule), box)
        if shared is not None:
            # An overflow becomes an infinity, which `check_finite` reports with its parameter.
            with np.errstate(over="ignore"):
                out[_slices(shared, box)] = _read_piece(source, rule, _slices(shared, _box(rule)))
    return out


def _read_piece(
    source: TensorSource, rule: TensorRule, index: tuple[slice, ...]
) -> Shaped[np.ndarray, "..."]:
    """Read a piece of what a rule places, in the axes of its place."""
    if rule.head_copies is not None:
        return _read_copies(source, rule, rule.head_copies, index)
    if rule.permuted_heads is not None:
        return _read_rows(source, rule, rule.permuted_heads, index)
    # A stack's axis is not the tensor's.
    pieces = list(index[len(index) - len(rule.shape) :])
    if rule.is_transposed:
        pieces[-2:] = reversed(pieces[-2:])
    if rule.part is not None:
        axis, *entries = rule.part
        taken = range(*entries)[pieces[axis]]
        pieces[axis] = slice(taken.start, taken.stop, taken.step)
    read = source.read(rule.source, tuple(pieces))
    if rule.is_transposed:
        read = read.swapaxes(-1, -2)
    return read.astype(np.float32) + np.float32(rule.offset) if rule.offset else read


def _read_copies(
    source: TensorSource, rule: TensorRule, head_copies: tuple[int, int], index: tuple[slice, ...]
) -> Shaped[np.ndarray, "..."]:
    """Read rows of heads that each stand there several times, side by side."""
    num_heads, copies = head_copies
    rows, *columns = index
    head_dim = rule.placed_shape[0] // (num_heads * copies)
    first, last = rows.start // (copies * head_dim), -(-rows.stop // (copies * head_dim))
    once = replace(rule, head_copies=None)
    read = _read_piece(source, once, (slice(first * head_dim, last * head_dim), *columns))
    heads = read.reshape(last - first, head_dim, *read.shape[1:]).repeat(copies, axis=0)
    start = first * copies * head_dim
    return heads.reshape(-1, *read.shape[1:])[rows.start - start : rows.stop - start]


def _read_rows(
    source: TensorSource, rule: TensorRule, num_heads: int, index: tuple[slice, ...]
) -> Shaped[np.ndarray, "..."]:
    """Read rows, rotary pairs in halves.

    The interleaved order has a head's pair at (2 j, 2 j + 1), ours at (j, j + head_dim / 2): whole
    heads are read and turned.
    """
    rows, *columns = index
    head_dim = rule.shape[0] // num_heads
    first, last = rows.start // head_dim, -(-rows.stop // head_dim)
    read = source.read(rule.source, (slice(first * head_dim, last * head_dim), *columns))
    pairs = read.reshape(last - first, head_dim // 2, 2, *read.shape[1:])
    halves = pairs.swapaxes(1, 2).reshape(read.shape)
    return halves[rows.start - first * head_dim : rows.stop - first * head_dim]


def _box(rule: TensorRule) -> _Box:
    return rule.index or tuple((0, size) for size in rule.placed_shape)


def _sizes(box: _Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _overlap(a: _Box, b: _Box) -> _Box | None:
    if len(a) != len(b):
        return None
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _slices(box: _Box, origin: _Box) -> tuple[slice, ...]:
    return tuple(slice(a - b, z - b) for (a, z), (b, _) in zip(box, origin, strict=True))
