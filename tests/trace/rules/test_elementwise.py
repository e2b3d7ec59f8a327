"""Every elementwise row, compiled: XLA splits all of them in all dimensions with no communication.

Some that look elementwise are loops until every element has converged (`igamma`), and would fail here.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.graph.graph import Factor
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.elementwise import ARITHMETIC

SHAPE = (8, 4)
PARAMETERS = {
    "integer_pow": {"y": 3},
    "reduce_precision": {"exponent_bits": 8, "mantissa_bits": 7},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
}


def primitive_named(name: str) -> Primitive:
    known = [getattr(room, attribute) for room in (lax, primitives) for attribute in dir(room)]
    return next(p for p in known if isinstance(p, Primitive) and p.name == name)


def trial(name: str):
    """An elementwise primitive as a function, and operands of `SHAPE` that it takes."""
    primitive = primitive_named(name)
    dtypes = (jnp.float32, jnp.int32, jnp.uint32, jnp.complex64)
    options = [PARAMETERS.get(name, {}), {"accuracy": None}, {"out_dtype": None}]
    for dtype, arity, params in itertools.product(dtypes, (1, 2, 3, 4), options):
        avals = [jax.ShapeDtypeStruct(SHAPE, dtype)] * arity
        if name == "select_n":
            avals[0] = jax.ShapeDtypeStruct(SHAPE, jnp.bool_)
            if arity != 3:
                continue

        def bind(*arrays, params=params):
            return primitive.bind(*arrays, **params)

        try:
            jax.jit(bind).lower(*avals)
        except Exception:  # noqa: BLE001, S112 - JAX raises several kinds for operands that a primitive does not take
            continue
        return bind, avals
    raise AssertionError(f"no operands found that {name} takes")


@pytest.fixture(scope="module")
def trials():
    return {name: trial(name) for name in sorted(ARITHMETIC)}


def test_rules_are_parallel_in_every_dimension(trials):
    for name, (bind, avals) in trials.items():
        (eqn,) = jax.make_jaxpr(bind)(*avals).jaxpr.eqns
        rule = rule_of(eqn)
        assert (eqn.primitive.name, rule.origin) == (name, "table")
        assert rule.factors == (Factor(8), Factor(4))
        assert set(rule.operands) | set(rule.results) == {((0,), (1,))}


def test_no_row_communicates(trials):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))

    def all_rows(operands):
        return {name: bind(*operands[name]) for name, (bind, _) in trials.items()}

    program = jax.jit(all_rows, in_shardings=sharding, out_shardings=sharding)
    text = program.lower({name: avals for name, (_, avals) in trials.items()}).compile().as_text()
    pattern = r" (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(.*"
    assert re.findall(pattern, text) == []
