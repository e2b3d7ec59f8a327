"""What a rule reads: one leaf equation of a jaxpr, reduced to its name, parameters, shapes and element types."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.extend import core


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a tensor; a token or any other value that is no array has the shape `()`.

    Attributes:
      shape: Logical shape; a random key counts as one element.
      dtype: Name of the element type, e.g. `bfloat16` or `key<fry>`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf equation.

    Attributes:
      name: Name of the primitive, e.g. `dot_general`.
      params: Parameters of the equation.
      operands: One type for each operand.
      results: One type for each result.
    """

    name: str
    params: Mapping[str, Any]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]


def _tensor_type(aval: Any) -> TensorType:
    return TensorType(tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval)))


def leaf_of(eqn: core.JaxprEqn) -> Leaf:
    """Reads an equation.

    Args:
      eqn: A leaf equation.

    Returns:
      The leaf, with dimensions as Python integers where they are static.
    """
    return Leaf(
        name=eqn.primitive.name,
        params=eqn.params,
        operands=tuple(_tensor_type(var.aval) for var in eqn.invars),
        results=tuple(_tensor_type(var.aval) for var in eqn.outvars),
    )
