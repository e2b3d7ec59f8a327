"""What the leaf equations of a program have in common.

A deep model repeats few equations many times. What depends on an equation's signature alone (its rule, its text, the
types of its results) is worked out once a signature; and since even a signature takes long to make, equations are
first compared at a glance.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.errors import TraceError
from autoshard.graph.graph import FactorRule, FixedLayout
from autoshard.trace.annotations import constraint_layout
from autoshard.trace.rules import rule_of, signature_of
from autoshard.trace.rules.collectives import axes_of
from autoshard.trace.walk import EquationKind, kind_of


class ArrayType(NamedTuple):
    """What a `Value` takes from the type of a variable."""

    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """What all leaf equations of one signature share.

    Attributes:
      number: Signatures are numbered as they are met.
      name: Primitive name. rule: How dimensions are tied. text: The signature for people.
      results: The type of each result.
      fixed_results, over: As in `Operation`.
      is_unknown: Whether no rule is known although there is something to split.
    """

    number: int
    name: str
    rule: FactorRule
    text: str
    results: tuple[ArrayType, ...]
    fixed_results: tuple[FixedLayout | None, ...] | None
    over: tuple[str, ...]
    is_unknown: bool


class Leaves:
    """The leaf equations met so far, one of each signature."""

    def __init__(self):
        self.by_signature: dict[Hashable, Leaf] = {}
        self.by_glance: dict[Hashable, Leaf] = {}
        self.types: dict[int, tuple[Any, ArrayType]] = {}
        """By the identity of an abstract value, which is kept so that no other can take it over."""

    def type_of(self, aval: Any) -> ArrayType:
        """The type of a variable with this abstract value.

        Raises:
          TraceError: If its shape is not static.
        """
        known = self.types.get(id(aval))
        if known is None:
            known = self.types[id(aval)] = (aval, _read_type(aval))
        return known[1]

    def of(self, equation: jex.JaxprEqn) -> Leaf | None:
        """What is known of a leaf equation; None for an equation that nests other programs."""
        glance = _glance(equation)
        try:
            leaf = self.by_glance.get(glance)
        except TypeError:
            if kind_of(equation) is EquationKind.LEAF:
                raise
            return None  # a call may hold a function that is bound to anything
        if leaf is None and kind_of(equation) is EquationKind.LEAF:
            signature = signature_of(equation)
            leaf = self.by_signature.get(signature)
            if leaf is None:
                leaf = self.by_signature[signature] = self._read(equation)
            for v in (*equation.invars, *equation.outvars):
                self.type_of(v.aval)  # keeps what the glance identifies
            self.by_glance[glance] = leaf
        return leaf

    def _read(self, equation: jex.JaxprEqn) -> Leaf:
        name, rule = equation.primitive.name, rule_of(equation)
        return Leaf(
            len(self.by_signature),
            name,
            rule,
            describe(equation),
            tuple(self.type_of(v.aval) for v in equation.outvars),
            (constraint_layout(equation),) if name == "sharding_constraint" else None,
            axes_of(equation),
            rule.origin == "replicated" and any(math.prod(getattr(v.aval, "shape", ())) > 1 for v in equation.invars),
        )


def _glance(equation: jex.JaxprEqn) -> Hashable:
    """A key that is fast to make, and equal only where signatures are.

    JAX nearly always hands one object to equal abstract values, so that their identities serve for their contents; and
    since 0.7 it demands that parameters can be hashed. The functions of custom derivatives, which calls hold, cannot
    where they are bound to arguments that are not differentiated and cannot.
    """
    return (
        equation.primitive,
        tuple(equation.params.items()),
        tuple([id(v.aval) for v in equation.invars]),
        tuple([id(v.aval) for v in equation.outvars]),
    )


def _read_type(aval: Any) -> ArrayType:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if any(not isinstance(d, int | np.integer) for d in shape):
        raise TraceError(f"Every dimension must have a static size, but a tensor of shape {shape} does not.")
    if dtype is None or not hasattr(dtype, "itemsize"):
        itemsize = 0
    elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
        itemsize = 8
    else:
        itemsize = int(dtype.itemsize)
    return ArrayType(shape, str(dtype), itemsize)


def describe(equation: jex.JaxprEqn) -> str:
    """One equation's signature as text: primitive, operand types, result types."""
    aval = lambda v: v.aval.str_short(short_dtypes=True) if hasattr(v.aval, "str_short") else str(v.aval)
    return (
        f"{equation.primitive.name}({', '.join(aval(v) for v in equation.invars)})"
        f" -> {', '.join(aval(v) for v in equation.outvars)}"
    )
