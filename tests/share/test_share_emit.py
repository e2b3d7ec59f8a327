"""A decision in the words of Kueue and Slurm, and as a picture."""

import itertools
import os
import subprocess

import pytest
import yaml
from examples import MIXED, job, nodes, place, situation

from autoshard.errors import ConfigError, ShareError
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.emit.kueue import kueue_text
from autoshard.share.emit.ranking import Ranked, ranked
from autoshard.share.emit.slurm import slurm_text
from autoshard.share.footprint import read_footprint
from autoshard.share.picture import lanes, write_picture
from autoshard.share.policies.queues import ShortestJobFirst
from autoshard.share.simulation.outcome import Span
from autoshard.share.simulation.simulate import simulate
from autoshard.share.situation import Decision

JOBS = (
    Ranked("short job", 100_000, read_footprint("v100:4")),
    Ranked("wide", 99_990, read_footprint("v100:2x8+p100:8")),
    Ranked("later", 99_980, None),
)


def test_those_that_run_come_first_and_the_short_before_the_long():
    rates = {"a:1": 1.0, "a:2": 1.5}
    own = situation(
        nodes(a=[4]), *(job(name, rates, steps) for name, steps in (("long", 9e3), ("waits", 1.0), ("short", 9.0)))
    )
    decision = Decision({"long": place("a:2", (0, 2)), "short": place("a:1", (0, 1))})
    order = ranked(own, decision, DecisionRules())
    assert [one.name for one in order] == ["short", "long", "waits"] and order[-1].footprint is None
    assert all(one.priority > other.priority for one, other in itertools.pairwise(order))


def test_two_jobs_of_one_name_in_kubernetes_are_refused():
    alike = Ranked("Short_Job", 5, None)
    with pytest.raises(ShareError, match="'short job' and 'Short_Job' are both 'short-job' there"):
        kueue_text((*JOBS, alike), MIXED)


def test_kueue_gets_quotas_priorities_and_sizes():
    documents = list(yaml.safe_load_all(kueue_text(JOBS, MIXED)))
    by_kind = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
    (queue,) = by_kind["ClusterQueue"]
    flavors = queue["spec"]["resourceGroups"][0]["flavors"]
    assert {f["name"]: f["resources"][0]["nominalQuota"] for f in flavors} == {"v100": 32, "p100": 32}
    assert {f["metadata"]["name"] for f in by_kind["ResourceFlavor"]} == {"v100", "p100"}
    assert by_kind["LocalQueue"][0]["spec"]["clusterQueue"] == queue["metadata"]["name"]
    values = {p["metadata"]["name"]: p["value"] for p in by_kind["WorkloadPriorityClass"]}
    assert values == {"autoshard-short-job": 100_000, "autoshard-wide": 99_990, "autoshard-later": 99_980}
    sizes = {name: yaml.safe_load(text) for name, text in by_kind["ConfigMap"][0]["data"].items()}
    assert sizes["later.yaml"]["suspend"] and not sizes["wide.yaml"]["suspend"]
    assert sizes["wide.yaml"]["workers"] == [
        {"group": "v100", "parallelism": 2, "devices_per_worker": 8},
        {"group": "p100", "parallelism": 1, "devices_per_worker": 8},
    ]
    assert sizes["wide.yaml"]["labels"]["kueue.x-k8s.io/priority-class"] in values


def test_slurm_is_told_by_scontrol(tmp_path):
    """The script runs under stand-ins that write down what they are asked; every job is pending under two numbers."""
    asked = tmp_path / "asked"
    for name, text in (
        ("squeue", 'echo "squeue $*" >> "$ASKED"; echo 7; echo 8'),
        ("scontrol", 'echo "scontrol $*" >> "$ASKED"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(asked)}
    subprocess.run(["bash"], input=slurm_text(JOBS).encode(), check=True, env=environment)
    lines = asked.read_text().splitlines()
    assert lines[0] == "squeue --noheader --states=PENDING --name=short job --format=%i"
    assert lines[1:3] == [
        f"scontrol update JobId={n} Priority=100000 NumNodes=1 Features=v100 TresPerNode=gres/gpu:4" for n in (7, 8)
    ]
    assert "NumNodes=3 Features=[v100*2&p100*1] TresPerNode=gres/gpu:8" in lines[4]
    assert lines[7] == "scontrol update JobId=7 Priority=0"


def test_rows_of_a_picture_are_never_taken_twice():
    own = nodes(a=[4])
    spans = [
        Span("one", place("a:2", (0, 2)), 0.0, 0.0, 10.0),
        Span("two", place("a:1", (0, 1)), 0.0, 0.0, 4.0),
        Span("three", place("a:1", (0, 1)), 0.0, 0.0, 10.0),
        Span("four", place("a:1", (0, 1)), 4.0, 4.0, 10.0),
    ]
    found = lanes(own, spans)
    rows = [(span, first + n) for span, _, first, count in found for n in range(count)]
    assert sum(count for *_, count in found) == 5
    for (one, row), (other, same) in itertools.combinations(rows, 2):
        assert row != same or one.end_s <= other.start_s or other.end_s <= one.start_s


@pytest.mark.parametrize("name", ["run.png", "run.svg", "run.html"])
def test_a_run_is_drawn(tmp_path, name):
    own = nodes(a=[4], b=[2])
    run = simulate([job(f"job{n}", {"a:1": 1.0, "b:1": 0.5}, 50.0 * n + 50) for n in range(6)], own, ShortestJobFirst())
    write_picture(tmp_path / name, own, [run])
    content = (tmp_path / name).read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[name.split(".")[1]])


def test_other_pictures_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"received 'run.pdf'"):
        write_picture(tmp_path / "run.pdf", nodes(a=[1]), [])
