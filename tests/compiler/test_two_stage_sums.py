"""Long columns are summed in two stages; what each stage sums follows from a device's piece."""

import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.two_stage_sums import two_stage_sums
from autoshard.graph.equation_plan import EquationPlan, SumStage

SIZES = {"data": 4, "tensor": 2}


def stages(shape, summed, entries):
    """Of a sum over the dimensions `summed` of an operand that lies as said."""
    plans = {0: EquationPlan(operands=((0, (entries,)),))}
    graph = planned(lambda x: jnp.sum(x, summed), [shape], plans, SIZES, [entries])
    assert [i.name for i in graph.entry] == ["reduce_sum"]
    return two_stage_sums(graph, graph.entry).get(0, ())


@pytest.mark.parametrize(
    ("shape", "summed", "entries", "expected"),
    [
        ((4096, 64), (0,), ((), ()), (SumStage(0, 256),)),
        ((1024, 64), (0,), ((), ()), (SumStage(0, 256),)),
        ((1023, 64), (0,), ((), ()), ()),  # 32 steps of 32 rows: a second kernel would gain nothing
        ((4097, 64), (0,), ((), ()), ()),  # XLA splits it
        ((16384, 64), (0,), (("data",), ()), (SumStage(0, 256),)),  # 4,096 on a device
        ((4096, 64), (0,), (("data", "tensor"), ()), ()),  # 512 on a device
        ((16, 256, 64), (0, 1), ((), (), ()), (SumStage(1, 256),)),
        ((16, 256, 64), (0, 1), ((), ("data",), ()), (SumStage(0, 4), SumStage(1, 64))),  # 16 * 64 rows; 4 * 64 first
        ((8, 1500, 64), (1,), ((), (), ()), (SumStage(1, 250),)),  # the largest divisor
        ((4096, 64), (1,), ((), ()), ()),  # rows
        ((64, 4096), (0, 1), ((), ()), ()),  # all
        ((4096, 1, 64), (0,), ((), (), ()), (SumStage(0, 256),)),
        ((4096, 64, 1), (1, 2), ((), (), ()), ()),  # rows: a dimension of one element is none
    ],
)
def test_the_minor_rows_of_a_device_are_summed_first(shape, summed, entries, expected):
    assert stages(shape, summed, entries) == expected


def test_a_prime_number_of_rows_is_summed_at_once():
    assert stages((1031, 64), (0,), ((), ())) == ()
