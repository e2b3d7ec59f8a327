"""What pictures and tables of a timeline say: every task once, shares that add up, and figures of each submesh."""

import collections
import re
import sys
import xml.etree.ElementTree

import pytest

from autoshard.errors import MissingExtraError
from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations, StepDurations, TransferDurations
from autoshard.pipelines.schedule.gantt import Colour, gantt_chart, ticks
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.picture import timeline_html, timeline_png
from autoshard.pipelines.schedule.simulate import simulate
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.schedule.timeline import SubmeshSummary, Timeline
from autoshard.pipelines.schedule.timeline_text import timeline_text

SVG = "{http://www.w3.org/2000/svg}"


def pipeline(kind, num_submeshes, num_stages, count) -> PipelineDurations:
    stages = (StageDurations(1e-3, 1.5e-3, 0.5e-3, 1e9, 0.5e9, 6e9, 1e8),) * num_stages
    transfers = tuple(TransferDurations(s, s + 1, 2e-4, 2e-4) for s in range(num_stages - 1))
    each = (1e-3,) * num_stages
    return PipelineDurations(make_schedule(kind, num_submeshes, num_stages, count), stages, transfers, each, each, each)


@pytest.fixture(scope="module")
def small() -> Timeline:
    """Two pipelines; one submesh has too little memory, and one a name that HTML must escape."""
    both = pipeline(ScheduleKind.INTERLEAVED, 2, 4, 3), pipeline(ScheduleKind.ZERO_BUBBLE, 2, 2, 3)
    limits, names = (
        ((8e9, 32e9), (16e9, 16e9)),
        (("v100[0:4]", "a100[0:2]"), ("<h100> & one name that is too long", "d")),
    )
    return simulate(StepDurations(both), limits, names)


@pytest.fixture(scope="module")
def large() -> Timeline:
    """Too many tasks to show each."""
    return simulate(StepDurations((pipeline(ScheduleKind.ONE_F_ONE_B, 4, 4, 300),)))


def drawing(page: str) -> xml.etree.ElementTree.Element:
    return xml.etree.ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])


def test_page_shows_every_event(small):
    page = timeline_html(small, "One & two")
    assert "<h1>One &amp; two</h1>" in page
    assert "src=" not in page and "href" not in page and "<script" not in page
    svg = drawing(page)
    rectangles = [r for g in svg.iter(f"{SVG}g") if g.get("class") == "task" for r in g.iter(f"{SVG}rect")]
    assert len(rectangles) == len(small.events)
    tips = collections.Counter(r.find(f"{SVG}title").text.splitlines()[0] for r in rectangles)
    assert tips["forward of micro-batch 2 on stage 3"] == 1  # of the only pipeline that has such a stage
    assert tips["weight of micro-batch 0 on stage 1"] == 1
    assert tips["micro-batch 1 to submesh 0 for B1@0"] == 2
    assert tips["copies of weights of stage 0"] == tips["sums of gradients of stage 0"] == 2
    assert tips["optimizer's update of stage 3"] == 1
    right = max(float(r.get("x")) + float(r.get("width")) for r in rectangles)
    frame = next(r for r in svg.iter(f"{SVG}rect") if r.get("class") == "frame")
    assert right == pytest.approx(float(frame.get("x")) + float(frame.get("width")), abs=0.02)
    words = [t.text for t in svg.iter(f"{SVG}text")]
    assert "Pipeline 1" in words and "<h100> & one name that is\N{HORIZONTAL ELLIPSIS}" in words
    assert [t.text for t in svg.iter(f"{SVG}text") if t.get("class") == "over"] == [
        f"{small.submeshes[0].peak_bytes / 1e9:.3g} GB of 8 GB"
    ]


def test_nothing_is_drawn_over_something_else(small):
    for row in gantt_chart(small).rows:
        for pieces in (row.work, *row.lanes):
            for one, two in zip(pieces, pieces[1:], strict=False):
                assert one.stop_s <= two.start_s


def test_shares_of_time_add_up(large):
    rows = gantt_chart(large)
    assert rows.is_summed
    for row in rows.rows:
        area_s = sum((p.stop_s - p.start_s) * (p.high - p.low) for p in row.work)
        assert area_s == pytest.approx(
            row.submesh.busy_s, rel=0.02
        )  # steps of a share are drawn as one if they are small
        forward_s = sum((p.stop_s - p.start_s) * (p.high - p.low) for p in row.work if p.colour is Colour.FORWARD)
        assert forward_s == pytest.approx(0.3, rel=0.05)
    page = timeline_html(large, "Many")
    assert "too many tasks" in page and len(page) < 200_000
    drawing(page)


def test_submeshes_beyond_the_first_are_counted():
    submeshes = tuple(SubmeshSummary(i, 0, f"p{i}", 0.0, 1.0, 1.0, 2.0, 1) for i in range(100))
    page = timeline_html(Timeline((), submeshes, 0.0, "recorded"), "Nothing happened")
    drawing(page)
    assert "4 more submeshes are left out." in page and ">p95</text>" in page and ">p96</text>" not in page
    assert timeline_text(Timeline((), submeshes, 0.0, "recorded")).splitlines()[-1] == "and 68 more submeshes"


def test_text(small):
    lines = timeline_text(small).splitlines()
    assert re.fullmatch(r"Step of [\d.]+ ms, simulated *", lines[0])
    assert re.split(r"  +", lines[1].strip()) == [
        "pipeline",
        "submesh",
        "busy",
        "idle",
        "peak memory",
        "limit",
        "in flight",
    ]
    first, last = (re.split(r"  +", line.strip()) for line in (lines[2], lines[-1]))
    one, other = small.submeshes[0], small.submeshes[-1]
    assert first[:2] == ["0", "v100[0:4]"] and first[4].endswith("GB (over)") and first[5:] == ["8 GB", "3"]
    assert first[2:4] == [f"{one.busy_s * 1e3:.3g} ms", f"{one.bubble_share:.1%}"]
    assert last == [
        "1",
        "d",
        f"{other.busy_s * 1e3:.3g} ms",
        f"{other.bubble_share:.1%}",
        f"{other.peak_bytes / 1e9:.3g} GB",
        "16 GB",
        "2",
    ]


def test_png(small, tmp_path, monkeypatch):
    timeline_png(small, tmp_path / "a.png", "Two pipelines")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'autoshard\[pictures\]'"):
        timeline_png(small, tmp_path / "b.png", "")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize("step_s", [1.0, 0.0123, 9.99e-6, 7.0, 1234.5, 0.2])
def test_ticks_are_few_and_round(step_s):
    found = ticks(step_s)
    assert 4 <= len(found) <= 13 and found[0] == 0 and step_s - (found[1] - found[0]) < found[-1] <= step_s * (1 + 1e-9)
    assert re.fullmatch(r"[125]\.0e.*", f"{found[1]:.1e}")
