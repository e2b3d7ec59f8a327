"""A comparison of plans: its figures as data, as JSON, and as a table for a terminal."""

import collections
import dataclasses
import json
import math
import textwrap
from typing import Any

from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table
from autoshard.strategies.hand_written import in_form

COLUMNS = ("mesh", "step", "vs plan", "compute", "comm.", "sent", "memory", "fits", "gap")
"""What `cells` returns."""
RECOMPUTED = "recomputed"
"""The column before these, where strategies have forms of a step to choose from."""
SEARCHED = "searched"
"""What it says of autoshard's own plan, whose form is told in words."""
UNTRIED = "Not tried: stopped."
"""Why a strategy has no plan that was left out at Ctrl-C."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One way to split the program.

    Attributes:
      name: `autoshard`, or the strategy's name, such as `zero3+megatron`.
      plan: Its plan; where nothing keeps to the memory limit, the fastest plan without one. None if there is none.
      fits: Whether the plan keeps to the memory limit.
      reason: Why there is no plan, or why it does not fit; empty otherwise.
      form: What layers compute again in the backward pass; of autoshard's own plan, all that was chosen of the form of
        the step. Empty for a step as it is written.
    """

    name: str
    plan: ProgramPlan | None
    fits: bool
    reason: str = ""
    form: str = ""

    @property
    def step_s(self) -> float:
        """Of its plan; infinite without one."""
        return math.inf if self.plan is None else self.plan.estimate.step_s

    @property
    def communication(self) -> dict[str, tuple[float, float]]:
        """By kind of collective: seconds a step, and bytes that each device sends."""
        sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for item in self.plan.estimate.communication if self.plan else ():
            sums[item.kind][0] += item.time_s
            sums[item.kind][1] += item.wire_bytes
        return {kind: (s[0], s[1]) for kind, s in sorted(sums.items(), key=lambda row: -row[1][0])}

    @property
    def exposed_s(self) -> dict[str, float]:
        """By kind of collective: the seconds of a step that kernels wait for it, which add to their own."""
        sums: dict[str, float] = collections.defaultdict(float)
        for item in self.plan.estimate.communication if self.plan else ():
            sums[item.kind] += item.exposed_s
        return dict(sums)

    @property
    def memory_bytes(self) -> dict[str, float]:
        """By class of tensor: bytes on each device at the peak."""
        sums: dict[str, float] = collections.defaultdict(float)
        for item in self.plan.estimate.memory if self.plan else ():
            sums[item.memory_class] += item.size_bytes
        return dict(sorted(sums.items(), key=lambda row: -row[1]))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A program's plan beside others.

    Attributes:
      title: What is compared.
      cluster: Name of the cluster. device: Name of its device type. num_devices: How many there are.
      limit_bytes: Memory that each device may use; None for no limit.
      contenders: autoshard's own plan first, then the strategies.
    """

    title: str
    cluster: str
    device: str
    num_devices: int
    limit_bytes: float | None
    contenders: tuple[Contender, ...]

    @property
    def own(self) -> Contender:
        """autoshard's own plan."""
        return self.contenders[0]

    @property
    def best_other(self) -> Contender | None:
        """The fastest strategy that fits; None if none does."""
        return min((c for c in self.contenders[1:] if c.fits), key=lambda c: c.step_s, default=None)

    @property
    def has_forms(self) -> bool:
        """Whether strategies had forms of the step to choose from."""
        return any(c.form for c in self.contenders[1:])

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        return ("strategy", *([RECOMPUTED] if self.has_forms else []), *COLUMNS)

    def rows(self) -> list[tuple[str, ...]]:
        """The figures of all contenders as text, as `ranked`."""
        form = lambda c: SEARCHED if c is self.own else c.form or "-"
        return [(c.name, *([form(c)] if self.has_forms else []), *cells(self, c)) for c in ranked(self)]

    def relative_step(self, contender: Contender) -> float | None:
        """Step time of a contender as a multiple of that of autoshard's plan; None where one of them has no plan."""
        if self.own.plan is None or contender.plan is None or not self.own.step_s:
            return None
        return contender.step_s / self.own.step_s

    def json(self) -> str:
        """All figures as JSON; null for what is not known. Times are seconds a step, bytes those of one device."""
        document = {
            "format": "autoshard-comparison",
            "version": 1,
            "title": self.title,
            "cluster": self.cluster,
            "device": self.device,
            "num_devices": self.num_devices,
            "limit_bytes": self.limit_bytes,
            "contenders": [self._figures(c) for c in self.contenders],
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)

    def _figures(self, c: Contender) -> dict[str, Any]:
        figures: dict[str, Any] = {"name": c.name, "form": c.form, "fits": c.fits, "reason": c.reason}
        if c.plan is None:
            return figures
        e, certificate = c.plan.estimate, c.plan.certificate
        finite = lambda value: value if math.isfinite(value) else None
        return figures | {
            "mesh": c.plan.mesh_axes,
            "step_s": e.step_s,
            "relative_step": self.relative_step(c),
            "compute_s": e.compute_s,
            "comm_s": e.comm_s,
            "exposed_s": e.exposed_s,
            "comm_bytes": e.comm_bytes,
            "communication": {k: {"time_s": s, "wire_bytes": b} for k, (s, b) in c.communication.items()},
            "peak_bytes": e.peak_bytes,
            "memory_bytes": c.memory_bytes,
            "status": certificate.status.value,
            "gap": finite(certificate.gap),
            "bound_s": finite(certificate.bound),
        }

    def text(self, width: int = PAGE_WIDTH) -> str:
        """One line a contender, as `ranked`; then the verdict, and in short why others have no plan that fits."""
        console = TextConsole(width)
        console.print(heading(self))
        words = ("strategy", RECOMPUTED, "mesh")
        rows = table("", [(name, "left" if name in words else "right") for name in self.columns])
        for row in self.rows():
            rows.add_row(*row)
        console.print(rows)
        console.print()
        console.print(verdict(self))
        for contender in ranked(self):
            if contender.reason:
                console.print(f"{contender.name}: {textwrap.shorten(contender.reason, 180, placeholder=' ...')}")
        return console.text

    def __str__(self) -> str:
        return self.text()


def heading(comparison: Comparison) -> str:
    """What is compared, on which devices, under which limit."""
    limit = comparison.limit_bytes
    allowed = "without a memory limit" if limit is None else f"{amount(limit)} allowed on each"
    devices = f"{comparison.num_devices} x {comparison.device}"
    return f"{comparison.title} on cluster `{comparison.cluster}`: {devices}, {allowed}"


def ranked(comparison: Comparison) -> list[Contender]:
    """autoshard's own plan, then the strategies: those that fit before those that do not, and by step time."""
    return [comparison.own, *sorted(comparison.contenders[1:], key=lambda c: (not c.fits, c.step_s))]


def cells(comparison: Comparison, contender: Contender) -> tuple[str, ...]:
    """The figures of a contender as text."""
    plan = contender.plan
    if plan is None:
        return ("-",) * (len(COLUMNS) - 2) + ("no plan", "-")
    e, relative = plan.estimate, comparison.relative_step(contender)
    return (
        ", ".join(f"{name}={size}" for name, size in plan.axes),
        seconds(e.step_s),
        "-" if relative is None else f"{relative:.3g}x",
        seconds(e.compute_s),
        seconds(e.exposed_s),
        amount(e.comm_bytes),
        amount(e.peak_bytes),
        "yes" if contender.fits else "no",
        f"{plan.certificate.gap:.2%}" if math.isfinite(plan.certificate.gap) else "-",
    )


def verdict(comparison: Comparison) -> str:
    """In one or two sentences: how much autoshard's plan gains on the best strategy that fits, and in which form."""
    own, best = comparison.own, comparison.best_other
    if own.plan is None or not own.fits:
        return "No plan found fits the memory."
    if best is None and any(c.reason == UNTRIED for c in comparison.contenders):
        return f"autoshard's plan takes {seconds(own.step_s)} a step; stopped before a strategy that fits was found."
    if best is None:
        return "None of the strategies fits the memory; autoshard's plan does."
    saved = 1 - own.step_s / best.step_s if best.step_s else 0.0
    bound = own.plan.certificate.bound
    where = "on its meshes and in the forms that were considered" if own.form else "on its meshes"
    proof = f"; no plan {where} is below {seconds(max(bound, 0.0))}" if math.isfinite(bound) else ""
    difference = f"{saved:.1%} less time" if saved >= 0 else f"{-saved:.1%} more time"
    own_form = f" Its layers keep for the backward pass: {own.form}." if own.form else ""
    return (
        f"autoshard's plan takes {seconds(own.step_s)} a step, the best strategy that fits "
        f"({in_form(best.name, best.form)}) {seconds(best.step_s)}: {difference}{proof}.{own_form}"
    )
