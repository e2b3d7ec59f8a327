"""Steps whose devices have shares drawn at random, other ones at every step, are plain ones; nothing is compiled.

In every run of a model with heads and experts; heads and hidden units in a loop are those of
tests/plans/test_balanced.py. benchmarks/shares_equality.py does so for all families that have heads or experts, on all
meshes.
"""

import jax
import jax.monitoring
import numpy as np
import pytest
import zoo_checks
from shares_programs import MESHES, program

from autoshard import Balance, baselines

PARTS = {"gpt": ["attention", "mlp"], "moe": ["attention", "experts"]}
"""What moves, by family."""


@pytest.fixture
def compiled():
    """What XLA compiled since the test began."""
    seen = []
    listen = lambda event, *_, **__: seen.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "sizes"),
    [pytest.param("gpt", "zero", "loop", marks=pytest.mark.exhaustive), ("moe", "8", "switch")],
)
def test_steps_with_shares_equal_plain_ones(compiled, family, mesh, sizes):
    reference = zoo_checks.reference_of(program(family))
    strategy, axes = MESHES[mesh]
    plan = baselines.plan_baseline(strategy, reference.subject, mesh=axes, options=zoo_checks.OPTIONS)
    run = plan.jit(reference.program.functions.step, balance=Balance(mode="migrate", sizes=sizes, most_buckets=2))
    run.compile(reference.first, reference.batches[0])
    rng, seen, late, held = np.random.default_rng(0), set(), [], []

    def step(state, batch):
        run.balance.set(rng.random(run.balance.axes["tensor"]))
        seen.add(tuple(placing.counts for placing in run.balance.placings))
        state, batch = jax.device_put((held.pop() if held else state, batch), run.in_shardings((state, batch)))
        before = len(compiled)
        state, metrics = run(state, batch)
        held.append(state)
        by_units = run.balance.by_units(state)
        late.extend(compiled[before:])
        return by_units, metrics

    zoo_checks.assert_small(zoo_checks.deviations_of(step, reference))
    assert len(seen) == zoo_checks.STEPS and late == []
    assert [room.unit.name.split(".")[-1] for room in run.balance.rooms] == PARTS[family]
    jax.clear_caches()
