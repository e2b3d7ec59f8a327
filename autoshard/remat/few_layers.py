"""The gradients of a loss with few of its layers: what one more layer adds tells what all of them take.

Layers of a run are equal, so that kernels and stored values of a loss with many of them follow from those with two and
with three, which are traced in a fraction of the time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.remat.policy import Keep, LayerRun, uniform
from autoshard.remat.rewrite import evaluated, loss_arguments, loss_of
from autoshard.trace.absent_cudnn import assume_cudnn
from autoshard.trace.walk import variables
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class FewLayers:
    """A loss of which layers can be left out.

    Attributes:
      closed: Its program, with calls and checkpoints inlined. runs: Its layers.
      num_params: How many of its arguments are parameters. args: Shapes of what it is called with.
    """

    closed: jex.ClosedJaxpr
    runs: tuple[LayerRun, ...]
    num_params: int
    args: tuple[Any, ...]

    def gradients(self, keep: Keep, counts: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The gradients of the parameters that are left, and the shapes of arguments to call that with.

        Args:
          keep: What all layers keep. counts: How many are left of each run, the first ones.

        Returns:
          None where a layer that is left does not make what another one makes for what comes behind.
        """
        short = _shortened(self.closed.jaxpr, self.runs, counts)
        if short is None:
            return None
        jaxpr, runs = short
        policy, num_params, consts = uniform(runs, keep), self.num_params, self.closed.consts
        read = {v for e in jaxpr.eqns for v in variables(e.invars)}
        params, others = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
        left = [n for n, v in enumerate(params) if v in read]

        def gradients(own: list[Any], others: list[Any], rest: list[Any]) -> Any:
            def loss(own: list[Any]) -> Any:
                arrays = list(rest)
                for n, array in zip(left, own, strict=True):
                    arrays[n] = array
                return evaluated(jex.ClosedJaxpr(jaxpr, consts), policy, [*arrays, *others], num_params)[0]

            return jax.grad(loss)(own)

        shape = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        args = [shape(params[n]) for n in left], list(map(shape, others)), list(map(shape, params))
        return gradients, args


@assume_cudnn()
def few_layers_of(step: TrainStep, state: Any, batch: Any, runs: tuple[LayerRun, ...]) -> FewLayers:
    """The loss of a step, of whose layers some can be left out.

    Args:
      step: The step. state, batch: Its arguments, arrays or shapes. runs: As `layers_of` has found them.
    """
    args = loss_arguments(step, state, batch)
    _, closed = loss_of(step, state, batch)
    return FewLayers(closed, runs, len(jax.tree.leaves(state.params)), args)


def _shortened(
    jaxpr: jex.Jaxpr, runs: Sequence[LayerRun], counts: Sequence[int]
) -> tuple[jex.Jaxpr, tuple[LayerRun, ...]] | None:
    """The program with `counts` layers of each run: the last of them makes what any other one made."""
    dropped: set[int] = set()
    instead: dict[Any, Any] = {}
    left = []
    for run, count in zip(runs, counts, strict=True):
        left.append(dataclasses.replace(run, start=run.start - len(dropped), count=count))
        if run.is_loop:
            continue
        last = run.start + (count - 1) * run.period
        for n in range(last + run.period, run.stop):
            dropped.add(n)
            kept = jaxpr.eqns[last + (n - run.start) % run.period]
            instead.update(zip(jaxpr.eqns[n].outvars, kept.outvars, strict=True))
    new = lambda atoms: [a if isinstance(a, jex.Literal) else instead.get(a, a) for a in atoms]
    equations = [e.replace(invars=new(e.invars)) for n, e in enumerate(jaxpr.eqns) if n not in dropped]
    outvars = new(jaxpr.outvars)
    made = {*jaxpr.invars, *jaxpr.constvars, *(v for e in equations for v in variables(e.outvars))}
    if not made.issuperset(v for atoms in (outvars, *(e.invars for e in equations)) for v in variables(atoms)):
        return None
    return jaxpr.replace(eqns=equations, outvars=outvars), tuple(left)
