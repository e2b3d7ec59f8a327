"""Whether a training step stays the same in micro-batches: its loss, what it reports and its gradients are means."""

from collections.abc import Iterator
from typing import Any

import jax

from autoshard.errors import StageError
from autoshard.graph.example_mean import why_no_means
from autoshard.trace.batch_growth import Growth, OtherProgramError, growths
from autoshard.trace.trace import program_of, trace
from autoshard.train_step import Metrics, TrainStep, batch_size


def why_no_mean_of(step: TrainStep, state: Any, batch: Any) -> str | None:
    """Because of what the step is not known to be the same in micro-batches, whose loss, metrics and gradients are
    averaged: an operation and its line, or what else keeps these from being plain means over examples. None if all are.

    What a graph shows to be a sum over examples, beside what depends on none, is a mean if it is divided by their
    number and the rest is not. That is told by the numbers in the program beside those in the program of fewer
    examples. Gradients are looked at, too, since functions may bring derivatives of their own.
    """
    if (num_examples := examples_of(batch)) == 1:
        return "a batch that cannot be cut"
    key = jax.eval_shape(step.key, state)

    def results(params: Any, mutable: Any, batch: Any, key: Any) -> tuple[Any, Metrics, Any]:
        gradients, _, metrics = step.gradients(params, mutable, batch, key, 1.0)
        return metrics["loss"], {name: m for name, m in metrics.items() if name != "loss"}, gradients

    arguments = lambda batch: (state.params, state.mutable, batch, key)
    whole = trace(results, arguments(batch))
    in_what = [_in_what(output.name) for output in whole.graph.outputs]
    examples = {a.value for a in whole.graph.arguments if a.position == 2}
    for why, where in zip(why_no_means(whole.graph, examples, num_examples), in_what, strict=True):
        if why is not None:
            return why + where
    written = program_of(results, arguments(batch))
    for number in _others(num_examples):
        try:
            other = program_of(results, arguments(_resized(batch, number)))
        except Exception as error:  # of the user's function
            return f"what it raises for {number}, not {num_examples} examples: {type(error).__name__}: {error!s:.300}"
        pair = (written, other) if number < num_examples else (other, written)
        if (why := _why_grown(*pair, in_what, max(num_examples, number), min(num_examples, number))) is not None:
            return why
    return None


def _resized(batch: Any, num_examples: int) -> Any:
    """The types of a batch of another number of examples."""
    types = jax.eval_shape(lambda whole: whole, batch)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype), types)


def examples_of(batch: Any) -> int:
    """Examples of a batch; 1 where it does not tell, and so cannot be cut."""
    try:
        return batch_size(batch)
    except StageError:
        return 1


def _in_what(name: str) -> str:
    """Which result an operation belongs to, by the name of the output; of the loss, nothing is said."""
    kind, _, path = name.partition(".")
    return {"0": "", "1": f", in the metric `{path}`"}.get(kind, f", in the gradient of `{path or 'params'}`")


def _others(num_examples: int) -> Iterator[int]:
    """With how many examples programs are compared: half of them, or the next smaller part, and the fewest that halving
    again leaves. One example is often another program, without a dimension of examples: where no part has two, twice
    the examples stand in for it."""
    part = num_examples // next(n for n in range(2, num_examples + 1) if num_examples % n == 0)
    if part == 1:
        yield 2 * num_examples
        return
    yield part
    least = part
    while least % 2 == 0 and least > 2:
        least //= 2
    if least != part:
        yield least


def _why_grown(whole: Any, part: Any, in_what: list[str], num_examples: int, fewer: int) -> str | None:
    """Because of what a sum over examples, beside what depends on none, is no mean over them; None if all are.

    Args:
      whole, part: The programs of `num_examples` examples, and of fewer.
      in_what: Says of each result which it is.
    """
    try:
        found = growths(whole, part)
    except OtherProgramError as error:
        return f"{error}, where the program of {fewer} examples is another one than that of {num_examples}"
    for growth, where in zip(found, in_what, strict=True):
        if not growth.is_(1.0):
            return _told(growth, num_examples, fewer) + where
    return None


def _told(growth: Growth, num_examples: int, fewer: int) -> str:
    if growth.why:
        return growth.why
    if growth.is_(num_examples / fewer):
        return "a sum over the examples that nothing divides by their number"
    return (
        f"numbers that change with that of the examples: of {num_examples} it is {growth.factor:.4g} times the mean "
        f"over parts of {fewer}"
    )
