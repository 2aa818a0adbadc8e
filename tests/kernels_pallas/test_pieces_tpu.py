"""Queries that are multiplied as integers stand for what they were."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tpu.pieces import in_integers
from kernels_pallas.tpu.sizes import DIGITS


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
