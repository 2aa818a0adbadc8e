"""Pieces see what their tokens do; queries that are multiplied as integers stand for what they were."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import Stripe, Tiling, pallas_tpu
from kernels_pallas.paged_attention.shapes import Shape
from kernels_pallas.tpu.pieces import in_integers, pieces_of
from kernels_pallas.tpu.sizes import DIGITS

from .test_paged_attention import make_arguments


def test_a_piece_past_its_row_s_tokens_sees_no_page():
    """A row of 130 tokens before a step of 7, beside one of which 1 is new: pieces of 4 tokens."""
    shape = Shape(4, 2, 128, page_size=32, time=7, totals=(137, 1))
    arguments, num_pages = make_arguments(shape)
    starts, lens = jnp.array([130, 100]), jnp.array([7, 1])
    cut = pallas_tpu.sizes_of(arguments, num_pages, window=None, tiling=Tiling(128, 4))
    pieces = pieces_of(arguments.page_table, starts, lens, Stripe(1, 0), cut, None)
    assert pieces.lens[:4].tolist() == [4, 3, 1, 0]
    assert pieces.ends[:4].tolist() == [134, 137, 101, 0]
    assert pieces.following[:5].tolist() == [0, 1, 2, cut.num_pieces, cut.num_pieces]


def test_queries_as_integers_are_exact_but_for_entries_far_below_the_largest():
    bits = jax.random.bits(jax.random.key(0), (64, 1, 256, 128), jnp.uint16)
    # Of either sign, with exponents from 2**-20 to 2**4 and all mantissas.
    exponents = 107 + (bits.astype(jnp.int32) >> 7) % 25
    bits = (bits & 0x807F).astype(jnp.int32) | (exponents << 7)
    rows = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16).at[0, 0, 0].set(0)
    digits, unit = in_integers(rows)
    assert unit is not None
    assert digits.dtype == jnp.int8
    wide, unit = np.asarray(rows, np.float64), np.asarray(unit, np.float64)
    places = np.split(np.asarray(digits, np.float64), DIGITS, axis=2)
    found = sum(digit * 256.0**place for place, digit in enumerate(places)) * unit
    assert (np.frexp(unit)[0] == 0.5).all()
    is_exact = np.abs(wide) >= 2.0**-14 * np.abs(wide).max(axis=-1, keepdims=True)
    assert 0.3 < is_exact.mean() < 0.9
    np.testing.assert_array_equal(found[is_exact], wide[is_exact])
    assert (np.abs(found - wide) <= unit / 2).all()
