"""Readers of traces, jobs in their likeness, and what is made of them."""

import json
import statistics

import pytest
from examples import job

from autoshard.errors import ShareError
from autoshard.share.traces.likeness import helios_like, philly_like
from autoshard.share.traces.read import read_trace
from autoshard.share.traces.record import Ending, TraceJob
from autoshard.share.traces.table import write_table
from autoshard.share.traces.workload import Template, workload


def attempt(start, end, *machines):
    return {"start_time": start, "end_time": end, "detail": [{"ip": ip, "gpus": list(gpus)} for ip, gpus in machines]}


def submitted(name, status, time, *attempts):
    return {"status": status, "vc": "a", "jobid": name, "attempts": attempts, "submitted_time": time, "user": "u"}


PHILLY = [
    submitted(
        "application_1506638472019_14199",
        "Pass",
        "2017-10-07 01:11:39",
        attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", ("m47", ["gpu0", "gpu1"])),
        attempt("2017-10-07 01:13:30", "2017-10-07 02:13:30", ("m1", ["gpu0"]), ("m2", ["gpu3"])),
    ),
    submitted("never", "Killed", "2017-10-07 00:00:00"),
    submitted(
        "early",
        "Failed",
        "2017-10-07 00:00:00",
        attempt("2017-10-07 00:00:00", "2017-10-07 00:00:10", ("m", ["gpu0"])),
        attempt("2017-10-07 00:01:00", "None", ("m", ["gpu0"])),
    ),
]
HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
7,u,v,8,64,1,COMPLETED,2020-04-01 00:10:00,2020-04-01 00:11:00,2020-04-01 01:11:00,3600,60
8,u,v,0,4,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:00,2020-04-01 00:00:01,1,0
9,u,v,1,8,1,CANCELLED,2020-04-01 00:00:00,2020-04-01 00:00:05,2020-04-01 00:00:35,30,5
10,u,v,2,8,1,NODE_FAIL,2020-04-01 02:00:00,2020-04-01 02:00:05,2020-04-01 02:01:05,60,5
"""


def test_philly(tmp_path):
    path = tmp_path / "cluster_job_log.json"
    path.write_text(json.dumps(PHILLY))
    assert read_trace(path) == (
        TraceJob("early", 0.0, 1, 10.0, Ending.FAILED),
        TraceJob("application_1506638472019_14199", 71 * 60 + 39, 2, 74.0 + 3600.0, Ending.DONE),
    )


def test_helios(tmp_path):
    path = tmp_path / "cluster_log.csv"
    path.write_text(HELIOS)
    assert read_trace(path) == (
        TraceJob("9", 0.0, 1, 30.0, Ending.KILLED),
        TraceJob("7", 600.0, 8, 3600.0, Ending.DONE),
        TraceJob("10", 7200.0, 2, 60.0, Ending.FAILED),
    )


def test_our_own_form_is_read_as_it_is_written(tmp_path):
    path, jobs = tmp_path / "trace.csv", philly_like(20, 3600.0, 3)
    write_table(path, jobs)
    assert read_trace(path) == jobs


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("t.csv", "name,when\na,1\n", r"columns name, arrival_s.*received name, when"),
        ("t.csv", "name,arrival_s,num_devices,duration_s\na,0,many,1\n", r"line 2: num_devices.*received 'many'"),
        ("t.csv", "name,arrival_s,num_devices,duration_s\na,nan,1,1\n", r"line 2: arrival_s must be a finite number"),
        ("t.csv", "name,arrival_s,num_devices,duration_s\na,0,1,inf\n", r"line 2: duration_s must be a finite"),
        ("t.csv", "name,arrival_s,num_devices,duration_s\na,0,0,1\n", "at least one job that ran.*received none"),
        ("t.csv", "name,arrival_s,num_devices,duration_s\na,0,1,1\na,2,1,1\n", "different names; 'a' is there 2 times"),
        ("t.csv", "", "received none"),
        ("t.json", "{}", "no cluster_job_log of the Philly traces: the file: should be a valid array; received {}"),
        ("t.json", '[{"jobid": "a", "status": "Gone", "submitted_time": "2017-10-07 00:00:00"}]', "status"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, text, what):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ShareError, match=what):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(ShareError, match="Check the path"):
        read_trace(tmp_path / "none.csv")


def test_philly_like_jobs_have_the_shares_of_their_categories():
    hours = [one.num_devices * one.duration_s / 3600 for one in philly_like(10_000, 1e5, 0)]
    shares = [
        sum(low < h <= high for h in hours) / len(hours) for low, high in ((0, 1), (1, 10), (10, 100), (100, 1000))
    ]
    assert shares == pytest.approx([0.72, 0.20, 0.06, 0.02], abs=0.018)  # four standard deviations of 72 %


def test_helios_like_jobs_have_its_median_and_mean():
    times = [one.duration_s for one in helios_like(40_000, 1e5, 0)]
    assert statistics.median(times) == pytest.approx(206, rel=0.05)
    assert statistics.fmean(times) == pytest.approx(6652, rel=0.2)
    ones = sum(one.num_devices == 1 for one in helios_like(10_000, 1e5, 1)) / 10_000
    assert ones == pytest.approx(0.55, abs=0.02)


def test_jobs_of_a_trace_take_as_long_as_they_took():
    """On as many devices of the slowest kind that holds the model; small jobs become small models."""
    small = job("small", {"a:1": 2.0, "a:2": 3.0, "b:1": 1.0}, deadline_s=100.0)
    large = job("large", {"a:2": 3.0, "a:4": 5.0})
    templates = [Template(small, 1.0), Template(large, float("inf"))]
    trace = [TraceJob("x", 10.0, 1, 600.0), TraceJob("y", 20.0, 4, 7200.0), TraceJob("z", 30.0, 8, 3600.0)]
    x, y, z = workload(trace, templates)
    assert (x.rates, x.steps, x.requested, x.deadline_s) == (small.rates, 600.0 * 1.0, 1, 110.0)
    assert (y.rates, y.steps, y.requested) == (large.rates, 7200.0 * 5.0, 4)
    assert (z.steps, z.requested) == (3600.0 * 2 * 5.0, 4)  # twice as long on half of the devices


def test_without_templates_nothing_can_be_made_of_a_trace():
    with pytest.raises(ShareError, match="Name at least one"):
        workload([], [])
