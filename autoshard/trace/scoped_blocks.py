"""Annotations for code that is not one's own: blocks put around what stands in some of its name scopes."""

import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.annotations.block import Block
from autoshard.errors import AnnotationError
from autoshard.trace.walk import nested_programs, open_jaxpr


def with_blocks(fn: Callable[..., Any], rules: Sequence[tuple[str | None, Block]]) -> Callable[..., Any]:
    """`fn` with blocks around what it does in name scopes (`jax.named_scope`, and the modules of Flax Linen).

    Args:
      fn: A pure function of positional pytrees of arrays.
      rules: (pattern of a scope's name, block to put inside it); None for a block around all of `fn`.

    Raises (when it is called):
      AnnotationError: No scope fits a pattern.
    """
    inside = [(pattern, block) for pattern, block in rules if pattern is not None]
    around = [block for pattern, block in rules if pattern is None]

    @functools.wraps(fn)
    def annotated(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        names = sorted(_scope_names(closed.jaxpr)) if inside else []
        for pattern, block in inside:
            if not fnmatch.filter(names, pattern):
                raise AnnotationError(
                    f"An annotation is for a scope of the model, but no scope fits {pattern!r} of {block.at_line}; "
                    f"there are {', '.join(names) or 'none'}. Name one of them, or put jax.named_scope around the code."
                )
        run = jex.jaxpr_as_fun(jex.ClosedJaxpr(_marked(closed.jaxpr, inside), closed.consts))
        for block in reversed(around):
            run = jax.named_scope(block.scope)(run)
        return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(args)))

    return annotated


def _scope_names(jaxpr: jex.Jaxpr) -> set[str]:
    """The names of all scopes in a program."""
    names = {s.name for e in jaxpr.eqns for s in e.source_info.name_stack.stack if _is_scope(s)}
    return names.union(*(_scope_names(open_jaxpr(n)) for e in jaxpr.eqns for n in nested_programs(e)))


def _is_scope(entry: Any) -> bool:
    """Whether an entry of a name stack is a scope, and not a transformation such as that of `vmap`."""
    return type(entry).__name__ == "Scope"


def _marked(jaxpr: jex.Jaxpr, rules: Sequence[tuple[str, Block]]) -> jex.Jaxpr:
    return jaxpr.replace(eqns=[_marked_equation(equation, rules) for equation in jaxpr.eqns])


def _marked_equation(equation: jex.JaxprEqn, rules: Sequence[tuple[str, Block]]) -> jex.JaxprEqn:
    """An equation with the scopes of blocks behind those that they are for, in the programs that it nests too."""
    info = equation.source_info
    scopes: list[Any] = []
    for scope in info.name_stack.stack:
        scopes.append(scope)
        if _is_scope(scope):
            scopes += [type(scope)(block.scope) for pattern, block in rules if fnmatch.fnmatchcase(scope.name, pattern)]
    if len(scopes) > len(info.name_stack.stack):
        equation = equation.replace(source_info=info.replace(name_stack=type(info.name_stack)(tuple(scopes))))
    return equation.replace(params={name: _marked_value(value, rules) for name, value in equation.params.items()})


def _marked_value(value: Any, rules: Sequence[tuple[str, Block]]) -> Any:
    if isinstance(value, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(_marked(value.jaxpr, rules), value.consts)
    if isinstance(value, jex.Jaxpr):
        return _marked(value, rules)
    if type(value) is tuple and any(isinstance(x, jex.ClosedJaxpr | jex.Jaxpr) for x in value):
        return tuple(_marked_value(x, rules) for x in value)
    return value
