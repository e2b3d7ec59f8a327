"""Puts a page together: what is shown of a plan, a comparison, a verification or a run, and in which order."""

import json
import pathlib
import re
from collections.abc import Sequence

import jinja2
import markupsafe
from bokeh.embed import json_item
from bokeh.resources import Resources

from autoshard import __version__
from autoshard.api.staged import StagedPlan
from autoshard.errors import ConfigError
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.offloading.reading import AnyPlan
from autoshard.plans.program_plan import ProgramPlan
from autoshard.report.compared_view import compared_parts, compared_subtitle
from autoshard.report.comparison_file import ComparisonFile, StagedComparisonFile
from autoshard.report.compiled_view import confirmation_parts, verification_parts
from autoshard.report.considered_view import considered_in_stages, considered_parts
from autoshard.report.hardware_view import hardware_parts
from autoshard.report.host_tables_view import hosted_overview_parts, pace_parts, table_parts
from autoshard.report.memory_price import memory_price_parts
from autoshard.report.overview import overview_parts, staged_overview_parts
from autoshard.report.parts import Figure, Page, Panel, Program, Section
from autoshard.report.pipeline_view import pipeline_parts
from autoshard.report.program_view import program_view
from autoshard.report.reading import Named
from autoshard.report.run_view import RunRecord, run_sections
from autoshard.report.step_figure import step_figure
from autoshard.verify.report import Report

_STATIC = pathlib.Path(__file__).parent / "static"
_STEP_LEAD = (
    "What is in a device's memory and what it does, over one step. Move over the figures, or use the slider, to see "
    "what is alive and what runs; click to hold the cursor. Drag over a span to enlarge it."
)
_MODEL_LEAD = (
    "The arguments of the program as a tree: how each is split over the mesh, what it takes, and what a step spends on "
    "it. Layers that are alike stand together, with the costs of all."
)
_COLLECTIVES_LEAD = (
    "Which collectives run, what they wait for or hide behind, and which tensors cause them. Open one to see why."
)


def page_of(main: Sequence[Named], beside: Sequence[Named] = ()) -> Page:
    """The page about what was read first; `beside` are other plans of the same program, comparisons, verifications."""
    plans = [n for n in main if isinstance(n.material, AnyPlan)]
    _refuse_unshown(plans, beside)
    others = [(n.name, n.material) for n in (*plans[1:], *beside) if isinstance(n.material, ProgramPlan)]
    sections: list[Section] = []
    programs: tuple[Program, ...] = ()
    subtitle = ""
    for one in main:
        if isinstance(one.material, RunRecord):
            sections += run_sections(one.material)
    if plans:
        plan = plans[0].material
        assert isinstance(plan, AnyPlan)
        programs = tuple(
            Program(plan.program_title(n) or "the program", program_view(p).json()) for n, p in enumerate(plan.programs)
        )
        sections += _of_plan(plan, others)
        subtitle = _plan_subtitle(plan)
    for n, one in enumerate((*main, *beside)):
        if isinstance(one.material, ComparisonFile | StagedComparisonFile):
            lead = "Other ways to do the same step, each the best of its kind by the same costs."
            sections.append(Section(f"compared-{n}", "Beside other strategies", lead, compared_parts(one.material)))
            subtitle = subtitle or compared_subtitle(one.material)
        elif isinstance(one.material, Report):
            lead = "What XLA's compilers made of the plan, beside what it predicts. Nothing was run."
            parts = verification_parts(one.material, f"verified-{n}")
            sections.append(Section(f"compiled-{n}", "Predicted beside compiled", lead, parts))
    return Page(main[0].name, subtitle or "; ".join(n.name for n in (*main, *beside)), tuple(sections), programs)


def _refuse_unshown(plans: Sequence[Named], beside: Sequence[Named]) -> None:
    """Refuses plans beside another one that there is nothing to show of.

    Raises:
      ConfigError: One of the plans is not of one program.
    """
    others = [n for n in beside if isinstance(n.material, AnyPlan)]
    for one in (*plans[:1], *others) if others else ():
        if not isinstance(one.material, ProgramPlan):
            raise ConfigError(
                "Plans beside another one make the price of memory a curve, which only plans of one program have; "
                f"received {one.name}, which has several. Show what differs with `autoshard diff`, and give --beside "
                "(`beside=` in code) comparisons and verifications."
            )


def _plan_subtitle(plan: AnyPlan) -> str:
    if isinstance(plan, StagedPlan):
        return f"Plan in stages for cluster {plan.cluster}: " + ", ".join(
            f"{s.num_devices} x {s.device}" for s in plan.slices
        )
    if isinstance(plan, HostTablesPlan):
        return f"Plan with tables in host memory for cluster {plan.cluster}: {plan.over_rows.logical_mesh}"
    return f"Plan {plan.name} for cluster {plan.cluster}: {plan.logical_mesh}"


def _of_plan(plan: AnyPlan, others: Sequence[tuple[str, ProgramPlan]]) -> list[Section]:
    sections = []
    if isinstance(plan, StagedPlan):
        sections.append(Section("overview", "Overview", "", staged_overview_parts(plan)))
        lead = "Which submesh does what and when, what crosses between them, and how full they are."
        sections.append(Section("pipelines", "Pipelines", lead, pipeline_parts(plan)))
        lead = "Other arrangements that the search looked at."
        sections.append(Section("forms-considered", "Forms of the step", lead, considered_in_stages(plan)))
    elif isinstance(plan, HostTablesPlan):
        sections.append(Section("overview", "Overview", "", hosted_overview_parts(plan)))
        lead = "Which table lives where, what it would cost elsewhere, and what fills the memory of each level."
        sections.append(Section("tables", "Tables", lead, table_parts(plan)))
        lead = "When a batch is looked up, computed and written back, as predicted, and what else was considered."
        sections.append(Section("pace", "How batches follow each other", lead, pace_parts(plan)))
        lead = "The program that the accelerators run, over the rows of a batch."
        sections.append(Section("over-rows", "The step over rows", lead, overview_parts(plan.over_rows)))
    else:
        sections.append(Section("overview", "Overview", "", overview_parts(plan)))
    sections.append(Section("step", "A step over time", _STEP_LEAD, (Panel("step"),)))
    sections.append(Section("model", "The model", _MODEL_LEAD, (Panel("model"),)))
    sections.append(Section("collectives", "Collectives", _COLLECTIVES_LEAD, (Panel("collectives"),)))
    for n, program in enumerate(plan.programs):
        sections += _of_program(program, n, others if len(plan.programs) == 1 else ())
    return sections


def _of_program(plan: ProgramPlan, n: int, others: Sequence[tuple[str, ProgramPlan]]) -> list[Section]:
    name = f"p{n}"
    lead = "How the mesh lies on the devices, and how many bytes go over which links."
    sections = [Section(f"hardware-{n}", "The mesh on the hardware", lead, hardware_parts(plan, name), n)]
    lead = "What else the search looked at, and why it lost."
    sections.append(Section(f"considered-{n}", "What was considered", lead, considered_parts(plan, name), n))
    lead = "What a step takes at least with how much memory."
    sections.append(Section(f"price-{n}", "The price of memory", lead, memory_price_parts(plan, others, name), n))
    if plan.confirmation is not None:
        lead = "What the compiler made of the plan when it was made."
        sections.append(Section(f"checked-{n}", "Compile check", lead, confirmation_parts(plan), n))
    return sections


def html_page(page: Page) -> str:
    """The page as HTML that needs nothing else: Bokeh's script and all data are in it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_STATIC), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = _code
    figures = [p for s in page.sections for p in s.parts if isinstance(p, Figure)]
    if page.programs:
        figures.append(Figure("step", "", step_figure()))
    data = {f"figure-{f.name}": _script_safe(json.dumps(json_item(f.model), separators=(",", ":"))) for f in figures}
    data |= {f"program-{n}": _script_safe(p.data) for n, p in enumerate(page.programs)}
    script = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return environment.get_template("page.html").render(
        page=page,
        version=__version__,
        style=markupsafe.Markup((_STATIC / "report.css").read_text()),
        bokeh=markupsafe.Markup(script),
        script=markupsafe.Markup((_STATIC / "report.js").read_text()),
        data={name: markupsafe.Markup(text) for name, text in data.items()},
        kind=lambda part: type(part).__name__,
    )


def _script_safe(text: str) -> str:
    """JSON that may stand in a script element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _code(text: str) -> markupsafe.Markup:
    """Text with what stands between backquotes as code."""
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))
