"""Planning in three steps on two machines: write the problem, solve it, make the plan; and planning with the cache."""

import dataclasses
import json
import math
import signal

import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.errors import FileFormatError, MeshError
from autoshard.plans.options import PlanOptions
from autoshard.solver import solve
from autoshard.solver.io.problem_file import read_problem_file
from autoshard.solver.io.solution_file import write_solution

MESH = {"data": 4, "tensor": 2}


@pytest.fixture
def settings(train, shapes, cluster):
    state, batch = shapes()
    return (train, state, batch), {"cluster": cluster, "mesh": MESH, "donate_argnums": 0, "memory_budget_bytes": 5e4}


def same_decisions(one: autoshard.Plan, other: autoshard.Plan) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("arguments", "outputs", "shardings", "estimate", "axes")
    )


def test_the_plan_of_a_solution_made_elsewhere_is_the_plan(settings, tmp_path):
    args, given = settings
    autoshard.write_problem(tmp_path / "p.npz", *args, **given)
    result = CliRunner().invoke(app, ["solve", str(tmp_path / "p.npz"), "--out", str(tmp_path / "s.json")])
    assert result.exit_code == 0, result.output
    made = autoshard.plan(*args, **given, solution=tmp_path / "s.json")
    usual = autoshard.plan(*args, **given, options=PlanOptions(relative_gap=0.0))
    assert made.certificate.objective == pytest.approx(usual.certificate.objective, rel=1e-9)
    assert made.estimate.step_s == pytest.approx(usual.estimate.step_s, rel=1e-9)
    assert made.certificate.status is usual.certificate.status
    assert made.certificate.bound == pytest.approx(usual.certificate.bound, rel=1e-6)


def test_the_file_tells_what_it_is(settings, tmp_path):
    args, given = settings
    autoshard.write_problem(tmp_path / "p.npz", *args, **given)
    file = read_problem_file(tmp_path / "p.npz")
    assert "data=4" in file.title and file.problem.capacity == 5e4
    assert {node.name for node in file.problem.nodes} >= {"state.params.up.kernel", "batch.x"}
    last = max(usage.stop for usage in file.problem.usages)
    assert len(file.instants) >= last and any("dot_general at" in text for text in file.instants)


def test_solutions_of_other_problems_are_refused(settings, tmp_path):
    args, given = settings
    autoshard.write_problem(tmp_path / "p.npz", *args, **given)
    file = read_problem_file(tmp_path / "p.npz")
    write_solution(solve(file.problem), file.problem, file.title, tmp_path / "s.json")
    for change in ({"memory_budget_bytes": 4e4}, {"mesh": {"data": 2, "tensor": 4}}, {"donate_argnums": ()}):
        with pytest.raises(FileFormatError, match="another problem .*data=4"):
            autoshard.plan(*args, **{**given, **change}, solution=tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps({**document, "choices": document["choices"][1:]}))
    with pytest.raises(FileFormatError, match="one valid choice for each"):
        autoshard.plan(*args, **given, solution=tmp_path / "s.json")


def test_one_problem_is_of_one_mesh(settings, tmp_path):
    args, given = settings
    for call in (
        lambda: autoshard.write_problem(tmp_path / "p.npz", *args, **{**given, "mesh": None}),
        lambda: autoshard.plan(*args, **{**given, "mesh": None}, solution=tmp_path / "s.json"),
    ):
        with pytest.raises(MeshError, match="data=4,tensor=2"):
            call()


def test_an_unchanged_plan_comes_from_the_cache(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    args, given = settings
    told: list[str] = []
    options = PlanOptions(on_progress=lambda p: told.append(p.detail))
    first = autoshard.plan(*args, **given, options=options)
    assert not any("from the cache" in line for line in told)
    again = autoshard.plan(*args, **given, options=options)
    assert any("from the cache" in line for line in told) and same_decisions(first, again)
    told.clear()
    autoshard.plan(*args, **given, options=dataclasses.replace(options, cache=False))
    assert told and not any("from the cache" in line for line in told)


def test_a_changed_plan_starts_from_the_nearest(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    args, given = settings
    first = autoshard.plan(*args, **given)
    told: list[str] = []
    options = PlanOptions(on_progress=lambda p: told.append(p.detail))
    looser = {**given, "memory_budget_bytes": 6e4}
    assert autoshard.plan(*args, **looser, options=options).estimate.step_s <= first.estimate.step_s * (1 + 1e-9)
    assert any("hint" in line for line in told)


def test_a_work_limit_gives_the_same_plan_again(settings):
    args, given = settings
    options = PlanOptions(work_limit=1.0, relative_gap=0.0)
    first, second = (autoshard.plan(*args, **given, options=options) for _ in range(2))
    assert same_decisions(first, second)


def test_ctrl_c_returns_the_best_plan_so_far(settings):
    """Stopped on the first of two meshes, once it has a plan; the certificate knows nothing of the other."""
    args, given = settings
    done = []

    def interrupt(progress):
        if progress.objective_s is not None and math.isfinite(progress.objective_s) and not done:
            done.append(signal.raise_signal(signal.SIGINT))

    plan = autoshard.plan(*args, **{**given, "mesh": None}, options=PlanOptions(on_progress=interrupt))
    assert [candidate.verdict for candidate in plan.candidates][1:] == ["not tried: stopped"]
    assert plan.certificate.bound == 0 and plan.certificate.gap == 1
    assert plan.certificate.status.value == "feasible"
    assert "not tried" in plan.explain(full=True)


def test_ctrl_c_before_any_plan_is_an_interrupt(settings):
    args, given = settings
    done = []

    def interrupt(progress):
        if progress.stage.startswith("solve") and not done:
            done.append(signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        autoshard.plan(*args, **given, options=PlanOptions(on_progress=interrupt))


def test_what_more_memory_would_gain(settings):
    args, given = settings
    free = autoshard.plan(*args, **{**given, "memory_budget_bytes": math.inf}, options=PlanOptions(relative_gap=0.0))
    assert "memory is not limited" in str(free)
    slack = autoshard.plan(*args, **{**given, "memory_budget_bytes": 1e9}, options=PlanOptions(relative_gap=0.0))
    assert slack.certificate.capacity_price.per_unit == 0
    assert "memory does not bind: more of it would gain nothing" in str(slack)
    tight_bytes = 0.75 * free.estimate.peak_bytes
    tight = autoshard.plan(
        *args, **{**given, "memory_budget_bytes": tight_bytes}, options=PlanOptions(relative_gap=0.0)
    )
    price = tight.certificate.capacity_price
    # With what is missing given back, the optimum is that without a limit.
    assert price.bound_with(free.estimate.peak_bytes - tight_bytes) <= free.certificate.objective * (1 + 1e-9)
    assert price.bound <= tight.certificate.objective * (1 + 1e-9)
    assert "more" in str(tight).partition("price")[2].partition("\n")[0]
