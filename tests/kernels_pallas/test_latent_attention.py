"""Latent attention in both forms and implementations, against each token's attention by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import latent_attention
from kernels_pallas.latent_attention import LatentArguments, UpProjections, pallas_gpu, pallas_tpu
from kernels_pallas.latent_attention.shapes import SHAPES, Shape
from kernels_pallas.paged_attention import Pages, Tiling

from ..compare import assert_close, relative_errors
from .stripes import in_stripes

NUM_LAYERS, LAYER = 3, 1
TILING = Tiling(block_tokens=48)
SCALE = 0.1


def lens_of(shape: Shape) -> np.ndarray:
    return np.minimum(shape.totals, shape.time).astype(np.int32)


def make_dense(shape: Shape) -> tuple[np.ndarray, ...]:
    """Return queries, their rotated parts, latents, their rotated parts, and the up-projections."""
    random = np.random.default_rng(0)
    rows, tokens, heads = len(shape.totals), max(shape.totals), shape.num_heads
    sizes = [
        (rows, shape.time, heads, shape.head_dim),
        (rows, shape.time, heads, shape.rope_dim),
        (rows, tokens, shape.latent_dim),
        (rows, tokens, shape.rope_dim),
        (heads, shape.head_dim, shape.latent_dim),
        (heads, shape.value_dim, shape.latent_dim),
    ]
    *parts, key_up, value_up = (random.standard_normal(size, np.float32) for size in sizes)
    return *parts, *(up / shape.latent_dim**0.5 for up in (key_up, value_up))


def make_arguments(
    shape: Shape, *, is_absorbed: bool, dtype=jnp.float32, dead: float = np.nan
) -> tuple[LatentArguments, int]:
    """Scatter the rows over permuted pages of the middle layer; what nobody owns is `dead`."""
    query, rope_query, latents, ropes, key_up, value_up = make_dense(shape)
    pages_of = [-(-total // shape.page_size) for total in shape.totals]
    num_pages = sum(pages_of) + 2
    order = iter(np.random.default_rng(1).permutation(num_pages))
    table = np.resize([-1, num_pages, 0, 2**31 - 1], (len(pages_of), max(pages_of) + 3)).astype(np.int32)
    pools = [
        np.full((NUM_LAYERS * num_pages, 1, shape.page_size, dense.shape[-1]), dead, np.float32)
        for dense in (latents, ropes)
    ]
    for row, total in enumerate(shape.totals):
        for logical in range(pages_of[row]):
            page = next(order)
            table[row, logical] = page
            tokens = slice(logical * shape.page_size, min((logical + 1) * shape.page_size, total))
            for pool, dense in zip(pools, (latents, ropes), strict=True):
                pool[LAYER * num_pages + page, 0, : tokens.stop - tokens.start] = dense[row, tokens]
    lens = lens_of(shape)
    if is_absorbed:
        query = np.einsum("bthd,hdl->bthl", query, key_up)
    arguments = LatentArguments(
        jnp.asarray(query, dtype),
        jnp.asarray(rope_query, dtype),
        *(Pages(jnp.asarray(pool, dtype)) for pool in pools),
        *map(jnp.asarray, (table, shape.totals - lens, lens)),
        page_offset=jnp.int32(LAYER * num_pages),
        up=None if is_absorbed else UpProjections(jnp.asarray(key_up), jnp.asarray(value_up)),
    )
    return arguments, num_pages


@jax.jit(static_argnames=("implementation", "num_pages", "window", "tiling"))
def run(implementation, arguments: LatentArguments, num_pages: int, **options):
    return implementation(arguments, num_pages=num_pages, scale=SCALE, **options)


def compute(implementation, shape: Shape, *, is_absorbed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return values of the heads, those of an absorbed call made of its latents, and log-sums."""
    arguments, num_pages = make_arguments(shape, is_absorbed=is_absorbed)
    tiling = {"tiling": TILING} if implementation is latent_attention.xla else {}
    out, log_sum = run(implementation, arguments, num_pages, window=shape.window, **tiling)
    out = np.asarray(out)
    if is_absorbed:
        out = np.einsum("bthl,hvl->bthv", out, make_dense(shape)[5])
    return out, np.asarray(log_sum)


def dense_attention(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Compute every new token's output and log-sum-exp by itself, in float64."""
    query, rope_query, latents, ropes, key_up, value_up = (a.astype(np.float64) for a in make_dense(shape))
    lens = lens_of(shape)
    out = np.zeros((*query.shape[:3], shape.value_dim))
    log_sum = np.full(query.shape[:3], -np.inf)
    for row, step in np.argwhere(np.arange(shape.time)[None] < lens[:, None]):
        end = shape.totals[row] - lens[row] + step + 1
        first = 0 if shape.window is None else max(end - shape.window, 0)
        for head in range(shape.num_heads):
            keys = latents[row, first:end] @ key_up[head].T
            logits = keys @ query[row, step, head] + ropes[row, first:end] @ rope_query[row, step, head]
            log_sum[row, step, head] = np.logaddexp.reduce(logits * SCALE)
            weights = np.exp(logits * SCALE - log_sum[row, step, head])
            out[row, step, head] = weights @ (latents[row, first:end] @ value_up[head].T)
    return out, log_sum


@pytest.mark.parametrize("implementation", [latent_attention.xla, latent_attention.reference])
def test_stripes_of_pages_merged_are_the_whole(implementation):
    shape = SHAPES["glm_lite_chunk"]
    arguments, num_pages = make_arguments(shape, is_absorbed=False)
    columns = -arguments.page_table.shape[1] % 3
    arguments = arguments._replace(page_table=jnp.pad(arguments.page_table, ((0, 0), (0, columns))))
    out, log_sum = in_stripes(
        lambda arguments, _: run(implementation, arguments, num_pages, window=shape.window), arguments, 3
    )
    expected, expected_log_sum = dense_attention(shape)
    assert_close(out, expected)
    is_seen = np.isfinite(expected_log_sum)
    assert_close(log_sum[is_seen], expected_log_sum[is_seen])


@pytest.mark.parametrize("is_absorbed", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, latent_attention.xla) for name in SHAPES]
    + [(name, latent_attention.reference) for name in ("glm_lite_chunk", "window_decode")],
)
def test_each_form_is_the_attention_of_each_token_by_itself(name: str, implementation, is_absorbed: bool):
    shape = SHAPES[name]
    out, log_sum = compute(implementation, shape, is_absorbed=is_absorbed)
    expected, expected_log_sum = dense_attention(shape)
    assert_close(out, expected)
    is_padding = np.arange(shape.time)[None] >= lens_of(shape)[:, None]
    assert (out[is_padding] == 0).all()
    assert (log_sum[is_padding] == -np.inf).all()
    assert_close(log_sum[~is_padding], expected_log_sum[~is_padding])


def test_a_window_one_token_too_wide_fails_the_comparison():
    shape = SHAPES["window_decode"]
    wide = dataclasses.replace(shape, window=21)
    assert min(relative_errors(dense_attention(wide)[0], dense_attention(shape)[0])) > 1e-2


def make_empty(**shapes) -> LatentArguments:
    sizes = {
        "query": (1, 1, 2, 16),
        "rope_query": (1, 1, 2, 4),
        "latents": (6, 1, 4, 16),
        "ropes": (6, 1, 4, 4),
    }
    query, rope_query, latents, ropes = (jnp.zeros(size) for size in (sizes | shapes).values())
    rows = jnp.zeros(1, jnp.int32)
    return LatentArguments(
        query, rope_query, Pages(latents), Pages(ropes), jnp.zeros((1, 2), jnp.int32), rows, rows, 0
    )


@pytest.mark.parametrize(
    ("shapes", "window", "message"),
    [
        ({"ropes": (6, 1, 8, 4)}, None, r"one KV head, got \(6, 1, 4\) and \(6, 1, 8\)"),
        ({"query": (1, 1, 2, 8)}, None, r"must have \(16, 4\) entries, got \(8, 4\)"),
        ({"latents": (5, 1, 4, 16), "ropes": (5, 1, 4, 4)}, None, "pages a layer, got 5 and 3"),
        ({}, 0, "window must be at least 1 token, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(shapes: dict, window: int | None, message: str):
    with pytest.raises(ValueError, match=message):
        latent_attention.check(make_empty(**shapes), num_pages=3, window=window)


def test_a_call_of_nothing_is_refused():
    arguments, num_pages = make_arguments(Shape(8, 128, 64, 8, 8, 16, 1, totals=(5,)), is_absorbed=True)
    arguments = arguments._replace(query=arguments.query[:, :0], rope_query=arguments.rope_query[:, :0])
    message = "got 1 sequences, 0 tokens and"
    with pytest.raises(ValueError, match=message):
        latent_attention.check(arguments, num_pages=num_pages, window=None)
    kernels = pallas_gpu.latent_attention, pallas_tpu.latent_attention
    for implementation in (latent_attention.xla, *kernels):
        with pytest.raises(ValueError, match=message):
            implementation(arguments, num_pages=num_pages, scale=SCALE)


def test_up_projections_of_other_heads_are_refused():
    up = UpProjections(jnp.zeros((3, 8, 16)), jnp.zeros((3, 8, 16)))
    with pytest.raises(ValueError, match=r"the latent's entries, \(2, 16\), got \(3, 16\)"):
        latent_attention.check(make_empty()._replace(up=up), num_pages=3, window=None)
