"""benchmarks/chaos.py: what it must see in a log, and a few real faults that a run survives."""

import json
import pathlib
import random
import sys

import pytest

from autoshard.launch.events import (
    DrainStarted,
    EventLog,
    Finished,
    GenerationStarted,
    PhaseStarted,
    Replanned,
    Restored,
    StepCommitted,
    WorkerEntry,
    WorkerLost,
)
from autoshard.launch.messages import Phase, Tier

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import chaos
from faults.injection import DAMAGES, Fault, Kind, Moment, draw, flip_a_bit, has_come
from faults.lineage import compared_losses, lineage
from faults.recovery import recovery
from faults.supervised import SupervisedRun

STEPS = 20


def started(generation: int, time: float) -> GenerationStarted:
    workers = tuple(WorkerEntry(rank=n, pid=n + 1, slot=n, host="here") for n in range(4))
    return GenerationStarted(time=time, generation=generation, workers=workers, why="")


def phase(generation: int, time: float, phase: Phase, step: int = 0) -> PhaseStarted:
    return PhaseStarted(time=time, generation=generation, phase=phase, step=step)


def restored(generation: int, time: float, step: int, source: Tier | None = Tier.MEMORY) -> Restored:
    return Restored(time=time, generation=generation, step=step, source=source, seconds=0.1)


def committed(generation: int, time: float, step: int, tier: Tier = Tier.MEMORY) -> StepCommitted:
    return StepCommitted(time=time, generation=generation, step=step, tier=tier)


def lost(generation: int, time: float, step: int) -> WorkerLost:
    return WorkerLost(
        time=time, generation=generation, rank=1, pid=2, slot=1, cause="signal 9", phase=Phase.TRAINING, step=step
    )


def a_run(second_begins_at: int, second_commits: tuple[int, ...]) -> list:
    """Ten steps, a loss in the eleventh, and the rest."""
    return [
        started(1, 0.0),
        restored(1, 1.0, 0, None),
        *(committed(1, 1.0 + step, step) for step in range(1, 11)),
        lost(1, 11.5, 10),
        started(2, 12.0),
        restored(2, 13.0, second_begins_at),
        *(committed(2, 14.0 + step, step) for step in second_commits),
        Finished(time=40.0, generation=2, step=STEPS, loss=1.0),
    ]


# ---- what is looked for


def test_a_run_that_goes_on_where_it_was_is_well():
    found = lineage(a_run(10, tuple(range(11, 21))), STEPS, 5, 1)
    assert found.problems == () and found.redone == (0,) and found.sources == ("", "memory")


@pytest.mark.parametrize(
    ("begins_at", "commits", "problem"),
    [
        (9, range(10, 21), "began at step 9, and 10 was committed"),
        (10, range(12, 21), "skipped from step 10 to 12"),
        (12, range(13, 21), "began at step 12, and only 10 were taken"),
        (10, [11, 11, *range(12, 21)], "committed step 11 after step 11"),
    ],
)
def test_steps_that_are_lost_skipped_or_taken_twice_are_seen(begins_at, commits, problem):
    assert problem in "; ".join(lineage(a_run(begins_at, tuple(commits)), STEPS, 5, 1).problems)


def test_what_was_damaged_on_purpose_may_be_lost_once():
    events = a_run(5, tuple(range(6, 21)))
    assert lineage(events, STEPS, 5, 1, [11.4]).problems == ()
    assert lineage(events, STEPS, 5, 1, [20.0]).problems != ()


def test_a_run_without_memory_may_redo_one_interval():
    events = [
        started(1, 0.0),
        restored(1, 1.0, 0, None),
        committed(1, 2.0, 5, Tier.DISK),
        lost(1, 3.0, 9),
        started(2, 4.0),
        restored(2, 5.0, 5, Tier.DISK),
        *(committed(2, 5.0 + step, step, Tier.DISK) for step in (10, 15, 20)),
        Finished(time=40.0, generation=2, step=STEPS, loss=1.0),
    ]
    assert lineage(events, STEPS, 5, None).problems == ()
    assert lineage(events, STEPS, 5, None).redone == (4,)
    assert "did not finish" in lineage(events[:-1], STEPS, 5, None).problems[0]
    assert "had to take 4 steps again" in "; ".join(lineage(events, STEPS, 3, None).problems)


def test_a_step_between_checkpoints_is_saved_only_where_a_generation_is_to_end():
    saved = committed(1, 2.0, 7, Tier.DISK)
    rest = [
        *(committed(1, 5.0 + step, step, Tier.DISK) for step in (10, 15, 20)),
        Finished(time=40.0, generation=1, step=STEPS, loss=1.0),
    ]
    begin = [started(1, 0.0), restored(1, 1.0, 0, None)]
    assert "step 7, which is none of its checkpoints" in lineage([*begin, saved, *rest], STEPS, 5, None).problems[0]
    asked = DrainStarted(time=1.5, generation=1, why="from 2 to 4 workers")
    assert lineage([*begin, asked, saved, *rest], STEPS, 5, None).problems == ()


def test_losses_are_compared_step_by_step(tmp_path):
    def write(name: str, losses: list[tuple[int, float]]) -> pathlib.Path:
        lines = [json.dumps({"kind": "train", "step": step, "loss": loss}) for step, loss in losses]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        return tmp_path / name

    reference = write("reference", [(1, 2.0), (2, 1.0)])
    same = compared_losses(write("same", [(1, 2.0), (2, 1.0)]), reference)
    assert same.is_bitwise_equal and same.final_difference == 0 and same.problems == ()
    other = compared_losses(write("other", [(1, 2.0), (2, 1.01)]), reference)
    assert not other.is_bitwise_equal and other.final_difference == pytest.approx(0.01)
    twice = compared_losses(write("twice", [(1, 2.0), (1, 2.0)]), reference)
    assert "steps [2] are missing, steps [1] are there twice" in twice.problems[0]


def test_the_parts_of_a_recovery_add_up():
    events = [
        lost(1, 10.25, 7),
        started(2, 10.5),
        phase(2, 10.5, Phase.STARTUP),
        phase(2, 11.5, Phase.PLANNING),
        Replanned(time=11.75, generation=2, plan="p", mesh="data=4", seconds=0.25, from_cache=True),
        phase(2, 11.75, Phase.STARTUP),
        phase(2, 12.0, Phase.RESTORE),
        restored(2, 12.5, 7),
        phase(2, 12.5, Phase.COMPILE, 7),
        phase(2, 13.5, Phase.TRAINING, 8),
        committed(2, 14.0, 8),
    ]
    found = recovery(events, 10.0)
    assert found is not None and found.total_s == 4.0 and found.from_cache
    parts = (found.noticed_s, found.stopped_s, found.joined_s, found.planned_s, found.restored_s, found.compiled_s)
    assert parts == (0.25, 0.25, 1.25, 0.25, 0.5, 1.0) and found.committed_s == 0.5
    assert recovery(events[:-1], 10.0) is None and recovery(events, 20.0) is None


# ---- faults


def test_the_same_seed_draws_the_same_faults():
    drawn = [[draw(numbers) for _ in range(400)] for numbers in (random.Random(3), random.Random(3))]
    assert drawn[0] == drawn[1]
    assert {fault.kind for fault in drawn[0]} == set(Kind) and {fault.moment for fault in drawn[0]} == set(Moment)
    assert all(fault.moment in (Moment.TRAINING, Moment.SAVING) for fault in drawn[0] if fault.kind in DAMAGES)


def test_moments_are_seen_in_the_newest_generation(tmp_path):
    run = SupervisedRun(tmp_path / "c.yaml", tmp_path, ())
    log = EventLog(tmp_path)
    for event in (started(1, 0.0), phase(1, 0.0, Phase.STARTUP)):
        log.write(event)
    run.read()
    assert has_come(run, Moment.STARTUP, 0, 5) and not has_come(run, Moment.STARTUP, 1, 5)
    assert not has_come(run, Moment.COMPILE, 0, 5) and not has_come(run, Moment.TRAINING, 0, 5)
    log.write(committed(1, 1.0, 4))
    run.read()
    assert has_come(run, Moment.TRAINING, 0, 5) and not has_come(run, Moment.SAVING, 0, 5)
    log.write(committed(1, 1.0, 5))
    run.read()
    assert has_come(run, Moment.SAVING, 0, 5) and has_come(run, Moment.COMPILE, 0, 5)


def test_exactly_one_bit_is_flipped(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    flip_a_bit(tmp_path / "file", random.Random(1))
    content = (tmp_path / "file").read_bytes()
    assert len(content) == 100 and sum(byte.bit_count() for byte in content) == 1


WORKER, COORDINATOR = Fault(Kind.WORKER, Moment.TRAINING, 0.1), Fault(Kind.COORDINATOR, Moment.RESTORE, 0.0)
SUPERVISOR = Fault(Kind.SUPERVISOR, Moment.TRAINING, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [[SUPERVISOR, COORDINATOR], pytest.param([WORKER, COORDINATOR, SUPERVISOR], marks=pytest.mark.exhaustive)],
    ids=len,
)
def test_a_run_survives_the_loss_of_the_coordinator_and_of_its_supervisor(faults, tmp_path, monkeypatch):
    """Real processes; the faults are given, and everything that the benchmark looks for is looked for."""
    monkeypatch.setenv("PYTHONPATH", str(chaos.ROOT))
    report = chaos.disturbed(chaos.Bench(tmp_path, 40, num_workers=2), 0, 0, "2", faults)
    assert report.problems == [] and report.orphans == []
    assert len(report.faults) == len(faults) and report.generations > len(faults)
    assert report.is_bitwise_equal
