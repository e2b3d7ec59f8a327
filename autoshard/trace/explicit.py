"""Programs in explicit mode: the layouts in their types are taken out, since the plan chooses layouts itself.

Under a mesh whose axes are of type Explicit (`jax.make_mesh`'s default, with `jax.set_mesh` around), JAX writes a
layout into the type of every array: it follows from those of the arguments, from `jax.sharding.reshard`, and from
`out_sharding` of an operation. That is how the program lies when it is run by hand. None of it changes what is
computed, so a jaxpr without it is the same program.
"""

import contextlib
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, NamedSharding

_PLACING = frozenset({"reshard", "mesh_cast", "sharding_constraint"})
"""Primitives that do nothing but place: in explicit mode `sharding_constraint` only asserts what the type says."""
_LAYOUTS = frozenset({"sharding", "out_sharding"})
"""Parameters of other primitives that give the layout of their result."""
_NO_MESH = AbstractMesh((), ())
_KEEPING_TYPES = frozenset({"shard_map"})
"""What nests a program of its own mesh, which stays as it is."""


def is_explicit(mesh: Any) -> bool:
    """Whether types tell layouts on a mesh."""
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def typed(leaf: Any) -> Any:
    """The layout that the type of an argument tells in the mesh that is set; None if it tells none."""
    sharding = getattr(leaf, "sharding", None)
    mesh = jax.sharding.get_abstract_mesh()
    is_of_mesh = isinstance(sharding, NamedSharding) and is_explicit(mesh) and sharding.mesh.abstract_mesh == mesh
    return sharding if is_of_mesh else None


def without_layouts(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program, with no layout in its types."""
    with jax.sharding.use_abstract_mesh(_NO_MESH):  # which new equations take down as the one around them
        return jex.ClosedJaxpr(_open_without(closed.jaxpr), closed.consts)


def _open_without(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    new: dict[Any, Any] = {}

    def defined(variables: Any) -> list[Any]:
        for v in variables:
            new[v] = v if isinstance(v, jex.DropVar) else jex.Var(_bare(v.aval))
        return [new[v] for v in variables]

    def used(atoms: Any) -> list[Any]:
        return [jex.Literal(a.val, _bare(a.aval)) if isinstance(a, jex.Literal) else new[a] for a in atoms]

    constvars, invars, equations = defined(jaxpr.constvars), defined(jaxpr.invars), []
    for equation in jaxpr.eqns:
        operands = used(equation.invars)
        if equation.primitive.name in _PLACING:
            new[equation.outvars[0]] = operands[0]
            continue
        params = equation.params
        if equation.primitive.name not in _KEEPING_TYPES:
            params = {name: _without(name, value) for name, value in params.items()}
        results = defined(equation.outvars)
        with _around(equation), jax.sharding.use_abstract_mesh(_NO_MESH):
            equations.append(
                jex.new_jaxpr_eqn(operands, results, equation.primitive, params, equation.effects, equation.source_info)
            )
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=used(jaxpr.outvars), eqns=equations)


def _around(equation: jex.JaxprEqn) -> contextlib.AbstractContextManager[object]:
    """What else was set around an equation, such as `compute_on`."""
    around = equation.ctx
    is_plain = around.compute_type is None and not around.xla_metadata
    return contextlib.nullcontext() if is_plain else around.manager


def _without(name: str, value: Any) -> Any:
    """A parameter of an equation without layouts; programs within lose theirs."""
    if name in _LAYOUTS:
        return None
    if name == "ctx_mesh":
        return _NO_MESH
    if isinstance(value, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(_open_without(value.jaxpr), value.consts)
    if isinstance(value, jex.Jaxpr):
        return _open_without(value)
    if isinstance(value, tuple) and any(isinstance(x, jex.ClosedJaxpr | jex.Jaxpr) for x in value):
        return tuple(_without("", x) for x in value)
    return value


def _bare(aval: Any) -> Any:
    """An abstract value without a layout; what is no array as it is."""
    if not isinstance(aval, ShapedArray):
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
