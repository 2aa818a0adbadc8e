"""The least time of a step, beside sums made another way."""

from dataclasses import replace

import pytest

from jkv.cache.spec import CacheSpec
from jkv.config import MeshRules, MeshSection, load_config
from jkv.plan.capacity import Deployment
from jkv.plan.decoder import cache_groups
from jkv.plan.lengths import one_length
from jkv.plan.machines import MACHINES
from jkv.plan.roofline import step, step_bytes, step_flops


def make_deployment(model: str, *flags: str, context: int = 8192) -> Deployment:
    config = load_config("smollm2-cpu", ["--model", model, *flags])
    sizes = config.model.sizes
    assert sizes is not None
    spec = CacheSpec.create(cache_groups(sizes, "bf16"), page_size=64, max_chunk=512)
    return Deployment(spec, one_length(context), config.mesh, sizes)


def test_a_dense_model_computes_with_every_weight_once_a_token():
    deployment = make_deployment("llama-3.1-70b")
    # 70,553,706,496 parameters, of which the embedding and 161 norms are not multiplied by.
    weights = 70_553_706_496 - 128_256 * 8192 - 161 * 8192
    attention = 4 * 80 * 64 * 128 * 8192
    assert step_flops(deployment, rows=3, width=1) == 3 * (2 * weights + attention)
    head = 128_256 * 8192
    # Logits are those of a sequence's last token alone.
    assert step_flops(deployment, rows=3, width=5) == 3 * (2 * (5 * (weights - head) + head) + 5 * attention)


def test_a_step_reads_weights_once_and_what_each_sequence_holds():
    deployment = make_deployment("llama-3.1-70b")
    weights = 70_553_706_496 - 128_256 * 8192 - 161 * 8192
    assert step_bytes(deployment, 3, width=1) == 2 * weights + 3 * 8192 * 327_680


def test_devices_share_a_step_s_work():
    mesh = MeshSection((("data", 2), ("model", 8)), "auto", make_deployment("llama-3.1-70b").mesh.rules)
    whole, shared = make_deployment("llama-3.1-70b"), replace(make_deployment("llama-3.1-70b"), mesh=mesh)
    # Eight sequences are four on a device, and all weights, heads and token ids are split by eight.
    assert 8 * step_flops(shared, 4, width=1) == step_flops(whole, 4, width=1)
    assert 8 * step_bytes(shared, 8, width=1) == step_bytes(whole, 4, width=1)


def test_a_stripe_attends_to_its_own_part_of_a_sequence():
    whole = make_deployment("llama-3.1-70b")
    mesh = MeshSection((("stripe", 4),), "auto", MeshRules(context="stripe"))
    striped = replace(whole, mesh=mesh, spec=replace(whole.spec, num_stripes=4))
    attention = 2 * 4 * 80 * 64 * 128 * 8192
    assert step_flops(whole, 2, width=1) - step_flops(striped, 2, width=1) == attention * 3 // 4
    held = 2 * 8192 * 327_680
    assert step_bytes(whole, 2, width=1) - step_bytes(striped, 2, width=1) == held * 3 // 4


def test_experts_count_by_the_tokens_that_are_sent_to_them():
    deployment = make_deployment("deepseek-v3")
    sizes = deployment.sizes
    assert sizes is not None
    assert sizes.experts is not None
    per_expert = 58 * 3 * 7168 * 2048
    one, none = (step_bytes(deployment, count, width=1) for count in (1, 10_000))
    held = 8192 * deployment.spec.bytes_per_token
    # One token goes to 8 of 256 experts; of so many tokens, each expert has some.
    assert none - one == pytest.approx(2 * 248 * per_expert + 9_999 * held, rel=1e-6)


@pytest.mark.parametrize("axis", ["expert", "mlp"])
def test_parts_that_are_split_as_sequences_are_get_the_tokens_of_all(axis: str):
    whole = make_deployment("deepseek-v3")
    mesh = MeshSection((("data", 8),), "auto", MeshRules(**dict.fromkeys(("seq", "page", axis), "data")))
    shared = replace(whole, mesh=mesh)
    assert 8 * step_flops(shared, 4, width=1) == step_flops(whole, 32, width=1)
    assert step_bytes(shared, 32, width=1) < step_bytes(whole, 4, width=1)


def test_a_window_bounds_what_is_attended_to():
    short, long = (make_deployment("gemma-3-4b", context=context) for context in (2048, 4096))
    # Of 34 layers 5 have no window; 8 heads of 256.
    more = step_flops(long, 1, width=1) - step_flops(short, 1, width=1)
    assert more == 4 * 5 * 8 * 256 * 2048


def test_the_longest_of_three_times_bounds_a_step():
    deployment, machine = make_deployment("llama-3.1-70b"), MACHINES["h200"]
    alone = step(deployment, machine, 1, 1, sent_bytes=0)
    assert alone.bound == "memory"
    assert alone.seconds == alone.memory_seconds == alone.read_bytes / 4.8e12
    assert alone.tokens_per_second == pytest.approx(1 / alone.seconds)
    assert step(deployment, machine, 1, 512, sent_bytes=0).bound == "compute"
    assert step(deployment, machine, 1, 1, sent_bytes=45 * 10**9).bound == "network"
    assert step(deployment, machine, 1, 1, sent_bytes=45 * 10**9).seconds == pytest.approx(0.1)
