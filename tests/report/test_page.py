"""What is shown agrees with what was planned, verified, compared or run; and a page holds all that it needs."""

import dataclasses
import html
import html.parser
import json
import math
import re

import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.comparison.comparison import Comparison, Contender
from autoshard.errors import ConfigError, FileFormatError
from autoshard.pipelines.plan.comparison import compare_forms
from autoshard.pipelines.schedule.durations import StepDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.printing import amount, seconds
from autoshard.report.compared_view import compared_parts
from autoshard.report.comparison_file import read_comparison
from autoshard.report.compiled_view import verification_parts
from autoshard.report.hardware_view import link_traffic
from autoshard.report.memory_price import Tangent, least_step_s, memory_price_parts, tangent_of
from autoshard.report.module_tree import Costs, module_tree
from autoshard.report.page import html_page, page_of
from autoshard.report.parts import Figure, Paragraph, Table
from autoshard.report.pipeline_view import pipeline_parts
from autoshard.report.program_view import program_view
from autoshard.report.reading import Named, read_material
from autoshard.report.run_view import RunRecord, read_run, run_sections
from autoshard.report.units import byte_unit, time_unit
from autoshard.verify.figures import Flow, MemoryFigures, ScheduleFigures, StepTimes
from autoshard.verify.report import Failure, Report
from autoshard.verify.verification import Verification


def leaves(modules):
    return [leaf for m in modules for leaf in (leaves(m.children) if m.children else [m])]


def test_the_tree_holds_every_argument_once_with_all_its_costs(gpt):
    tree, e = module_tree(gpt), gpt.estimate
    assert sum(leaf.count for leaf in leaves(tree)) == len(gpt.arguments)
    total = sum((m.costs for m in tree), Costs())
    sizes = [math.prod(a.shape) * (0 if a.dtype.startswith("key") else 4) for a in gpt.arguments]
    assert total.whole_bytes == sum(sizes), "all are float32 or int32, but for the random key"
    gathered = [n for n, a in enumerate(gpt.profile.parameter_of) if a >= 0]
    assert total.sent_bytes == pytest.approx(sum(e.communication[n].wire_bytes for n in gathered))
    assert total.exposed_s + total.hidden_s == pytest.approx(sum(e.communication[n].time_s for n in gathered))
    worked = [n for n, a in enumerate(gpt.profile.work_for) if a >= 0]
    assert total.compute_s == pytest.approx(sum(e.compute[n].compute_s for n in worked))


def test_alike_layers_are_one(gpt):
    """By hand: the `up` kernel of 4 layers is 256 x 1024 of 4 bytes each; over all 16 devices, a sixteenth on each."""
    (up,) = [leaf for leaf in leaves(module_tree(gpt)) if leaf.path == "state.params.blocks.*.mlp.up.kernel"]
    assert (up.name, up.count, up.shape) == ("kernel", 4, "256x1024 float32")
    assert up.costs.whole_bytes == 4 * 256 * 1024 * 4
    axes = re.findall(r"data|tensor", up.layout)
    assert up.costs.device_bytes == up.costs.whole_bytes / 4 ** len(axes)
    (blocks,) = [m for m in walk(module_tree(gpt)) if m.path == "state.params.blocks"]
    assert [child.name for child in blocks.children] == ["0-3"]


def walk(modules):
    return [one for m in modules for one in (m, *walk(m.children))]


def test_layers_that_differ_stay_apart(gpt):
    odd = tuple(
        dataclasses.replace(a, entries=((), ())) if a.name == "state.params.blocks.1.mlp.up.kernel" else a
        for a in gpt.arguments
    )
    tree = module_tree(dataclasses.replace(gpt, arguments=odd))
    (blocks,) = [m for m in walk(tree) if m.path == "state.params.blocks"]
    assert sorted(child.name for child in blocks.children) == ["0, 2-3", "1"]


def test_links_carry_what_collectives_send(gpt):
    traffic = link_traffic(gpt)
    assert sum(t.total_bytes for t in traffic) == pytest.approx(gpt.estimate.comm_bytes)
    assert {t.level for t in traffic} == {0, 1}, "two nodes"


def test_the_view_over_time_has_the_peak_and_all_the_traffic(gpt):
    view = program_view(gpt)
    usage = [sum(h.size_bytes for h in view.held if h.start <= i < h.stop) for i in range(len(view.instants))]
    assert max(usage) == pytest.approx(gpt.estimate.peak_bytes)
    assert sum(c.sent_bytes for c in view.collectives) == pytest.approx(gpt.estimate.comm_bytes)
    assert sum(c.exposed_s for c in view.collectives) == pytest.approx(gpt.estimate.exposed_s)
    assert max(run.stop for run in (*view.kernel_runs, *view.waited_runs)) * view.tick_s == pytest.approx(view.step_s)
    data = json.loads(view.json())
    assert len(data["tensors"]) < len(gpt.profile.tensors), "layers fall together"


def test_tangents_bound_plans_of_every_budget(gpt):
    """By hand: 50 ms at 4 GB, and 10 ms a GB: 60 ms at 3 GB. Of two lines the greater counts."""
    own = tangent_of(gpt)
    assert own == Tangent(4e9, 0.05, 1e-11) and own.at(3e9) == pytest.approx(0.06)
    flat = Tangent(8e9, 0.045, 0.0)
    assert least_step_s((own, flat), 3e9) == pytest.approx(0.06)
    assert least_step_s((own, flat), 6e9) == 0.045 and least_step_s((own,), 20e9) == 0.0
    parts = memory_price_parts(gpt, [("other.json", gpt)], "p")
    (table,) = [p for p in parts if isinstance(p, Table)]
    assert [row[0] for row in table.rows] == ["this plan", "other.json"] and any(isinstance(p, Figure) for p in parts)
    (alone,) = memory_price_parts(dataclasses.replace(gpt, budget_bytes=None), (), "p")
    assert "not limited" in alone.text


def test_a_page_holds_everything_and_loads_nothing(gpt, run_folder, staged, hosted):
    plans = ((Named("gpt", gpt),), (Named("staged", staged),), (Named("hosted", hosted),))
    for named in (*plans, read_material(run_folder)):
        text = html_page(page_of(named))
        assert len(text) < 5e6 and not re.search(r"<(?:script|link|img)[^>]+(?:src|href)\s*=", text)
        assert "default-src 'none'" in text
        names = re.findall(r'data-figure="([^"]+)"', text.partition("<footer>")[0])
        assert names and len(set(names)) == len(names)
        assert all(f'id="figure-{name}"' in text for name in names)
        sections = re.findall(r'<section id="([^"]+)"', text)
        assert len(set(sections)) == len(sections) and all(f'href="#{name}"' in text for name in sections)


def test_names_of_the_user_are_text(gpt):
    evil = "</script><script>alert(1)</script>"
    named = tuple(dataclasses.replace(a, name=a.name.replace("tokens", evil) + evil) for a in gpt.arguments)
    text = html_page(page_of((Named(evil, dataclasses.replace(gpt, arguments=named, name=evil)),)))
    assert evil not in text and html.escape(evil) in text
    assert "Something with &lt;b&gt;markup&lt;/b&gt; and <code>code</code>." in text


def test_a_plan_in_stages_has_a_lane_for_each_place(staged):
    page = page_of((Named("staged", staged),))
    assert len(page.programs) == len(staged.programs)
    (pipelines,) = [s for s in page.sections if s.name == "pipelines"]
    (lanes,) = [p for p in pipelines.parts if isinstance(p, Figure)]
    assert len(lanes.model.yaxis[0].major_label_overrides) == sum(map(len, staged.meshes)) == 3
    bars = lanes.model.renderers[0].data_source.data
    assert max(bars["right"]) * time_unit(staged.step_s).size == pytest.approx(staged.step_s)
    first, *rest = staged.durations.pipelines
    apart = dataclasses.replace(first, schedule=make_schedule(ScheduleKind.ZERO_BUBBLE, 2, 2, 2))
    split = dataclasses.replace(staged, durations=StepDurations((apart, *rest)))
    stages = [part for part in pipeline_parts(split) if isinstance(part, Table) and "forward" in part.columns]
    assert ["weights" in table.columns for table in stages] == [True, False]
    assert all(len(row) == len(table.columns) for table in stages for row in table.rows)


def test_a_plan_with_tables_in_host_memory_shows_places_memory_and_pace(hosted, tmp_path):
    hosted.save(tmp_path / "plan.json")
    page = page_of(read_material(tmp_path / "plan.json"))
    assert page.subtitle.startswith("Plan with tables in host memory for cluster h100x8_cpu: 8 x H100-SXM")
    assert len(page.programs) == 1 and {"step", "model", "over-rows", "hardware-0"} < {s.name for s in page.sections}
    parts = {name: next(s for s in page.sections if s.name == name).parts for name in ("overview", "tables", "pace")}
    figures = {p.name: p for own in parts.values() for p in own if isinstance(p, Figure)}
    table = next(p for p in parts["tables"] if isinstance(p, Table))
    assert [row[0] for row in table.rows] == ["users", "items"] and table.emphasised == {0}
    assert [row[4] for row in table.rows] == ["host memory", "accelerators, whole"]
    ends = lambda name: max(max(r.data_source.data["right"]) for r in figures[name].model.renderers)
    own = hosted.predicted
    assert ends("device-memory") * byte_unit(own.device_bytes).size == pytest.approx(own.device_bytes)
    assert ends("host-memory") * byte_unit(own.host_bytes).size == pytest.approx(own.host_bytes)
    lanes = figures["pace"].model.renderers[0].data_source.data
    begins = [left for left, tip in zip(lanes["left"], lanes["tip"], strict=True) if tip.startswith("accelerator")]
    unit = time_unit(ends("pace") * 1e-3)
    assert unit.name == "ms" and len(begins) == 8
    assert (begins[-1] - begins[0]) / 7 * unit.size == pytest.approx(hosted.step_s)
    assert parts["overview"][0].cards[0][1:] == (seconds(hosted.step_s), "all tables on the devices: does not fit")


def test_a_run_shows_its_generations_losses_and_events(run_folder):
    run = read_run(run_folder)
    training, goodput, events = run_sections(run)
    (loss,) = [p for p in training.parts if isinstance(p, Figure) and p.name == "loss"]
    assert [name for name, _ in loss.legend] == ["generation 1", "generation 2"]
    assert "20 steps" not in goodput.parts[0].text and "1 worker lost" in goodput.parts[0].text
    (table,) = [p for p in events.parts if isinstance(p, Table)]
    assert any("signal 9" in row[-1] for n, row in enumerate(table.rows) if n in table.emphasised)
    assert run_sections(RunRecord("empty", (), ())) == ()


def test_comparisons_are_read_back(gpt, staged, tmp_path):
    slower = dataclasses.replace(gpt, estimate=dataclasses.replace(gpt.estimate, step_s=2 * gpt.estimate.step_s))
    contenders = (
        Contender("autoshard", gpt, True, form="all in all 2 layers"),
        Contender("zero3", slower, True, form="all"),
        Contender("ddp", None, False, "too large"),
    )
    found = Comparison("gpt", "h100x16", "H100", 16, 4e9, contenders)
    path = tmp_path / "compared.json"
    path.write_text(found.json())
    read = read_comparison(path)
    assert [c.step_s for c in read.contenders] == [gpt.estimate.step_s, slower.estimate.step_s, None]
    verdict, time, memory, table = compared_parts(read)
    assert "50.0% less time" in verdict.text and "zero3, all recomputed" in verdict.text
    assert "all in all 2 layers" in verdict.text
    assert len(time.model.y_range.factors) == len(memory.model.y_range.factors) == 2 and len(table.rows) == 3
    path.write_text(compare_forms(staged, "gpt").json())
    (named,) = read_material(path)
    assert named.material.devices == "8 x V100-SXM2-32GB, 8 x P100-SXM2"
    assert "<h2" in html_page(page_of((named,)))
    path.write_text('{"format": "autoshard-comparison"}')
    with pytest.raises(FileFormatError, match="not the JSON of a comparison"):
        read_comparison(path)


def test_a_verification_is_shown_with_what_failed(gpt, tmp_path):
    Report((Failure("tpu-v5e", "no compiler"),)).save(tmp_path / "verified.json")
    gpt.save(tmp_path / "plan.json")
    out = tmp_path / "page.html"
    run = ["report", tmp_path / "plan.json", "--beside", tmp_path / "verified.json", "--out", out]
    result = CliRunner().invoke(app, [str(part) for part in run])
    assert result.exit_code == 0 and result.stdout.startswith(f"{out}: "), result.output
    assert "tpu-v5e: could not be verified: no compiler" in out.read_text()


def test_a_verification_shows_both_sides_of_every_flow():
    memory = MemoryFigures(1e9, 1e9, 9e8, 5e9, 7e9)
    times = StepTimes(0.5, 0.49, 0.02, 0.01)
    flows = (Flow("all-gather", ("data",), 48, 24, 4e9, 4.1e9), Flow("all-reduce", ("tensor",), 0, 2, 0, 5e8))
    found = Verification(
        plan="spread", cluster="h100x16", target="h100", axes=(("data", 4), ("tensor", 4)), flows=flows, strays=(),
        rematerialised=(), predicted_memory=memory, compiled_memory=memory, reserved_bytes=7e9, predicted_flops=1e12,
        compiled_flops=1e12, estimated_cycles=None, compile_s=1.0, jax_version="0", predicted_reserved_bytes=7e9,
        schedule=ScheduleFigures(times, times, "", (), (), ()),
    )  # fmt: skip
    parts = verification_parts(Report((found,)), "v")
    (bars,) = [p for p in parts if isinstance(p, Figure)]
    assert len(bars.model.y_range.factors) == 4 and [name for name, _ in bars.legend] == ["predicted", "compiled"]
    table = next(p for p in parts if isinstance(p, Table))
    assert [row[-1] for row in table.rows] == ["+2.5%", "not predicted"]
    warnings = [p.text for p in parts if isinstance(p, Paragraph) and p.is_warning]
    assert any("no collective over tensor was predicted" in text for text in warnings)


def test_what_cannot_be_shown_is_refused(gpt, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.html"):
        autoshard.write_report(gpt, tmp_path / "page.pdf")
    with pytest.raises(FileFormatError, match="not the output folder of a run"):
        autoshard.write_report(tmp_path, tmp_path / "page.html")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(FileFormatError, match="not an autoshard plan"):
        autoshard.write_report(tmp_path / "other.json", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_plan_without_a_profile_is_shown_as_far_as_it_goes(gpt):
    page = page_of((Named("gpt", dataclasses.replace(gpt, profile=None)),))
    assert not json.loads(page.programs[0].data)["has_profile"] and "<h2" in html_page(page)


def test_notebooks_show_both_kinds_without_scripts(gpt, staged):
    evil = dataclasses.replace(gpt, name="<script>alert(1)</script>")
    for plan, facts in (
        (evil, (amount(gpt.estimate.peak_bytes), seconds(gpt.estimate.step_s), "state.params.blocks.*.mlp.up.kernel")),
        (staged, (seconds(staged.step_s), "Pipeline 0", staged.timeline.submeshes[0].name)),
    ):
        shown = plan._repr_html_()
        parser = html.parser.HTMLParser()
        parser.feed(shown)
        assert "<script" not in shown and all(html.escape(fact) in shown for fact in facts)
        assert shown.count("<table") == shown.count("</table>") == 2 and len(shown) < 40_000
        assert html.escape(plan.explain(full=True)) in shown
