"""The fastest of several programs for one step, found by running them."""

import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.compiler.candidates import Candidate
from autoshard.execution.candidates import CandidateFigures, CompiledCandidate
from autoshard.execution.trial import TIMED_STEPS, WARM_STEPS, WORTH_TRYING, Trial, trial_of

H100X8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
TRIED = WARM_STEPS + TIMED_STEPS


def candidate(way: Candidate, waits_s: float = 0.0, replayed_s: float = 1.0, reserved_bytes: float = 1.0):
    """A compiled step that counts its calls, and takes at least that long."""
    step = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()

    def run(x):
        calls.append(way)
        time.sleep(waits_s)
        return step(x)

    calls: list[Candidate] = []
    figures = CandidateFigures(way, replayed_s, 0.0, reserved_bytes)
    return CompiledCandidate(figures, run, "", None), calls


def test_each_is_run_in_turn_and_every_call_is_a_step():
    slow, slow_calls = candidate(Candidate.LEAST_MEMORY, waits_s=0.05)
    fast, fast_calls = candidate(Candidate.UNORDERED)
    trial, x = trial_of([slow, fast], None), jnp.float32(0)
    for n in range(2 * TRIED + 5):
        assert (trial.chosen is None) == (n < 2 * TRIED)
        x = trial(x)
    assert x == 2 * TRIED + 5
    assert trial.chosen is fast and (len(slow_calls), len(fast_calls)) == (TRIED, TRIED + 5)
    assert [t.candidate for t in trial.timed] == [slow, fast]
    assert trial.timed[0].step_s >= 0.05 > trial.timed[1].step_s


def test_processes_agree_on_what_is_fastest_for_the_slowest_of_them():
    first, _ = candidate(Candidate.LEAST_MEMORY)
    second, _ = candidate(Candidate.UNORDERED)
    trial, x = Trial([first, second], lambda own: [2.0, 1.0]), jnp.float32(0)
    for _ in range(2 * TRIED):
        x = trial(x)
    assert trial.chosen is second and [t.step_s for t in trial.timed] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("budget_bytes", "tried"),
    [
        (None, [Candidate.LEAST_MEMORY, Candidate.UNORDERED]),  # far slower by replay: not tried
        (8.0, [Candidate.LEAST_MEMORY, Candidate.PLAN_COSTS]),  # the fastest does not fit
        (1.0, [Candidate.LEAST_MEMORY]),  # none fits
    ],
)
def test_what_fits_and_may_be_the_fastest_is_tried(budget_bytes, tried):
    of = lambda *given: candidate(*given)[0]
    candidates = [
        of(Candidate.LEAST_MEMORY, 0.0, WORTH_TRYING, 5.0),
        of(Candidate.PLAN_COSTS, 0.0, 1.01 * WORTH_TRYING, 6.0),
        of(Candidate.UNORDERED, 0.0, 1.0, 9.0),
    ]
    trial = trial_of(candidates, budget_bytes)
    assert [c.figures.candidate for c in trial.candidates] == tried
    assert (trial.chosen is None) == (len(tried) > 1)


BOUNDED = Candidate.PLAN_COSTS, Candidate.PLAN_COSTS_AT_ONCE, Candidate.PIPELINED_LOOPS
IN_ORDERS = (*BOUNDED, Candidate.GATHERED_FREELY, Candidate.GATHERED_AT_ONCE)
QUEUED = Candidate.PLAN_COSTS_QUEUED, Candidate.GATHERED_QUEUED, Candidate.UNORDERED_QUEUED


@pytest.mark.parametrize(
    ("num_devices", "ordered", "more"), [(1, (), ()), (8, IN_ORDERS, (Candidate.UNORDERED_AT_ONCE, *QUEUED))]
)
def test_one_device_has_nothing_to_hide(num_devices, ordered, more):
    """Beside the order of least memory, one device gets a program without orders, and no others."""
    whole = autoshard.Cluster.from_file(H100X8)
    node = dataclasses.replace(whole.groups[0], devices_per_node=num_devices)
    cluster = dataclasses.replace(whole, groups=(node,))
    w, x = (jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2
    plan = autoshard.plan(step, w, x, cluster=cluster, donate_argnums=0)
    assert plan.compile_candidates == (*ordered, Candidate.UNORDERED, *more)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None
