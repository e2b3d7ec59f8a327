"""A comparison on a page: what a step and a device's memory are made of, a bar for each contender, and the figures."""

from autoshard.printing import amount, seconds
from autoshard.report.colours import MEMORY, OTHERS, OWN, TIME
from autoshard.report.comparison_file import ComparedPlan, ComparisonFile, StagedComparisonFile
from autoshard.report.figures import byte_bars, time_bars
from autoshard.report.parts import Figure, Paragraph, Part, Table
from autoshard.strategies.hand_written import in_form


def compared_parts(found: ComparisonFile | StagedComparisonFile) -> tuple[Part, ...]:
    """What is shown of a comparison."""
    return _forms(found) if isinstance(found, StagedComparisonFile) else _strategies(found)


def compared_subtitle(found: ComparisonFile | StagedComparisonFile) -> str:
    """What is compared, in a line."""
    if isinstance(found, StagedComparisonFile):
        return f"{found.title} on cluster {found.cluster}: {found.devices}, {found.batch_size} examples a step"
    return f"{found.title} on cluster {found.cluster}: {found.num_devices} x {found.device}"


def _verdict(own_s: float | None, others: list[tuple[str, float]], form: str = "") -> Paragraph:
    if own_s is None or not others:
        return Paragraph("There is nothing that fits to compare with.")
    name, step_s = min(others, key=lambda o: o[1])
    saved = 1 - own_s / step_s if step_s else 0.0
    difference = f"{saved:.1%} less time." if saved >= 0 else f"{-saved:.1%} more time."
    return Paragraph(
        f"autoshard's plan takes {seconds(own_s)} a step, the best other that fits ({name}) {seconds(step_s)}: "
        + difference
        + (f" Its layers keep for the backward pass: {form}." if form else "")
    )


def _named(c: ComparedPlan, own: ComparedPlan) -> str:
    """A contender, and in which form of the step it is shown."""
    return c.name if c is own else in_form(c.name, c.form)


def _strategies(found: ComparisonFile) -> tuple[Part, ...]:
    own, *others = found.contenders
    ranked = [own, *sorted(others, key=lambda c: (not c.fits, c.step_s is None, c.step_s or 0.0))]
    planned = [c for c in ranked if c.step_s is not None]
    names = [_named(c, own) + ("" if c.fits else " (too large)") for c in planned]
    times = [{"computation": c.compute_s or 0.0, **_exposed(c)} for c in planned]
    fitting = [(_named(c, own), c.step_s) for c in others if c.fits and c.step_s is not None]
    parts: list[Part] = [_verdict(own.step_s, fitting, own.form)]
    if planned:
        model, legend = time_bars(names, times, TIME)
        parts.append(Figure("compared-time", "Predicted time of one step", model, legend))
        model, legend = byte_bars(names, [c.memory_bytes for c in planned], MEMORY, found.limit_bytes)
        parts.append(Figure("compared-memory", "Memory of one device at the peak", model, legend))
    text = lambda value, form: "-" if value is None else form(value)
    rows = tuple(
        (
            _named(c, own),
            ", ".join(f"{a}={n}" for a, n in c.mesh.items()) or "-",
            text(c.step_s, seconds),
            text(c.relative_step, lambda r: f"{r:.3g} x"),
            text(c.compute_s, seconds),
            text(c.exposed_s, seconds),
            text(c.comm_bytes, amount),
            text(c.peak_bytes, amount),
            "yes" if c.fits else "no" if c.step_s is not None else "no plan",
            c.reason,
        )
        for c in ranked
    )
    columns = ("strategy", "mesh", "step", "of the plan's", "compute", "exposed", "sent", "memory", "fits", "why not")
    parts.append(Table("Contenders", columns, rows, frozenset(range(2, 8)), frozenset({0})))
    return tuple(parts)


def _exposed(c: ComparedPlan) -> dict[str, float]:
    """The exposed time by kind of collective, in proportion to the time of each kind."""
    total_s = sum(t.time_s for t in c.communication.values())
    share = (c.exposed_s or 0.0) / total_s if total_s else 0.0
    return {kind: share * t.time_s for kind, t in c.communication.items()}


def _forms(found: StagedComparisonFile) -> tuple[Part, ...]:
    own, *others = found.contenders
    timed = [(c.name, c.step_s) for c in found.contenders if c.step_s is not None]
    parts: list[Part] = [_verdict(own.step_s, [(c.name, c.step_s) for c in others if c.step_s is not None])]
    if timed:
        bars = [{"this plan" if name == own.name else "other form": step_s} for name, step_s in timed]
        model, legend = time_bars([name for name, _ in timed], bars, {"this plan": OWN, "other form": OTHERS})
        parts.append(Figure("compared-time", "Predicted time of one step", model, legend))
    rows = tuple(
        (
            c.name,
            "-" if c.step_s is None else seconds(c.step_s),
            "-" if c.relative_step is None else f"{c.relative_step:.3g} x",
            c.reason,
        )
        for c in found.contenders
    )
    parts.append(
        Table(
            "Forms", ("form of the step", "step", "of the plan's", "why not"), rows, frozenset({1, 2}), frozenset({0})
        )
    )
    return tuple(parts)
