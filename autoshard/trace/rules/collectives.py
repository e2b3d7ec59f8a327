"""Collectives that a program names itself, in a part that it splits by hand (`shard_map`)."""

from jax.extend import core

NAMES = frozenset(
    """all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute psum psum2 psum_invariant
    ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter""".split()
)
"""Their primitives, of all versions of JAX since 0.10."""


def axes_of(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective runs over; none for any other equation."""
    if equation.primitive.name not in NAMES:
        return ()
    named = equation.params["axes"] if "axes" in equation.params else equation.params["axis_name"]
    named = named if isinstance(named, tuple | list) else (named,)
    return tuple(axis for axis in named if isinstance(axis, str))
