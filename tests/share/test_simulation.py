"""What must hold of every simulation, and small ones worked out by hand."""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from examples import job, nodes

from autoshard.errors import ShareError
from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.policies.registry import POLICIES, make_policy
from autoshard.share.policies.sia_like import SiaLike
from autoshard.share.pool import FreeDevices
from autoshard.share.simulation.events import NodeFailure, random_failures
from autoshard.share.simulation.simulate import SimulationSettings, simulate
from autoshard.share.situation import Decision


def policy(name):
    return make_policy(name, DecisionRules(payback_s=300.0), SolveLimits(time_limit_s=5.0))


@st.composite
def cases(draw):
    """Two kinds of nodes, up to six jobs, and failures."""
    own = nodes(a=[4] * draw(st.integers(1, 2)), b=[2] * draw(st.integers(1, 2)))
    jobs = []
    for number in range(draw(st.integers(1, 6))):
        speed = draw(st.sampled_from([0.5, 1.0, 3.0]))
        rates = {"a:1": speed, "a:2": 1.8 * speed, "a:4": 3.0 * speed, "b:1": 0.6 * speed, "b:2": speed}
        jobs.append(
            job(
                f"job{number}",
                rates,
                draw(st.integers(1, 2000)),
                arrival_s=float(draw(st.integers(0, 600))),
                move_s=draw(st.sampled_from([0.0, 20.0])),
                request=draw(st.sampled_from([1, 2, 4])),
                is_elastic=draw(st.booleans()),
                is_preemptible=draw(st.booleans()),
            )
        )
    failures = random_failures(own, 900.0, 200.0, 3000.0, draw(st.integers(0, 99))) if draw(st.booleans()) else ()
    return own, jobs, SimulationSettings(failures, retries=draw(st.sampled_from([None, 1])), checkpoint_s=100.0)


@pytest.mark.parametrize("name", POLICIES)
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_laws(name, case):
    own, jobs, settings = case
    found = simulate(jobs, own, policy(name), settings)
    size = {node.number: node.num_devices for node in own}
    spans = collections.defaultdict(list)
    for span in found.spans:
        spans[span.job].append(span)
    assert {record.name for record in found.jobs} == {one.name for one in jobs}
    # no device is used twice, and none that is not there
    for moment in {span.start_s for span in found.spans}:
        used = collections.Counter()
        for span in found.spans:
            if span.start_s <= moment < span.end_s:
                for taken in span.placement.taken:
                    used[taken.node] += taken.num_devices
        assert all(used[node] <= size[node] for node in used)
        for failure in settings.failures:
            if failure.fails_s < moment < failure.repaired_s:
                assert not used[failure.node]
    for one, record in ((j, r) for j in jobs for r in found.jobs if r.name == j.name):
        mine = spans[one.name]
        assert all(s.start_s >= one.arrival_s - 1e-6 and s.end_s <= record.end_s + 1e-6 for s in mine)
        # steps are neither lost nor made up
        taken = sum((s.end_s - max(s.paused_until_s, s.start_s)) * one.rates.of(s.placement.footprint) for s in mine)
        if not record.is_failed:
            assert taken == pytest.approx(one.steps + record.redone_steps, rel=1e-4, abs=1e-3)
        # no job is over its limits
        assert all(s.placement.footprint in {r.footprint for r in one.rates.entries} for s in mine)
        if not one.is_elastic or name in ("fifo", "sjf", "rigid"):
            assert {s.placement.footprint.num_devices for s in mine} <= {one.requested}
        if name in ("fifo", "sjf", "rigid") or not (one.is_elastic or one.is_preemptible):
            lost = sum(
                f.node in s.placement.nodes and abs(f.fails_s - s.end_s) < 1e-3 for s in mine for f in settings.failures
            )
            assert len(mine) <= 1 + lost


class WorkConserving:
    """A policy that is looked at after each decision."""

    def __init__(self, inner):
        self.inner, self.name, self.round_s = inner, inner.name, inner.round_s

    def decide(self, situation):
        decision = self.inner.decide(situation)
        free = FreeDevices(situation.nodes, decision.placements.values())
        for state in situation.jobs:
            if state.job.name not in decision.placements:
                sizes = [r.footprint for r in state.job.rates.entries]
                if not state.job.is_elastic:
                    sizes = [f for f in sizes if f.num_devices == state.job.requested]
                assert all(free.place(footprint) is None for footprint in sizes), state.job.name
        return decision


@pytest.mark.parametrize("num_periods", [1, 3])
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_no_job_waits_for_devices_that_are_idle(num_periods, case):
    own, jobs, settings = case
    rules = DecisionRules(payback_s=300.0, num_periods=num_periods)
    simulate(jobs, own, WorkConserving(make_policy("autoshard", rules, SolveLimits())), settings)


ONE = {"a:1": 1.0}


def ends(found):
    return {record.name: record.end_s for record in found.jobs}


def test_fifo_takes_jobs_in_turn():
    jobs = [job("first", ONE, 100), job("second", ONE, 50, arrival_s=10.0), job("third", ONE, 5, arrival_s=20.0)]
    found = simulate(jobs, nodes(a=[1]), policy("fifo"))
    assert ends(found) == pytest.approx({"first": 100, "second": 150, "third": 155})
    assert found.figures.mean_completion_s == pytest.approx((100 + 140 + 135) / 3)
    assert found.figures.makespan_s == pytest.approx(155) and found.figures.utilisation == pytest.approx(1.0)


def test_the_shortest_job_overtakes():
    jobs = [job("first", ONE, 100), job("second", ONE, 50, arrival_s=10.0), job("third", ONE, 5, arrival_s=20.0)]
    assert ends(simulate(jobs, nodes(a=[1]), policy("sjf"))) == pytest.approx(
        {"first": 100, "third": 105, "second": 155}
    )


def test_backfill_lets_by_only_what_does_not_delay_the_first():
    """Three devices. `wide` waits for all until 100; `short` ends by then and may go before, `long` may not."""
    small, wide = {"a:1": 1.0}, {"a:3": 1.0}
    jobs = [
        job("running", {"a:2": 1.0}, 100, request=2),
        job("wide", wide, 10, arrival_s=1.0, request=3),
        job("long", small, 200, arrival_s=2.0, request=1),
        job("short", small, 50, arrival_s=3.0, request=1),
    ]
    found = ends(simulate(jobs, nodes(a=[3]), policy("fifo")))
    assert found == pytest.approx({"running": 100, "wide": 110, "short": 53, "long": 310})


def test_a_move_takes_its_time():
    """Starting takes 10 s, and then 100 steps."""
    found = simulate([job("one", ONE, 100, move_s=10.0)], nodes(a=[1]), policy("autoshard"))
    assert ends(found) == pytest.approx({"one": 110})
    assert found.spans[0].paused_until_s == pytest.approx(10)


def test_a_job_on_one_node_loses_what_it_did_since_its_checkpoint():
    """The node fails at 250, checkpoints are at 100 and 200: 50 steps are taken again after the repair at 300."""
    settings = SimulationSettings((NodeFailure(0, 250.0, 300.0),), checkpoint_s=100.0)
    found = simulate([job("one", ONE, 400)], nodes(a=[1]), policy("autoshard"), settings)
    assert ends(found) == pytest.approx({"one": 500}) and found.jobs[0].redone_steps == pytest.approx(50)


def test_a_job_on_two_nodes_loses_nothing_and_goes_on_with_one():
    settings = SimulationSettings((NodeFailure(0, 250.0, 1e9),), checkpoint_s=100.0)
    rates = {"a:1": 1.0, "a:2x1": 2.0}
    found = simulate([job("one", rates, 600)], nodes(a=[1, 1]), policy("autoshard"), settings)
    assert ends(found) == pytest.approx({"one": 350}) and found.jobs[0].redone_steps == 0


def test_a_job_without_retries_is_lost_with_its_node():
    settings = SimulationSettings((NodeFailure(0, 50.0, 60.0),), retries=0)
    figures = simulate([job("one", ONE, 100)], nodes(a=[1]), policy("fifo"), settings).figures
    assert figures.num_failed == 1


def test_a_late_job_is_counted():
    jobs = [job("one", ONE, 100, deadline_s=100.0), job("two", ONE, 100, deadline_s=150.0)]
    assert simulate(jobs, nodes(a=[1]), policy("fifo")).figures.num_late == 1


def test_sia_doubles_from_the_least_and_waits_for_rounds():
    """Powers of two from 1, one step each round of 60 s, on an idle cluster."""
    rates = {f"a:{k}": float(k) for k in (1, 2, 4, 8)}
    found = simulate([job("one", rates, 1e4)], nodes(a=[8]), policy("sia-like"))
    sizes = [(span.start_s, span.placement.footprint.num_devices) for span in found.spans]
    assert sizes == [(0.0, 1), (60.0, 2), (120.0, 4), (180.0, 8)]


def test_sia_values_follow_the_paper():
    # p = -1/2, lambda = 1.1: goodput 4 times the least is worth 1.1 - 1/2
    assert SiaLike()._value(4.0) == pytest.approx(0.6) and SiaLike()._value(1.0) == pytest.approx(0.1)


class Greedy:
    """Gives everybody the same device, which nobody may."""

    name, round_s = "greedy", 0.0

    def decide(self, situation):
        free = FreeDevices(situation.nodes)
        return Decision({s.job.name: free.place(s.job.rates.best.footprint) for s in situation.jobs})


def test_a_decision_that_gives_a_device_twice_is_refused():
    with pytest.raises(ShareError, match="on node 0, which has 1 devices now, 2 were given away"):
        simulate([job("one", ONE), job("two", ONE)], nodes(a=[1]), Greedy())


def test_a_job_of_fixed_size_may_not_be_resized():
    class Resizing(Greedy):
        def decide(self, situation):
            free = FreeDevices(situation.nodes)
            state = situation.jobs[0]
            at = state.job.rates.entries[0 if state.placement is None else 1].footprint
            return Decision({state.job.name: free.place(at)})

    fixed = job("fixed", {"a:1": 1.0, "a:2": 2.0}, 1e4, is_elastic=False, request=1)
    with pytest.raises(ShareError, match="'fixed' has a fixed size"):
        simulate([fixed], nodes(a=[2]), Resizing())


def test_unknown_policies_are_named():
    with pytest.raises(ShareError, match="received 'best'"):
        policy("best")


def test_failures_are_the_same_for_every_policy_and_come_as_often_as_asked():
    own = nodes(a=[8] * 50)
    found = random_failures(own, 1000.0, 0.0, 10_000.0, 1)
    assert found == random_failures(own, 1000.0, 0.0, 10_000.0, 1)
    assert len(found) == pytest.approx(500, rel=0.15)  # 50 nodes, ten times each; one deviation is 4.5 %
    assert dataclasses.replace(found[0]) in found
