"""The processes of a run agree on a plan: the first one's is sent to all, and no run starts with two.

Two processes that plan the same may differ: where the solver or the search is ended by its time limit, what was found
by then depends on how fast they were.
"""

import hashlib
import tempfile
from pathlib import Path

import jax

from autoshard.errors import PlanMismatchError
from autoshard.pipelines.plan.files import read_staged_plan, write_staged_plan
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.transfer.peers import all_gather_text, broadcast_bytes


def plan_of_first(plan: PipelinePlan | None) -> PipelinePlan:
    """The plan of process 0, in every process; all of them must call this together, others than the first with None.

        plan = autoshard.plan(...) if jax.process_index() == 0 else None
        plan = plan_of_first(plan)

    Raises:
      PlanMismatchError: The first process has no plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        text = b""
        if plan is not None and jax.process_index() == 0:
            write_staged_plan(plan, path)
            text = path.read_bytes()
        text = broadcast_bytes(text)
        if not text:
            raise PlanMismatchError(
                "The plan of process 0 is to be used by all processes, but it gave None. Plan there."
            )
        path.write_bytes(text)
        return read_staged_plan(path)


def check_same_plan(plan: PipelinePlan) -> None:
    """Compares the plans of all processes, which must call this together.

    Raises:
      PlanMismatchError: They are to do different things.
    """
    digests = all_gather_text(_digest(plan))
    unlike = [process for process, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise PlanMismatchError(
            f"All processes of a run must have the same plan, but that of process {unlike[0]} differs from that of "
            f"process 0 ({len(unlike)} of {len(digests)} differ). Plan once and load the file everywhere, or take the "
            "first one's with autoshard.StagedPlan.of_first."
        )


def _digest(plan: PipelinePlan) -> str:
    """Of all that says what is done, and in which order; not of what planning took, which differs always."""
    programs = [(p.axes, p.arguments, p.outputs, p.output_steps, p.shardings, p.equations) for p in plan.programs]
    done = plan.arrangement, plan.starts, plan.stop, plan.meshes, plan.program_of, plan.parameters, plan.owners
    return hashlib.sha256(repr((done, plan.durations, plan.donates_state, programs)).encode()).hexdigest()[:32]
