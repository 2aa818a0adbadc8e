"""What a program's devices send each other is read from it, and the assertion catches what differs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jkv.collectives import Collective, assert_collectives, find_collectives, traffic

WIDTH = 1024


def make_program(function: Any, *specs: PartitionSpec, out: PartitionSpec) -> Any:
    """Compile a function of float32 matrices for two by four devices."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arguments = [
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    return jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*arguments).compile()


def make_text(*lines: str) -> str:
    """Return the text of a program of these instructions."""
    header = ["HloModule m, num_partitions=8", "", "ENTRY %main (x: f32[8]) -> f32[8] {"]
    return "\n".join([*header, *lines, "}"])


def test_a_sum_over_split_columns_is_one_all_reduce_of_the_result():
    split = PartitionSpec(None, "model"), PartitionSpec("model", None)
    program = make_program(jnp.matmul, *split, out=PartitionSpec())
    assert find_collectives(program) == [Collective("all-reduce", WIDTH**2 * 4, 4)]
    assert_collectives(program, {"all-reduce": (1, WIDTH**2 * 4)})


def test_a_gather_counts_what_is_gathered():
    program = make_program(lambda x: x, PartitionSpec("data", "model"), out=PartitionSpec("data", None))
    assert traffic(find_collectives(program)) == {"all-gather": (1, WIDTH**2 * 4 // 2)}


def test_what_stays_on_its_device_is_no_traffic():
    program = make_program(jnp.sin, PartitionSpec("data", "model"), out=PartitionSpec("data", "model"))
    assert_collectives(program, {})


def test_a_collective_in_a_loop_says_so():
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, x: jnp.sin(x @ w), x)

    split = PartitionSpec(None, None), PartitionSpec("model", None)
    program = make_program(loop, *split, out=PartitionSpec())
    loops = {collective.kind: collective.num_loops for collective in find_collectives(program)}
    assert loops["all-reduce"] == 1


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({}, r"must be {}, got {'all-reduce': \(1, 4194304\)}"),
        ({"all-reduce": (2, WIDTH**2 * 4)}, r"must be .*\(2, 4194304\)}, got"),
        ({"all-reduce": (1, 4)}, r"Collective\(kind='all-reduce', num_bytes=4194304, num_devices=4"),
    ],
)
def test_other_traffic_than_expected_is_listed(expected: dict, message: str):
    split = PartitionSpec(None, "model"), PartitionSpec("model", None)
    program = make_program(jnp.matmul, *split, out=PartitionSpec())
    with pytest.raises(AssertionError, match=message):
        assert_collectives(program, expected)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"kind must be one of all-reduce, .* got 'all_reduce'"):
        assert_collectives(make_text(), {"all_reduce": (1, 4)})


# The forms of libtpu 0.0.48 and of the CUDA plugin 0.11.2.
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "f32[64]{0} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add",
            Collective("all-reduce", 256, 4),
        ),
        (
            "(bf16[16]{0}, bf16[64]{0:T(256)}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
            Collective("all-gather", 128, 4),
        ),
        (
            "s8[16]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
            Collective("reduce-scatter", 32, 2),
        ),
        (
            "(f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x)",
            Collective("collective-permute", 16, 2),
        ),
        (
            "f32[64]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4,'c'=3] {'a','b':(2)2}, channel_id=1",
            Collective("all-reduce", 256, 4),
        ),
        (
            "(f32[4]{0}, f32[4]{0}) all-to-all(%x, %y), replica_groups={}",
            Collective("all-to-all", 32, 8),
        ),
    ],
)
def test_asynchronous_and_grouped_forms_are_read(line: str, expected: Collective):
    assert find_collectives(make_text(f"%s = {line}")) == [expected]


def test_groups_of_single_devices_send_nothing():
    line = "f32[64]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add"
    assert find_collectives(make_text(f"%s = {line}")) == []


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match="must list, count or name its groups of devices, got %s = "):
        find_collectives(make_text("%s = f32[64]{0} all-reduce(%x), replica_groups=@mesh"))


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 150), ("all-gather", 75), ("reduce-scatter", 75), ("all-to-all", 75)],
)
def test_a_device_sends_its_share_of_a_ring(kind: Any, sent: int):
    assert Collective(kind, 100, 4).sent_bytes == sent
    assert Collective("collective-permute", 100, 2).sent_bytes == 100
