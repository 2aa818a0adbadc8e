"""Caches driven through histories of appends, truncations, forks and moves, beside a dense model of them.

The model keeps each sequence's heads as their codec reads them, so that what differs is never the codec.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import ops
from jkv.cache import sequences
from jkv.cache.allocator import PageAllocator
from jkv.cache.cache import Cache
from jkv.cache.codec import Codec, PoolLayout
from jkv.cache.encoding import decode, encode, encode_run, unpack
from jkv.cache.runs import rounded
from jkv.cache.spec import CacheGroup, CacheSpec, GroupKind

from .poison import poison

NUM_LAYERS, LAYER = 2, 1
WINDOW = 20
# A form's programs run for less time than it takes to optimize them.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Heads, or runs of slots, that codecs read back at once: forms of one head size share that program.
NUM_READ = 64


@dataclass(frozen=True)
class Form:
    """What a history runs on.

    Attributes:
        layout: dense or paged tables; window and paged_window overwrite what the window has left.
        codec: of keys, and of values after a slash; of latents, and of their rotated parts.
        page_size: tokens of a page.
        head_dim: entries of a head.
        heads: query heads and KV heads.
        num_rows: sequences.
        pages_per_row: capacity of a sequence, in pages.
        kind: keys and values, or latents with a rotated part of as many entries in the place of values.
        pool_layout: how slots lie in a page.
    """

    layout: str
    codec: str = "f32"
    page_size: int = 8
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)
    num_rows: int = 3
    pages_per_row: int = 5
    kind: GroupKind = "gqa"
    pool_layout: PoolLayout = "plain"

    @property
    def window(self) -> int | None:
        return WINDOW if "window" in self.layout else None

    @property
    def spec(self) -> CacheSpec:
        codec, _, second = self.codec.partition("/")
        parts = {"value_codec": second or None}
        if self.kind == "latent":
            parts = {"kind": self.kind, "rope_dim": self.head_dim, "rope_codec": second or None}
        group = CacheGroup(NUM_LAYERS, self.heads[1], self.head_dim, codec, window=self.window, **parts)
        sizes = {"page_size": self.page_size, "max_chunk": self.page_size}
        return CacheSpec.create([group], **sizes, layout=self.pool_layout)

    @property
    def tolerance(self) -> float:
        # Raw bfloat16 pages are multiplied as they are: queries and probabilities are rounded as well.
        return 2**-7 if "bf16" in self.codec else 2e-5


class History:
    """A cache and the model of what it holds.

    Args:
        form: what the cache is.
        seed: of all heads.
        known: what attention should give in each append, where it has been computed: a history that takes the
            same steps in another layout has the same answers.
    """

    def __init__(self, form: Form, seed: int = 0, known: Sequence[np.ndarray] = ()):
        self.form = form
        self.known = iter(known)
        self.random = np.random.default_rng(seed)
        spec, rows = form.spec, form.num_rows
        (group,) = spec.groups
        self.scales = tuple(
            jnp.full((NUM_LAYERS, group.num_kv_heads), 5.0 / (127 if codec.entry == "int8" else 448))
            if codec.scaling == "static"
            else None
            for codec in group.codecs
        )
        capacity = form.pages_per_row * form.page_size
        self.width = spec.pages_for(capacity)
        sizes = {"num_sequences": rows, "capacity": capacity, "scales": [self.scales]}
        self.allocator = None
        if form.layout.startswith("paged"):
            # As many as a dense cache's, so that they share programs.
            self.allocator = PageAllocator(rows * self.width)
            cache = Cache.paged(spec, **sizes, num_pages=[self.allocator.num_pages])
        else:
            cache = Cache.dense(spec, **sizes)
        self.cache = poison(cache)
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self.heads = [np.zeros((2, 0, *form.heads[1:], form.head_dim), np.float32) for _ in range(rows)]

    def append(self, lens: list[int], time: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Add tokens to each row in one step of `time`; return what attention gives and what it should."""
        form = self.form
        time = max(lens) if time is None else time
        self._own(lens)
        query = self.random.standard_normal((form.num_rows, time, form.heads[0], form.head_dim), np.float32)
        shape = (2, form.num_rows, time, form.heads[1], form.head_dim)
        # Of few bits, so that a rotation's sums are exact: cache and model round at the same borders.
        key, value = np.round(16 * self.random.standard_normal(shape, np.float32)) / 16
        arrays = (jnp.asarray(array) for array in (query, key, value))
        out, self.cache = _step(self.cache, jnp.array(lens, jnp.int32), *arrays, form.window, form.kind)
        new = self._as_read(key, value)
        for row, count in enumerate(lens):
            self.heads[row] = np.concatenate([self.heads[row], new[:, row, :count]], axis=1)
        self.check_lengths()
        known = next(self.known, None)
        return np.asarray(out), self._expected(query, lens) if known is None else known

    def truncate(self, lengths: list[int]) -> None:
        self.cache = self.cache.truncate(jnp.array(lengths, jnp.int32))
        for row, length in enumerate(lengths):
            self.heads[row] = self.heads[row][:, :length]
            if self.allocator and self.form.window is None:
                kept = self.form.spec.pages_for(self.heads[row].shape[1])
                self.allocator.free(self.pages[row][kept:])
                del self.pages[row][kept:]
        self.check_lengths()

    def fork(self, rows: list[int]) -> None:
        """Make row `i` continue row `rows[i]`: paged tables share pages, dense ones copy them."""
        indices = jnp.array(rows, jnp.int32)
        if self.allocator is None:
            self.cache = _select(self.cache, indices)
        else:
            self.cache = _fork(self.cache, indices, [self._fork_pages(rows)])
        self.heads = [self.heads[row] for row in rows]
        self.check_lengths()

    def clear(self, row: int) -> None:
        self.cache = sequences.clear(self.cache, jnp.arange(self.form.num_rows) == row)
        self.heads[row] = self.heads[row][:, :0]
        if self.allocator:
            self.allocator.free(self.pages[row])
            self.pages[row] = []
        self.check_lengths()

    def check_lengths(self) -> None:
        assert self.cache.lengths.tolist() == [heads.shape[1] for heads in self.heads]
        assert self.cache.num_dropped.tolist() == [0] * self.form.num_rows
        if self.allocator:
            self.allocator.check()

    def _own(self, lens: list[int]) -> None:
        """Give each row of a paged cache the pages for its new tokens."""
        if self.allocator is None:
            return
        copies = []
        for row, count in enumerate(lens):
            first = self.heads[row].shape[1] // self.form.page_size
            if count and self.form.window is None and first < len(self.pages[row]):
                pair = self.allocator.make_writable(self.pages[row], first)
                assert pair is not None
                copies.append(pair)
            needed = self.form.spec.pages_for(self.heads[row].shape[1] + count) - len(self.pages[row])
            fresh = self.allocator.allocate(max(needed, 0))
            assert fresh is not None
            self.pages[row] += fresh
        if copies:
            pairs = np.full((2, self.form.num_rows), -1, np.int32)
            pairs[:, : len(copies)] = np.reshape(copies, (-1, 2)).T
            self.cache = _copy_pages(self.cache, *jnp.asarray(pairs))
        self._assign()

    def _assign(self) -> None:
        table = np.full((self.form.num_rows, self.width), -1, np.int32)
        for row, pages in enumerate(self.pages):
            table[row, : len(pages)] = pages
        self.cache = self.cache.assign([jnp.asarray(table)])

    def _fork_pages(self, rows: list[int]) -> jax.Array:
        """Do the books of a fork, and return the pages that are copied to."""
        assert self.allocator
        page_size, is_ring = self.form.page_size, self.form.window is not None
        targets = np.full((len(rows), self.width if is_ring else 1), -1, np.int32)
        old = [list(pages) for pages in self.pages]
        moved = [index for index, row in enumerate(rows) if index != row]
        for index in moved:
            whole = 0 if is_ring else self.heads[rows[index]].shape[1] // page_size
            self.pages[index] = old[rows[index]][:whole]
            self.allocator.share(self.pages[index])
        # Before any is taken: a page that is copied from may be copied to as well.
        for index in moved:
            self.allocator.free(old[index])
        for index in moved:
            fresh = self.allocator.allocate(len(old[rows[index]]) - len(self.pages[index]))
            assert fresh is not None
            targets[index, : len(fresh)] = fresh
            self.pages[index] = self.pages[index] + fresh
        return jnp.asarray(targets)

    def _as_read(self, *heads: np.ndarray) -> np.ndarray:
        """Return keys and values as their codecs read them back, keys of open runs as they are kept."""
        codecs = self.form.spec.groups[0].codecs
        # All heads have the same scale.
        scales = [None if scale is None else scale[LAYER, :1] for scale in self.scales]
        read = [
            _in_parts(_read, part.reshape(-1, part.shape[-1]), codec, scale).reshape(part.shape)
            for part, codec, scale in zip(heads, codecs, scales, strict=True)
        ]
        return np.stack(read)

    def runs(self, keys: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the slots of a run, 1 where there are none, and the keys that later runs see."""
        codec, _ = self.form.spec.groups[0].codecs
        if codec.scaling != "slots":
            return 1, keys
        span = codec.span(self.form.page_size)
        whole = len(keys) // span * span
        runs = keys[:whole].reshape(-1, span, *keys.shape[1:]).swapaxes(1, 2).astype(np.float32)
        read = _in_parts(_read_runs, runs.reshape(-1, *runs.shape[2:])).reshape(runs.shape).swapaxes(1, 2)
        return span, np.concatenate([read.reshape(whole, *keys.shape[1:]), keys[whole:]])

    def _expected(self, query: np.ndarray, lens: list[int]) -> np.ndarray:
        """Compute each new token's attention by itself, in float64."""
        out = np.zeros(query.shape)
        group = self.form.heads[0] // self.form.heads[1]
        for row, count in enumerate(lens):
            keys, values = self.heads[row].astype(np.float64)
            if self.form.kind == "latent":
                # Both parts have the same query.
                keys, values = keys + values, keys
            span, encoded = self.runs(keys)
            ends = np.arange(len(keys) - count, len(keys))[:, None]
            past = ends - np.arange(len(keys))[None]
            is_seen = past >= 0 if self.form.window is None else (past >= 0) & (past < self.form.window)
            is_own = np.arange(len(keys))[None] // span == ends // span
            for head in range(self.form.heads[0]):
                logits = query[row, :count, head] @ encoded[:, head // group].T
                if span > 1:
                    logits = np.where(is_own, query[row, :count, head] @ keys[:, head // group].T, logits)
                logits /= self.form.head_dim**0.5
                logits = np.where(is_seen, logits, -np.inf)
                weights = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
                out[row, :count, head] = weights @ values[:, head // group] / weights.sum(1, keepdims=True)
        return out


def _in_parts(function: Callable[..., jax.Array], rows: np.ndarray, *options: Any) -> np.ndarray:
    """Return what the function gives for rows, `NUM_READ` of them a call."""
    num_parts = -(-len(rows) // NUM_READ)
    padded = np.zeros((num_parts * NUM_READ, *rows.shape[1:]), np.float32)
    padded[: len(rows)] = rows
    parts = [function(jnp.asarray(part), *options) for part in padded.reshape(-1, NUM_READ, *rows.shape[1:])]
    return np.concatenate([padded[:0], *map(np.asarray, parts)])[: len(rows)]


_jit = functools.partial(jax.jit, compiler_options=QUICK)
_select = _jit(sequences.select)
_fork = _jit(sequences.fork)


@functools.partial(jax.jit, static_argnums=1)
def _read(heads: jax.Array, codec: Codec, scale: jax.Array | None) -> jax.Array:
    """Return heads `[part, head_dim]` as the codec reads them back."""
    if codec.scaling == "slots":
        return rounded(heads).astype(jnp.float32)
    heads = heads[:, None]
    return decode(codec, encode(codec, heads, scale), scale)[:, 0]


@jax.jit
def _read_runs(runs: jax.Array) -> jax.Array:
    """Return runs `[part, slot, head_dim]` of slots as they are read back."""
    stored = encode_run(runs)
    assert stored.scale is not None
    assert stored.zero is not None
    scale, zero = (array.astype(jnp.float32)[..., None, :] for array in (stored.scale, stored.zero))
    return unpack(stored.data) * scale + zero


@functools.partial(_jit, donate_argnums=0)
def _copy_pages(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
    return sequences.copy_pages(cache, [sources], [targets])


@functools.partial(_jit, static_argnums=(5, 6), donate_argnums=0)
def _step(
    cache: Cache,
    lens: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int | None,
    kind: GroupKind,
) -> tuple[jax.Array, Cache]:
    cache, batch = cache.begin(lens, time=query.shape[1])
    place, options = (cache, (0, LAYER), batch), {"scale": query.shape[-1] ** -0.5, "window": window}
    if kind == "latent":
        out, cache, _ = ops.attend_latent(query, query, key[:, :, 0], value[:, :, 0], *place, **options)
    else:
        out, cache, _ = ops.attend(query, key, value, *place, **options)
    return out, cache
