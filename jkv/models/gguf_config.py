"""The reader of a GGUF file's metadata.

Knows which keys change what a model computes, after llama.cpp; opens no file.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jkv.layers.moe import Routing
from jkv.layers.rope import RopeConfig, check_longrope, yarn_mscale
from jkv.models.families import FAMILIES, Family, family_switches, windows_by_period
from jkv.models.fields import AT_LEAST_ZERO, COUNT, INDEX, POSITIVE, TEXT, check_fields, many, whole
from jkv.models.gguf_latent import LATENT_KINDS, latent_dims, latent_mixture
from jkv.models.model_config import MAX_LAYERS, MixtureConfig, ModelConfig, check_sizes

# Tensors that are no parameters: divisors of the rotary frequencies, and longrope's two sets of them.
_FREQS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
FREQUENCY_TABLES = (_FREQS, *_LONGROPE)

_REQUIRED = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    }
)
_OPTIONAL = frozenset(
    {
        "vocab_size",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_FIXED: dict[str, Any] = {
    # Converters write it for Qwen3-Coder, whose config.json names a shared expert of no width.
    "expert_shared_feed_forward_length": 0,
    # Rows of queries and keys in interleaved pairs, as every file of this architecture has them.
    "tensor_data_layout": "Meta AI original pth",
    # llama.cpp overrides or multiplies these in ways that differ between its versions.
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
# The same, over heads and over latents.
_HEADS_FIXED: dict[str, Any] = {"rope.scaling.yarn_log_multiplier": 0.0}
_LATENT_FIXED: dict[str, Any] = {"rope.scaling.attn_factor": 1.0}
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_KINDS = {
    "block_count": whole(1, MAX_LAYERS),
    "context_length": COUNT,
    "embedding_length": COUNT,
    "feed_forward_length": COUNT,
    "attention.head_count": COUNT,
    "attention.layer_norm_rms_epsilon": AT_LEAST_ZERO,
    "vocab_size": COUNT,
    "attention.head_count_kv": COUNT,
    "attention.key_length": COUNT,
    "attention.value_length": COUNT,
    "attention.sliding_window": INDEX,
    "rope.dimension_count": COUNT,
    "attn_logit_softcapping": POSITIVE,
    "final_logit_softcapping": POSITIVE,
    "expert_count": INDEX,
    "expert_used_count": INDEX,
    "expert_feed_forward_length": COUNT,
    "rope.freq_base": POSITIVE,
    "rope.freq_base_swa": POSITIVE,
    "rope.scale_linear": AT_LEAST_ZERO,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": AT_LEAST_ZERO,
    "rope.scaling.attn_factor": POSITIVE,
    "rope.scaling.original_context_length": COUNT,
    "rope.scaling.yarn_beta_fast": POSITIVE,
    "rope.scaling.yarn_beta_slow": POSITIVE,
    **LATENT_KINDS,
}
_END_TOKENS = ("eos", "eot", "eom")
_TOKEN_KINDS = {
    "tokenizer.ggml.tokens": many(TEXT),
    **{f"tokenizer.ggml.{name}_token_id": INDEX for name in ("bos", *_END_TOKENS)},
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    tables: Mapping[str, list[float]] = MappingProxyType({}),
) -> ModelConfig:
    """Read a GGUF file's metadata.

    Args:
        metadata: the file's keys and values.
        tensor_names: its tensors, which say whether there are biases and an output head.
        tables: those of `FREQUENCY_TABLES` that the file has.

    Raises:
        ValueError: the architecture is not one of `FAMILIES`, a size is missing, or a key could change what
            the model computes and is not understood.
    """
    architecture = str(metadata.get("general.architecture"))
    name, family = _family(
        architecture,
        has_experts=bool(metadata.get(f"{architecture}.expert_count")),
        has_correction=any(tensor.endswith("exp_probs_b.bias") for tensor in tensor_names),
    )
    given = _keys(metadata, architecture, family)
    check_fields(given, _KINDS, f"{architecture}.")
    check_fields(metadata, _TOKEN_KINDS, "")
    check_fields(tables, dict.fromkeys(FREQUENCY_TABLES, many(POSITIVE)), "")
    num_layers = _num_layers(given, architecture, tensor_names)
    num_heads = given["attention.head_count"]
    latent = latent_dims(given) if family.has_latent else None
    head_dim = latent.key if latent else _head_dim(given, architecture, family)
    rope_dim = latent.rope if latent else given.get("rope.dimension_count", head_dim)
    found = {name for name in FREQUENCY_TABLES if name in tensor_names}
    if found != tables.keys():
        raise ValueError(f"tables must be those of the file, {sorted(found)}, got {sorted(tables)}")
    return check_sizes(
        ModelConfig(
            family=name,
            vocab_size=_vocab_size(metadata, given),
            num_layers=num_layers,
            embed_dim=given["embedding_length"],
            num_heads=num_heads,
            num_kv_heads=num_heads if latent else given.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            mlp_dim=given["feed_forward_length"],
            norm_eps=float(given["attention.layer_norm_rms_epsilon"]),
            rope=_rope(given, family, rope_dim, tables),
            window_rope=_window_rope(given, family, rope_dim),
            max_length=given["context_length"],
            windows=windows_by_period(family, given.get("attention.sliding_window") or None, num_layers),
            has_qkv_bias="blk.0.attn_q.bias" in tensor_names,
            has_output_bias="blk.0.attn_output.bias" in tensor_names,
            has_mlp_bias=any(f"blk.0.{part}.bias" in tensor_names for part in ("ffn_up", "ffn_up_exps")),
            attention_scale=_attention_scale(given, family),
            attention_soft_cap=given.get("attn_logit_softcapping"),
            logit_soft_cap=given.get("final_logit_softcapping"),
            gating=family.gating,
            mixture=_mixture(given, family),
            latent=latent,
            is_tied="output.weight" not in tensor_names,
            eos_token_ids=_end_tokens(metadata),
            **family_switches(family, given["embedding_length"]),
        )
    )


def _family(architecture: str, *, has_experts: bool, has_correction: bool) -> tuple[str, Family]:
    """Return the first family of an architecture; llama.cpp counts Mixtral as a Llama, GLM as a DeepSeek."""
    for name, family in FAMILIES.items():
        mixture = family.mixture
        traits = (mixture is not None, mixture is not None and mixture.has_correction)
        if family.gguf_name == architecture and traits == (has_experts, has_correction):
            return name, family
    known = sorted({family.gguf_name for family in FAMILIES.values()})
    experts = "with" if has_experts else "without"
    raise ValueError(
        f"general.architecture must be one of {known}, each with or without experts as its family is, "
        f"got {architecture!r} {experts} experts"
    )


def _keys(metadata: Mapping[str, Any], architecture: str, family: Family) -> dict[str, Any]:
    """Return the architecture's own keys without their prefix, all of them understood."""
    prefix = f"{architecture}."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    required = _REQUIRED | family.gguf_required | ({"expert_used_count"} if family.mixture else set())
    missing = sorted(prefix + key for key in required - set(given))
    if missing:
        raise ValueError(f"the GGUF metadata lacks {missing}")
    fixed = _FIXED | (_LATENT_FIXED if family.has_latent else _HEADS_FIXED)
    known = required | _OPTIONAL | fixed.keys() | _EXPERT_KEYS
    if family.has_latent:
        known |= LATENT_KINDS.keys()
    if "rope_local_base_freq" in family.defaults:
        known |= {"rope.freq_base_swa"}
    unknown = sorted(prefix + key for key in set(given) - known)
    if unknown:
        raise ValueError(f"the GGUF metadata has keys that jkv does not compute: {unknown}")
    for key, value in fixed.items():
        if given.get(key, value) != value:
            raise ValueError(f"{prefix}{key} must be {value!r}, got {given[key]!r}")
    return given


def _num_layers(given: Mapping[str, Any], architecture: str, tensor_names: Collection[str]) -> int:
    """Return the decoder's layers; llama.cpp counts those that predict later tokens among a file's blocks.

    A converter may have left their tensors out, but a block without a `nextn` tensor is none of them.
    """
    num_blocks, num_past = given["block_count"], given.get("nextn_predict_layers", 0)
    if num_past >= num_blocks:
        raise ValueError(
            f"{architecture}.nextn_predict_layers must be below block_count, got {num_past} of {num_blocks}"
        )
    for layer in range(num_blocks - num_past, num_blocks):
        names = [name for name in tensor_names if name.startswith(f"blk.{layer}.")]
        if names and not any(".nextn." in name for name in names):
            raise ValueError(
                f"blk.{layer} must have a nextn tensor, as {architecture}.nextn_predict_layers is {num_past} "
                f"and block_count {num_blocks}, got none"
            )
    return num_blocks - num_past


def _head_dim(given: Mapping[str, Any], architecture: str, family: Family) -> int:
    head_dim = given.get("attention.key_length", given["embedding_length"] // given["attention.head_count"])
    whole_keys = {"attention.value_length", "rope.dimension_count"}
    if "partial_rotary_factor" in family.keys:
        whole_keys.remove("rope.dimension_count")
    for key in sorted(whole_keys):
        if given.get(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key} must be the head's size {head_dim}, got {given[key]}")
    return head_dim


def _attention_scale(given: Mapping[str, Any], family: Family) -> float | None:
    if family.gguf_wide_scale != given["block_count"]:
        return None
    return (given["embedding_length"] / given["attention.head_count"]) ** -0.5


def _mixture(given: Mapping[str, Any], family: Family) -> MixtureConfig | None:
    """Read as llama.cpp does: the chosen weights are normalized in all families but DeepSeek's."""
    keys = family.mixture
    if keys is None:
        return None
    if family.has_latent:
        return latent_mixture(given, keys)
    routing = Routing(
        given["expert_count"],
        given["expert_used_count"],
        keys.score,
        is_normalized=True,
        has_bias=keys.has_bias,
    )
    return MixtureConfig(routing, given.get("expert_feed_forward_length", given["feed_forward_length"]))


def _vocab_size(metadata: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    size = given.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    if not size:
        raise ValueError("the GGUF metadata must have a vocab_size or tokenizer.ggml.tokens, got neither")
    return size


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _window_rope(given: Mapping[str, Any], family: Family, head_dim: int) -> RopeConfig | None:
    theta = given.get("rope.freq_base_swa", family.defaults.get("rope_local_base_freq"))
    return None if theta is None else RopeConfig(dim=head_dim, theta=float(theta))


def _rope(
    given: Mapping[str, Any], family: Family, dim: int, tables: Mapping[str, list[float]]
) -> RopeConfig:
    """Read as llama.cpp does: a factor without a type is linear, attn_factor multiplies yarn's own."""
    factors = tuple(tables[_FREQS]) if _FREQS in tables else None
    rope = RopeConfig(dim=dim, theta=float(given.get("rope.freq_base", 10000.0)), frequency_factors=factors)
    if given.get("rope.scaling.type") == "longrope" or not tables.keys().isdisjoint(_LONGROPE):
        return _longrope(given, rope, tables)
    kind = given.get("rope.scaling.type", "linear")
    factor = float(given.get("rope.scaling.factor") or given.get("rope.scale_linear") or 1.0)
    attention_factor = float(given.get("rope.scaling.attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn"):
        known = ["linear", "longrope", "none", "yarn"]
        raise ValueError(f"rope.scaling.type must be one of {known}, got {kind!r}")
    if kind == "yarn":
        # The converter writes a tenth of DeepSeek's mscale_all_dim; all published mscales equal it.
        mscale = 10 * float(given.get("rope.scaling.yarn_log_multiplier", 0.0))
        return replace(
            rope,
            scaling="yarn",
            factor=factor,
            original_max_position=given.get("rope.scaling.original_context_length", given["context_length"]),
            beta_fast=float(given.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(given.get("rope.scaling.yarn_beta_slow", 1.0)),
            truncate=family.has_truncated_yarn,
            attention_factor=None if family.has_latent else attention_factor * yarn_mscale(factor),
            mscale=mscale,
            mscale_all_dim=mscale,
        )
    if attention_factor != 1.0:
        raise ValueError(f"rope.scaling.attn_factor must be 1.0 without yarn, got {attention_factor}")
    return rope if kind == "none" or factor == 1.0 else replace(rope, scaling="linear", factor=factor)


def _longrope(given: Mapping[str, Any], rope: RopeConfig, tables: Mapping[str, list[float]]) -> RopeConfig:
    """Read as llama.cpp does: both tables and attn_factor say all, which converters of Phi-3 give no type."""
    if tables.keys() != set(_LONGROPE):
        raise ValueError(f"longrope must have the tables {list(_LONGROPE)}, got {sorted(tables)}")
    kind, factor = given.get("rope.scaling.type", "longrope"), given.get("rope.scaling.factor", 1.0)
    if kind != "longrope" or factor != 1.0:
        raise ValueError(
            f"rope.scaling.type must be 'longrope' beside {_LONGROPE[0]}, and its factor 1.0, got {kind!r} "
            f"and {factor}"
        )
    context = given["context_length"]
    original = given.get("rope.scaling.original_context_length", context)
    short, long = (tuple(tables[name]) for name in _LONGROPE)
    return check_longrope(
        replace(
            rope,
            scaling="longrope",
            factor=context / original,
            original_max_position=original,
            attention_factor=float(given.get("rope.scaling.attn_factor", 1.0)),
            frequency_factors=short,
            long_factors=long,
        )
    )
