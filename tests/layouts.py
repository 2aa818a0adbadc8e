"""Caches of several groups driven through one history, on one device or split over a mesh."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.stages import Compiled

from jkv import ops
from jkv.cache import sequences
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.sharding import Sharding

from .poison import poison

NUM_ROWS, NUM_HEADS, HEAD_DIM, PAGE_SIZE, WIDTH, CAPACITY = 16, 16, 16, 8, 12, 64
WINDOW = 20
# Width of a ragged step.
NUM_TOKENS = 96
# Token ids of greedy decoding, whose queries, keys and values are drawn.
VOCAB = 64
ROWS = np.arange(NUM_ROWS)
# Programs that run once each: what is fast to compile is fast.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Form:
    """A cache group of the history: one layer of KV heads, or of latents where there are none."""

    num_kv_heads: int | None
    codec: str
    window: int | None = None
    implementation: ops.Implementation = "auto"

    def group(self, copies: int) -> CacheGroup:
        if self.num_kv_heads is None:
            return CacheGroup(
                2, 1, HEAD_DIM, self.codec, window=self.window, kind="latent", rope_dim=HEAD_DIM
            )
        return CacheGroup(2, self.num_kv_heads * copies, HEAD_DIM, self.codec, window=self.window)

    def copies(self, sharding: Sharding | None) -> int:
        """Return how many devices hold each KV head."""
        if sharding is None or self.num_kv_heads is None:
            return 1
        return max(1, sharding.size("kv_head") // self.num_kv_heads)

    def scales(self, copies: int) -> tuple[jax.Array | None, jax.Array | None]:
        """Return calibrated scales of keys and values where the codec is static, another for each head."""
        if not self.codec.endswith("static"):
            return None, None
        heads = np.arange(2 * (self.num_kv_heads or 1), dtype=np.float32).reshape(2, -1)
        scales = jnp.asarray(np.repeat(1 / 16 + heads / 256, copies, axis=1))
        return scales, 2 * scales


def make_sharding(rules: dict[str, tuple[str, int]], axis_type: AxisType) -> Sharding:
    """Return a mesh that splits `seq`, `head` and `context` as the rules say, by axis and size."""
    names, sizes = zip(*rules.values(), strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names))
    both = {"seq": ("seq", "page"), "head": ("q_head", "kv_head"), "context": ("context",)}
    return Sharding.create(mesh, {axis: rules[rule][0] for rule in rules for axis in both[rule]})


class Layout:
    """One history's cache, and the pages of its rows where they are assigned."""

    def __init__(self, forms: tuple[Form, ...], sharding: Sharding | None, *, is_paged: bool):
        self.forms, self.sharding, self.is_paged = forms, sharding, is_paged
        size = sharding.size if sharding else lambda axis: 1
        self.num_stripes, self.shard_rows = size("context"), NUM_ROWS // size("seq")
        self.spec = CacheSpec.create(
            [form.group(form.copies(sharding)) for form in forms],
            page_size=PAGE_SIZE,
            max_chunk=WIDTH,
            num_stripes=self.num_stripes,
        )
        self.widths = [self.spec.table_width(CAPACITY, index) for index in range(len(forms))]
        self.programs: dict[tuple[int, bool], Compiled] = {}
        sizes = {"num_sequences": NUM_ROWS, "capacity": CAPACITY, "sharding": sharding}
        sizes["scales"] = [form.scales(form.copies(sharding)) for form in forms]
        if not is_paged:
            self.cache = poison(Cache.dense(self.spec, **sizes))
            return
        # Each shard gives out its pages from the last to the first: enough for those of forks too.
        self.num_pages = [3 * self.shard_rows * width // self.num_stripes for width in self.widths]
        self.cache = poison(Cache.paged(self.spec, num_pages=self.num_pages, **sizes))
        shards = NUM_ROWS // self.shard_rows * self.num_stripes
        self.free = [[list(range(count)) for _ in range(shards)] for count in self.num_pages]
        tables = [
            np.array([[self.take(group, row, column) for column in range(width)] for row in ROWS])
            for group, width in enumerate(self.widths)
        ]
        self.cache = self.cache.assign([self.place(table.astype(np.int32)) for table in tables])

    def take(self, group: int, row: int, page: int) -> int:
        shard = row // self.shard_rows * self.num_stripes + page % self.num_stripes
        return self.free[group][shard].pop()

    def place(self, array: np.ndarray, *axes: str | None) -> jax.Array:
        """Put rows where they belong."""
        axes = axes or ("seq", *[None] * (array.ndim - 1))
        return (
            jnp.asarray(array) if self.sharding is None else jax.device_put(array, self.sharding.named(*axes))
        )

    def step(
        self, lens: list[int], seed: int, *, tokens: np.ndarray | None = None, is_ragged: bool = False
    ) -> list[np.ndarray]:
        """Add tokens to each row, and return what attention gives in each group.

        Args:
            lens: new tokens of each row.
            seed: of their queries, keys and values.
            tokens: id of the one new token `[group, row]`, to which these belong; None: all differ.
            is_ragged: the tokens of all rows lie one after the other.
        """
        ids = [None] * len(self.forms) if tokens is None else tokens
        inputs = [
            self._inputs(form, lens, seed, is_ragged, own) for form, own in zip(self.forms, ids, strict=True)
        ]
        arguments = (self.cache, self.place(np.array(lens, np.int32)), inputs)
        form = (inputs[0][0].shape[1], is_ragged)
        if form not in self.programs:
            options = {"forms": self.forms, "sharding": self.sharding, "is_ragged": is_ragged}
            self.programs[form] = _step.lower(*arguments, **options).compile()
        outs, self.cache = self.programs[form](*arguments)
        return [np.asarray(out) for out in outs]

    def _inputs(
        self, form: Form, lens: list[int], seed: int, is_ragged: bool, tokens: np.ndarray | None
    ) -> list[jax.Array]:
        random, time = np.random.default_rng(seed), 1 if max(lens) == 1 else WIDTH
        rows = NUM_ROWS if tokens is None else VOCAB
        query = random.standard_normal((rows, time, NUM_HEADS, HEAD_DIM), np.float32)
        key, value = random.standard_normal((2, rows, time, form.num_kv_heads or 1, HEAD_DIM), np.float32)
        if tokens is not None:
            query, key, value = (x[tokens] for x in (query, key, value))
        axes = ("seq", None, "q_head", None)
        others = axes
        if form.num_kv_heads is None:
            key, value, others = key[:, :, 0], value[:, :, 0], ("seq", None, None)
        else:
            key, value = (np.repeat(x, form.copies(self.sharding), axis=2) for x in (key, value))
        if is_ragged:
            query, key, value = (_packed(x, lens) for x in (query, key, value))
        return [self.place(query, *axes), self.place(key, *others), self.place(value, *others)]

    def decode(self, count: int) -> np.ndarray:
        """Decode greedily, by drawn weights on what attention gives; return `[step, group, row]`."""
        weight = np.random.default_rng(0).standard_normal((NUM_HEADS * HEAD_DIM, VOCAB), np.float32)
        chosen = [np.tile(ROWS, (len(self.forms), 1))]
        for _ in range(count):
            outs = self.step([1] * NUM_ROWS, 3, tokens=chosen[-1])
            chosen.append(np.stack([(out.reshape(NUM_ROWS, -1) @ weight).argmax(-1) for out in outs]))
        return np.stack(chosen[1:])

    def fork(self, rows: np.ndarray) -> None:
        """Continue other rows of the same shard."""
        local = self.place((rows % self.shard_rows).astype(np.int32))
        if not self.is_paged:
            self.cache = _select(self.cache, local, sharding=self.sharding)
            return
        lengths, targets = np.asarray(self.cache.lengths), []
        for group, width in enumerate(self.widths):
            pages = range(width) if self.cache.is_ring(group) else None
            own = [
                [self.take(group, row, page) for page in pages or [lengths[rows[row]] // PAGE_SIZE]]
                for row in ROWS
            ]
            targets.append(np.array(own, np.int32))
        pages = [self.place(target) for target in targets]
        self.cache = _fork(self.cache, local, pages, sharding=self.sharding)
        # What a row that moved has not got yet is given to it.
        tables = [np.array(pool.page_table) for pool in self.cache.pools]
        for group, table in enumerate(tables):
            for row, column in np.argwhere(table < 0):
                table[row, column] = self.take(group, row, column)
        self.cache = self.cache.assign([self.place(table) for table in tables])

    def truncate(self, count: int) -> None:
        """Take the latest tokens of each row back."""
        self.cache = self.cache.truncate(self.place(np.asarray(self.cache.lengths) - count))


def _packed(rows: np.ndarray, lens: list[int]) -> np.ndarray:
    """Put the tokens of all rows one after the other, and padding after them."""
    tokens = np.concatenate([row[:count] for row, count in zip(rows, lens, strict=True)])
    return np.pad(tokens, [(0, NUM_TOKENS - len(tokens)), *[(0, 0)] * (tokens.ndim - 1)])[None]


def run_history(
    forms: tuple[Form, ...], sharding: Sharding | None, *, is_paged: bool
) -> tuple[Layout, list[list[np.ndarray]], np.ndarray]:
    """Prefill in chunks, decode, fork, go on, truncate, decode.

    Returns:
        What was driven, what attention gave in each step and group, and greedy tokens `[step, group, row]`.
    """
    layout = Layout(forms, sharding, is_paged=is_paged)
    prefills = ([12, 7, 12, 1, 0, 12, 5, 9], [12, 12, 3, 8, 12, 12, 12, 12], [11, 12, 12, 12, 12, 2, 12, 12])
    outs = [layout.step(2 * lens, seed) for seed, lens in enumerate(prefills)]
    tokens = [layout.decode(3)]
    layout.fork(ROWS // 2 * 2)
    # More than is taken back: rows write to no page that they share.
    outs.append(layout.step(2 * [3, 4, 12, 5, 9, 12, 3, 7], 4))
    layout.truncate(3)
    outs.append(layout.step([1] * NUM_ROWS, 5))
    tokens.append(layout.decode(3))
    return layout, outs, np.concatenate(tokens)


@functools.partial(
    jax.jit,
    static_argnames=("forms", "sharding", "is_ragged"),
    donate_argnums=0,
    compiler_options=COMPILER_OPTIONS,
)
def _step(
    cache: Cache,
    lens: jax.Array,
    inputs: list[list[jax.Array]],
    *,
    forms: tuple[Form, ...],
    sharding: Sharding | None,
    is_ragged: bool,
) -> tuple[list[jax.Array], Cache]:
    time = inputs[0][0].shape[1]
    cache, batch = cache.begin_ragged(lens, num_tokens=time) if is_ragged else cache.begin(lens, time=time)
    outs = []
    for group, (form, (query, key, value)) in enumerate(zip(forms, inputs, strict=True)):
        place = {"where": (group, 1), "batch": batch, "window": form.window, "sharding": sharding}
        place["implementation"] = form.implementation
        if form.num_kv_heads is None:
            out, cache, _ = ops.attend_latent(query, query, key, value, cache, **place, scale=HEAD_DIM**-0.5)
        else:
            out, cache, _ = ops.attend(query, key, value, cache, **place, scale=HEAD_DIM**-0.5)
        outs.append(out)
    return outs, cache


@functools.partial(jax.jit, static_argnames="sharding")
def _select(cache: Cache, rows: jax.Array, *, sharding: Sharding | None) -> Cache:
    return sequences.select(cache, rows, sharding=sharding)


@functools.partial(jax.jit, static_argnames="sharding")
def _fork(cache: Cache, rows: jax.Array, pages: list[jax.Array], *, sharding: Sharding | None) -> Cache:
    return sequences.fork(cache, rows, pages, sharding=sharding)
