"""Jobs files: keys, errors, rates from plans and their cache, and the command that shows it all."""

import json
import pathlib

import numpy as np
import pytest
import typer.testing
import yaml
from examples import MIXED

from autoshard.cli import app
from autoshard.cluster import Cluster
from autoshard.errors import FileFormatError, ShareError
from autoshard.share.footprint import read_footprint
from autoshard.share.jobs_file import JobEntry, read_jobs_file
from autoshard.share.jobs_of_file import jobs_of_file, templates_of
from autoshard.share.planned_rates import KeptRate, RateCache, planned_rates
from autoshard.share.rates import Source
from autoshard.solver.io.problem_file import ProblemFile, write_problem_file
from autoshard.solver.problem import Node, Problem

GIVEN = "configs/jobs/given_rates.yaml"
TWO_KINDS = "configs/clusters/v100x8_p100x8.yaml"
NO_CACHE = RateCache(None)


def write(path, *jobs):
    path.write_text(yaml.safe_dump({"format": "autoshard-jobs", "version": 1, "jobs": list(jobs)}))
    return path


def read(path):
    return jobs_of_file(read_jobs_file(path), MIXED, NO_CACHE, lambda text: None)


@pytest.mark.parametrize("path", sorted(pathlib.Path("configs/jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path):
    assert all(job.config is None or pathlib.Path(job.config).exists() for job in read_jobs_file(path).jobs)


def test_every_key_is_explained():
    text = pathlib.Path("autoshard/share/jobs_file.py").read_text().split('"""')[1]
    guide = pathlib.Path("docs/guide_several_jobs.md").read_text()
    for key in JobEntry.model_fields:
        assert f"{key}:" in text or f"- {key}:" in text, key
        assert f"`{key}`" in guide, key


def test_limits_groups_and_interpolation(tmp_path):
    path = write(
        tmp_path / "jobs.yaml",
        {
            "name": "one",
            "steps": 10,
            "rates": {"v100:1": 1.0, "v100:4": 2.0, "v100:8": 5.0, "p100:1": 0.5},
            "interpolate": True,
            "groups": ["v100"],
            "most_devices": 4,
            "elastic": False,
            "request": 2,
            "most_device_hours": 3,
        },
    )
    (one,) = read(path)
    rates = {str(rate.footprint): (rate.steps_per_s, rate.source) for rate in one.rates.entries}
    assert rates == {
        "v100:1": (1.0, Source.GIVEN),
        "v100:4": (2.0, Source.GIVEN),
        "v100:2": (pytest.approx(2.0**0.5), Source.INTERPOLATED),
    }
    assert (one.steps, one.is_elastic, one.requested) == (10.0, False, 2)
    assert templates_of(read_jobs_file(path), (one,))[0].most_device_hours == 3.0


ONE = {"name": "one", "steps": 10, "rates": {"v100:1": 1.0}}


@pytest.mark.parametrize(
    ("jobs", "error", "what"),
    [
        ([], FileFormatError, "jobs of different names; received none"),
        ([ONE, {**ONE, "rates": {"v100:1": 2.0}}], FileFormatError, "jobs of different names; received one"),
        ([{"name": "one", "steps": 1}], FileFormatError, "must have config, or rates or problems"),
        ([{"name": "one", "rates": {"v100:1": 1.0}}], FileFormatError, "must have steps"),
        ([{**ONE, "step": 3}], FileFormatError, "unknown key 'step'.*steps"),
        ([{**ONE, "least_devices": 4, "most_devices": 2}], FileFormatError, "received 4 and 2"),
        ([{**ONE, "name": "../two"}], FileFormatError, "a name that a folder can have.*received '../two'"),
        ([{**ONE, "name": ""}], FileFormatError, "a name that a folder can have"),
        ([{**ONE, "request": 0}], FileFormatError, "request above 0; received 0"),
        ([{**ONE, "deadline_s": -5}], FileFormatError, "deadline_s above 0; received -5"),
        ([{**ONE, "deadline_s": 5, "arrival_s": 9}], FileFormatError, "after its arrival_s.*received 5 and 9"),
        ([{**ONE, "weight": 0}], FileFormatError, "weight above 0; received 0"),
        (
            [{**ONE, "groups": ["a100"]}],
            ShareError,
            "'one': groups are.* v100, p100; received a100",
        ),
        ([{**ONE, "rates": {"v100:1": 0.0}}], ShareError, "above 0; not so for v100:1"),
        ([{**ONE, "rates": {"v100:9": 1.0}}], ShareError, "has 4 nodes of 8 devices"),
        ([{**ONE, "least_devices": 2}], ShareError, "'one' fits on none.*nothing within its limits"),
        ([{**ONE, "rates": {"v100=1": 1.0}}], ShareError, "A footprint is written"),
    ],
)
def test_mistakes_are_explained(tmp_path, jobs, error, what):
    with pytest.raises(error, match=what):
        read(write(tmp_path / "jobs.yaml", *jobs))


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text("format: autoshard-cluster\nversion: 1\n")
    with pytest.raises(FileFormatError, match="must begin with `format: autoshard-jobs`"):
        read_jobs_file(path)


# ---- plans

TINY = "configs/gpt_tiny.yaml"
SMALLER = ["data.batch_size=8", "plan.work_limit=0.2", "model.overrides.num_layers=1"]


def test_rates_come_from_plans_which_are_made_once(tmp_path):
    cluster, said = Cluster.from_file("configs/clusters/h100x8.yaml"), []
    cache = RateCache(tmp_path)
    group = cluster.groups[0].name
    sizes = [read_footprint(f"{group}:1")]
    first = planned_rates(TINY, SMALLER, cluster, sizes, False, cache, said.append)
    assert len(said) == 1 and [rate.source for rate in first.entries] == [Source.PLAN]
    assert first.entries[0].steps_per_s > 0
    assert planned_rates(TINY, SMALLER, cluster, sizes, False, cache, said.append) == first and len(said) == 1
    for file in tmp_path.iterdir():
        file.write_text("{")  # damaged: planned again
    assert planned_rates(TINY, SMALLER, cluster, sizes, False, cache, said.append) == first and len(said) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept for later runs.*file"):
        RateCache(tmp_path / "file").put("key", KeptRate(step_s=1.0, mesh="data=1"))


def test_what_does_not_fit_is_left_out(tmp_path):
    cluster, said = Cluster.from_file("configs/clusters/h100x8.yaml"), []
    size = read_footprint(f"{cluster.groups[0].name}:1")
    tight = [*SMALLER, "plan.memory_budget_bytes=1000"]
    assert planned_rates(TINY, tight, cluster, [size], False, RateCache(tmp_path), said.append).entries == ()
    assert "does not fit" in said[0]


# ---- the command


def run(*arguments):
    result = typer.testing.CliRunner().invoke(app, ["share", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_decision_is_shown_with_its_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    path = tmp_path / "decision.json"
    status, output = run(GIVEN, "--cluster", TWO_KINDS, "--json", path)
    assert status == 0 and "next best" in output and "gap 0.00%" in output
    document = json.loads(path.read_text())
    jobs = {job["name"]: job for job in document["jobs"]}
    assert document["bound"] >= document["value"] and set(jobs) == {"vision", "language", "tuning", "report"}
    assert all("worse" in job["next_best"] for job in jobs.values())
    assert "deadline" in jobs["report"]["why"] and jobs["tuning"]["footprint"] in ("v100:2", "p100:2")


def test_policies_are_compared_and_drawn(tmp_path):
    picture, figures = tmp_path / "share.html", tmp_path / "share.json"
    status, output = run(
        *(GIVEN, "--cluster", TWO_KINDS, "--simulate", "helios-like", "--num-jobs", 20, "--hours", 1, "--failures", 20),
        *("--policies", "fifo,autoshard", "--picture", picture, "--json", figures),
    )
    assert status == 0, output
    policies = json.loads(figures.read_text())["policies"]
    assert [own["policy"] for own in policies] == ["fifo", "autoshard (completion)"]
    assert all(own["num_jobs"] == 20 for own in policies)
    page = picture.read_text()
    assert page.count("<svg") == 1 and "99th percentile" in page and "fifo: mean completion" in page


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--simulate", "philly-like", "--run"), "exclude each other"),
        (("--simulate", "nothing.csv"), "Check the path"),
        (("--simulate", "philly-like", "--policies", "best"), "received 'best'"),
        (("--run",), "a job needs a configuration"),
        (("--picture", "share.pdf"), "ends in .html"),
        (("--simulate", "philly-like", "--num-jobs", "999999", "--picture", "share.pdf"), "ends in .html"),
        (("--payback", "inf"), "a number must be finite"),
        (("--simulate", "philly-like", "--hours", "inf"), "a number must be finite"),
        (("--simulate", "jobs", "--failures", "inf"), "a number must be finite"),
        (("--emit", "slurm", "--run"), "received --emit and --run"),
        (("--emit", "slurm", "--json", "share.json"), "not of --emit"),
        (("--run", "--picture", "share.png"), "not of --run"),
    ],
)
def test_wrong_options_are_explained(arguments, what):
    status, output = run(GIVEN, "--cluster", TWO_KINDS, *arguments)
    assert status == 2 and what in " ".join(output.split())


def test_a_problem_file_tells_a_rate(tmp_path, monkeypatch):
    """The time of a step is the cost of the solved problem."""
    monkeypatch.setenv("AUTOSHARD_CACHE", "off")
    nodes = (Node("a", np.array([0.25, 0.5])),)
    write_problem_file(ProblemFile(Problem(nodes, ()), "a step"), tmp_path / "step.npz")
    job = {"name": "one", "steps": 10, "problems": {"v100:8": "step.npz"}}
    (one,) = read(write(tmp_path / "jobs.yaml", job))
    (rate,) = one.rates.entries
    assert (str(rate.footprint), rate.steps_per_s, rate.source) == ("v100:8", pytest.approx(4.0), Source.PLAN)
