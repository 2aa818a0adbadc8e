"""A call of attention cut into stripes of pages, as devices share them, and their results put together."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import Stripe


def in_stripes(
    compute: Callable[[Any, int], tuple[Any, Any]], arguments: Any, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `compute(arguments, stripe)` gives for each of `count` stripes, merged in float64."""
    width = arguments.page_table.shape[1]
    assert width % count == 0, (width, count)
    parts = [
        compute(
            arguments._replace(
                page_table=arguments.page_table[:, stripe::count],
                stripe=Stripe(jnp.int32(count), jnp.int32(stripe)),
            ),
            stripe,
        )
        for stripe in range(count)
    ]
    outs, log_sums = (np.stack(arrays).astype(np.float64) for arrays in zip(*parts, strict=True))
    log_sum = np.logaddexp.reduce(log_sums)
    weights = np.exp(log_sums - np.where(np.isfinite(log_sum), log_sum, 0))
    return (outs * weights[..., None]).sum(0), log_sum
