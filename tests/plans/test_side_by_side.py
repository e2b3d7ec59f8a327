"""Meshes that are searched by several processes, each a real one."""

import dataclasses
import math
import pathlib

import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import ConfigError, SolverError
from autoshard.interrupts import StopRequest
from autoshard.planner.program import prepare
from autoshard.plans import mesh_walk, search, search_processes
from autoshard.plans.found import Found, Incumbent
from autoshard.plans.found_elsewhere import with_problem, without_problem
from autoshard.plans.logical_meshes import logical_meshes
from autoshard.plans.mesh_search import search_mesh, search_meshes
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import MeshCandidate
from autoshard.plans.question import Question, axes_of
from autoshard.plans.search_processes import SearchProcesses, processes_of
from autoshard.plans.side_by_side import Terms, searched
from autoshard.solver.warm_up import ALWAYS, WITHIN_CAPACITY, load_kernels
from autoshard.trace.trace import trace

OPTIONS = PlanOptions(cache=False)
CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x16.yaml"


@pytest.fixture(scope="module")
def question(train, shapes):
    """Of a plan for sixteen devices in two nodes."""
    traced = trace(train, shapes(), (0,))
    return Question(traced, prepare(traced.graph), math.inf, None, OPTIONS, None, 0.0)


@pytest.fixture(scope="module")
def meshes(question, two_nodes):
    return logical_meshes(question.traced.graph, two_nodes.slices()[0], None, None, OPTIONS)


@pytest.fixture(scope="module")
def two_nodes():
    return Cluster.from_file(CLUSTER)


@pytest.fixture
def beside(monkeypatch):
    """Two processes beside this one, even for small programs."""
    load_kernels(ALWAYS + WITHIN_CAPACITY)
    monkeypatch.setattr(search_processes, "LARGE", 0)
    with SearchProcesses(2) as processes:
        yield processes


def test_what_several_processes_find_is_what_one_finds(question, meshes, beside):
    assert len(meshes) >= 3
    alone = search_meshes(question, meshes, None, StopRequest())
    told = []
    options = dataclasses.replace(OPTIONS, on_progress=told.append)
    asked = dataclasses.replace(question, beside=beside, options=options)
    together = search_meshes(asked, meshes, None, StopRequest())
    assert [c.hardware for c in together.candidates] == [c.hardware for c in alone.candidates]
    assert together.cost_s == pytest.approx(alone.cost_s, rel=OPTIONS.relative_gap)
    assert together.step_s == pytest.approx(min(c.step_s for c in together.candidates if c.step_s is not None))
    assert any("done beside" in p.detail for p in told), "other processes took their share"


def test_an_outcome_keeps_all_but_the_problem(question, meshes):
    found = search_mesh(question, meshes[0], StopRequest(), Incumbent(), None, "solve")
    again = with_problem(question, without_problem(found))
    assert again.winner[1].choices == found.winner[1].choices and again.winner[0].mesh == found.winner[0].mesh
    assert (again.candidates, again.weights, again.prices, again.fits) == (
        (found.candidates, found.weights, found.prices, found.fits)
    )
    assert again.step_s == pytest.approx(found.step_s, rel=1e-12)
    assert again.evaluated.peak[0] == found.evaluated.peak[0]


def test_a_plan_of_another_problem_is_refused(question, meshes, train, shapes):
    outcome = without_problem(search_mesh(question, meshes[0], StopRequest(), Incumbent(), None, "solve"))
    traced = trace(train, shapes(128), (0,))
    other = dataclasses.replace(question, traced=traced, program=prepare(traced.graph))
    with pytest.raises(SolverError, match="another problem"):
        with_problem(other, outcome)


def test_a_mesh_is_searched_here_if_its_process_is_gone(question, meshes, beside):
    """Every process is killed as soon as it is asked."""

    def killed(process, request):
        beside.end(process)

    beside.ask = killed
    asked = dataclasses.replace(question, beside=beside)
    found = search_meshes(asked, meshes, None, StopRequest())
    assert len(found.candidates) == len(meshes) and all(c.bound_s > 0 for c in found.candidates)


def no_search(question, mesh, stop, incumbent, weights, stage):
    """Counts as the search of a mesh, and finds nothing."""
    return Found(None, (MeshCandidate(axes_of(mesh), None, 0.0, "nothing", str(mesh)),), ())


@pytest.mark.parametrize("ready", [True, False])
def test_each_mesh_is_searched_once_until_terms_end(question, meshes, beside, ready):
    asked = dataclasses.replace(question, beside=beside)
    assert beside.begin(question.program)
    terms = Terms(asked, Incumbent(), None)
    found = list(searched(no_search, lambda: terms, meshes, StopRequest(), "solve", ready))
    assert sorted(str(own.mesh) for own in found) == sorted(map(str, meshes))
    asks = iter([terms])
    found = list(searched(no_search, lambda: next(asks, None), meshes, StopRequest(), "solve", False))
    assert [own.mesh for own in found] == [meshes[0]]
    assert not list(searched(no_search, lambda: terms, meshes, StopRequest(True), "solve", ready))


def test_small_programs_and_limits_of_work_need_no_other_process(question, monkeypatch):
    with SearchProcesses(2) as processes:
        assert not processes.begin(question.program)
    monkeypatch.setattr(search_processes, "LARGE", 0)
    assert not processes.begin(question.program), "their time is over"
    assert processes_of(PlanOptions(work_limit=1.0, processes=4)).count == 0
    assert processes_of(PlanOptions(processes=3)).count == 2
    assert 0 <= processes_of(PlanOptions()).count <= 3


def test_a_search_whose_time_is_over_ends(train, shapes, two_nodes, monkeypatch):
    """Neither the walk nor the search of close meshes has any time left: the plan is the one of the meshes that are
    all searched."""
    monkeypatch.setattr(mesh_walk, "_LONGEST_WALK", 0.0)
    monkeypatch.setattr(mesh_walk, "_WORTH_A_WALK", -1.0)
    monkeypatch.setattr(search, "_SHARE_OF_TIME", 0.0)
    monkeypatch.setattr(search, "waits_longer", lambda found: True)
    plan = autoshard.plan(train, *shapes(), cluster=two_nodes, donate_argnums=0, options=OPTIONS)
    assert {len(c.axes) for c in plan.candidates} <= {1, 2}
    assert plan.estimate.step_s == pytest.approx(min(c.step_s for c in plan.candidates if c.step_s is not None))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_processes_are_counted(wrong):
    with pytest.raises(ConfigError, match="processes"):
        autoshard.PlanOptions(processes=wrong)
