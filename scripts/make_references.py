"""Make tiny checkpoints with random weights and what Hugging Face transformers computes with them.

Run in an environment of its own: pip install torch==2.13.0 transformers==5.24.0 safetensors

    python scripts/make_references.py tests/golden [NAME ...]

Each folder gets config.json and model.safetensors as transformers saves them, and reference.npz: `tokens
[2, 40]`, `logits [2, 40, vocab]` of one forward pass in float32, and `greedy [2, 56]`, the tokens and 16
greedy ones; of longrope `short_logits [2, 24, vocab]` too, of the tokens' first.
"""

# torch and transformers are not in the environment that is checked.
# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MODELS = {
    "qwen2": ("Qwen2", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 16, "swiglu_limit": 1.0, "rope_parameters": YARN | {"rope_theta": 1000.0}},
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"sliding_window": 16}),
    "phi3_longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.2, 2.5, 6.0],
            },
        },
    ),
    "deepseek_v2_grouped": (
        "DeepseekV2",
        MLA
        | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
        | {"n_shared_experts": 2, "attention_bias": True},
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        MLA
        | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"rope_parameters": YARN | {"rope_theta": 1000.0, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        MLA
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8}
        | {"v_head_dim": 20, "rms_norm_eps": 1e-5},
    ),
}


def make_model(name: str) -> transformers.PreTrainedModel:
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    # Norms and biases start as ones and zeros, which would hide how they are read.
    for parameter_name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.2)
        if "norm" in parameter_name and not name.startswith("gemma"):
            parameter.data += 1
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model.eval()


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight `[expert, in, out]` as MXFP4 blocks and scales, and what they stand for."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    rows = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = torch.ceil(torch.log2(rows.abs().amax(-1) / 6))
    levels = rows / torch.exp2(exponent)[..., None]
    codes = (levels[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = (exponent + 127).to(torch.uint8)
    unpacked = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert unpacked.shape == weight.shape
    return blocks, scales, unpacked


def pack_experts(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Store the experts as published checkpoints do, and let the model compute with what is stored."""
    tensors = load_file(folder / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            weight = getattr(block.mlp.experts, part)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], weight.data = pack(weight.data)
            del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def make_reference(name: str, folder: Path) -> None:
    model = make_model(name)
    model.save_pretrained(folder)
    if name == "gpt_oss":
        pack_experts(model, folder)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    # longrope has other frequencies below the original context.
    short = {"short_logits": model(tokens[:, :24]).logits.numpy()} if name == "phi3_longrope" else {}
    greedy = tokens
    for _ in range(16):
        greedy = torch.cat([greedy, model(greedy, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    np.savez_compressed(
        folder / "reference.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        greedy=greedy.numpy().astype(np.int32),
        **short,
    )
    # It says how long transformers would generate, which no test asks.
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        make_reference(name, Path(sys.argv[1]) / name)
