"""The model families as data.

Knows what their files name and leave unsaid; reads no file and builds no layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jkv.layers.mlp import SWIGLU, Gating


@dataclass(frozen=True)
class MixtureKeys:
    """How the members of a family route, and where config.json says the rest.

    Attributes:
        mlp_dim: key of an expert's width.
        score: see `Routing`.
        is_normalized: see `Routing`; None: config.json's `norm_topk_prob` says.
        group_score: see `Routing`; config.json's `n_group` and `topk_group` count the groups.
        has_bias: biases on the logits and in the experts.
        has_correction: see `Routing`.
        methods: values of config.json's `topk_method` that choose so, of which `greedy` does without groups;
            () has no such key, or a fixed one.
        are_interleaved: a Hugging Face file has one tensor for all experts' gate and up projections, inputs
            first, a gate's column before its up's; else two for each expert.
    """

    mlp_dim: str
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool | None = True
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False
    has_correction: bool = False
    methods: tuple[str, ...] = ()
    are_interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """What the members of a family have in common.

    Attributes:
        architecture: the class name in a Hugging Face config.json.
        model_type: its `model_type`.
        gguf_name: `general.architecture` of a GGUF file; of families that share it, the first fits.
        is_gguf_permuted: GGUF stores q and k rows in the interleaved rotary order.
        has_qk_norm: see `ModelConfig`.
        is_qk_norm_wide: see `ModelConfig`.
        has_qkv_bias: see `ModelConfig`; None: config.json's `attention_bias` says, for the output too.
        has_sinks: see `ModelConfig`.
        has_pre_norms: see `ModelConfig`.
        has_post_norms: see `ModelConfig`.
        norm_offset: a Hugging Face file stores each norm's scale less this.
        has_window: config.json's `sliding_window` counts by itself; else `use_sliding_window` switches it on.
        window_period: of so many layers the last has no window, where config.json does not list the layers.
        has_scaled_embedding: token vectors are multiplied by the root of their width.
        gating: see `ModelConfig`.
        mixture: None has an MLP in every layer.
        has_latent: its attention is latent, of the widths that config.json names.
        keys: config.json keys of this family beyond those that all share.
        defaults: what transformers takes where config.json leaves a key out.
        rope: the rotary embedding's entry where config.json has none.
        fixed: keys that would change the maths, and the one value with which they do not.
        gguf_required: GGUF keys of this family beyond those that all share.
        has_truncated_yarn: a yarn of GGUF has its ramp end at whole dimensions; the file does not say.
        gguf_wide_scale: a GGUF model of so many layers scales attention by its width over its heads, of which
            the file says nothing (llama.cpp knows it too).
        hf_names: names of a layer's tensors in Hugging Face files, by parameter, where they are others than
            Llama's.
        gguf_names: the same in GGUF files.
        hf_fused: tensors of a Hugging Face file that hold several parameters' rows, one after the other.
        gguf_fused: the same in GGUF files.
    """

    architecture: str
    model_type: str
    gguf_name: str
    is_gguf_permuted: bool = False
    has_qk_norm: bool = False
    is_qk_norm_wide: bool = False
    has_qkv_bias: bool | None = None
    has_sinks: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norm_offset: float = 0.0
    has_window: bool = False
    window_period: int = 0
    has_scaled_embedding: bool = False
    gating: Gating = SWIGLU
    mixture: MixtureKeys | None = None
    has_latent: bool = False
    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    gguf_required: frozenset[str] = frozenset()
    has_truncated_yarn: bool = True
    gguf_wide_scale: int | None = None
    hf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    hf_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def family_switches(family: Family, embed_dim: int) -> dict[str, Any]:
    """Return what every member of a family has in its configuration, whatever its file says."""
    return {
        "has_qk_norm": family.has_qk_norm,
        "is_qk_norm_wide": family.is_qk_norm_wide,
        "has_sinks": family.has_sinks,
        "has_pre_norms": family.has_pre_norms,
        "has_post_norms": family.has_post_norms,
        "embed_scale": embed_dim**0.5 if family.has_scaled_embedding else 1.0,
    }


def windows_by_period(
    family: Family, window: int | None, num_layers: int, period: int = 0
) -> tuple[int | None, ...]:
    """Return each layer's window where the last of `period` layers (the family's, if 0) has none."""
    period = period or family.window_period
    return tuple(None if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
# transformers 4 and 5 name the number of experts differently.
_EXPERT_KEYS = frozenset({"num_experts_per_tok", "num_local_experts", "num_experts"})
_GEMMA_KEYS = frozenset(
    {
        "attention_bias",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
    }
)
_GELU = Gating("gelu_tanh")
_GEMMA_FIXED = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
_DEEPSEEK_KEYS = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "routed_scaling_factor",
        "topk_group",
        "v_head_dim",
    }
)
# Transformers rotates neighbouring entries, and routes by these alone.
_DEEPSEEK_V3_FIXED = {
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_DEEPSEEK_V3_MIXTURE = MixtureKeys(
    "moe_intermediate_size",
    "sigmoid",
    is_normalized=None,
    group_score="top2",
    has_correction=True,
)
# What files of before and after the up-projection was split in two both have.
_DEEPSEEK_GGUF = frozenset(
    {
        "attention.kv_lora_rank",
        "expert_feed_forward_length",
        "expert_shared_count",
        "leading_dense_block_count",
        "rope.dimension_count",
    }
)
_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

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
        defaults={"num_key_value_heads": 8},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "mixtral",
        "llama",
        is_gguf_permuted=True,
        has_qkv_bias=False,
        has_window=True,
        mixture=MixtureKeys("intermediate_size"),
        keys=_EXPERT_KEYS | {"sliding_window"},
        defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "sliding_window": None},
        hf_names={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.gate_proj": "block_sparse_moe.experts.{expert}.w1",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{expert}.w3",
            "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2",
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        "qwen2",
        has_qkv_bias=True,
        keys=_WINDOW_KEYS,
        fixed={"use_mrope": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        has_qk_norm=True,
        keys=_WINDOW_KEYS | {"attention_bias"},
        defaults={"head_dim": 128},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen3moe",
        has_qk_norm=True,
        mixture=MixtureKeys("moe_intermediate_size", is_normalized=None),
        keys=_EXPERT_KEYS
        | {
            "attention_bias",
            "moe_intermediate_size",
            "norm_topk_prob",
            "sliding_window",
            "max_window_layers",
        },
        defaults={"num_key_value_heads": 4},
        fixed={
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
            # transformers would give every layer the window, whatever max_window_layers says.
            "use_sliding_window": False,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        "gemma2",
        has_post_norms=True,
        norm_offset=1.0,
        has_window=True,
        window_period=2,
        has_scaled_embedding=True,
        gating=_GELU,
        # Published files repeat the window in a key that nothing reads.
        keys=_GEMMA_KEYS | {"sliding_window_size"},
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        fixed=_GEMMA_FIXED,
        gguf_required=frozenset(
            {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
        ),
        gguf_wide_scale=46,
        hf_names={"mlp_norm": "pre_feedforward_layernorm"},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "gemma3",
        has_qk_norm=True,
        has_post_norms=True,
        norm_offset=1.0,
        has_window=True,
        window_period=6,
        has_scaled_embedding=True,
        gating=_GELU,
        keys=_GEMMA_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        # Files of models that also see leave out most of the decoder's sizes.
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "tie_word_embeddings": True,
        },
        fixed=_GEMMA_FIXED,
        gguf_required=frozenset({"attention.sliding_window"}),
        gguf_wide_scale=62,
        hf_names={"mlp_norm": "pre_feedforward_layernorm"},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        "gpt-oss",
        has_sinks=True,
        has_window=True,
        window_period=2,
        gating=Gating(slope=1.702, limit=7.0, up_offset=1.0),
        mixture=MixtureKeys("intermediate_size", has_bias=True, are_interleaved=True),
        keys=_EXPERT_KEYS
        | {"attention_bias", "sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit"},
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
        },
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        gguf_required=frozenset({"attention.sliding_window"}),
        has_truncated_yarn=False,
        hf_names={"mlp.router": "mlp.router"},
        gguf_names={"mlp_norm": "post_attention_norm"},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "olmo2",
        "olmo2",
        has_qk_norm=True,
        is_qk_norm_wide=True,
        has_pre_norms=False,
        has_post_norms=True,
        keys=frozenset({"attention_bias"}),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        "phi3",
        has_qkv_bias=False,
        has_window=True,
        keys=frozenset({"sliding_window", "original_max_position_embeddings", "partial_rotary_factor"}),
        defaults={"sliding_window": None},
        fixed={
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
        },
        hf_fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP},
        gguf_fused={"attn_qkv": _QKV, "ffn_up": _GATE_UP},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        "deepseek2",
        has_latent=True,
        mixture=MixtureKeys(
            "moe_intermediate_size", is_normalized=False, methods=("greedy", "group_limited_greedy")
        ),
        keys=_DEEPSEEK_KEYS | {"topk_method"},
        defaults={"q_lora_rank": 1536, "n_shared_experts": 2, "topk_method": "greedy"},
        fixed={"mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
        gguf_required=_DEEPSEEK_GGUF,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        "deepseek2",
        has_latent=True,
        mixture=_DEEPSEEK_V3_MIXTURE,
        keys=_DEEPSEEK_KEYS,
        defaults={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        fixed=_DEEPSEEK_V3_FIXED,
        gguf_required=_DEEPSEEK_GGUF,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        "deepseek2",
        has_latent=True,
        mixture=_DEEPSEEK_V3_MIXTURE,
        keys=_DEEPSEEK_KEYS | {"mlp_layer_types"},
        defaults={
            "q_lora_rank": 768,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
        fixed=_DEEPSEEK_V3_FIXED,
        gguf_required=_DEEPSEEK_GGUF,
    ),
}
