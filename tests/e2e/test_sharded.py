"""A model over eight CPU devices, sequences by four and heads by two, against one device and a reference."""

import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jkv.cache.cache import Cache
from jkv.collectives import assert_collectives
from jkv.config import load_config
from jkv.decode.configured import make_sharding
from jkv.decode.generate import Decoding, Stream, begin, generate, results
from jkv.decode.loop import decode
from jkv.models.decoder import cache_spec
from jkv.models.load import LanguageModel, load_model
from jkv.sharding import Sharding

from ..compare import assert_close
from ..poison import poison

LLAMA = Path(__file__).parents[1] / "golden" / "llama"
NUM_ROWS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 4, 40, 16
# Both of them compile for seconds: `make test` runs each test with one, and either with each kind of program.
AXIS_TYPES = ("auto", "explicit")


class Sharded(NamedTuple):
    model: LanguageModel
    sharding: Sharding


def axes(short: str) -> Any:
    """Return a mark that runs a test with both types of axes, with that which is not `short` by the gates."""
    marked = [pytest.param(name, marks=() if name == short else pytest.mark.gate) for name in AXIS_TYPES]
    return pytest.mark.parametrize("sharded", marked, indirect=True)


@pytest.fixture(scope="module", params=AXIS_TYPES)
def sharded(request: pytest.FixtureRequest) -> Sharded:
    config = load_config("smollm2-cpu", ["--mesh", "cpu-4x2", "--mesh.axis-types", request.param])
    sharding = make_sharding(config.mesh)
    assert sharding is not None
    assert sharding.is_explicit == (request.param == "explicit")
    return Sharded(load_model(LLAMA, sharding=sharding), sharding)


@functools.cache
def reference(name: str) -> np.ndarray:
    """Return the reference's two rows twice."""
    with np.load(LLAMA / "reference.npz") as arrays:
        return np.tile(arrays[name], (NUM_ROWS // 2, *[1] * (arrays[name].ndim - 1)))


def make_decoding(sharded: Sharded, **options) -> Decoding:
    model, sharding = sharded
    spec = cache_spec(model.config, page_size=4, codec="f32", num_stripes=sharding.size("context"))
    return Decoding(model.step, model.weights, spec, model.config.vocab_size, sharding=sharding, **options)


def cached_logits(model: LanguageModel, sharding: Sharding | None) -> np.ndarray:
    spec = cache_spec(model.config, page_size=4, codec="f32")
    cache = poison(Cache.dense(spec, num_sequences=NUM_ROWS, capacity=48, sharding=sharding))

    @jax.jit
    def run(weights, tokens, cache, lens):
        cache, batch = cache.begin(lens, time=tokens.shape[1], outputs="all")
        return model.step(weights, tokens, cache, batch)[0]

    tokens, lens = jnp.asarray(reference("tokens")), jnp.full(NUM_ROWS, NUM_PROMPT_TOKENS, jnp.int32)
    if sharding is not None:
        tokens = jax.device_put(tokens, sharding.named("seq", None))
        lens = jax.device_put(lens, sharding.named("seq"))
    return np.asarray(run(model.weights, tokens, cache, lens))


def gathered_entries(compiled_text: str) -> list[int]:
    """Return the size of every array that an all-gather makes."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* all-gather(?:-start)?\(", compiled_text)
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


@axes("explicit")
def test_logits_equal_those_of_one_device(sharded: Sharded):
    assert_close(cached_logits(*sharded), cached_logits(load_model(LLAMA), None), 1e-5)


@axes("auto")
def test_greedy_tokens_equal_the_reference(sharded: Sharded):
    prompts = reference("tokens").tolist()
    generations = generate(make_decoding(sharded), prompts, max_new_tokens=NUM_NEW_TOKENS)
    expected = reference("greedy")[:, NUM_PROMPT_TOKENS:]
    assert [list(row.tokens) for row in generations] == expected.tolist()


@axes("auto")
def test_a_stopped_sequence_leaves_those_of_other_devices_running(sharded: Sharded):
    stream = Stream(make_decoding(sharded), reference("tokens").tolist(), max_new_tokens=NUM_NEW_TOKENS)
    next(iter(stream))
    stream.stop(1)
    list(stream)
    expected = reference("greedy")[:, NUM_PROMPT_TOKENS:].tolist()
    expected[1] = expected[1][:1]
    assert [list(row.tokens) for row in results(stream.state)] == expected


def test_greedy_tokens_from_pages_in_stripes_equal_the_reference():
    config = load_config("smollm2-cpu", ["--mesh", "cpu-context", "--mesh.axis-types", "explicit"])
    sharding = make_sharding(config.mesh)
    assert sharding is not None
    # 55 tokens take 14 pages of 4, four of them on the first device: one of four sequences has to wait.
    decoding = make_decoding(Sharded(load_model(LLAMA, sharding=sharding), sharding), num_pages=12)
    generations = generate(decoding, reference("tokens").tolist(), max_new_tokens=NUM_NEW_TOKENS)
    expected = reference("greedy")[:, NUM_PROMPT_TOKENS:]
    assert [list(row.tokens) for row in generations] == expected.tolist()


@pytest.mark.parametrize("capacity", [48, 4096])
@pytest.mark.parametrize("num_stripes", [1, 4])
def test_a_layer_sends_two_sums_and_those_of_partial_results(num_stripes: int, capacity: int):
    """One after attention and one after the MLP, over stripes two more; none grows with context."""
    mesh = jax.make_mesh((2, 4), ("model", "other"), axis_types=(AxisType.Auto,) * 2)
    rules = dict.fromkeys(("q_head", "kv_head", "mlp"), "model")
    rules |= {"context": "other"} if num_stripes > 1 else {"seq": "other", "page": "other"}
    sharding = Sharding.create(mesh, rules)
    model = load_model(LLAMA, sharding=sharding)
    sizes, rows = model.config, NUM_ROWS // sharding.size("seq")
    spec = cache_spec(sizes, page_size=4, codec="f32", num_stripes=num_stripes)
    cache = Cache.dense(spec, num_sequences=NUM_ROWS, capacity=capacity, sharding=sharding)
    tokens = jax.device_put(jnp.zeros((NUM_ROWS, 1), jnp.int32), sharding.named("seq", None))

    @jax.jit
    def step(weights, cache, tokens):
        cache, batch = cache.begin(jnp.ones(NUM_ROWS, jnp.int32), time=1)
        return model.step(weights, tokens, cache, batch)

    counts, entries = 2, 2 * rows * sizes.embed_dim
    if num_stripes > 1:
        heads = rows * sizes.num_heads // 2
        counts, entries = counts + 2, entries + heads + heads * (sizes.head_dim + 1)
    expected = {"all-reduce": (sizes.num_layers * counts, sizes.num_layers * entries * 4)}
    assert_collectives(step.lower(model.weights, cache, tokens).compile(), expected)


@pytest.mark.gate
def test_a_mixture_of_experts_decodes_over_a_mesh():
    folder = LLAMA.parent / "mixtral_moe"
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "expert"), axis_types=(AxisType.Auto,) * 3)
    heads = dict.fromkeys(("q_head", "kv_head", "mlp", "vocab"), "model")
    sharding = Sharding.create(mesh, {"seq": "data", "page": "data", "expert": "expert", **heads})
    model = load_model(folder, sharding=sharding)
    with np.load(folder / "reference.npz") as arrays:
        tokens, greedy = arrays["tokens"], arrays["greedy"]
    decoding = make_decoding(Sharded(model, sharding))
    generations = generate(decoding, tokens.tolist(), max_new_tokens=NUM_NEW_TOKENS)
    assert [list(row.tokens) for row in generations] == greedy[:, NUM_PROMPT_TOKENS:].tolist()


@axes("explicit")
def test_sequences_take_pages_from_the_pool_of_their_device(sharded: Sharded):
    # 55 tokens take 14 pages of 4, all that each device has for its one sequence.
    decoding = make_decoding(sharded, num_pages=14)
    generations = generate(decoding, reference("tokens").tolist(), max_new_tokens=NUM_NEW_TOKENS)
    expected = reference("greedy")[:, NUM_PROMPT_TOKENS:]
    assert [list(row.tokens) for row in generations] == expected.tolist()


def test_a_cache_is_born_with_each_device_holding_its_own_sequences_and_heads(sharded: Sharded):
    model, sharding = sharded
    spec = cache_spec(model.config, page_size=4, codec="f32")
    cache = Cache.dense(spec, num_sequences=NUM_ROWS, capacity=48, sharding=sharding)
    pool = cache.pools[0]
    # Three layers of twelve pages for the one sequence of a device, and one of the two KV heads.
    assert {shard.data.shape for shard in pool.keys.data.addressable_shards} == {(3 * 12, 1, 4, 8)}
    assert {shard.data.shape for shard in pool.page_table.addressable_shards} == {(1, 12)}
    assert all(np.asarray(shard.data).max() == 11 for shard in pool.page_table.addressable_shards)


def test_more_devices_than_kv_heads_each_hold_a_copy_of_one():
    config = load_config("smollm2-cpu", ["--mesh", "cpu-2x4", "--mesh.kv-copies", "2"])
    sharding = make_sharding(config.mesh)
    assert sharding is not None
    copied = Sharded(load_model(LLAMA, sharding=sharding, kv_copies=2), sharding)
    assert_close(cached_logits(*copied), cached_logits(load_model(LLAMA), None), 1e-5)
    spec = cache_spec(copied.model.config, page_size=4, codec="f32")
    keys = Cache.dense(spec, num_sequences=2, capacity=8, sharding=sharding).pools[0].keys.data
    assert {shard.data.shape[1] for shard in keys.addressable_shards} == {1}


@axes("auto")
def test_no_step_gathers_a_cache(sharded: Sharded):
    decoding = make_decoding(sharded, capacity=512)
    state = begin(decoding, reference("tokens").tolist(), max_new_tokens=1)
    device_entries = state.cache.pools[0].keys.data.size // 8
    text = decode.lower(decoding.step, decoding.weights, state, 1).compile().as_text()
    assert max(gathered_entries(text), default=0) < device_entries // 2


def test_the_search_for_gathers_finds_one(sharded: Sharded):
    sharding = sharded.sharding
    pool = jax.device_put(jnp.zeros((64, 2, 4, 8)), sharding.named("page", "kv_head", None, None))
    whole = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec())
    text = jax.jit(lambda pool: pool, out_shardings=whole).lower(pool).compile().as_text()
    assert max(gathered_entries(text)) == pool.size
