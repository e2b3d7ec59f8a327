"""The integer program against all decisions tried, and what its placements must obey."""

import collections
import dataclasses
import itertools
import math
import pathlib
import signal

import hypothesis
import hypothesis.strategies as st
import pytest
from examples import job, nodes, place, power_law, situation

from autoshard.errors import ShareError
from autoshard.share.allocation.build import formulate
from autoshard.share.allocation.completion_prices import completion_prices
from autoshard.share.allocation.cp_sat import SolveLimits, solve_allocation
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.exhaustive import best_value
from autoshard.share.allocation.node_classes import packs_by_sum, patterns
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.allocation.problem import AllocationProblem, Choice, JobChoices, value_of
from autoshard.share.allocation.relaxation import relax
from autoshard.share.footprint import Footprint, Part, read_footprint
from autoshard.share.pool import Node, Placement, Taken

EXACT = SolveLimits(gap=0.0)


@st.composite
def footprints(draw):
    parts = [
        Part("ab"[n], draw(st.integers(1, 2)), draw(st.integers(1, 5)))
        for n in draw(st.sampled_from([[0], [1], [0, 1]]))
    ]
    return Footprint(tuple(parts))


@st.composite
def problems(draw):
    """Up to four nodes of any size, and up to four jobs, some of which run somewhere."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    own = tuple(Node(n, draw(st.sampled_from("ab")), size) for n, size in enumerate(sizes))
    free = {node.number: node.num_devices for node in own}
    num_periods = draw(st.integers(1, 2))
    jobs = []
    for number in range(draw(st.integers(1, 4))):
        values = st.floats(-3, 10, allow_nan=False)
        severities = st.floats(0, 4)
        choices = [Choice(None, draw(values), draw(severities))]
        placement = None
        node = draw(st.sampled_from(own))
        if draw(st.booleans()) and free[node.number]:
            devices = draw(st.integers(1, free[node.number]))
            free[node.number] -= devices
            footprint = Footprint((Part(node.group, 1, devices),))
            placement = Placement(footprint, (Taken(node.number, devices),))
            end = draw(st.integers(1, num_periods))
            choices.append(Choice(footprint, draw(values), draw(severities), True, 0, end))
        for _ in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, num_periods - 1))
            end = draw(st.integers(first + 1, num_periods))
            choices.append(Choice(draw(footprints()), draw(values), draw(severities), False, first, end))
        jobs.append(JobChoices(f"job{number}", tuple(choices), placement))
    return AllocationProblem(own, tuple(jobs), draw(st.sampled_from([0.0, 2.0])), num_periods)


@hypothesis.settings(max_examples=70, deadline=None, derandomize=True)
@hypothesis.given(problems())
def test_it_is_as_good_as_the_best_of_all_decisions(problem):
    found, best = solve_allocation(problem, EXACT), best_value(problem)
    assert found.value == pytest.approx(best, abs=1e-5)
    assert found.bound >= best - 1e-9
    used = collections.Counter()
    for own, number, placement in zip(problem.jobs, found.chosen, found.placements, strict=True):
        choice = own.choices[number]
        assert (placement is None) == (choice.footprint is None or choice.first_period > 0)
        if placement is None:
            continue
        assert placement.footprint == choice.footprint
        if choice.is_kept:
            assert placement == own.placement
        group = {node.number: node.group for node in problem.nodes}
        devices = collections.Counter()
        for taken in placement.taken:
            devices[group[taken.node]] += taken.num_devices
            used[taken.node] += taken.num_devices
        assert devices == {part.group: part.num_devices for part in choice.footprint.parts}
    assert all(used[node.number] <= node.num_devices for node in problem.nodes)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(problems())
def test_the_relaxation_bounds_it_and_its_choices_cost_what_is_said(problem):
    """Forcing any choice lowers the best value to at most the bound less its reduced cost."""
    relaxed = relax(problem)
    assert best_value(problem) <= relaxed.bound + 1e-6
    for number, own in enumerate(problem.jobs):
        for cost, choice in zip(relaxed.reduced_costs[number], own.choices, strict=True):
            jobs = list(problem.jobs)
            jobs[number] = dataclasses.replace(own, choices=(choice,))
            forced = best_value(dataclasses.replace(problem, jobs=tuple(jobs)))
            assert forced <= relaxed.bound - cost + 1e-6


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(problems())
def test_near_the_relaxation_the_bound_still_holds(problem):
    """Solved over two choices of each job, beside staying and waiting."""
    found = solve_allocation(problem, dataclasses.replace(EXACT, most_choices=1))
    best = best_value(problem)
    assert found.value <= best + 1e-6 <= found.bound + 2e-6
    assert found.value == pytest.approx(value_of(problem, found.chosen))


@pytest.mark.parametrize("size", range(1, 9))
def test_sums_suffice_exactly_where_it_is_said(size):
    """Every multiset of parts that fills two nodes by its sum can be put on them, if the sizes divide each other."""
    for sizes in itertools.chain(*(itertools.combinations(range(1, size + 1), n) for n in (1, 2, 3))):
        if not packs_by_sum(size, sizes):
            continue
        for counts in itertools.product(*(range(2 * size // d + 1) for d in sizes)):
            total = sum(c * d for c, d in zip(counts, sizes, strict=True))
            if total > 2 * size:
                continue
            ways = [
                sum(c * d for c, d in zip(first, sizes, strict=True))
                for first in itertools.product(*(range(c + 1) for c in counts))
            ]
            assert any(w <= size and total - w <= size for w in ways), (size, sizes, counts)
    assert not packs_by_sum(8, (3, 5)) and not packs_by_sum(6, (4,)) and packs_by_sum(8, (1, 2, 8))


def test_patterns_are_the_fillings_to_which_nothing_can_be_added():
    # 5 devices, parts of 2 and 3: 3+2, 2+2; and 3 alone leaves room for a 2
    assert sorted(map(str, patterns(5, [2, 3]))) == sorted(map(str, ({3: 1, 2: 1}, {2: 2})))


def test_two_threes_do_not_fit_on_a_five():
    """Where sums would mislead: two nodes of 5 hold two parts of 3, not three."""
    part = read_footprint("a:3")
    jobs = tuple(JobChoices(f"job{n}", (Choice(None, 0.0), Choice(part, 1.0))) for n in range(3))
    assert solve_allocation(AllocationProblem(nodes(a=[5, 5]), jobs), EXACT).value == pytest.approx(2.0)


def test_a_job_that_may_not_be_stopped_and_has_lost_its_place_is_named():
    jobs = (JobChoices("fixed", (Choice(read_footprint("a:4"), 1.0),)),)
    with pytest.raises(ShareError, match=r"no such decision.*fixed.*preemptible"):
        solve_allocation(AllocationProblem(nodes(a=[2]), jobs), EXACT)


# ---- objectives


def test_completion_prices_are_those_of_hesrpt():
    # two equal weights, p = 1/2, so q = 2: shares (1/2)^2 and 1 - (1/2)^2 for the larger and the smaller job
    small, large = completion_prices([1.0, 9.0], [1.0, 1.0], 0.5)
    assert large == pytest.approx(math.sqrt(0.25)) and small == pytest.approx(math.sqrt(0.75))


@hypothesis.given(
    st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 10)), min_size=1, max_size=200), st.floats(0.05, 0.95)
)
def test_shares_behind_the_prices_add_up_to_one(jobs, exponent):
    prices = completion_prices([size for size, _ in jobs], [weight for _, weight in jobs], exponent)
    assert sum(price ** (1 / (1 - exponent)) for price in prices) == pytest.approx(1.0)


def test_hesrpt_completes_sooner_than_equal_and_than_greedy_shares():
    """Two jobs of sizes 1 and 2 with p = 1/2: the shares of the prices have the least mean completion time."""

    def mean_completion(small_share):
        rate_small, rate_large = math.sqrt(small_share), math.sqrt(1 - small_share)
        first = 1.0 / rate_small
        return (first + first + (2.0 - rate_large * first)) / 2

    small, _ = completion_prices([1.0, 2.0], [1.0, 1.0], 0.5)
    ours = mean_completion(small**2)
    assert small**2 == pytest.approx(0.75)
    assert all(ours <= mean_completion(share / 100) + 1e-12 for share in range(26, 100))


def test_decisions_follow_hesrpt_where_that_applies():
    """One node of 64 devices that can be cut anywhere, three jobs with p = 1/2: shares 1/9, 3/9, 5/9."""
    rates = {f"a:{k}": math.sqrt(k) for k in range(1, 65)}
    jobs = [job(name, rates, steps) for name, steps in (("long", 9e6), ("middle", 6e6), ("short", 3e6))]
    got = decide(situation(nodes(a=[64]), *jobs), DecisionRules(), EXACT).placements
    sizes = [got[name].footprint.num_devices for name in ("long", "middle", "short")]
    assert sizes == pytest.approx([64 / 9, 64 / 3, 64 * 5 / 9], abs=1.0)


def test_throughput_counts_devices_of_ideal_efficiency():
    """Two jobs on four devices: 4 of `flat` are worth 1.6, 4 of `steep` 4, so that `steep` gets all it can use."""
    flat = job("flat", {"a:1": 1.0, "a:2": 1.3, "a:4": 1.6}, 1e6)
    steep = job("steep", {"a:1": 10.0, "a:2": 20.0, "a:4": 40.0}, 1e6)
    rules = DecisionRules(Objective.THROUGHPUT)
    decision = decide(situation(nodes(a=[4]), flat, steep), rules, EXACT)
    assert {name: str(own.footprint) for name, own in decision.placements.items()} == {"steep": "a:4"}
    assert decision.value == pytest.approx(4.0)


def test_fairness_helps_the_job_that_is_worst_off():
    """Equal jobs, one of which has waited: it gets the devices."""
    rates = {"a:1": 1.0, "a:2": 1.9}
    waited = job("waited", rates, 1000.0, arrival_s=0.0)
    new = job("new", rates, 1000.0, arrival_s=3000.0)
    rules = DecisionRules(Objective.FAIRNESS)
    decision = decide(situation(nodes(a=[2]), new, waited, now_s=3000.0), rules, EXACT)
    sizes = {name: own.footprint.num_devices for name, own in decision.placements.items()}
    assert sizes.get("waited", 0) >= sizes.get("new", 0) and "waited" in sizes


def test_makespan_gives_more_to_the_longer_job():
    rates = {"a:1": 1.0, "a:3": 3.0}
    decision = decide(
        situation(nodes(a=[4]), job("long", rates, 3000.0), job("short", rates, 1000.0)),
        DecisionRules(Objective.MAKESPAN),
        EXACT,
    )
    assert {name: str(own.footprint) for name, own in decision.placements.items()} == {"long": "a:3", "short": "a:1"}


def test_over_a_horizon_both_deadlines_are_met_where_now_alone_misses_one():
    """Two devices. `urgent` must have both now; `later` has time to wait, and both would be late on one device each."""
    urgent = job("urgent", {"a:1": 1.0, "a:2": 2.0}, 800.0, deadline_s=450.0)
    later = job("later", {"a:1": 1.0, "a:2": 2.0}, 800.0, deadline_s=1400.0)
    rules = DecisionRules(Objective.DEADLINES, payback_s=450.0, num_periods=3)
    problem = formulate(situation(nodes(a=[2]), later, urgent), rules)
    solution = solve_allocation(problem, EXACT)
    picked = {own.name: own.choices[n] for own, n in zip(problem.jobs, solution.chosen, strict=True)}
    assert (str(picked["urgent"].footprint), picked["urgent"].first_period) == ("a:2", 0)
    assert picked["later"].first_period == 1 and str(picked["later"].footprint) == "a:2"


# ---- moves


def test_a_move_must_pay_within_its_time():
    """One device on `a` at 1 step a second; `b` is twice as fast, and a move takes 100 s."""
    mover = job("mover", {"a:1": 1.0, "b:1": 2.0}, 1e6, move_s=100.0)
    where = {"mover": place("a:1", (0, 1))}
    for payback_s, expected in ((150.0, "a:1"), (300.0, "b:1")):
        # within 150 s: 2 * 50 < 1 * 150; within 300 s: 2 * 200 * 0.95 > 300
        rules = DecisionRules(payback_s=payback_s)
        decision = decide(situation(nodes(a=[1], b=[1]), mover, running=where), rules, EXACT)
        assert str(decision.placements["mover"].footprint) == expected


def test_equal_jobs_do_not_change_places():
    one, two = job("one", {"a:1": 1.0, "b:1": 1.0}), job("two", {"a:1": 1.0, "b:1": 1.0})
    where = {"one": place("b:1", (1, 1)), "two": place("a:1", (0, 1))}
    decision = decide(situation(nodes(a=[1], b=[1]), one, two, running=where), DecisionRules(), EXACT)
    assert decision.placements == where


def test_jobs_make_room_by_moving_within_their_kind():
    """Two jobs on half a node each, on two nodes; a job that needs a whole node gets one, and both go on."""
    half = {"a:2": 1.0}
    big = job("big", {"a:4": 50.0}, 100.0)
    where = {"one": place("a:2", (0, 2)), "two": place("a:2", (1, 2))}
    decision = decide(
        situation(nodes(a=[4, 4]), job("one", half, 1e5), job("two", half, 1e5), big, running=where),
        DecisionRules(),
        EXACT,
    )
    assert set(decision.placements) == {"one", "two", "big"}
    kept = [name for name in where if decision.placements[name] == where[name]]
    assert len(kept) == 1


def test_fixed_jobs_stay_as_they_are():
    """A long job that may not be stopped keeps its devices from a short one."""
    fixed = job("fixed", {"a:2": 1.0}, 1e6, is_elastic=False, is_preemptible=False)
    short = job("short", {"a:1": 1.0, "a:2": 2.0}, 10.0)
    where = {"fixed": place("a:2", (0, 2))}
    decision = decide(situation(nodes(a=[2]), fixed, short, running=where), DecisionRules(), EXACT)
    assert decision.placements == where


def test_a_job_whose_node_is_gone_is_placed_anew():
    lost = job("lost", {"a:2": 1.0}, 1e3)
    there = nodes(a=[2, 2])[1:]
    decision = decide(situation(there, lost, running={"lost": place("a:2", (0, 2))}), DecisionRules(), EXACT)
    assert decision.placements["lost"].nodes == {1}


def test_nobody_waits_for_devices_that_are_idle():
    """Also over a horizon, where the program may prefer to wait for faster ones."""
    from examples import MIXED

    from autoshard.share.pool import nodes_of

    jobs = [power_law(f"job{n}", 0.8, 1e4 * (n + 1), most=8, slow=0.1) for n in range(5)]
    rules = DecisionRules(num_periods=3)
    decision = decide(situation(nodes_of(MIXED), *jobs), rules, SolveLimits(time_limit_s=5.0, gap=0.05))
    assert set(decision.placements) == {own.name for own in jobs}


def test_a_decision_is_repeated():
    from examples import MIXED

    from autoshard.share.pool import nodes_of

    jobs = [power_law(f"job{n}", 0.8, 1e4 * (n + 1)) for n in range(12)]
    first, second = (decide(situation(nodes_of(MIXED), *jobs), DecisionRules(), SolveLimits()) for _ in range(2))
    assert dataclasses.replace(first, decided_in_s=0.0) == dataclasses.replace(second, decided_in_s=0.0)


def test_ctrl_c_is_left_to_the_program():
    """CP-SAT would take SIGINT for itself and leave the system's own action behind, which ends a driver unsaved."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        own = situation(nodes(a=[4]), *(job(name, {"a:1": 1.0, "a:2": 1.5}) for name in "xyz"))
        assert decide(own, DecisionRules(), EXACT).placements
        status = pathlib.Path("/proc/self/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        assert caught >> (signal.SIGINT - 1) & 1
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
