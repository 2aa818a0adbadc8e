"""Named shapes of real models, small enough for an oracle; shared by tests and benchmarks.

Knows sizes and options; makes no array.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call of latent attention.

    Attributes:
        num_heads: query heads.
        latent_dim: entries of a latent.
        rope_dim: entries of its rotated part.
        head_dim: entries of a head's key, without the rotated part.
        value_dim: entries of a head's value.
        page_size: tokens of a page.
        time: new tokens of a row at most.
        totals: tokens of each row after the step; a row of 0 is idle.
        window: see `reference`.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    head_dim: int
    value_dim: int
    page_size: int
    time: int
    totals: tuple[int, ...] = (0, 1, 37, 150)
    window: int | None = None


# Heads are fewer than the models have.
SHAPES: dict[str, Shape] = {
    "deepseek_decode": Shape(8, 512, 64, 128, 128, page_size=16, time=1),
    "deepseek_chunk": Shape(4, 128, 64, 32, 32, page_size=64, time=7),
    "glm_lite_chunk": Shape(5, 64, 16, 24, 32, page_size=5, time=7),
    "window_decode": Shape(4, 32, 8, 16, 16, page_size=1, time=1, window=20),
}

# Calls of published models and of their shards as they are served: for compilers and benchmarks.
MODELS: dict[str, Shape] = {
    "deepseek_v3": Shape(128, 512, 64, 128, 128, page_size=128, time=1, totals=(8192,) * 64),
    "deepseek_v3_of_8": Shape(16, 512, 64, 128, 128, page_size=128, time=1, totals=(8192,) * 64),
    "deepseek_v3_chunk": Shape(128, 512, 64, 128, 128, page_size=128, time=16, totals=(8192,) * 4),
}
