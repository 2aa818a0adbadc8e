"""What a GGUF file's metadata says of latent attention and of DeepSeek's experts.

Knows the keys of llama.cpp's architecture deepseek2, without their prefix; opens no file.
"""

from collections.abc import Mapping
from typing import Any

from jkv.layers.latent import LatentDims
from jkv.layers.moe import Routing
from jkv.models.families import MixtureKeys
from jkv.models.fields import COUNT, INDEX, NUMBER, POSITIVE, SWITCH
from jkv.models.model_config import MixtureConfig

LATENT_KINDS = {
    "attention.kv_lora_rank": COUNT,
    "attention.q_lora_rank": COUNT,
    "attention.key_length_mla": COUNT,
    "attention.value_length_mla": COUNT,
    "expert_gating_func": INDEX,
    "expert_group_count": COUNT,
    "expert_group_used_count": COUNT,
    "expert_shared_count": INDEX,
    "expert_weights_norm": SWITCH,
    "expert_weights_scale": POSITIVE,
    "leading_dense_block_count": INDEX,
    # Layers past the decoder's: `jkv.models.weights.leading` leaves them out.
    "nextn_predict_layers": INDEX,
    "rope.scaling.yarn_log_multiplier": NUMBER,
}
# llama.cpp's codes; 0 leaves it to the architecture.
_SCORE_CODES = {"softmax": 1, "sigmoid": 2}


def latent_dims(given: Mapping[str, Any]) -> LatentDims:
    """Return the widths of latent attention.

    Files that split the up-projection in two have a head's widths under keys of their own, and under the
    common ones those of the absorbed form; older files have a head's widths under the common ones.

    Raises:
        ValueError: the widths do not fit each other.
    """
    latent, rope = given["attention.kv_lora_rank"], given["rope.dimension_count"]
    suffix = "_mla" if "attention.key_length_mla" in given else ""
    if suffix:
        sizes = {"head_count_kv": 1, "key_length": latent + rope, "value_length": latent}
    else:
        sizes = {"head_count_kv": given["attention.head_count"]}
    for name, size in sizes.items():
        key = f"attention.{name}"
        if given.get(key, size) != size:
            raise ValueError(
                f"{key} must be {size} beside a latent of {latent} entries and {rope} rotated ones, "
                f"got {given[key]}"
            )
    key_length, value_length = (given.get(f"attention.{name}_length{suffix}") for name in ("key", "value"))
    if key_length is None or value_length is None or key_length <= rope:
        raise ValueError(
            f"attention.key_length{suffix} must be above the {rope} rotated entries and stand beside "
            f"attention.value_length{suffix}, got {key_length} and {value_length}"
        )
    return LatentDims(
        latent=latent,
        rope=rope,
        key=key_length - rope,
        value=value_length,
        query=given.get("attention.q_lora_rank"),
    )


def latent_mixture(given: Mapping[str, Any], keys: MixtureKeys) -> MixtureConfig:
    """Return the experts beside latent attention.

    As in llama.cpp, a file without groups, older than their keys, has experts chosen among all. The score of
    a group is the model's own, also where llama.cpp takes the best two for the best one.

    Raises:
        ValueError: logits become scores in another way, or one of the groups' two keys is missing.
    """
    code = _SCORE_CODES[keys.score]
    if given.get("expert_gating_func", 0) not in (0, code):
        correction = "with" if keys.has_correction else "without"
        raise ValueError(
            f"expert_gating_func must be {code} ({keys.score}) {correction} exp_probs_b, "
            f"got {given['expert_gating_func']}"
        )
    if ("expert_group_count" in given) != ("expert_group_used_count" in given):
        raise ValueError("expert_group_count and expert_group_used_count must be given together, got one")
    routing = Routing(
        num_experts=given["expert_count"],
        num_active=given["expert_used_count"],
        score=keys.score,
        num_groups=given.get("expert_group_count", 1),
        num_active_groups=given.get("expert_group_used_count", 1),
        group_score=keys.group_score,
        is_normalized=given.get("expert_weights_norm", False),
        scale=float(given.get("expert_weights_scale", 1.0)),
        has_correction=keys.has_correction,
    )
    mlp_dim = given["expert_feed_forward_length"]
    shared_dim = given["expert_shared_count"] * mlp_dim or None
    return MixtureConfig(routing, mlp_dim, shared_dim, given["leading_dense_block_count"])
