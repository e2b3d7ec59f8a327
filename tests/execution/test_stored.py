"""What a product reads is stored, and not computed again from a gathered copy."""

import jax
import jax.numpy as jnp

from autoshard.execution.stored import is_made_of_a_copy, read_by_products
from autoshard.graph.equation_plan import EquationPlan

WHOLE, SPLIT = ((), ()), ((), ("data",))


def test_only_what_products_read_and_gathered_operands_make_is_stored():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x + x) @ w)(shape, shape).jaxpr
    add, tanh, product = jaxpr.eqns
    assert read_by_products(jaxpr.eqns) == {*tanh.outvars, jaxpr.invars[1]}
    gathered = EquationPlan(operands=((0, (WHOLE,)),))
    assert is_made_of_a_copy(tanh, {0: SPLIT}, gathered) and is_made_of_a_copy(add, {0: SPLIT}, gathered)
    assert not is_made_of_a_copy(tanh, {0: SPLIT}, EquationPlan()), "read as it is"
    assert not is_made_of_a_copy(tanh, {0: WHOLE}, EquationPlan(operands=((0, (SPLIT,)),))), "a slice is no copy"
    assert not is_made_of_a_copy(product, {0: SPLIT}, gathered), "a product's result is stored anyway"
