"""Kernels of convolutions are turned round as they are read, so that cuDNN does it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planned import planned

from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.compiler.turned_kernels import turned_where_read
from autoshard.graph.equation_plan import EquationPlan
from autoshard.verify.devices import _is_installed, devices_for
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

needs_xla_gpu = pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)

WHOLE, FIRST, INNER = ((),) * 4, ((), (), ("data",), ()), ((), (), (), ("data",))
ROWS = (("data",), (), (), ())
AXES = {"data": 2}
IMAGE, KERNEL = (4, 8, 8, 16), (3, 3, 16, 32)


def convolved(x, w):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims)


def gradient(g, w):
    """Of the image: equation 0 turns the kernel, equation 1 convolves."""
    return jax.linear_transpose(lambda x: convolved(x, w), jax.ShapeDtypeStruct(IMAGE, jnp.float32))(g)


def plans_of(turning, convolving, fn=gradient, arguments=(ROWS, INNER)):
    graph = planned(fn, [(4, 4, 4, 32), KERNEL], {}, AXES)
    number = {i.name: i.equation for i in graph.entry}
    assert list(number)[:2] == ["rev", "conv_general_dilated"] and number["rev"] < number["conv_general_dilated"]
    plans = {number["rev"]: turning, number["conv_general_dilated"]: convolving}
    graph = planned(fn, [(4, 4, 4, 32), KERNEL], plans, AXES, list(arguments))
    return graph, number["rev"], number["conv_general_dilated"]


TURNED = EquationPlan(operands=((0, (FIRST,)),), results=((0, FIRST),))
GATHERED = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),), delayed=(0, 1))


def test_what_a_kernel_that_is_gathered_when_it_is_turned_is_made_of_is_gathered_instead():
    graph, rev, convolution = plans_of(TURNED, GATHERED)
    found = turned_where_read(graph, graph.entry)
    assert found[rev] == EquationPlan(operands=((0, (FIRST, WHOLE)),), results=((0, WHOLE),))
    assert found[convolution] == EquationPlan(operands=GATHERED.operands, results=GATHERED.results, delayed=(0,))
    there = plans_of(EquationPlan(results=((0, INNER),)), GATHERED)[0]
    assert turned_where_read(there, there.entry)[rev].operands == ((0, (WHOLE,)),), "where it is turned as it lies"


def test_it_is_gathered_on_the_way_of_another_reader():
    """The forward convolution gathers the kernel as it lies: both can read one copy."""
    both = lambda g, w: (*gradient(g, w), jnp.sin(w))
    graph = planned(both, [(4, 4, 4, 32), KERNEL], {}, AXES)
    number = {i.name: i.equation for i in graph.entry}
    plans = {
        number["rev"]: TURNED,
        number["conv_general_dilated"]: GATHERED,
        number["sin"]: EquationPlan(operands=((0, (WHOLE,)),), results=((0, WHOLE),)),
    }
    graph = planned(both, [(4, 4, 4, 32), KERNEL], plans, AXES, [ROWS, INNER])
    assert turned_where_read(graph, graph.entry)[number["rev"]].operands == ((0, (WHOLE,)),)


@pytest.mark.parametrize(
    "case", [(TURNED, EquationPlan(operands=((1, (FIRST,)),))), (TURNED, EquationPlan(results=((0, ROWS),)))]
)
def test_nothing_changes_where_the_turned_kernel_is_not_moved(case):
    graph, *_ = plans_of(*case)
    assert turned_where_read(graph, graph.entry) == {}


def test_nothing_changes_where_others_read_the_turned_kernel():
    def fn(g, w):
        turned = jax.lax.rev(w, (0, 1))
        dims = ("NHWC", "HWOI", "NHWC")
        return jax.lax.conv_general_dilated(g, turned, (1, 1), "SAME", dimension_numbers=dims), jnp.sin(turned)

    graph, *_ = plans_of(TURNED, GATHERED, fn)
    assert turned_where_read(graph, graph.entry) == {}


def test_the_orders_of_other_compilers_leave_it():
    graph, rev, _ = plans_of(TURNED, GATHERED)
    after = lambda rules: (
        orderings(graph.graph, graph.equations, [ROWS, INNER], AXES, rules)(None).equations[rev].results
    )
    assert after(OrderingRules()) == ((0, FIRST),)
    assert after(OrderingRules(turns_kernels=True)) == ((0, WHOLE),)


@needs_xla_gpu
@pytest.mark.parametrize("is_turned_first", [True, False])
def test_xla_gpu_turns_a_kernel_in_the_convolution_only_where_nothing_is_between(is_turned_first):
    mesh = jax.sharding.Mesh(np.array(devices_for(H100, (("data", 2),), 2), dtype=object), ("data",))
    placed = lambda entries: NamedSharding(mesh, P(*[axes[0] if axes else None for axes in entries]))
    kept = jax.lax.with_sharding_constraint

    def fn(g, w):
        first, then = (INNER, WHOLE) if is_turned_first else (WHOLE, WHOLE)
        turned = kept(kept(jax.lax.rev(kept(w, placed(first)), (0, 1)), placed(first)), placed(then))
        dims = ("NHWC", "HWOI", "NHWC")
        return jax.lax.conv_general_dilated(
            g, turned, (1, 1), ((2, 1), (2, 1)), lhs_dilation=(2, 2), dimension_numbers=dims
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4, 4, 32), KERNEL)]
    shardings = placed(ROWS), placed(INNER)
    lowered = jax.jit(fn, in_shardings=shardings, out_shardings=placed(ROWS)).lower(*shapes)
    text = lowered.compile(compiler_options=COMPILER_OPTIONS).as_text()
    assert ("__cudnn$convBackwardInput" in text) != is_turned_first
    assert ("__cudnn$convForward" in text) == is_turned_first
