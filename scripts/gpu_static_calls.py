"""Counts the kernels of a call of attention on an H200 that is not here; for docs/kernels.md.

    JAX_PLATFORMS=cpu PYTHONPATH=. python scripts/gpu_static_calls.py

Needs the compilers of jkv[aot]. Compiles a call by itself, heads of Llama 3 8B and latents of DeepSeek-V3 in
pages of 64, and counts what the GPU launches for it: the kernels of Pallas, which attend and merge, and those
that XLA makes to plan them and to order queries and results. A loop of kernels is an error.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jkv.targets import shapes_on, target
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.latent_attention.shapes import MODELS as LATENT_MODELS
from kernels_pallas.latent_attention.shapes import Shape as LatentShape
from kernels_pallas.paged_attention import pallas_gpu
from kernels_pallas.paged_attention.shapes import MODELS, Shape
from scripts.compilers import check_compilers
from scripts.gpu_launches import OF_PALLAS, Launch, compile_and_list
from tests.kernels_pallas.models import latent_arguments, model_arguments

PAGE_SIZE, HELD = 64, 8192
# Name, codec, the model's shape, new tokens of a sequence, and sequences.
CALLS = [
    *(("heads", "bf16", MODELS["llama3_8b"], 1, num_seqs) for num_seqs in (1, 8, 64, 256)),
    *(("heads", codec, MODELS["llama3_8b"], 1, 64) for codec in ("int8", "fp8_e4m3", "int4_token", "int4")),
    *(("heads", codec, MODELS["llama3_8b"], 512, 4) for codec in ("bf16", "int4")),
    *(("latents", "bf16", LATENT_MODELS["deepseek_v3"], 1, num_seqs) for num_seqs in (1, 64, 256)),
    ("latents", "int4_token", LATENT_MODELS["deepseek_v3"], 1, 64),
]


def launches_of(mesh: Mesh, shape: Shape | LatentShape, codec: str) -> list[Launch]:
    """Compile a call for an H200 and return its kernels."""
    if isinstance(shape, Shape):
        arguments, num_pages = model_arguments(shape, codec, layout="gpu")
        attend, scale = pallas_gpu.paged_attention, shape.head_dim**-0.5
    else:
        arguments, num_pages = latent_arguments(shape, codec, layout="gpu")
        attend, scale = latent_gpu.latent_attention, (shape.head_dim + shape.rope_dim) ** -0.5
    call = jax.jit(functools.partial(attend, num_pages=num_pages, scale=scale))
    # Of a layer that is not known before.
    arguments = arguments._replace(page_offset=jax.ShapeDtypeStruct((), jnp.int32))
    return compile_and_list(call.lower(*shapes_on(mesh, [arguments])))[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    check_compilers(parser, ["h200"])
    mesh = target("h200")
    columns = ["call", "codec", "tokens", "sequences", "kernels", "of Pallas"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, codec, model, time, num_seqs in CALLS:
        shape = dataclasses.replace(model, page_size=PAGE_SIZE, time=time, totals=(HELD,) * num_seqs)
        launches = launches_of(mesh, shape, codec)
        of_pallas = sum(launch.name == OF_PALLAS for launch in launches)
        cells = [name, codec, time, num_seqs, len(launches), of_pallas]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
