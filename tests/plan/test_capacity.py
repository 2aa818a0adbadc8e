"""The sums of a deployment's bytes, beside sums made another way."""

import functools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.config import MeshSection, load_config
from jkv.layers.moe import Routing
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.model_config import MixtureConfig, ModelConfig
from jkv.models.sizes import sizes_of
from jkv.models.step import split_model
from jkv.plan.capacity import Deployment, choices
from jkv.plan.decoder import cache_groups
from jkv.plan.lengths import LengthMix, one_length
from jkv.targets import shapes_on
from kernels_pallas.hopper import splits
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.latent_attention import pallas_gpu as latent_gpu
from kernels_pallas.paged_attention import PagedArguments, Pages, pallas_gpu

from ..machines import find_target
from ..tiny import make_config

ONE = load_config("smollm2-cpu").mesh


def make_spec(page_size: int = 16, **options) -> CacheSpec:
    group = CacheGroup(80, 8, 128, "bf16", window=options.pop("window", None))
    return CacheSpec.create([group], page_size=page_size, **options)


def make_mesh(data: int, model: int) -> MeshSection:
    return MeshSection((("data", data), ("model", model)), ONE.axis_types, ONE.rules)


def make_deployment(length: int = 8192, mesh: MeshSection = ONE, **options) -> Deployment:
    sizes = load_config("smollm2-cpu", ["--model", "llama-3.1-70b"]).model.sizes
    given = {"spec": make_spec(), "mix": one_length(length), "mesh": mesh, "sizes": sizes}
    return Deployment(**(given | options))


def test_the_cache_is_two_b_s_l_h_d_p():
    memory = make_deployment(sizes=None).memory(32)
    assert memory.cache == 80 * 2**30
    assert (memory.weights, memory.rounding, memory.padding, memory.activations, memory.logits) == (0,) * 5


def test_a_page_s_rest_is_counted_over_the_mix():
    mix = LengthMix(((8, Fraction(1, 4)), (33, Fraction(3, 4))))
    deployment = make_deployment(mix=mix)
    token = deployment.spec.bytes_per_token
    memory = deployment.memory(4)
    assert memory.cache == (8 + 3 * 33) * token
    assert memory.cache + memory.rounding == (16 + 3 * 48) * token


def test_a_window_bounds_what_a_sequence_holds():
    spec = make_spec(window=100, max_chunk=16)
    memory = make_deployment(1000, spec=spec).memory(3)
    assert memory.cache == 3 * 100 * spec.bytes_per_token
    assert memory.cache + memory.rounding == 3 * 128 * spec.bytes_per_token


def test_pools_are_the_cache_s_own_sum():
    spec = CacheSpec.create([CacheGroup(80, 8, 80, "int4", window=200)], page_size=16, layout="tpu")
    memory = make_deployment(333, spec=spec).memory(7)
    assert memory.recent == 7 * spec.bytes_per_sequence > 0
    parts = memory.cache + memory.rounding + memory.padding + memory.recent
    assert parts == spec.dense_bytes(7, 333)


def test_padding_is_what_the_device_adds():
    spec = replace(make_spec(layout="tpu"), groups=(CacheGroup(80, 8, 96, "bf16"),))
    memory = make_deployment(spec=spec).memory(1)
    assert 3 * memory.padding == memory.cache


def test_each_figure_is_the_sum_that_it_is_said_to_be():
    memory = make_deployment(step_tokens=64).memory(100)
    assert memory.weights == 2 * 70_553_706_496
    assert memory.logits == 100 * 128256 * 4
    # A token a sequence is more than the 64 of a chunk. Attention's blocks are wider than the MLP.
    assert memory.activations == 100 * (8192 + (3 * 64 + 2 * 8) * 128) * 2
    block = 100 * 128 * 2 * 8 * 128 * 2
    assert memory.workspace == 100 * 64 * (128 + 2 + 2 * 128) * 4 + block
    assert memory.tables == 100 * (512 + 3) * 4
    assert memory.total == sum(vars(memory).values())


@pytest.mark.parametrize(
    ("model", "context"),
    [("llama-3.1-8b", 8000), ("llama-3.1-70b", 131072), ("deepseek-v3", 30000)],
)
def test_a_gpu_s_partial_results_are_what_its_kernel_allocates(model: str, context: int, monkeypatch):
    """On one of eight devices: the arrays of all splits, and those that they are merged to."""
    mesh = load_config("smollm2-cpu", ["--mesh", "h200-8"]).mesh
    sizes = load_config("smollm2-cpu", ["--model", model]).model.sizes
    assert sizes is not None
    spec = CacheSpec.create(cache_groups(sizes, "bf16"), page_size=64)
    planned = Deployment(spec, one_length(context), mesh, sizes)
    heads, pages, held = sizes.num_heads // 8, -(-context // 64), []
    merge = splits.merge

    def recorded(*partial, **options):
        merged = merge(*partial, **options)
        held.extend([*partial[:2], *merged])
        return merged

    monkeypatch.setattr(splits, "merge", recorded)
    call = functools.partial(make_call, spec.split_heads(8), heads, num_seqs=4, num_pages=pages)
    jax.eval_shape(lambda: attend_on_a_gpu(call()))
    assert planned.partial_bytes(4) == sum(4 * array.size for array in held)
    # In a step of a token a sequence nothing else is as wide.
    decode = replace(planned, step_tokens=1)
    assert decode.memory(32).workspace == decode.partial_bytes(32)
    elsewhere = replace(planned, mesh=make_mesh(1, 8))
    assert elsewhere.partial_bytes(4) == 0


def test_a_stripe_s_partial_results_are_those_of_its_own_pages():
    mesh = load_config("smollm2-cpu", ["--mesh", "h200-8"]).mesh

    def partial_bytes(model: str, context: int, num_stripes: int) -> int:
        sizes = load_config("smollm2-cpu", ["--model", model]).model.sizes
        assert sizes is not None
        spec = CacheSpec.create(cache_groups(sizes, "bf16"), page_size=64, num_stripes=num_stripes)
        return Deployment(spec, one_length(context), mesh, sizes).partial_bytes(4)

    assert partial_bytes("llama-3.1-70b", 8 * 4096, 8) == partial_bytes("llama-3.1-70b", 4096, 1) > 0
    assert partial_bytes("deepseek-v3", 8 * 4096, 8) == partial_bytes("deepseek-v3", 4096, 1) > 0


def make_call(
    spec: CacheSpec, num_heads: int, *, num_seqs: int, num_pages: int, time: int = 1
) -> PagedArguments | LatentArguments:
    """Return a step's call of attention, over a table of so many pages."""
    group, rows = spec.groups[0], jnp.ones(num_seqs, jnp.int32)
    pages = [
        Pages(jnp.zeros((1, group.num_kv_heads, spec.page_size, dim), jnp.bfloat16)) for dim in group.dims
    ]
    queries = [jnp.zeros((num_seqs, time, num_heads, dim), jnp.bfloat16) for dim in group.dims]
    rest = (*pages, jnp.zeros((num_seqs, num_pages), jnp.int32), rows, rows, 0)
    return LatentArguments(*queries, *rest) if group.kind == "latent" else PagedArguments(queries[0], *rest)


def attend_on_a_gpu(call: PagedArguments | LatentArguments) -> Any:
    """Make a call of the kernel of one layer of one page."""
    if isinstance(call, LatentArguments):
        return latent_gpu.latent_attention(call, num_pages=1, scale=1.0)
    return pallas_gpu.paged_attention(call, num_pages=1, scale=1.0)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.17), (256, 0.25)])
def test_a_gpu_s_kernel_holds_no_more_of_a_prompt_than_is_planned(head_dim: int, share: float):
    sizes = load_config("smollm2-cpu", ["--model", "llama-3.1-70b"]).model.sizes
    assert sizes is not None
    # Attention is then the wider moment of a layer.
    sizes = replace(sizes, head_dim=head_dim, mlp_dim=1024)
    spec = CacheSpec.create(cache_groups(sizes, "bf16"), page_size=64)
    planned = Deployment(spec, one_length(8192), ONE, sizes, step_tokens=512).memory(1).workspace
    call = functools.partial(make_call, spec, sizes.num_heads, num_seqs=1, num_pages=128, time=512)
    program = jax.jit(attend_on_a_gpu).lower(shapes_on(find_target("h200"), jax.eval_shape(call))).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert 0.9 * share < memory.temp_size_in_bytes / planned < share


def test_more_partial_results_than_the_kernel_takes_are_not_counted():
    """Plain JAX attends then."""
    mesh = load_config("smollm2-cpu", ["--mesh", "h200-8"]).mesh
    deployment = make_deployment(8192, mesh)
    # 17 splits of 8 rows of 128 float32 are 70 KB a sequence.
    assert deployment.partial_bytes(15420) == 15420 * 18 * 8 * 129 * 4
    assert deployment.partial_bytes(15421) == 0


@pytest.mark.parametrize(
    ("sizes", "rows", "time", "codec"),
    [
        ({"mlp_dim": 2048}, 2, 128, "f32"),
        ({}, 32, 1, "int8"),
        ({"mixture": MixtureConfig(Routing(8, 4), 512)}, 2, 128, "f32"),
    ],
    ids=["prompt", "decode", "experts"],
)
def test_a_step_takes_what_is_planned_for_it(sizes: dict, rows: int, time: int, codec: str):
    """XLA's CPU compiler adds copies of its own: a seventh where the residual stream is wide."""
    config = make_config(embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=64, max_length=1024, **sizes)
    spec = cache_spec(config, page_size=64, codec=codec)
    planned = Deployment(spec, one_length(512), ONE, sizes_of(config), "float32", "float32", rows * time)
    temporaries = step_temporaries(config, spec, rows, time)
    memory = planned.memory(rows)
    assert 0.8 < (memory.activations + memory.workspace) / temporaries < 1.1
    assert (memory.workspace == 0) == (time > 1)


def step_temporaries(config: ModelConfig, spec: CacheSpec, rows: int, time: int) -> int:
    """Return the bytes that the compiler allots to a step beside its operands and results."""
    step, weights = split_model(Decoder(config, rngs=nnx.Rngs(0)))

    def run(weights, tokens, lens, cache):
        cache, batch = cache.begin(lens, time=time)
        return step(weights, tokens, cache, batch)

    cache = jax.eval_shape(functools.partial(Cache.dense, spec, num_sequences=rows, capacity=512))
    tokens, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, time), (rows,)))
    compiled = jax.jit(run, donate_argnums=3).lower(weights, tokens, lens, cache).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_devices_share_heads_and_sequences():
    one, many = make_deployment(), make_deployment(mesh=make_mesh(4, 8))
    assert many.memory(32).cache * 32 == one.memory(32).cache
    # The device with the most of 33 sequences has 9.
    assert many.memory(33).cache * 8 == one.memory(9).cache


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
def test_one_more_sequence_than_fit_does_not_fit(mesh: tuple[int, int]):
    deployment, budget = make_deployment(mesh=make_mesh(*mesh)), 100 * 10**9
    most = deployment.sequences_in(budget)
    assert most > 0
    assert deployment.memory(most).total <= budget < deployment.memory(most + 1).total


def test_nothing_fits_beside_weights_that_do_not():
    assert make_deployment().sequences_in(141 * 10**9) == 0


def test_choices_say_what_fits_and_what_cannot_be():
    deployment = make_deployment(mesh=make_mesh(1, 2), spec=make_spec(layout="gpu"))
    found = choices(deployment, 10**11, ["bf16", "int8"], [12, 16])
    assert [choice.page_size for choice in found] == [12, 16, 12, 16]
    refused, fitting, _, smaller = found
    assert (refused.num_sequences, refused.bytes_per_token) == (None, None)
    assert "multiple of 64 in the layout 'gpu', got 12" in refused.refusal
    assert fitting.num_sequences == deployment.sequences_in(10**11)
    assert smaller.num_sequences == deployment.with_cache("int8", 16).sequences_in(10**11)
    assert smaller.bytes_per_token < fitting.bytes_per_token
