"""The model families as data, and the sizes and switches of one model.

Knows names and sizes; reads no file and builds no layer.
"""

from dataclasses import dataclass

from jkv.layers.rope import RopeConfig

# Published decoders have up to 200; each layer of a model is built before its tensors are looked for.
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes a decoder; hashable.

    Attributes:
        family: key of `FAMILIES`.
        vocab_size: rows of the embedding.
        num_layers: decoder blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: entries of one head.
        mlp_dim: width of the gated MLP.
        norm_eps: added to the mean square in every RMSNorm.
        rope: the rotary embedding.
        max_length: positions that the checkpoint was made for.
        windows: per layer, how many latest positions a query sees, its own included; None is all.
        has_qk_norm: RMSNorm over each query and key head before rotation.
        has_qkv_bias: biases on the query, key and value projections.
        has_output_bias: a bias on the attention's output projection.
        has_mlp_bias: biases in the MLP.
        is_tied: the output head is the embedding.
        bos_token_id: token that starts a text, where the checkpoint names one; the tokenizer knows whether to
            add it.
        eos_token_ids: tokens that end generation.
    """

    family: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    rope: RopeConfig
    max_length: int
    windows: tuple[int | None, ...]
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    is_tied: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def check_sizes(config: ModelConfig) -> ModelConfig:
    """Return `config`, or raise a ValueError that names the sizes which do not fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            "the query heads must be a multiple of the KV heads, "
            f"got {config.num_heads} and {config.num_kv_heads}"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ValueError(
            f"a head must have an even number of entries, got {config.head_dim} "
            f"({config.embed_dim} over {config.num_heads} heads where no size is named)"
        )
    if any(window is not None and window < 1 for window in config.windows):
        raise ValueError(f"a sliding window must hold at least one token, got {config.windows}")
    return config


@dataclass(frozen=True)
class Family:
    """What the members of a family have in common.

    Attributes:
        architecture: the class name in a Hugging Face config.json.
        model_type: its `model_type`.
        gguf_name: `general.architecture` of a GGUF file.
        is_gguf_permuted: GGUF stores q and k rows in the interleaved rotary order.
        has_qk_norm: see `ModelConfig`.
        has_qkv_bias: see `ModelConfig`; None: config.json's `attention_bias` says, for the output too.
        has_window: config.json's `sliding_window` counts by itself; else `use_sliding_window` switches it on.
        keys: config.json keys of this family beyond those that all share.
    """

    architecture: str
    model_type: str
    gguf_name: str
    is_gguf_permuted: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None
    has_window: bool = False
    keys: frozenset[str] = frozenset()


_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        "llama",
        is_gguf_permuted=True,
        keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "mistral",
        "llama",
        is_gguf_permuted=True,
        has_qkv_bias=False,
        has_window=True,
        keys=frozenset({"sliding_window"}),
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", "qwen2", has_qkv_bias=True, keys=_WINDOW_KEYS),
    "qwen3": Family(
        "Qwen3ForCausalLM", "qwen3", "qwen3", has_qk_norm=True, keys=_WINDOW_KEYS | {"attention_bias"}
    ),
}
