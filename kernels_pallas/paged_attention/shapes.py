"""Named shapes of real models, small enough for an oracle; shared by tests and benchmarks.

Knows sizes and options; makes no array.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call of paged attention.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: entries of a head.
        page_size: tokens of a page.
        time: new tokens of a row at most.
        totals: tokens of each row after the step; a row of 0 is idle.
        window: see `reference`.
        soft_cap: see `reference`.
        has_sinks: whether each query head has a sink.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    time: int
    totals: tuple[int, ...] = (0, 1, 37, 150)
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


SHAPES: dict[str, Shape] = {
    "multi_head_decode": Shape(4, 4, 64, page_size=16, time=1),
    "multi_head_chunk": Shape(4, 4, 8, page_size=5, time=7),
    "llama_decode": Shape(8, 2, 128, page_size=64, time=1),
    "llama_chunk": Shape(8, 2, 128, page_size=16, time=7),
    "qwen_decode_group_8": Shape(16, 2, 80, page_size=16, time=1),
    "qwen_chunk_group_8": Shape(16, 2, 80, page_size=64, time=7),
    "multi_query_decode": Shape(8, 1, 64, page_size=1, time=1),
    "multi_query_chunk": Shape(8, 1, 64, page_size=5, time=7),
    "mistral_window_decode": Shape(8, 2, 64, page_size=16, time=1, window=20),
    "mistral_window_chunk": Shape(8, 2, 8, page_size=1, time=7, window=4),
    "gemma_soft_cap_decode": Shape(8, 4, 80, page_size=16, time=1, soft_cap=5.0),
    "gemma_soft_cap_chunk": Shape(8, 4, 64, page_size=5, time=7, window=20, soft_cap=5.0),
    "gpt_oss_sinks_decode": Shape(8, 1, 64, page_size=16, time=1, window=20, has_sinks=True),
    "gpt_oss_sinks_chunk": Shape(8, 1, 64, page_size=64, time=7, has_sinks=True),
}

# Calls of published models and of their shards as they are served: for compilers and benchmarks.
MODELS: dict[str, Shape] = {
    "llama3_8b": Shape(32, 8, 128, page_size=128, time=1, totals=(8192,) * 64),
    "llama3_8b_small_pages": Shape(32, 8, 128, page_size=32, time=1, totals=(8192,) * 64),
    "llama3_8b_chunk": Shape(32, 8, 128, page_size=128, time=512, totals=(8192,) * 4),
    "llama2_7b_chunk": Shape(32, 32, 128, page_size=128, time=512, totals=(8192,) * 4),
    "llama3_70b": Shape(64, 8, 128, page_size=128, time=1, totals=(8192,) * 64),
    "llama3_70b_of_8": Shape(8, 1, 128, page_size=128, time=1, totals=(8192,) * 64),
    "qwen3_30b_a3b": Shape(32, 4, 128, page_size=128, time=1, totals=(8192,) * 64),
    "gemma2_9b": Shape(16, 8, 256, page_size=128, time=1, totals=(8192,) * 64, soft_cap=50.0),
    "gemma3_27b_window": Shape(32, 16, 128, page_size=128, time=1, totals=(8192,) * 64, window=1024),
    "gpt_oss_120b": Shape(64, 8, 64, page_size=128, time=1, totals=(8192,) * 64, has_sinks=True),
    "gpt_oss_120b_window": Shape(
        64, 8, 64, page_size=128, time=1, totals=(8192,) * 64, window=128, has_sinks=True
    ),
}
