"""A conversion to a smaller type is made before what it reads is moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan

WHOLE, ROWS = ((), ()), (("data",), ())


@pytest.mark.parametrize("narrows_first", [True, False])
def test_the_smaller_type_is_gathered(narrows_first):
    """Of a weight that lies by rows, its copy in bfloat16: what the mesh sends is that, or the float32 weight."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    program = jax.make_jaxpr(lambda w: w.astype(jnp.bfloat16))(jax.ShapeDtypeStruct((8, 8), jnp.float32)).jaxpr
    wanted = EquationPlan(operands=((0, (WHOLE,)),), results=((0, WHOLE),), narrows_first=narrows_first)
    evaluator = Evaluator(mesh, {0: wanted})
    run = jax.jit(lambda w: evaluator.part(program, [0], {program.invars[0]: (w, ROWS)}, program.outvars)[0])
    weight = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    names = {"convert_element_type", "sharding_constraint"}
    said = [e for e in run.trace(weight).jaxpr.eqns if e.primitive.name in names]
    moved = next(e for e in said if getattr(e.params.get("sharding"), "spec", None) == PartitionSpec())
    assert moved.invars[0].aval.dtype == (jnp.bfloat16 if narrows_first else jnp.float32)
    assert bool(said[0].primitive.name == "convert_element_type") == narrows_first
    np.testing.assert_array_equal(run(weight), weight.astype(jnp.bfloat16))
