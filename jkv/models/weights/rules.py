"""Which tensor of a checkpoint fills which parameter of the decoder, as data.

Knows names and shapes; reads nothing.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from jkv.layers.latent import LatentDims
from jkv.models.families import FAMILIES
from jkv.models.model_config import MixtureConfig, ModelConfig

Format = Literal["hf", "gguf"]

# Tables that the configuration holds too: GGUF's is read with the metadata, old Hugging Face files repeat it.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope_(freqs|factors_(short|long))\.weight$")


@dataclass(frozen=True)
class TensorRule:
    """Places one tensor of a checkpoint.

    Attributes:
        source: its name in the checkpoint.
        target: dotted path of the parameter.
        shape: its shape in the checkpoint.
        permuted_heads: heads whose rows stand in the interleaved rotary order, to be undone; None: none do.
        index: (start, stop) along each axis of the parameter; () is all of it.
        is_copy: the tensor may be left out, and must equal the one that fills the parameter.
        part: axis, start, stop and step of the tensor's entries that are placed; None is all. What is left
            is for other rules.
        is_transposed: the last two axes change places.
        offset: added to each entry.
        head_copies: heads that the placed rows are, and how often each is placed, copies side by side; None:
            once.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    permuted_heads: int | None = None
    index: tuple[tuple[int, int], ...] = ()
    is_copy: bool = False
    part: tuple[int, int, int, int] | None = None
    is_transposed: bool = False
    offset: float = 0.0
    head_copies: tuple[int, int] | None = None

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The shape of the place that the tensor fills; it may be one of a stack."""
        shape = list(self.shape)
        if self.part is not None:
            axis, *entries = self.part
            shape[axis] = len(range(*entries))
        if self.is_transposed:
            shape[-2:] = reversed(shape[-2:])
        if self.head_copies is not None:
            shape[0] *= self.head_copies[1]
        return (*(1,) * (len(self.index) - len(shape)), *shape)


def tensor_rules(
    config: ModelConfig, format: Format, tensor_names: Collection[str] = ()
) -> tuple[TensorRule, ...]:
    """Return the rules that fill every parameter of a decoder once.

    Args:
        config: the model's.
        format: of the checkpoint.
        tensor_names: its tensors, which say whether latents' up-projection is split in two.
    """
    vocab = (config.vocab_size, config.embed_dim)
    embedding, norm, head = _OUTER[format]
    rules = [
        TensorRule(embedding, "embed.embedding", vocab),
        TensorRule(norm, "norm.scale", (config.embed_dim,), offset=_norm_offset(config, format)),
    ]
    if not config.is_tied:
        rules.append(TensorRule(head, "lm_head.weight", vocab))
    elif format == "hf":
        rules.append(TensorRule(head, "embed.embedding", vocab, is_copy=True))
    for layer in range(config.num_layers):
        prefix = {"hf": f"model.layers.{layer}.", "gguf": f"blk.{layer}."}[format]
        is_split = f"{prefix}attn_k_b.weight" in tensor_names
        for rule in _layer_rules(config, layer, format, is_split=is_split):
            target = f"layers.{layer}.{rule.target}"
            rules.append(replace(rule, source=prefix + rule.source, target=target))
    return tuple(rules)


def is_derived(name: str) -> bool:
    """Return whether a tensor only repeats what the configuration says."""
    return _DERIVED.search(name) is not None


_OUTER: dict[Format, tuple[str, str, str]] = {
    "hf": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "gguf": ("token_embd.weight", "output_norm.weight", "output.weight"),
}


# A layer's tensors, by parameter: Llama's names in Hugging Face files, and llama.cpp's.
_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.q_proj": ("self_attn.q_proj", "attn_q"),
    "attention.k_proj": ("self_attn.k_proj", "attn_k"),
    "attention.v_proj": ("self_attn.v_proj", "attn_v"),
    "attention.o_proj": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "attention.sinks": ("self_attn.sinks", "attn_sinks.weight"),
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    "mlp.gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up_proj": ("mlp.up_proj", "ffn_up"),
    "mlp.down_proj": ("mlp.down_proj", "ffn_down"),
    "mlp.router": ("mlp.gate", "ffn_gate_inp"),
    "mlp.shared.gate_proj": ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    "mlp.shared.up_proj": ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    "mlp.shared.down_proj": ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    "mlp.experts.gate_proj": ("mlp.experts.{expert}.gate_proj", "ffn_gate_exps"),
    "mlp.experts.up_proj": ("mlp.experts.{expert}.up_proj", "ffn_up_exps"),
    "mlp.experts.down_proj": ("mlp.experts.{expert}.down_proj", "ffn_down_exps"),
}


def _name(target: str, config: ModelConfig, format: Format) -> str:
    family = FAMILIES[config.family]
    others = {"hf": family.hf_names, "gguf": family.gguf_names}[format]
    return others.get(target, _NAMES[target][format == "gguf"])


def _norm_offset(config: ModelConfig, format: Format) -> float:
    # llama.cpp's converter has added it.
    return FAMILIES[config.family].norm_offset if format == "hf" else 0.0


def _layer_rules(config: ModelConfig, layer: int, format: Format, *, is_split: bool) -> Iterator[TensorRule]:
    """Yield a layer's rules, sources and targets without the layer's prefix."""
    for target, size in _norms(config).items():
        source = f"{_name(target, config, format)}.weight"
        yield TensorRule(source, f"{target}.scale", (size,), offset=_norm_offset(config, format))
    if config.has_sinks:
        yield TensorRule(_name("attention.sinks", config, format), "attention.sinks", (config.num_heads,))
    if config.latent is not None:
        yield from _latent_rules(config, config.latent, format)
        yield from _up_rules(config, config.latent, format, is_split=is_split)
    maps = {} if config.latent else _attention_maps(config)
    mixture = config.mixture
    if mixture is None or layer < mixture.num_dense_layers:
        maps |= _mlp_maps(config, "mlp", config.mlp_dim)
    else:
        router = (mixture.routing.num_experts, config.embed_dim)
        maps["mlp.router"] = _Map(router, mixture.routing.has_bias)
        if mixture.routing.has_correction:
            source = {"hf": "mlp.gate.e_score_correction_bias", "gguf": "exp_probs_b.bias"}[format]
            yield TensorRule(source, "mlp.router.correction", router[:1])
        if mixture.shared_dim is not None:
            maps |= _mlp_maps(config, "mlp.shared", mixture.shared_dim)
        yield from _expert_rules(config, mixture, format)
    yield from _map_rules(config, maps, format)


def _norms(config: ModelConfig) -> dict[str, int]:
    """Return the width of each norm."""
    norms = {}
    if config.has_pre_norms:
        norms |= {"attention_norm": config.embed_dim, "mlp_norm": config.embed_dim}
    if config.has_post_norms:
        norms |= {"attention_post_norm": config.embed_dim, "mlp_post_norm": config.embed_dim}
    if config.has_qk_norm:
        heads = (config.num_heads, config.num_kv_heads) if config.is_qk_norm_wide else (1, 1)
        norms |= {f"attention.{x}_norm": n * config.head_dim for x, n in zip("qk", heads, strict=True)}
    return norms


class _Map(NamedTuple):
    """A linear map, its weight `[out, in]` in the checkpoint.

    Attributes:
        shape: of the weight.
        has_bias: whether it has a bias `[out]`.
        heads: those whose rows are rotated.
        head_copies: see `TensorRule`.
    """

    shape: tuple[int, int]
    has_bias: bool
    heads: int | None = None
    head_copies: tuple[int, int] | None = None


def _attention_maps(config: ModelConfig) -> dict[str, _Map]:
    embed, bias = config.embed_dim, config.has_qkv_bias
    num_kv_heads = config.num_kv_heads // config.kv_copies
    q, kv = config.num_heads * config.head_dim, num_kv_heads * config.head_dim
    copies = None if config.kv_copies == 1 else (num_kv_heads, config.kv_copies)
    return {
        "attention.q_proj": _Map((q, embed), bias, config.num_heads),
        "attention.k_proj": _Map((kv, embed), bias, num_kv_heads, copies),
        "attention.v_proj": _Map((kv, embed), bias, head_copies=copies),
        "attention.o_proj": _Map((embed, q), config.has_output_bias),
    }


# Latent attention's tensors: in Hugging Face files after "self_attn.", and in GGUF files.
_LATENT_NAMES = {
    "queries": ("q_proj", "attn_q"),
    "q_down": ("q_a_proj", "attn_q_a"),
    "q_norm": ("q_a_layernorm", "attn_q_a_norm"),
    "q_up": ("q_b_proj", "attn_q_b"),
    "kv_down": ("kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    "kv_norm": ("kv_a_layernorm", "attn_kv_a_norm"),
    "kv_up": ("kv_b_proj", "attn_kv_b"),
    "output": ("o_proj", "attn_output"),
}


def _latent_name(part: str, format: Format) -> str:
    hf, gguf = _LATENT_NAMES[part]
    return f"self_attn.{hf}" if format == "hf" else gguf


def _latent_rules(config: ModelConfig, dims: LatentDims, format: Format) -> Iterator[TensorRule]:
    """Yield the rules of latent attention but those of keys and values of a latent."""
    embed, heads = config.embed_dim, config.num_heads

    def down(part: str, width: int) -> Iterator[TensorRule]:
        source, target = _latent_name(part, format), f"attention.{part}"
        yield TensorRule(f"{source}.weight", f"{target}.weight", (width, embed))
        if config.has_qkv_bias:
            yield TensorRule(f"{source}.bias", f"{target}.bias", (width,))

    def norm(part: str, width: int) -> TensorRule:
        return TensorRule(f"{_latent_name(part, format)}.weight", f"attention.{part}.scale", (width,))

    queries, width = "queries", embed
    if dims.query is not None:
        queries, width = "q_up", dims.query
        yield from down("q_down", dims.query)
        yield norm("q_norm", dims.query)
    source, shape = f"{_latent_name(queries, format)}.weight", (heads * (dims.key + dims.rope), width)
    yield from _in_halves(TensorRule(source, "attention.q_proj.weight", shape), heads, dims.rope)
    for rule in down("kv_down", dims.latent + dims.rope):
        yield from _in_halves(rule, 1, dims.rope)
    yield norm("kv_norm", dims.latent)
    output = _latent_name("output", format)
    yield TensorRule(f"{output}.weight", "attention.o_proj.weight", (embed, heads * dims.value))
    if config.has_output_bias:
        yield TensorRule(f"{output}.bias", "attention.o_proj.bias", (embed,))


def _up_rules(
    config: ModelConfig, dims: LatentDims, format: Format, *, is_split: bool
) -> Iterator[TensorRule]:
    """Yield the rules of what makes keys and values of a latent: one tensor, or two, the keys' transposed."""
    heads = config.num_heads
    if is_split:
        keys, values = (heads, dims.latent, dims.key), (heads, dims.value, dims.latent)
        yield TensorRule("attn_k_b.weight", "attention.key_up", keys, is_transposed=True)
        yield TensorRule("attn_v_b.weight", "attention.value_up", values)
        return
    source, shape = f"{_latent_name('kv_up', format)}.weight", (heads * (dims.key + dims.value), dims.latent)
    for head in range(heads):
        start = head * (dims.key + dims.value)
        for target, size in (("key_up", dims.key), ("value_up", dims.value)):
            index = ((head, head + 1), (0, size), (0, dims.latent))
            part = (0, start, start + size, 1)
            yield TensorRule(source, f"attention.{target}", shape, index=index, part=part)
            start += size


def _in_halves(rule: TensorRule, num_heads: int, rope_dim: int) -> Iterator[TensorRule]:
    """Yield the rule in parts: the last entries of each head are pairs of neighbours, ours are in halves."""
    size = rule.shape[0] // num_heads
    half, columns = rope_dim // 2, tuple((0, column) for column in rule.shape[1:])
    for start in range(0, rule.shape[0], size):
        rope, end = start + size - rope_dim, start + size
        for place, part in (
            ((start, rope), (start, rope, 1)),
            ((rope, rope + half), (rope, end, 2)),
            ((rope + half, end), (rope + 1, end, 2)),
        ):
            yield replace(rule, index=(place, *columns), part=(0, *part))


def _mlp_maps(config: ModelConfig, target: str, mlp_dim: int) -> dict[str, _Map]:
    embed, bias = config.embed_dim, config.has_mlp_bias
    return {
        f"{target}.gate_proj": _Map((mlp_dim, embed), bias),
        f"{target}.up_proj": _Map((mlp_dim, embed), bias),
        f"{target}.down_proj": _Map((embed, mlp_dim), bias),
    }


def _map_rules(config: ModelConfig, maps: dict[str, _Map], format: Format) -> Iterator[TensorRule]:
    family = FAMILIES[config.family]
    heads_count = format == "gguf" and family.is_gguf_permuted
    fused = {"hf": family.hf_fused, "gguf": family.gguf_fused}[format]
    places = {
        target: place for name, targets in fused.items() for target, place in _places(name, targets, maps)
    }
    for target, (shape, has_bias, heads, copies) in maps.items():
        source, rows, num_rows = places.get(target, (_name(target, config, format), None, shape[0]))
        part = None if rows is None else (0, *rows, 1)
        heads = heads if heads_count else None
        for parameter, sizes in (("weight", (num_rows, shape[1])), ("bias", (num_rows,))):
            if parameter == "weight" or has_bias:
                name = f"{target}.{parameter}"
                yield TensorRule(f"{source}.{parameter}", name, sizes, heads, part=part, head_copies=copies)


def _places(
    name: str, targets: tuple[str, ...], maps: dict[str, _Map]
) -> Iterator[tuple[str, tuple[str, tuple[int, int], int]]]:
    """Yield where in a fused tensor each map's rows are, and how many rows it has."""
    ends = list(accumulate(maps[target].shape[0] for target in targets))
    for target, start, end in zip(targets, [0, *ends], ends, strict=False):
        yield target, (name, (start, end), ends[-1])


def _expert_rules(config: ModelConfig, mixture: MixtureConfig, format: Format) -> Iterator[TensorRule]:
    keys = FAMILIES[config.family].mixture
    if format == "hf" and keys is not None and keys.are_interleaved:
        yield from _interleaved_rules(config, mixture)
        return
    num_experts = mixture.routing.num_experts
    for target, (shape, has_bias, *_) in _mlp_maps(config, "mlp.experts", mixture.mlp_dim).items():
        name = _name(target, config, format)
        if format == "gguf":
            stack = (num_experts, *shape)
            yield TensorRule(f"{name}.weight", f"{target}.weight", stack, is_transposed=True)
            if has_bias:
                yield TensorRule(f"{name}.bias", f"{target}.bias", stack[:2])
            continue
        for expert in range(num_experts):
            source = f"{name.format(expert=expert)}.weight"
            index = ((expert, expert + 1), (0, shape[1]), (0, shape[0]))
            yield TensorRule(source, f"{target}.weight", shape, index=index, is_transposed=True)


def _interleaved_rules(config: ModelConfig, mixture: MixtureConfig) -> Iterator[TensorRule]:
    """Yield the rules of gpt-oss: all experts' weights `[expert, in, out]`, gate and up column by column."""
    num_experts, embed, mlp = mixture.routing.num_experts, config.embed_dim, mixture.mlp_dim
    for first, target in enumerate(("mlp.experts.gate_proj", "mlp.experts.up_proj")):
        for source, parameter, shape in (
            ("mlp.experts.gate_up_proj", "weight", (num_experts, embed, 2 * mlp)),
            ("mlp.experts.gate_up_proj_bias", "bias", (num_experts, 2 * mlp)),
        ):
            part = (len(shape) - 1, first, 2 * mlp, 2)
            yield TensorRule(source, f"{target}.{parameter}", shape, part=part)
    down = "mlp.experts.down_proj"
    yield TensorRule(down, f"{down}.weight", (num_experts, mlp, embed))
    yield TensorRule(f"{down}_bias", f"{down}.bias", (num_experts, embed))
