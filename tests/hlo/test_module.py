"""Compiled programs, read from short texts of every construct; figures derived by hand."""

import numpy as np
import pytest

from autoshard.errors import VerificationError
from autoshard.hlo.collectives import Piece, compiled_collectives
from autoshard.hlo.cycles import estimated_cycles
from autoshard.hlo.flops import least_dim, product_flops
from autoshard.hlo.module import Array, bits_of, dtype_name, parse
from autoshard.hlo.replica_groups import axes_of, replica_groups, source_target_pairs

AXES = (("data", 2), ("tensor", 4))
HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def module(body: str, before: str = ""):
    return parse(f"{HEAD}{ADD}{before}ENTRY %main (a: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n")


def collectives(body: str, before: str = ""):
    return compiled_collectives(module(body, before), AXES)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("f32", 32), ("bf16", 16), ("pred", 8), ("f8e4m3fn", 8), ("u4", 4), ("c64", 64), ("token", 0)]
)
def test_bits_of_types(dtype, bits):
    assert bits_of(dtype) == bits


def test_what_is_no_program_is_refused():
    with pytest.raises(VerificationError, match="ENTRY"):
        parse("HloModule empty\n")
    with pytest.raises(VerificationError, match="element type"):
        bits_of("quux")


def test_an_instruction_is_read():
    (start, done) = list(
        module(
            "  %start.1 = ((f32[8,16]{1,0:T(8,128)}, /*index=1*/bf16[<=4]{0}), u32[]{:S(2)}) copy-start(%a), "
            'metadata={op_name="jit(step)/eqn7/eqn9/mul(x)" stack_frame_id=3}\n'
            "  ROOT %done = f32[8,16]{1,0} copy-done(%start.1), control-predecessors={%start.1}"
        )
        .computations["main"]
        .instructions.values()
    )
    assert start.opcode == "copy-start" and start.operands == ("a",)
    assert start.result == (Array("f32", (8, 16)), Array("bf16", (4,)), Array("u32", ()))
    assert start.op_name == "jit(step)/eqn7/eqn9/mul(x)"
    assert done.operands == ("start.1",) and done.result_bytes == 8 * 16 * 4


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]], ["tensor"]),
        ("replica_groups={}", [list(range(8))], ["data", "tensor"]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]], ["data"]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]], ["tensor"]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]], ["data"]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]], ["tensor"]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]], ["tensor"]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]], ["data", "tensor"]),
    ],
)
def test_groups_of_devices(text, groups, axes):
    found = replica_groups(f", channel_id=1, {text}, dimensions={{0}}", 8)
    assert found.tolist() == groups
    assert [AXES[k][0] for k in axes_of(found, [2, 4])] == axes


def test_unknown_groups_are_refused():
    with pytest.raises(VerificationError, match="three ways"):
        replica_groups("replica_groups=?", 8)


def test_pairs_of_a_permutation():
    pairs = source_target_pairs("source_target_pairs={{0,0},{1,5},{5,1}}")
    assert np.array_equal(pairs, [[1, 5], [5, 1]])


INPUT = "  %a = f32[8,16]{1,0} parameter(0)\n"


@pytest.mark.parametrize(
    ("text", "kind", "wire_bytes"),
    [
        # 512 bytes on each device, in groups of four
        ("f32[32,16] all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 3 * 512),
        ("f32[8,16] all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 2 * 3 / 4 * 512),
        ("f32[2,16] reduce-scatter(%a), replica_groups=[2,4]<=[8], to_apply=%add", "reduce-scatter", 3 / 4 * 512),
        ("f32[8,16] all-to-all(%a), replica_groups=[2,4]<=[8], dimensions={0}", "all-to-all", 3 / 4 * 512),
        ("f32[8,16] collective-permute(%a), source_target_pairs={{0,1},{1,0}}", "collective-permute", 512),
    ],
)
def test_bytes_on_the_wire(text, kind, wire_bytes):
    (found,) = collectives(f"{INPUT}  ROOT %c = {text}")
    assert (found.kind, found.axes, found.wire_bytes) == (kind, ("tensor",), wire_bytes)


def test_groups_of_one_device_move_nothing():
    assert collectives(f"{INPUT}  ROOT %c = f32[8,16] all-reduce(%a), replica_groups=[8,1]<=[8], to_apply=%add") == ()


def test_a_started_collective_counts_once_and_an_argument_is_named():
    body = (
        "  %a = f32[8,16]{1,0} parameter(0), metadata={op_name=\"inner[0][\\'up\\']\"}\n"
        "  %s = (f32[8,16], f32[16,16]) all-gather-start(%a), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}\n"
        "  ROOT %d = f32[16,16] all-gather-done(%s)"
    )
    (found,) = collectives(body)
    assert found.kind == "all-gather" and found.axes == ("data",)
    assert found.pieces == (Piece(Array("f32", (8, 16)), 512.0, (), "inner[0][\\'up\\']"),)


def test_what_was_joined_is_told_apart():
    """Several operands, or one that is put together from several; each has the equations that made it."""
    joined = """%wrapped (p: f32[128], q: f32[64]) -> f32[192] {
  %p = f32[128] parameter(0)
  %q = f32[64] parameter(1)
  ROOT %concatenate = f32[192] concatenate(%p, %q), dimensions={0}
}

"""
    body = (
        '  %one = f32[8,16] add(%a, %a), metadata={op_name="jit(f)/eqn3/add"}\n'
        '  %two = f32[64] add(%a, %a), metadata={op_name="jit(f)/eqn4/add"}\n'
        "  %flat = f32[128] bitcast(%one)\n"
        "  %whole = f32[192] fusion(%flat, %two), kind=kLoop, calls=%wrapped\n"
        "  %r = f32[192] all-reduce(%whole), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add\n"
        "  ROOT %t = (f32[8,16], f32[64]) all-reduce(%one, %two), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add"
    )
    for found in collectives(INPUT + body, joined):
        assert [(p.wire_bytes, p.equations) for p in found.pieces] == [(512.0, (3,)), (256.0, (4,))]


def loop(known: str) -> tuple[str, str]:
    """A loop of five turns with an all-reduce and a product, and the computations that it calls."""
    before = """%condition (s: (s32[], f32[8,16])) -> pred[] {
  %s = (s32[], f32[8,16]) parameter(0)
  %five = s32[] constant(5)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %s = (s32[], f32[8,16]) parameter(0)
  %x = f32[8,16] get-tuple-element(%s), index=1
  %w = f32[16,16] constant({...})
  %y = f32[8,16] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = f32[8,16] all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8,16]) tuple(%i, %r)
}

"""
    body = f"{INPUT}  %z = (s32[], f32[8,16]) tuple(%c, %a)\n"
    return body + f"  ROOT %l = (s32[], f32[8,16]) while(%z), condition=%condition, body=%body{known}", before


@pytest.mark.parametrize("known", ["", ', backend_config={"known_trip_count":{"n":"5"}}'])
def test_loops_multiply(known):
    body, before = loop(known)
    (found,) = collectives(body, before)
    assert found.times == 5 and found.wire_bytes == 5 * 2 * 3 / 4 * 512
    assert product_flops(module(body, before)) == 5 * 2 * 8 * 16 * 16


def test_branches_share():
    before = """%left (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16] parameter(0)
  ROOT %r = f32[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

%right (p: f32[8,16]) -> f32[8,16] {
  ROOT %p = f32[8,16] parameter(0)
}

"""
    (found,) = collectives(
        f"{INPUT}  ROOT %c = f32[8,16] conditional(%i, %a, %a), branch_computations={{%left, %right}}", before
    )
    assert found.times == 0.5


FUSED = """%scatter (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16] parameter(0)
  %r = f32[8,16] all-reduce(%p), channel_id=6, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %cut = f32[2,16] dynamic-slice(%r, %k, %k), dynamic_slice_sizes={2,16}
}

%start (p: f32[2,16]) -> f32[4,16] {
  %p = f32[2,16] parameter(0)
  ROOT %g = f32[4,16] all-gather(%p), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

%done (p: f32[2,16]) -> f32[4,16] {
  %p = f32[2,16] parameter(0)
  ROOT %g = f32[4,16] all-gather(%p), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

"""


JOINED = """%scatter (p: f32[8,16], q: f32[8,4]) -> (f32[2,16], SECOND) {
  %p = f32[8,16] parameter(0)
  %q = f32[8,4] parameter(1)
  %r = (f32[8,16], f32[8,4]) all-reduce(%p, %q), channel_id=6, replica_groups=[2,4]<=[8], to_apply=%add
  %g = f32[8,16] get-tuple-element(%r), index=0
  %cut = f32[2,16] dynamic-slice(%g, %k, %k), dynamic_slice_sizes={2,16}
  %h = f32[8,4] get-tuple-element(%r), index=1
  OTHER
  ROOT %both = (f32[2,16], SECOND) tuple(%cut, %other)
}

"""


@pytest.mark.parametrize(
    ("second", "other", "kind", "wire_bytes"),
    [
        ("f32[2,4]", "dynamic-slice(%h, %k, %k), dynamic_slice_sizes={2,4}", "reduce-scatter", 3 / 4 * (512 + 128)),
        ("f32[8,4]", "negate(%h)", "all-reduce", 2 * 3 / 4 * (512 + 128)),
    ],
)
def test_joined_reduce_scatters_within_a_fusion(second, other, kind, wire_bytes):
    """XLA:TPU joins reduce-scatters as one fused all-reduce of several arrays, each of which is sliced."""
    body = f"  ROOT %s = (f32[2,16], {second}) fusion(%a, %b), kind=kCustom, calls=%scatter"
    before = JOINED.replace("OTHER", f"%other = {second} {other}").replace("SECOND", second)
    (found,) = collectives(INPUT + "  %b = f32[8,4] slice(%a), slice={[0:8], [0:4]}\n" + body, before)
    assert (found.kind, found.wire_bytes) == (kind, wire_bytes)


def test_collectives_within_fusions():
    """XLA:TPU fuses a reduce-scatter as a sliced all-reduce, and repeats an asynchronous collective in each fusion."""
    body = (
        "  %s = f32[2,16] fusion(%a), kind=kCustom, calls=%scatter, "
        'backend_config={"window_config":{"estimated_cycles":"70"}}\n'
        "  %b = f32[4,16] fusion(%s), kind=kCustom, calls=%start\n"
        "  ROOT %e = f32[4,16] fusion(%s), kind=kCustom, calls=%done, "
        'backend_config={"window_config":{"estimated_cycles":"30"}}'
    )
    found = collectives(INPUT + body, FUSED)
    assert [(c.kind, c.axes, c.wire_bytes) for c in found] == [
        ("reduce-scatter", ("tensor",), 3 / 4 * 512),
        ("all-gather", ("data",), 128),
    ]
    assert estimated_cycles(module(INPUT + body, FUSED)) == 100
    assert estimated_cycles(module(INPUT + "  ROOT %n = f32[8,16] negate(%a)")) is None


def test_a_gather_that_is_only_sliced_is_told():
    gathered = "  %g = f32[32,16] all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}\n"
    cut = "  ROOT %c = f32[8,4] dynamic-slice(%g, %k, %k), dynamic_slice_sizes={8,4}"
    used = "  %n = f32[32,16] negate(%g)\n"
    (alone,), (also_used,) = (collectives(INPUT + gathered + more + cut) for more in ("", used))
    assert alone.only_sliced and not also_used.only_sliced


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        ("f32[8,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 4 * 16),
        (
            '(f32[8,4], s8[64]) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend'
            '_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
            2 * 8 * 4 * 16,
        ),
        ("f32[8,4] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 4 * 16),
        # four outputs of a kernel of three at each of two images; the padding takes two of twelve products away
        ("f32[2,4,5] convolution(%i, %k), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 2 * 5 * 7 * 10),
        # every second position of a transposed convolution is a zero: each of 8 outputs meets one input
        (
            "f32[2,8,5] convolution(%i, %k2), window={size=2 pad=1_1 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
            2 * 2 * 5 * 7 * 8,
        ),
        (
            "(f32[2,4,7], u8[0]) custom-call(%o, %k), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, "
            'custom_call_target="__cudnn$convBackwardInput"',
            2 * 2 * 5 * 7 * 10,
        ),
        (
            "(f32[3,7,5], u8[0]) custom-call(%i, %o), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, "
            'custom_call_target="__cudnn$convBackwardFilter"',
            2 * 2 * 5 * 7 * 10,
        ),
        ("f32[8,16] add(%a, %a)", 0),
    ],
)
def test_products(text, flops):
    arrays = {"b": "16,4", "i": "2,4,7", "k": "3,7,5", "k2": "2,7,5", "o": "2,4,5"}
    inputs = "".join(f"  %{name} = f32[{dims}] parameter(1)\n" for name, dims in arrays.items())
    assert product_flops(module(f"{INPUT}{inputs}  ROOT %c = {text}")) == flops


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bf16", "bfloat16"), ("f8e4m3fn", "float8_e4m3fn"), ("s8", "int8"), ("u32", "uint32"), ("c64", "complex64")],
)
def test_types_have_numpy_s_names(dtype, name):
    assert dtype_name(dtype) == name


def test_the_least_dimension_of_a_product_leaves_batches_out():
    """Four products of 8 x 16 by 16 x 32: eight rows; a sum of matrices is no product."""
    module = parse(
        HEAD
        + """ENTRY %main (a: f32[4,8,16], b: f32[4,16,32]) -> f32[4,8,32] {
  %a = f32[4,8,16]{2,1,0} parameter(0)
  %b = f32[4,16,32]{2,1,0} parameter(1)
  %sum = f32[4,8,16]{2,1,0} add(%a, %a)
  ROOT %d = f32[4,8,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}
}
""".replace("\\\n", "")
    )
    assert {r.instruction.name: least_dim(r) for r in module.runs()} == {
        "a": np.inf, "b": np.inf, "sum": np.inf, "d": 8,
    }  # fmt: skip
