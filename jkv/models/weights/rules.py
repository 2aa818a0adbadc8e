"""Which tensor of a checkpoint fills which parameter of the decoder, as data.

Knows names and shapes; reads nothing.
"""

import re
from dataclasses import dataclass
from typing import Literal

from jkv.models.families import FAMILIES, ModelConfig

Format = Literal["hf", "gguf"]

# Tables that the configuration holds too: GGUF's is read with the metadata, old Hugging Face files repeat it.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope_freqs\.weight$")


@dataclass(frozen=True)
class TensorRule:
    """Places one tensor of a checkpoint.

    Attributes:
        source: its name in the checkpoint.
        target: dotted path of the parameter.
        shape: its shape in the checkpoint, which is that of the place it fills.
        permuted_heads: heads whose rows stand in the interleaved rotary order, to be undone; None: none do.
        index: (start, stop) along each axis of the parameter; () is all of it.
        is_copy: the tensor may be left out, and must equal the one that fills the parameter.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    permuted_heads: int | None = None
    index: tuple[tuple[int, int], ...] = ()
    is_copy: bool = False


def tensor_rules(config: ModelConfig, format: Format) -> tuple[TensorRule, ...]:
    """Return the rules that fill every parameter of a decoder once."""
    vocab = (config.vocab_size, config.embed_dim)
    embedding, norm, head = _OUTER[format]
    rules = [
        TensorRule(embedding, "embed.embedding", vocab),
        TensorRule(norm, "norm.scale", (config.embed_dim,)),
    ]
    if not config.is_tied:
        rules.append(TensorRule(head, "lm_head.weight", vocab))
    elif format == "hf":
        rules.append(TensorRule(head, "embed.embedding", vocab, is_copy=True))
    for layer in range(config.num_layers):
        prefix = {"hf": f"model.layers.{layer}.", "gguf": f"blk.{layer}."}[format]
        for part in _layer_parts(config):
            rules += _part_rules(
                part, prefix + part.names[format], f"layers.{layer}.{part.target}", config, format
            )
    return tuple(rules)


def is_derived(name: str) -> bool:
    """Return whether a tensor only repeats what the configuration says."""
    return _DERIVED.search(name) is not None


_OUTER: dict[Format, tuple[str, str, str]] = {
    "hf": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "gguf": ("token_embd.weight", "output_norm.weight", "output.weight"),
}


@dataclass(frozen=True)
class _Part:
    """A norm or a linear map of every layer; `heads` counts those whose rows are rotated."""

    target: str
    names: dict[Format, str]
    shape: tuple[int, ...]
    has_bias: bool = False
    heads: int | None = None


def _layer_parts(config: ModelConfig) -> list[_Part]:
    def part(target: str, hf: str, gguf: str, shape: tuple[int, ...], **options) -> _Part:
        return _Part(target, {"hf": hf, "gguf": gguf}, shape, **options)

    embed, mlp, head = config.embed_dim, config.mlp_dim, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    qkv_bias, mlp_bias = {"has_bias": config.has_qkv_bias}, {"has_bias": config.has_mlp_bias}
    parts = [
        part("attention_norm", "input_layernorm", "attn_norm", (embed,)),
        part(
            "attention.q_proj", "self_attn.q_proj", "attn_q", (q, embed), heads=config.num_heads, **qkv_bias
        ),
        part(
            "attention.k_proj",
            "self_attn.k_proj",
            "attn_k",
            (kv, embed),
            heads=config.num_kv_heads,
            **qkv_bias,
        ),
        part("attention.v_proj", "self_attn.v_proj", "attn_v", (kv, embed), **qkv_bias),
        part(
            "attention.o_proj", "self_attn.o_proj", "attn_output", (embed, q), has_bias=config.has_output_bias
        ),
        part("mlp_norm", "post_attention_layernorm", "ffn_norm", (embed,)),
        part("mlp.gate_proj", "mlp.gate_proj", "ffn_gate", (mlp, embed), **mlp_bias),
        part("mlp.up_proj", "mlp.up_proj", "ffn_up", (mlp, embed), **mlp_bias),
        part("mlp.down_proj", "mlp.down_proj", "ffn_down", (embed, mlp), **mlp_bias),
    ]
    if config.has_qk_norm:
        parts.append(part("attention.q_norm", "self_attn.q_norm", "attn_q_norm", (head,)))
        parts.append(part("attention.k_norm", "self_attn.k_norm", "attn_k_norm", (head,)))
    return parts


def _part_rules(
    part: _Part, source: str, target: str, config: ModelConfig, format: Format
) -> list[TensorRule]:
    is_permuted = format == "gguf" and FAMILIES[config.family].is_gguf_permuted
    heads = part.heads if is_permuted else None
    parameter = "weight" if len(part.shape) == 2 else "scale"
    rules = [TensorRule(f"{source}.weight", f"{target}.{parameter}", part.shape, heads)]
    if part.has_bias:
        rules.append(TensorRule(f"{source}.bias", f"{target}.bias", part.shape[:1], heads))
    return rules
