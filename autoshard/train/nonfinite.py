"""What happens when a run's numbers are no longer finite: going back, and finding where they ceased to be.

The state before the bad step is gone, since each step reuses its memory. Batches are a function of the step's number,
so the steps from the last good checkpoint can be taken again and give the same numbers.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.api import StagedPlan
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.elastic.decisions import is_first
from autoshard.errors import TrainingError
from autoshard.execution.nonfinite import NonFiniteOrigin, find_nonfinite
from autoshard.files import write_text_atomically
from autoshard.launch.messages import Tier
from autoshard.trace.trace import path_name
from autoshard.train.run import Run
from autoshard.transfer.peers import all_gather_rows
from autoshard.uneven_step import UnevenStep


def is_bad(metrics: Mapping[str, float]) -> bool:
    """Whether a step's loss is not finite, other than in a step that loss scaling left out."""
    return not math.isfinite(metrics["loss"]) and metrics.get("is_finite", 1.0) != 0.0


def bad_leaves(tree: Any) -> frozenset[str]:
    """Paths of the leaves that hold a number that is not finite."""
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    floats = [(name, leaf) for name, leaf in named if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size]
    if not floats:
        return frozenset()
    together: dict[frozenset[Any], list[int]] = {}  # a state in stages lies on several meshes
    for n, (_, leaf) in enumerate(floats):
        devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        together.setdefault(frozenset(devices), []).append(n)
    bad = np.zeros(len(floats), bool)
    for devices, numbers in together.items():
        if not devices or any(d.process_index == jax.process_index() for d in devices):
            bad[numbers] = ~np.array(jax.device_get(_are_finite([floats[n][1] for n in numbers])))
    if jax.process_count() > 1 and len(together) > 1:
        # on one device of each process: what a step still sends to others needs a thread (see `agreement.met`)
        bad = np.any(all_gather_rows(bad), axis=0)
    return frozenset(name for (name, _), found in zip(floats, bad, strict=True) if found)


@jax.jit
def _are_finite(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of numbers that ceased to be finite.

    Attributes:
        noticed_at: the step after which it was seen. step: the step in which it happened; None if taking the steps
            again from `since` did not bring it about.
        since: the step of the checkpoint that the search started from; 0 for the initial state.
        origin: the first value that was not finite, and the outputs of the step that were not.
        place: where in the batch it is, if the batch held it.
    """

    noticed_at: int
    step: int | None
    since: int
    origin: NonFiniteOrigin | None
    place: str

    def __str__(self) -> str:
        if self.step is None or self.origin is None:
            return (
                f"Taking the steps after step {self.since} again gave finite numbers only: the fault may lie in the "
                "hardware, or in data that are not the same each time they are read."
            )
        outputs = ", ".join(f"`{name}`" for name in self.origin.outputs[:4])
        more = len(self.origin.outputs) - 4
        return (
            f"It happened in step {self.step}. {self.origin}{self.place}\n"
            f"Not finite after that step: {outputs}{f' and {more} more' if more > 0 else ''}."
        )


def diagnose(run: Run, checkpoints: Checkpoints, noticed_at: int) -> Diagnosis:
    """Finds where numbers that were bad after step `noticed_at` ceased to be finite.

    Takes the steps since the last checkpoint again, up to twice.
    """
    restored = run.latest_state(checkpoints, Tier.DISK)
    since, state = restored.step, restored.state
    by_design = bad_leaves(state)
    first = None
    for number in range(since, noticed_at):
        state, metrics = run.step(state, run.batch(number))
        if is_bad(jax.device_get(jax.block_until_ready(metrics))) or bad_leaves(state) - by_design:
            first = number + 1
            break
    if first is None:
        return Diagnosis(noticed_at, None, since, None, "")
    restored = run.latest_state(checkpoints, Tier.DISK)
    state = restored.state
    for number in range(restored.step, first - 1):
        state, metrics = run.step(state, run.batch(number))
        jax.block_until_ready(metrics)
    return _of_step(run, noticed_at, since, first, state)


def _of_step(run: Run, noticed_at: int, since: int, step: int, state: Any) -> Diagnosis:
    """The diagnosis of the step that is taken from `state`."""
    fn, batch = run.functions.step, run.batch(step - 1)
    if run.one_mesh is not None and isinstance(run.plan, StagedPlan):
        fn, state, batch = fn.in_parts(run.plan.parts), run.one_mesh.bring(state), jax.tree.map(jnp.asarray, batch)
    if isinstance(fn, UnevenStep):
        fn = fn.alone(run.config.data.batch_size)
    origin = find_nonfinite(fn, (state, batch))
    place = ""
    if origin is not None and origin.argument.startswith("batch."):
        array = run.data.batches[step - 1][origin.argument.removeprefix("batch.")]
        index = np.argwhere(~np.isfinite(array))[0]
        place = f" The first is at index {index.tolist()} of {list(array.shape)}, from data.batches[{step - 1}]."
    if origin is not None:
        outputs = [_of_result(name) for name in origin.outputs]
        metrics_first = sorted(outputs, key=lambda name: name.startswith("state."))
        origin = dataclasses.replace(origin, outputs=tuple(metrics_first))
    return Diagnosis(noticed_at, step, since, origin, place)


def _of_result(name: str) -> str:
    """`0.params.w` of a step's result as `state.params.w`, and `1.loss` as `loss`."""
    part, _, rest = name.partition(".")
    return f"state.{rest}" if part == "0" else rest


def stop(run: Run, checkpoints: Checkpoints, noticed_at: int, what: str) -> TrainingError:
    """The error that ends a run, after the search for where it began; its report is in `nonfinite.json` as well.

    Args:
        run, checkpoints: the run; its checkpoints are all finite.
        noticed_at: steps taken.
        what: what was seen, as a sentence.
    """
    try:
        found = diagnose(run, checkpoints, noticed_at)
        story, record = str(found), dataclasses.asdict(found)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # mostly for want of memory
        story = f"Where it began could not be found: {str(error).partition(chr(10))[0]:.300}"
        record = {"noticed_at": noticed_at, "failure": story}
    latest = checkpoints.latest_step(Tier.DISK)
    good = "There is no checkpoint" if latest is None else f"The last good checkpoint is that of step {latest}"
    if is_first():
        text = json.dumps({**record, "message": f"{what} {story}"}, indent=1)
        write_text_atomically(run.folder / "nonfinite.json", text + "\n")
    return TrainingError(
        f"{what} {story}\n{good}; this report is in {run.folder / 'nonfinite.json'}. Lower optimizer.learning_rate, "
        "set optimizer.clip_norm, correct the data, or set train.on_nonfinite=continue to go on regardless."
    )
