"""Sums in two stages are the sums, on a device and over a mesh."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan, SumStage
from autoshard.hlo.kernel_forms import column_steps
from autoshard.hlo.module import parse
from autoshard.trace.trace import trace
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import _is_installed, gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

H100X1 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x1.yaml"
RULES = OrderingRules(sums_by_block=True)


@pytest.mark.parametrize("scattered", [False, True], ids=["reduced", "scattered"])
@pytest.mark.parametrize(
    ("shape", "summed", "split"),
    [
        ((4096, 8), (0,), ((), ())),
        ((8192, 8), (0,), (("data",), ())),
        ((16, 512, 8), (0, 1), (("data",), (), ())),
        ((16, 512, 8), (0, 1), ((), ("data",), ())),
        ((4, 1, 1024, 8), (2,), (("data",), (), (), ())),
    ],
)
def test_two_stages_sum_as_one_does(shape, summed, split, scattered):
    """Of whole numbers, so that every order of adding gives the same; on four devices."""
    fn = lambda x: jnp.sum(x, summed)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    left = tuple(axes for dim, axes in enumerate(split) if dim not in summed)
    is_partial = any(split[dim] for dim in summed)
    if scattered and not is_partial:
        pytest.skip("nothing is summed over devices")
    own = (("data",),) if scattered else left
    scatters = (("data", 0),) if scattered else ()
    plan = {0: EquationPlan(operands=((0, (split,)),), results=((0, own),), scatters=scatters)}
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, jnp.float32))
    plans = orderings(trace(fn, list(closed.in_avals)).graph, plan, [split], mesh.shape, RULES)(None).equations
    assert plans[0].sums_first
    run = jax.jit(lambda x: Evaluator(mesh, plans)(closed, [x], [split]))
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)
    np.testing.assert_array_equal(run(x)[0], fn(x))
    assert str(jax.make_jaxpr(run)(x)).count("reduce_sum") == 2


def test_what_is_summed_at_once_stays_so():
    shape = jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    graph = trace(lambda x: jnp.sum(x, 0), [shape]).graph
    assert not any(p.sums_first for p in orderings(graph, {}, [((), ())], {}, OrderingRules())(None).equations.values())


def normed(scale, bias, weight, x):
    """The loss of a layer behind a norm, with what the backward pass hands on."""
    hidden = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias
    return jnp.sum(jnp.tanh(hidden @ weight) ** 2)


@pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)
def test_xla_gpu_sums_no_column_by_one_block():
    """The gradients of a norm's scale and bias, of 4,096 rows, one kernel with the gradient that goes on: 128 steps as
    JAX compiles them, eight in a plan."""
    device = gpu_devices(H100, 8, 8)[:1]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024,), (1024,), (1024, 1024), (4096, 1024))]
    fn = jax.grad(normed, argnums=(0, 1, 2, 3))
    plan = autoshard.plan(fn, *args, cluster=H100X1, options=autoshard.PlanOptions(cache=False))
    assert [p.sums_first for _, p in plan.shardings if p.sums_first] == [(SumStage(0, 256),)] * 2
    choosing = plan.interface.choosing
    planned = compile_step(plan, fn, args, device, COMPILER_OPTIONS, choosing=choosing).text
    placed = jax.sharding.SingleDeviceSharding(device[0])
    alone = jax.jit(fn, in_shardings=placed, out_shardings=placed).lower(*args).compile(COMPILER_OPTIONS).as_text()
    longest = {}
    for name, text in (("alone", alone), ("planned", planned)):
        module = parse(text)
        steps = [column_steps(module, run.instruction) for run in module.runs()]
        longest[name] = max(s.steps for s in steps if s is not None)
    assert longest == {"alone": 128, "planned": 8}
