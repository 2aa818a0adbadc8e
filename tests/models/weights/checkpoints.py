"""Small checkpoints on disk and in memory for the tests of this folder."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jkv.models.weights.rules import TensorRule
from jkv.models.weights.source import TensorInfo

GOLDEN = Path(__file__).parents[2] / "golden"
GOLDEN_NAMES = ("llama", "llama3_rope", "mistral_sliding", "qwen3_qknorm")
# Hugging Face names inside a layer, and llama.cpp's.
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class ArraySource:
    """A source over arrays in memory that notes what is read."""

    arrays: dict[str, np.ndarray]

    def __post_init__(self):
        self.reads: list[tuple[str, tuple[slice, ...]]] = []

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(a.shape, a.dtype, str(a.dtype)) for name, a in self.arrays.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        self.reads.append((name, index))
        return self.arrays[name][index]


def make_normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make_targets(rules: Iterable[TensorRule], dtype: object = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    return {rule.target: jax.ShapeDtypeStruct(rule.shape, dtype) for rule in rules}


def read_golden(name: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")


def write_folder(folder: Path, config: Mapping, tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def make_hf_llama(
    head_dim: int, *, num_layers: int = 2, **changes: object
) -> tuple[dict, dict[str, np.ndarray]]:
    """Return config.json and tensors of a Llama with 4 query heads and 2 KV heads."""
    embed, mlp, vocab, q, kv = 32, 64, 96, 4 * head_dim, 2 * head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    layer_shapes = {
        "input_layernorm": (embed,),
        "self_attn.q_proj": (q, embed),
        "self_attn.k_proj": (kv, embed),
        "self_attn.v_proj": (kv, embed),
        "self_attn.o_proj": (embed, q),
        "post_attention_layernorm": (embed,),
        "mlp.gate_proj": (mlp, embed),
        "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp),
    }
    shapes = {"model.embed_tokens": (vocab, embed), "model.norm": (embed,), "lm_head": (vocab, embed)}
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    tensors = {f"{n}.weight": make_normal(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    return config | changes, tensors


def add_qkv_biases(config: dict, tensors: dict[str, np.ndarray]) -> None:
    for layer in range(config["num_hidden_layers"]):
        for name in "qkv":
            rows = tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"].shape[0]
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = make_normal(rows, seed=rows + layer)


def interleave_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put a head's row i and i + half side by side, as llama.cpp's converter does for Llama's q and k."""
    heads = np.split(rows, num_heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in heads])


def write_gguf(
    path: Path,
    config: Mapping,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    encoding: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    theta: float = 10_000.0,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write Hugging Face tensors as llama.cpp does; vectors stay F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(theta)
    for name, tensor in tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            tensor = interleave_rows(tensor, heads[part])
        if tensor.ndim == 1 or encoding == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), tensor)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor, encoding), raw_dtype=encoding)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, parameter = name.rsplit(".", 1)
    if stem in outer:
        return f"{outer[stem]}.{parameter}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{parameter}"
