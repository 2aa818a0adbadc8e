"""The reader of a Hugging Face config.json.

Knows which keys change what a model computes; opens no file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jkv.layers.latent import LatentDims
from jkv.layers.mlp import Gating
from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig
from jkv.models.families import FAMILIES, Family, family_switches, windows_by_period
from jkv.models.fields import (
    AT_LEAST_ZERO,
    COUNT,
    INDEX,
    MAPPING,
    NUMBER,
    POSITIVE,
    SWITCH,
    TEXT,
    Kind,
    check_fields,
    either,
    many,
    whole,
)
from jkv.models.model_config import MAX_LAYERS, MixtureConfig, ModelConfig, check_sizes

_REQUIRED = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    }
)
_OPTIONAL = frozenset(
    {
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "quantization_config",
        # Layers past the decoder's: `jkv.models.weights.leading` leaves them out.
        "num_nextn_predict_layers",
    }
)
# Keys that would change the maths, and the one value with which they do not. Null is as good as absent.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
}
# Keys about training, storage and the library that wrote the file.
_HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "aux_loss_alpha",
        "auto_map",
        "cache_implementation",
        "dtype",
        "embd_pdrop",
        "ep_size",
        "experts_per_token",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_sequence_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_KINDS = {
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": whole(1, MAX_LAYERS),
    "num_attention_heads": COUNT,
    "max_position_embeddings": COUNT,
    "rms_norm_eps": AT_LEAST_ZERO,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "rope_theta": POSITIVE,
    "rope_scaling": MAPPING,
    "rope_parameters": MAPPING,
    "tie_word_embeddings": SWITCH,
    "eos_token_id": either(INDEX, many(INDEX)),
    "quantization_config": MAPPING,
    "num_nextn_predict_layers": INDEX,
    "attention_bias": SWITCH,
    "mlp_bias": SWITCH,
    "sliding_window": COUNT,
    "use_sliding_window": SWITCH,
    "max_window_layers": INDEX,
    "layer_types": many(TEXT),
    "sliding_window_pattern": COUNT,
    "_sliding_window_pattern": COUNT,
    "rope_local_base_freq": POSITIVE,
    "partial_rotary_factor": POSITIVE,
    "original_max_position_embeddings": COUNT,
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": POSITIVE,
    "final_logit_softcapping": POSITIVE,
    "num_experts": COUNT,
    "num_local_experts": COUNT,
    "num_experts_per_tok": COUNT,
    "moe_intermediate_size": COUNT,
    "norm_topk_prob": SWITCH,
    "kv_lora_rank": COUNT,
    "q_lora_rank": COUNT,
    "qk_head_dim": COUNT,
    "qk_nope_head_dim": COUNT,
    "qk_rope_head_dim": COUNT,
    "v_head_dim": COUNT,
    "first_k_dense_replace": INDEX,
    "mlp_layer_types": many(TEXT),
    "n_group": COUNT,
    "n_routed_experts": COUNT,
    "n_shared_experts": INDEX,
    "routed_scaling_factor": POSITIVE,
    "topk_group": COUNT,
    "topk_method": TEXT,
    "swiglu_alpha": POSITIVE,
    "swiglu_limit": POSITIVE,
}
# Models that also see, and what their decoder is alone; and the keys of what is not the decoder.
_SEEING = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_SIGHT_KEYS = frozenset(
    {
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "mm_tokens_per_image",
        "text_config",
        "vision_config",
    }
)
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LATENT_KEYS = frozenset({"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_KINDS = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "original_max_position_embeddings": COUNT,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "truncate": SWITCH,
    "attention_factor": POSITIVE,
    "attn_factor": POSITIVE,
    "mscale": AT_LEAST_ZERO,
    "mscale_all_dim": AT_LEAST_ZERO,
    "partial_rotary_factor": NUMBER,
    "short_factor": many(POSITIVE),
    "long_factor": many(POSITIVE),
}
_BLOCK = Kind(
    f"a list of two, each {COUNT.words}", lambda value: many(COUNT).holds(value) and len(value) == 2
)
_QUANTIZATION_KINDS = {"weight_block_size": _BLOCK}
# What transformers takes where a window is switched on without a size, and from which layer on (Qwen).
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json, in the form of transformers 4 or 5.

    Of a model that also sees, the decoder alone is read.

    Raises:
        ValueError: the architecture is not one of `FAMILIES`, a size is missing, or a key could change what
            the model computes and is not understood.
    """
    config = _text_part(config)
    name, family = _family(config)
    config = {**family.defaults, **config}
    given = _without_nulls(config)
    _check_keys(given, family)
    num_heads = given["num_attention_heads"]
    head_dim = given.get("head_dim") or given["hidden_size"] // num_heads
    latent = _latent(given) if family.has_latent else None
    has_bias = bool(given.get("attention_bias", False))
    rope, window_rope = _ropes(given, family, latent.rope if latent else head_dim)
    return check_sizes(
        ModelConfig(
            family=name,
            vocab_size=given["vocab_size"],
            num_layers=given["num_hidden_layers"],
            embed_dim=given["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=num_heads if latent else given.get("num_key_value_heads", num_heads),
            head_dim=latent.key if latent else head_dim,
            mlp_dim=given["intermediate_size"],
            norm_eps=float(given["rms_norm_eps"]),
            rope=rope,
            window_rope=window_rope,
            max_length=_max_length(given),
            windows=_windows(given, config, family),
            has_qkv_bias=has_bias if family.has_qkv_bias is None else family.has_qkv_bias,
            has_output_bias=has_bias,
            has_mlp_bias=bool(given.get("mlp_bias", family.mixture is not None and family.mixture.has_bias)),
            attention_scale=_attention_scale(given),
            attention_soft_cap=given.get("attn_logit_softcapping"),
            logit_soft_cap=given.get("final_logit_softcapping"),
            gating=_gating(given, family),
            mixture=_mixture(given, family),
            latent=latent,
            is_tied=bool(given.get("tie_word_embeddings", False)),
            eos_token_ids=_token_ids(given.get("eos_token_id")),
            **family_switches(family, given["hidden_size"]),
        )
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json that a model's decoder would have alone; tokens stand outside of its part."""
    text = next((text for seeing, text in _SEEING.items() if config.get("architectures") == [seeing]), None)
    if text is None:
        return config
    check_fields(config, {"text_config": MAPPING}, "config.json's ")
    outer = {key: value for key, value in _without_nulls(config).items() if key not in _SIGHT_KEYS}
    return {**config.get("text_config", {}), **outer, "architectures": [text]}


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    architectures, model_type = config.get("architectures"), config.get("model_type")
    for name, family in FAMILIES.items():
        if architectures == [family.architecture] or (not architectures and model_type == family.model_type):
            _check_model_type(family, model_type)
            return name, family
    known = [*(family.architecture for family in FAMILIES.values()), *_SEEING]
    raise ValueError(f"config.json must name one of {known}, got {architectures or model_type}")


def _check_model_type(family: Family, model_type: Any) -> None:
    """Refuse the type of another family; one that jkv does not know is that of a copy, and says nothing."""
    known = [other.model_type for other in FAMILIES.values()]
    if model_type in known and model_type != family.model_type:
        raise ValueError(
            f"config.json's model_type must be {family.model_type!r}, that of a {family.architecture}, "
            f"got {model_type!r}"
        )


def _check_keys(given: Mapping[str, Any], family: Family) -> None:
    missing = sorted(_REQUIRED - set(given))
    if missing:
        raise ValueError(f"config.json of a {family.architecture} lacks {missing}")
    fixed = {key: value for key, value in {**_FIXED, **family.fixed}.items() if key not in family.keys}
    known = _REQUIRED | _OPTIONAL | fixed.keys() | _HARMLESS | family.keys
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"config.json of a {family.architecture} has keys that jkv does not compute: {unknown}; "
            "remove those that do not change the model"
        )
    check_fields(given, _KINDS, "config.json's ")
    for key, value in fixed.items():
        if given.get(key, value) != value:
            raise ValueError(f"config.json's {key} must be {value!r}, got {given[key]!r}")
    quantization = given.get("quantization_config", {"quant_method": "fp8"})
    check_fields(_without_nulls(quantization), _QUANTIZATION_KINDS, "config.json's quantization_config.")
    method = quantization.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ValueError(
            f"config.json's quantization_config must be of quant_method 'fp8' or 'mxfp4', got {method!r}; "
            "use the unquantized checkpoint or a GGUF file"
        )


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _max_length(given: Mapping[str, Any]) -> int:
    """Return the tokens that the model reads; who adds yarn as Qwen's cards say leaves the old number."""
    length = given["max_position_embeddings"]
    entry = _without_nulls(given.get("rope_scaling") or given.get("rope_parameters") or {})
    original = entry.get("original_max_position_embeddings")
    if original is None or "yarn" not in (entry.get("rope_type"), entry.get("type")):
        return length
    return max(length, int(entry["factor"] * original))


def _attention_scale(given: Mapping[str, Any]) -> float | None:
    scalar = given.get("query_pre_attn_scalar")
    return None if scalar is None else float(scalar) ** -0.5


def _gating(given: Mapping[str, Any], family: Family) -> Gating:
    named = {"slope": given.get("swiglu_alpha"), "limit": given.get("swiglu_limit")}
    return replace(
        family.gating, **{name: float(value) for name, value in named.items() if value is not None}
    )


def _mixture(given: Mapping[str, Any], family: Family) -> MixtureConfig | None:
    keys = family.mixture
    if keys is None:
        return None
    counts = {given[key] for key in _NUM_EXPERTS if key in given}
    missing = [key for key in ("num_experts_per_tok", keys.mlp_dim) if key not in given]
    if len(counts) != 1 or missing:
        raise ValueError(
            f"config.json must give one number of experts as {' or '.join(_NUM_EXPERTS)}, "
            f"num_experts_per_tok and {keys.mlp_dim}, got {sorted(counts)}, without {missing}"
        )
    method = given.get("topk_method")
    if keys.methods and method not in keys.methods:
        raise ValueError(f"config.json's topk_method must be one of {list(keys.methods)}, got {method!r}")
    is_normalized = given.get("norm_topk_prob", False) if keys.is_normalized is None else keys.is_normalized
    has_groups = method != "greedy"
    routing = Routing(
        num_experts=counts.pop(),
        num_active=given["num_experts_per_tok"],
        score=keys.score,
        num_groups=given.get("n_group", 1) if has_groups else 1,
        num_active_groups=given.get("topk_group", 1) if has_groups else 1,
        group_score=keys.group_score,
        is_normalized=is_normalized,
        scale=float(given.get("routed_scaling_factor", 1.0)),
        has_bias=keys.has_bias,
        has_correction=keys.has_correction,
    )
    mlp_dim = given[keys.mlp_dim]
    shared_dim = given.get("n_shared_experts", 0) * mlp_dim or None
    return MixtureConfig(routing, mlp_dim, shared_dim, _num_dense_layers(given))


def _num_dense_layers(given: Mapping[str, Any]) -> int:
    kinds, num_layers = given.get("mlp_layer_types"), given["num_hidden_layers"]
    if kinds is None:
        return given.get("first_k_dense_replace", 0)
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (num_layers - count):
        raise ValueError(
            f"config.json's mlp_layer_types must be {num_layers}, first 'dense' ones, then 'sparse' ones, "
            f"got {kinds}"
        )
    return count


def _latent(given: Mapping[str, Any]) -> LatentDims:
    missing = sorted(_LATENT_KEYS - set(given))
    if missing:
        raise ValueError(f"config.json of a model with latent attention lacks {missing}")
    dims = LatentDims(
        latent=given["kv_lora_rank"],
        rope=given["qk_rope_head_dim"],
        key=given["qk_nope_head_dim"],
        value=given["v_head_dim"],
        query=given.get("q_lora_rank"),
    )
    whole = dims.key + dims.rope
    if given.get("qk_head_dim", whole) != whole:
        raise ValueError(
            f"config.json's qk_head_dim must be {whole}, of its parts, got {given['qk_head_dim']}"
        )
    return dims


def _ropes(given: Mapping[str, Any], family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding and that of layers with a window, where it is another one.

    Its entries stand side by side, or each under the kind of its layers.
    """
    scaling, parameters = given.get("rope_scaling"), given.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise ValueError(f"config.json's rope_scaling and rope_parameters differ: {scaling} and {parameters}")
    name = "rope_scaling" if scaling else "rope_parameters"
    entry = _without_nulls(given.get(name, family.rope))
    local = {"rope_theta": given["rope_local_base_freq"]} if "rope_local_base_freq" in given else None
    if not _LAYER_TYPES.isdisjoint(entry):
        check_fields(entry, dict.fromkeys(_LAYER_TYPES, MAPPING), f"config.json's {name}.")
        local = {**(local or {}), **entry.get("sliding_attention", {})}
        entry = entry.get("full_attention", {})
    rope = _rope(given, family, _without_nulls(entry), name, head_dim)
    return rope, None if local is None else _rope(given, family, _without_nulls(local), name, head_dim)


def _rope(
    given: Mapping[str, Any], family: Family, entry: Mapping[str, Any], name: str, head_dim: int
) -> RopeConfig:
    check_fields(entry, _ROPE_KINDS, f"config.json's {name}.")
    share = entry.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    # transformers applies a part of the head in some scalings of other families and ignores it in others.
    if share != 1.0 and "partial_rotary_factor" not in family.keys:
        raise ValueError(f"config.json's partial_rotary_factor must be 1.0, got {share}")
    if not 0 < share <= 1:
        raise ValueError(f"config.json's partial_rotary_factor must be above 0 and at most 1, got {share}")
    return RopeConfig.from_hf(
        dict(entry),
        dim=int(head_dim * share),
        theta=float(given.get("rope_theta", 10000.0)),
        max_position=given["max_position_embeddings"],
        original_max_position=given.get("original_max_position_embeddings"),
    )


def _windows(given: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    num_layers = given["num_hidden_layers"]
    is_windowed = family.has_window or given.get("use_sliding_window")
    # Here alone null means something: no window, where a missing key means the default one.
    window = config.get("sliding_window", _DEFAULT_WINDOW) if is_windowed else None
    kinds = given.get("layer_types")
    if kinds is None and family.window_period:
        named = (given.get(key) for key in ("sliding_window_pattern", "_sliding_window_pattern"))
        return windows_by_period(family, window, num_layers, next((value for value in named if value), 0))
    if kinds is None:
        first = 0 if family.has_window else given.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= _LAYER_TYPES:
        raise ValueError(
            f"config.json's layer_types must be {num_layers} of 'full_attention' and 'sliding_attention', "
            f"got {kinds}"
        )
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "config.json's layer_types has 'sliding_attention' layers, but no sliding_window is in use"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
