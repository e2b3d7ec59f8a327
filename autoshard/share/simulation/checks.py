"""Whether a decision can be obeyed."""

import collections

from autoshard.errors import ShareError
from autoshard.share.pool import Placement
from autoshard.share.situation import Decision, JobState, Situation


def check_decision(situation: Situation, decision: Decision) -> None:
    """Refuses a decision that gives devices twice, or to a job what it cannot have.

    Raises:
        ShareError: it does, and to whom.
    """
    states = {state.job.name: state for state in situation.jobs}
    for name in decision.placements:
        if name not in states:
            raise ShareError(f"A decision names jobs that are there; received {name!r}. This is a fault of the policy.")
    used: collections.Counter[int] = collections.Counter()
    for placement in decision.placements.values():
        for taken in placement.taken:
            used[taken.node] += taken.num_devices
    there = {node.number: node.num_devices for node in situation.nodes}
    for node, devices in used.items():
        if devices > there.get(node, 0):
            raise ShareError(
                f"A device has one job; on node {node}, which has {there.get(node, 0)} devices now, {devices} were "
                "given away. This is a fault of the policy."
            )
    for name, state in states.items():
        _check_job(state, decision.placements.get(name), there)


def _check_job(state: JobState, placement: Placement | None, there: dict[int, int]) -> None:
    job, before = state.job, state.placement
    if placement is not None:
        if not job.rates.of(placement.footprint):
            raise ShareError(f"Job {job.name!r} cannot run on {placement.footprint}. This is a fault of the policy.")
        wanted = collections.Counter({p.group: p.num_devices for p in placement.footprint.parts})
        if sum(wanted.values()) != sum(taken.num_devices for taken in placement.taken):
            raise ShareError(f"Job {job.name!r} got other devices than {placement.footprint}: a fault of the policy.")
    if before is None or not all(there.get(one.node, 0) >= one.num_devices for one in before.taken):
        return
    if placement is None and not job.is_preemptible:
        raise ShareError(f"Job {job.name!r} may not be stopped, and was: a fault of the policy.")
    size = before.footprint.num_devices
    if placement is not None and not job.is_elastic and placement.footprint.num_devices != size:
        raise ShareError(f"Job {job.name!r} has a fixed size, and got another: a fault of the policy.")
