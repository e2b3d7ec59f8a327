"""Compiles every example on eight devices: what a rule lets be split, XLA splits with no other communication.

Each factor alone, and every pair of factors together: no collective for parallel factors, one all-reduce (or one for
each) for reductions, and the values of the unsharded equation.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.execution.by_shards import rule_by_shards, run_by_shards
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import PLACES, Dims, FactorRule
from autoshard.graph.layout import SpecEntries
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.shardy import function_of

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(?:-start)?\("
)


def majors_of(rule: FactorRule, factor: int) -> set[int]:
    """The factors that must be split to the end before a factor can be: those left of it in some dimension."""
    found: set[int] = set()
    pending = [factor]
    while pending:
        current = pending.pop()
        for dim in (dim for tensor in rule.operands + rule.results for dim in tensor if current in dim):
            new = set(dim[: dim.index(current)]) - found
            found |= new
            pending += new
    return found


def compiled(eqn, rule: FactorRule, ways: dict[int, int]):
    """Compiles an equation with each given factor split the given number of ways."""
    mesh = jax.make_mesh(
        tuple(ways.values()),
        tuple(f"f{factor}" for factor in ways),
        axis_types=(AxisType.Auto,) * len(ways),
        devices=jax.devices()[: math.prod(ways.values())],
    )

    def entries(dims: Dims) -> SpecEntries:
        return tuple(tuple(f"f{factor}" for factor in dim if factor in ways) for dim in dims)

    def sharding(dims: Dims) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[names or None for names in entries(dims)]))

    function, operands = function_of(eqn)
    if rule_by_shards(eqn, EquationPlan()) is not None:
        wanted = EquationPlan(
            operands=tuple((slot, (entries(dims),)) for slot, dims in enumerate(rule.operands)),
            results=tuple((slot, entries(dims)) for slot, dims in enumerate(rule.results)),
        )
        function = lambda *arrays: run_by_shards(eqn, arrays, rule, wanted, mesh)
    jitted = jax.jit(
        function,
        in_shardings=tuple(map(sharding, rule.operands)),
        out_shardings=list(map(sharding, rule.results)),
        keep_unused=True,
    )
    return jitted.lower(*operands).compile()


def check(eqn, rule: FactorRule, ways: dict[int, int], arrays, expected) -> None:
    program = compiled(eqn, rule, ways)
    collectives = COLLECTIVE.findall(program.as_text())
    sums_of = lambda reduction: 0 if reduction is None else 2 if reduction in PLACES else 1  # the extreme, its place
    reductions = sum(sums_of(rule.factors[factor].reduction) for factor in ways)
    assert set(collectives) <= {"all-reduce"}, f"{eqn.primitive} {rule} split {ways}"
    assert bool(collectives) == bool(reductions) and len(collectives) <= reductions, f"{rule} split {ways}"
    placed = [
        jax.device_put(array, sharding) for array, sharding in zip(arrays, program.input_shardings[0], strict=True)
    ]
    for got, want in zip(program(*placed), expected, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        if want.dtype == jnp.bfloat16:  # sums of 8 or 16 positive terms, rounded to 8 bits in another order
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.05)
        elif np.issubdtype(want.dtype, np.inexact):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
        else:
            np.testing.assert_array_equal(got, want)


def ways_of(rule: FactorRule, factor: int) -> dict[int, int] | None:
    """Splits a factor as far as eight devices allow, and its majors wholly; None if they do not allow it."""
    ways = {major: rule.factors[major].size for major in sorted(majors_of(rule, factor))}
    left = 8 // math.prod(ways.values())
    own = math.gcd(left, rule.factors[factor].size)
    return {**ways, factor: own} if own > 1 else None


def unsharded(eqn, random_array):
    function, operands = function_of(eqn)
    rng = np.random.default_rng(0)
    arrays = [random_array(rng, operand) for operand in operands]
    return arrays, jax.jit(function)(*arrays)


def test_factors_split_without_other_communication(any_example, random_array):
    eqn = any_example.eqn
    rule = rule_of(eqn)
    arrays, expected = unsharded(eqn, random_array)
    for factor in range(len(rule.factors)):
        ways = ways_of(rule, factor)
        if ways is not None:
            check(eqn, rule, ways, arrays, expected)


def test_pairs_of_factors_split_together(paired_example, random_array):
    eqn = paired_example.eqn
    rule = rule_of(eqn)
    arrays, expected = unsharded(eqn, random_array)
    majors = [factor for factor in range(len(rule.factors)) if not majors_of(rule, factor)]
    pairs = [pair for pair in itertools.combinations(majors, 2) if all(rule.factors[f].size % 2 == 0 for f in pair)]
    assert pairs
    for pair in pairs:
        check(eqn, rule, dict.fromkeys(pair, 2), arrays, expected)


def test_indices_out_of_bounds_agree_when_the_table_is_split():
    """The shards' masks must treat an index outside the table as the whole table does."""
    table = jnp.arange(1.0, 33.0).reshape(16, 2)
    indices = jnp.array([-20, -1, 0, 15, 16, 40])
    updates = jnp.ones((6, 2))
    programs = [
        lambda t, k, x: t.at[k].get(mode="fill", fill_value=-7.0),
        lambda t, k, x: t.at[k].get(mode="clip"),
        lambda t, k, x: t.at[k].add(x, mode="drop"),
        lambda t, k, x: t.at[k].add(x, mode="clip"),
    ]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    for program in programs:
        split = jax.jit(program, in_shardings=(rows, whole, whole), out_shardings=whole)
        np.testing.assert_allclose(split(table, indices, updates), program(table, indices, updates))
