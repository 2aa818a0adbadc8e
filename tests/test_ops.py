"""The one door to the kernels: choice of implementation, gradients, and what is refused."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jkv import ops
from jkv.cache.cache import Cache
from jkv.cache.spec import CacheGroup, CacheSpec
from jkv.ops import choice
from jkv.ops.checks import check_options, check_own, find_group
from jkv.ops.pools import stored_pages
from kernels_pallas import page_write
from kernels_pallas.latent_attention import LatentArguments
from kernels_pallas.paged_attention import PagedArguments, Pages, Stripe

from .compare import assert_close
from .poison import poison

ROWS, TIME, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 5, 4, 2, 8


def make_cache() -> Cache:
    spec = CacheSpec.create([CacheGroup(2, NUM_KV_HEADS, HEAD_DIM)], page_size=2)
    return poison(Cache.dense(spec, num_sequences=ROWS, capacity=8))


def make_heads(num_heads: int, head_dim: int = HEAD_DIM, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (ROWS, TIME, num_heads, head_dim))


def attend(query, key, value, where: tuple = (0, 1), **options):
    """Write and attend in one step over an empty cache."""

    @jax.jit
    def run(query, key, value, cache):
        cache, batch = cache.begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
        return ops.attend(query, key, value, cache, where, batch, scale=HEAD_DIM**-0.5, **options)

    return run(query, key, value, make_cache())


def make_rows() -> tuple[jax.Array, jax.Array, jax.Array]:
    return make_heads(NUM_HEADS), make_heads(NUM_KV_HEADS, seed=1), make_heads(NUM_KV_HEADS, seed=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 2}, {"soft_cap": 1.0}, {"sinks": jnp.array([0.0, 1.0, 2.0, -1.0])}],
    ids=["plain", "window", "soft_cap", "sinks"],
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_attention_through_a_cache_is_that_without_one(implementation: str, options: dict):
    rows = make_rows()
    out, _, log_sum = attend(*rows, implementation=implementation, **options)
    expected, cache, expected_log_sum = ops.attend(*rows, scale=HEAD_DIM**-0.5, **options)
    assert cache is None
    assert_close(out, expected)
    assert_close(log_sum, expected_log_sum)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.histories),
        {"window": 11, "soft_cap": 1.0, "sinks": jnp.array([0.0, 1.0, 2.0, -1.0])},
    ],
    ids=["plain", "window_soft_cap_and_sinks"],
)
def test_keys_in_runs_of_slots_are_attended_as_the_definition_says(options: dict):
    """Steps that end within a run, on its border and past several."""
    spec = CacheSpec.create([CacheGroup(2, NUM_KV_HEADS, HEAD_DIM, "int4")], page_size=8)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(cache, lens, query, key, value, implementation):
        cache, batch = cache.begin(lens, time=query.shape[1])
        both = {"scale": HEAD_DIM**-0.5, "implementation": implementation, **options}
        return ops.attend(query, key, value, cache, (0, 1), batch, **both)

    caches = [poison(Cache.dense(spec, num_sequences=ROWS, capacity=64)) for _ in range(2)]
    for lens in ([21, 6], [1, 1], [1, 1], [9, 0], [3, 21]):
        keys = jax.random.split(jax.random.key(sum(lens)), 3)
        heads = [
            # Of two widths, each of which is a program.
            jax.random.normal(key, (ROWS, 1 if max(lens) == 1 else 21, count, HEAD_DIM))
            for key, count in zip(keys, (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), strict=True)
        ]
        lens = jnp.array(lens, jnp.int32)
        found, expected = (
            run(cache, lens, *heads, implementation=name)
            for cache, name in zip(caches, ("xla", "reference"), strict=True)
        )
        caches = [found.cache, expected.cache]
        assert_close(found.out, expected.out)


def test_a_wide_step_that_only_reads_keys_in_runs_is_refused():
    spec = CacheSpec.create([CacheGroup(1, NUM_KV_HEADS, HEAD_DIM, "int4")], page_size=8)
    cache = Cache.dense(spec, num_sequences=ROWS, capacity=64)
    cache, batch = cache.begin(jnp.full(ROWS, 9, jnp.int32), time=9)
    query = jnp.zeros((ROWS, 9, NUM_HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="only reads int4 keys takes steps of at most 8 tokens, got 9"):
        ops.attend(query, None, None, cache, (0, 0), batch, scale=1.0)


def test_a_traced_layer_index_is_the_layer():
    rows = make_rows()
    static, traced = attend(*rows), attend(*rows, where=(0, jnp.int32(1)))
    assert_close(traced[0], static[0])


@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_a_read_alone_writes_nothing(codec: str):
    query, key, value = make_rows()

    @jax.jit
    def run(cache):
        cache, batch = cache.begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
        first, written, _ = ops.attend(query, key, value, cache, (0, 0), batch, scale=1.0)
        second, read, _ = ops.attend(query, None, None, written, (0, 0), batch, scale=1.0)
        return first, second, written, read

    spec = CacheSpec.create([CacheGroup(2, NUM_KV_HEADS, HEAD_DIM, codec)], page_size=8)
    first, second, written, read = run(poison(Cache.dense(spec, num_sequences=ROWS, capacity=8)))
    assert_close(second, first)
    for before, after in zip(jax.tree.leaves(written), jax.tree.leaves(read), strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize(
    ("where", "message"), [((-1, 0), "cache group must be in"), ((0, 9), "layer must be")]
)
def test_an_append_to_no_layer_is_refused(where: tuple[int, int], message: str):
    cache = make_cache()
    cache, batch = cache.begin(jnp.ones(cache.lengths.shape, jnp.int32), time=1)
    group = cache.spec.groups[0]
    rows = jnp.zeros((cache.lengths.shape[0], 1, group.num_kv_heads, group.head_dim))
    with pytest.raises(ValueError, match=message):
        ops.append(cache, where, batch, rows, rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": float("inf")}, "scale must be finite, got inf"),
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"soft_cap": 0.0}, r"soft_cap must be above 0 and finite, got 0\.0"),
        ({"soft_cap": float("nan")}, "soft_cap must be above 0 and finite, got nan"),
        ({"sinks": jnp.zeros(1)}, r"sinks must be one a query head, \(4,\), got \(1,\)"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check_options(jnp.zeros((1, 1, 4, 8)), **{"scale": 1.0} | options)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (jnp.zeros((1, 4, 8)), r"queries must be .* got float32\[1, 4, 8\]"),
        (jnp.zeros((1, 1, 4, 8), jnp.int32), r"queries must be .* got int32\[1, 1, 4, 8\]"),
    ],
)
def test_queries_of_another_kind_are_refused(query: jax.Array, message: str):
    with pytest.raises(ValueError, match=message):
        check_options(query, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((2, 5, 2, 8), (2, 5, 1, 8), r"of as many heads, got \(2, 5, 4, 8\), \(2, 5, 2, 8\), \(2, 5, 1, 8\)"),
        ((2, 4, 2, 8), (2, 4, 2, 8), "must be of the same rows and tokens"),
        ((2, 5, 2), (2, 5, 2, 8), "must be of the same rows and tokens"),
        ((2, 5, 2, 6), (2, 5, 2, 8), "keys must have the queries' head_dim, 8, got 6"),
    ],
)
def test_rows_of_other_tokens_are_refused_without_a_cache(key: tuple, value: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        check_own(make_heads(NUM_HEADS), jnp.zeros(key), jnp.zeros(value))


def test_an_implementation_is_named_or_left_to_the_platform():
    assert ops.choose("auto") == "xla"
    assert ops.choose("reference") == "reference"


A100 = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
ON_TPUS = "attention 'pallas_tpu' runs on TPUs, got {}; use 'auto'"
ON_GPUS = "attention 'pallas_gpu' runs on GPUs of compute capability 9.0, got {}; use 'auto'"


@pytest.mark.parametrize("codec", ["f32", "bf16"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    ("name", "message"), [("pallas_tpu", ON_TPUS), ("pallas_gpu", ON_GPUS)], ids=["tpu", "gpu"]
)
def test_a_kernel_by_name_is_refused_by_platform_before_shapes(
    name: ops.Implementation, message: str, is_traced: bool, codec: str
):
    wrapped = jax.jit if is_traced else lambda call: call
    for kind in ("gqa", "latent"):
        with pytest.raises(ValueError, match=message.format("cpu")):
            wrapped(functools.partial(attend_row, kind, codec, "plain", name))()
    with pytest.raises(ValueError, match=message.format("NVIDIA A100")):
        ops.choose(name, device=A100)


@pytest.mark.parametrize("kind", ["gqa", "latent"])
def test_a_gpus_kernel_refuses_pools_as_they_lie_on_tpus_by_the_layout_s_name(kind: str, monkeypatch):
    monkeypatch.setattr(choice, "_is_interpreted", lambda: True)
    with pytest.raises(ValueError, match="takes pools of layout 'plain' or 'gpu', got 'tpu'"):
        attend_row(kind, "int8", "tpu", "pallas_gpu")


def attend_row(kind: Any, codec: str, layout: Any, implementation: ops.Implementation) -> ops.Attended:
    """Attend to one token in a page of sizes that all kernels take."""
    group = CacheGroup(1, 1, 128, codec, kind=kind, rope_dim=64 if kind == "latent" else 0)
    spec = CacheSpec.create([group], page_size=64, layout=layout)
    cache, batch = Cache.dense(spec, num_sequences=1, capacity=64).begin(jnp.ones(1, jnp.int32), time=1)
    query, rope = jnp.zeros((1, 1, 1, 128), jnp.bfloat16), jnp.zeros((1, 1, 1, 64), jnp.bfloat16)
    options = {"scale": 1.0, "implementation": implementation}
    if kind == "gqa":
        return ops.attend(query, query, query, cache, (0, 0), batch, **options)
    rows = (query, rope, query[:, :, 0], rope[:, :, 0])
    return ops.attend_latent(*rows, cache, (0, 0), batch, **options)


@pytest.mark.parametrize(
    ("capability", "head_dim", "chosen", "said"),
    [
        ("9.0", 64, "pallas_gpu", "auto -> pallas_gpu"),
        ("9.0", 8, "xla", "auto -> xla: the GPU kernel takes heads of .*, got 8"),
        ("8.0", 64, "xla", "auto -> xla: NVIDIA A100 has no kernel"),
    ],
)
def test_auto_chooses_a_gpus_kernel_where_it_takes_the_call_and_says_so(
    capability: str, head_dim: int, chosen: str, said: str, monkeypatch, caplog
):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    pages = Pages(jnp.zeros((2, 1, 8, head_dim), jnp.bfloat16))
    rows = jnp.zeros(1, jnp.int32)
    call = PagedArguments(
        jnp.zeros((1, 1, 1, head_dim)), pages, pages, jnp.zeros((1, 2), jnp.int32), rows, rows, 0
    )
    with caplog.at_level("INFO", "jkv.ops"):
        assert ops.choose("auto", call) == chosen
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    ("codec", "dtype", "reason"),
    [
        ("int8", "bfloat16", None),
        ("int8", "float32", "heads in bfloat16, got float32"),
        ("int4", "bfloat16", "int8 and fp8 with scales of tokens, got entries of int4 in uint8 with scales"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "pallas_gpu"])
def test_a_gpus_kernel_encodes_what_it_takes_and_the_scatter_the_rest(
    implementation: ops.Implementation, codec: str, dtype: str, reason: str | None, caplog
):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    writer = choice.choose_writer(implementation, device)
    group = CacheGroup(1, 2, 64, codec)
    cache = Cache.dense(CacheSpec.create([group], page_size=16), num_sequences=1, capacity=16)
    pages, heads = stored_pages(cache.spec, cache.pools[0], 0, 0), (jnp.zeros((1, 1, 2, 64), dtype),) * 2
    with caplog.at_level("INFO", "jkv.ops"):
        found = writer.encoding(pages, heads)
    assert writer.rows is page_write.xla
    assert (found is None) == (reason is not None)
    assert (reason or "") in caplog.text
    assert (f"page write: {implementation} -> xla" in caplog.text) == (reason is not None)


@pytest.mark.parametrize(
    ("latent_dim", "chosen", "said"),
    [
        (512, "pallas_gpu", "auto -> pallas_gpu"),
        (320, "xla", "auto -> xla: the GPU kernel takes latents of .*, got 320 and 64"),
    ],
)
def test_auto_attends_to_latents_by_a_gpus_kernel_where_it_takes_the_call(
    latent_dim: int, chosen: str, said: str, monkeypatch, caplog
):
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    queries = (jnp.zeros((1, 1, 16, dim)) for dim in (latent_dim, 64))
    pages = (Pages(jnp.zeros((2, 1, 64, dim), jnp.bfloat16)) for dim in (latent_dim, 64))
    rows = jnp.zeros(1, jnp.int32)
    call = LatentArguments(*queries, *pages, jnp.zeros((1, 2), jnp.int32), rows, rows, 0)
    with caplog.at_level("INFO", "jkv.ops"):
        assert ops.choose("auto", call) == chosen
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    ("page_size", "chosen", "said"),
    [
        (16, "pallas_tpu", "auto -> pallas_tpu"),
        (8, "xla", "auto -> xla: a page of keys must be a multiple of 16 rows of 128 lanes, got 8"),
    ],
)
def test_auto_chooses_a_tpus_kernel_where_it_takes_the_call_and_says_so(
    page_size: int, chosen: str, said: str, monkeypatch, caplog
):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="tpu")])
    pages = Pages(jnp.zeros((2, 1, page_size, 128), jnp.bfloat16))
    rows = jnp.zeros(1, jnp.int32)
    call = PagedArguments(
        jnp.zeros((1, 1, 1, 128)), pages, pages, jnp.zeros((1, 2), jnp.int32), rows, rows, 0
    )._replace(stripe=Stripe(2, 1))
    with caplog.at_level("INFO", "jkv.ops"):
        assert ops.choose("auto", call) == chosen
    assert said in caplog.text


def test_auto_attends_to_latents_by_a_tpus_kernel(monkeypatch, caplog):
    """But in the expanded form."""
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="tpu")])
    latents, ropes = (Pages(jnp.zeros((2, 1, 16, 128), jnp.bfloat16)) for _ in range(2))
    query, rows = jnp.zeros((1, 1, 1, 128)), jnp.zeros(1, jnp.int32)
    table = jnp.zeros((1, 2), jnp.int32)
    call = LatentArguments(query, query, latents, ropes, table, rows, rows, 0, stripe=Stripe(2, 1))
    assert ops.choose("auto", call) == "pallas_tpu"
    weight = jnp.zeros((1, 128, 128))
    with caplog.at_level("INFO", "jkv.ops"):
        assert ops.choose("auto", call._replace(up=ops.UpProjections(weight, weight))) == "xla"
    assert "auto -> xla: latents must be attended to as they are" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "where", "message"),
    [
        (make_heads(2), None, (0, 0), "given together or not at all"),
        (make_heads(2), make_heads(2), (1, 0), r"cache group must be in \[0, 1\), got 1"),
        (make_heads(2), make_heads(2), (0, 2), r"layer must be in \[0, 2\) of cache group 0, got 2"),
        (make_heads(2), make_heads(2), (0, -1), r"layer must be in \[0, 2\)"),
        (make_heads(1), make_heads(1), (0, 0), r"keys must have .* \(2, 8\), got \(1, 8\)"),
    ],
)
def test_a_call_that_cannot_be_computed_is_refused(key, value, where, message: str):
    with pytest.raises(ValueError, match=message):
        attend(make_heads(NUM_HEADS), key, value, where)


@pytest.mark.parametrize("layer", [2, jnp.int32(2), jnp.int32(-1)])
def test_a_layer_that_is_known_is_checked_whatever_it_is(layer):
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\) of cache group 0, got (2|-1)"):
        find_group(make_cache(), (0, layer))


def test_heads_and_latents_have_a_door_each():
    latent = CacheGroup(1, 1, HEAD_DIM, kind="latent", rope_dim=4)
    cache = Cache.dense(CacheSpec.create([latent], page_size=2), num_sequences=ROWS, capacity=8)
    cache, batch = cache.begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
    with pytest.raises(ValueError, match="cache group 0 holds latents: call `attend_latent`"):
        ops.attend(*make_rows(), cache, (0, 0), batch, scale=1.0)
    query, (_, latent, rope) = make_heads(NUM_HEADS), make_rows()
    with pytest.raises(ValueError, match=r"rotated parts must have .* \(1, 4\), got \(1, 8\)"):
        ops.attend_latent(query, query, latent[:, :, 0], rope[:, :, 0], cache, (0, 0), batch, scale=1.0)
    cache, batch = make_cache().begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
    with pytest.raises(ValueError, match="cache group 0 holds keys and values: call `attend`"):
        ops.attend_latent(query, query, latent[:, :, 0], rope[:, :, 0], cache, (0, 0), batch, scale=1.0)


def test_rows_that_are_not_the_steps_are_refused():
    """A query of the last token alone would be taken for the first of five."""
    query, key, value = (heads[:, :1] for heads in make_rows())
    for rows in ((query, None, None), (query, key, value)):
        with pytest.raises(
            ValueError, match=r"the step's rows and their tokens are \(2, 5\), got .* \(2, 1, 4, 8\)"
        ):
            attend(*rows)
    cache, batch = make_cache().begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
    with pytest.raises(ValueError, match=r"are \(2, 5\), got an array of \(2, 1, 2, 8\)"):
        ops.append(cache, (0, 0), batch, key, value)
    with pytest.raises(ValueError, match="got a batch and no cache"):
        ops.attend(*make_rows(), batch=batch, scale=1.0)


def test_attention_without_keys_or_a_cache_is_refused():
    with pytest.raises(ValueError, match="needs keys and values"):
        ops.attend(make_heads(NUM_HEADS), None, None, scale=1.0)


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_that_sees_past_what_its_group_keeps_is_refused(window: int | None):
    group = CacheGroup(1, NUM_KV_HEADS, HEAD_DIM, window=4)
    cache = Cache.dense(CacheSpec.create([group], page_size=2), num_sequences=ROWS, capacity=64)
    cache, batch = cache.begin(jnp.full(ROWS, TIME, jnp.int32), time=TIME)
    with pytest.raises(ValueError, match=f"keeps the latest 4 tokens, .* got {window}"):
        ops.attend(*make_rows(), cache, (0, 0), batch, scale=1.0, window=window)
