"""A loss function as users write it, in the one form in which everything else calls it.

That form takes arrays and a key: `(params, batch, rng)`, or with mutable state `(params, mutable, batch, rng)`. A
function that takes these stays as it is. `loss_and_aux` makes what is returned a pair.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from autoshard.errors import StageError
from autoshard.module_params import ModuleParams


def loss_of_arrays(loss_fn: Callable[..., Any], takes_module: bool, has_mutable: bool) -> Callable[..., Any]:
    """A loss as one that takes arrays, and a key by position; itself if it is one.

    A function that has made that of another says so by `takes_arrays`.

    Args:
      loss_fn: As of a `TrainStep`. takes_module: Whether it takes a module in place of parameters and mutable state.
      has_mutable: Whether it takes mutable state; nothing for one that takes a module.

    Raises:
      StageError: It takes other arguments.
    """
    if getattr(loss_fn, "takes_arrays", False):
        return loss_fn
    if takes_module:
        return LossOfModule(_with_key(loss_fn, ("module", "batch")))
    return _with_key(loss_fn, ("params", "mutable", "batch") if has_mutable else ("params", "batch"))


def loss_and_aux(returned: Any, has_mutable: bool) -> tuple[Any, Any]:
    """(loss, aux) of what a loss function returns, or with mutable state (loss, (mutable, aux)).

    Raises:
      StageError: It returns something else.
    """
    if not has_mutable and isinstance(returned, jax.Array | np.ndarray | np.number | float):
        return returned, None
    what = "(loss, (mutable, aux))" if has_mutable else "the loss, or (loss, aux)"
    if not _is_pair(returned):
        raise StageError(f"`loss_fn` of a TrainStep must return {what}; received {type(returned).__name__}.")
    if has_mutable and not _is_pair(returned[1]):
        raise StageError(f"`loss_fn` of a TrainStep must return {what}; received (loss, {type(returned[1]).__name__}).")
    return returned


@dataclasses.dataclass(frozen=True)
class LossOfModule:
    """A loss that takes a module, `(module, batch, rng)`, as one of its parameters and mutable state.

    Attributes:
      loss_fn: It takes a key by position.
    """

    takes_arrays: ClassVar[bool] = True

    loss_fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.loss_fn, "__name__", "loss_fn")

    def __call__(self, params: ModuleParams, mutable: Any, batch: Any, key: jax.Array) -> Any:
        """(loss, (new mutable state, aux)).

        Raises:
          StageError: The loss leaves something in the module that was not there, or returns what it may not.
        """
        module = params.module(mutable)
        loss, aux = loss_and_aux(self.loss_fn(module, batch, key), has_mutable=False)
        _, _, rest = nnx.split(module, nnx.Param, ...)
        after = nnx.to_pure_dict(rest)
        before, now = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (dict(mutable), after))
        if before.keys() != now.keys():
            path = next(iter(before.keys() ^ now.keys()))
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise StageError(
                f"The loss of a TrainStep leaves its module as it is made, but `{self.__name__}` "
                f"{'adds' if path in now else 'removes'} `{name}` of {type(module).__name__}. Take what is sown out of "
                "the module before the loss returns: nnx.pop(module, nnx.Intermediate)."
            )
        return loss, (after, aux)


@dataclasses.dataclass(frozen=True)
class LossWithKey:
    """A loss that takes no key by position as one that does, last of its arguments.

    Attributes:
      loss_fn: The loss. keyword: The name by which it takes the key; None: it takes none.
    """

    loss_fn: Callable[..., Any]
    keyword: str | None

    @property
    def __name__(self) -> str:
        return getattr(self.loss_fn, "__name__", "loss_fn")

    def __call__(self, *args: Any) -> Any:
        """What the loss returns."""
        *others, key = args
        return self.loss_fn(*others) if self.keyword is None else self.loss_fn(*others, **{self.keyword: key})


def _with_key(loss_fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """A loss as one that takes a key by position, behind arguments of these names; itself if it can be called so."""
    try:
        inner = _that_tells(loss_fn)
        signature = inspect.signature(inner, follow_wrapped=_takes_any(inner))
    except (TypeError, ValueError):  # it does not tell, as some that are not of Python
        return loss_fn
    if _binds(signature, *names, "rng"):
        return loss_fn
    already_set = inner.keywords if isinstance(inner, functools.partial) else {}
    for keyword in ("rng", "key"):
        is_open = keyword in signature.parameters and keyword not in already_set
        if is_open and _binds(signature, *names, **{keyword: "rng"}):
            return LossWithKey(loss_fn, keyword)
    if _binds(signature, *names):
        return LossWithKey(loss_fn, None)
    listed = ", ".join(names)
    raise StageError(
        f"`loss_fn` of a TrainStep takes ({listed}, rng) or ({listed}); received "
        f"{getattr(loss_fn, '__name__', type(loss_fn).__name__)}{signature}. Put all data into one `batch`, such as a "
        "dict of arrays, and set what else the function takes by functools.partial; has_mutable=True is for a loss of "
        "(params, mutable, batch)."
    )


def _that_tells(fn: Any) -> Any:
    """The function that tells what `fn` takes: the one in it, where it passes on whatever it is given, as those of
    `jax.jit` and `jax.checkpoint` do. A wrapper with arguments of its own may take others than the function in it.
    """
    return inspect.unwrap(fn, stop=lambda f: inspect.ismethod(f) or not _takes_any(f))


def _takes_any(fn: Any) -> bool:
    code = getattr(fn, "__code__", None)
    return code is None or bool(code.co_flags & inspect.CO_VARARGS)


def _binds(signature: inspect.Signature, *args: Any, **keywords: Any) -> bool:
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2
