"""The plans of a run: one for each set of devices that it ran on, or was planned for ahead of time.

They lie in `plans/<set>/plan.json` of the run's folder; `plan.json` there is a copy of the one in use. Where a run
plans several programs, such as a step and an evaluation, `plans/<set>/plan-2.json` is that of the second, and so on.
"""

import dataclasses
import hashlib
import pathlib
import re
import time
from collections.abc import Callable

import jax
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from autoshard.api import Plan, StagedPlan, load
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ConfigError
from autoshard.files import write_bytes_atomically

PLANS, PLAN = "plans", "plan.json"
"""Names of the folder of plans, and of a plan in it."""

_MOST_CHARACTERS = 80
"""Longest description of a set that serves as a name; a file system takes 255 bytes."""

_SEEN_WITHIN_S = 60.0
"""How long a file system may take to show what another host wrote: `acdirmax` and `acregmax` of NFS (nfs(5))."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSet:
    """What devices there are, as far as a plan depends on it.

    Attributes:
        groups: (nodes, devices of each node, kind of device) of each group of equal nodes, in device order.
        num_processes: among which the devices are shared out.
    """

    groups: tuple[tuple[int, int, str], ...]
    num_processes: int

    @classmethod
    def of(cls, cluster: Cluster, num_processes: int) -> "DeviceSet":
        """The devices of `cluster`, shared out among `num_processes` processes."""
        groups = ((g.num_nodes, g.devices_per_node, g.device_type.name) for g in cluster.groups)
        return cls(tuple(groups), num_processes)

    @property
    def name(self) -> str:
        """A name for files: as it is printed, or with a digest where that is too long or has other characters."""
        text = "_".join([f"{self.num_processes}-processes", *(f"{n}x{d}x{kind}" for n, d, kind in self.groups)])
        plain = re.sub(r"[^A-Za-z0-9_-]", "-", text)[:_MOST_CHARACTERS]
        return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def __str__(self) -> str:
        groups = ", ".join(f"{n} x {d} x {kind}" for n, d, kind in self.groups)
        return f"{groups} in {self.num_processes} processes"


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a generation.

    Attributes:
        plan: the plan.
        path: its file among the plans of the run.
        from_cache: it was there already.
        is_compiled: by this version of JAX it was compiled before, and what was compiled was kept.
        seconds: what it took to find or to make it.
        reason: why the one that was there did not serve; empty if it did, or if there was none.
    """

    plan: Plan | StagedPlan
    path: pathlib.Path
    from_cache: bool
    is_compiled: bool
    seconds: float
    reason: str


class _Compiled(BaseModel):
    """What is written beside a plan once its program is compiled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan_sha256: str
    jax: str


class _Decision(BaseModel):
    """What the first process tells the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    from_cache: bool
    is_compiled: bool
    seconds: NonNegativeFloat
    reason: str


def plan_folder(run_dir: pathlib.Path, devices: DeviceSet) -> pathlib.Path:
    """Where the plan for `devices` lies, and what else is known of it."""
    return run_dir / PLANS / devices.name


def plan_for_devices(
    run_dir: pathlib.Path,
    devices: DeviceSet,
    make: Callable[[], Plan | StagedPlan],
    fits: Callable[[Plan | StagedPlan], str | None],
    decide_for_all: Callable[[Callable[[], str]], str],
    is_dry_run: bool = False,
    program: int = 1,
) -> ChosenPlan:
    """The plan for a set of devices: the one that the run has for it, or else a new one, which it keeps.

    All processes call this together. Each looks whether the plan that is there fits, at the same time, so that what
    `fits` traces is at hand everywhere; the first process decides, and alone makes a plan where one is needed. The same
    set of devices thus always has the same plan, and a run that comes back to it goes on exactly as before.

    Args:
        run_dir: the run's folder, which all processes see.
        devices: the set.
        make: makes a plan; called in the first process only.
        fits: why a plan cannot be used, or None if it can.
        decide_for_all: gives all processes the text that its argument returns in the first.
        is_dry_run: leave the run's `plan.json` as it is.
        program: which of the programs that a run plans, counted from 1; `plan.json` is that of the first.

    Returns:
        The plan, read from its file, equal in all processes.

    Raises:
        ConfigError: not all processes see the same folder.
        AutoshardError: whatever `make` raises, in the first process.
    """
    started_s = time.perf_counter()
    path = plan_folder(run_dir, devices) / (PLAN if program == 1 else f"plan-{program}.json")
    kept = _Kept.read(path, fits)

    def decide() -> str:
        content = kept.content
        if kept.plan is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            make().save(path)
            content = path.read_bytes()
        if program == 1 and not is_dry_run and _content(run_dir / PLAN) != content:
            write_bytes_atomically(run_dir / PLAN, content)
        seconds = time.perf_counter() - started_s
        made = _Decision(
            sha256=_digest(content),
            from_cache=kept.plan is not None,
            is_compiled=_content(_compiled_path(path)) == _compiled_mark(content),
            seconds=seconds,
            reason=kept.reason,
        )
        return made.model_dump_json()

    decision = _Decision.model_validate_json(decide_for_all(decide))
    if kept.plan is None or _digest(kept.content) != decision.sha256:
        kept = _Kept(_read_when_seen(path, decision.sha256), kept.content, kept.reason)
    assert kept.plan is not None  # as `_read_when_seen` gives one
    return ChosenPlan(kept.plan, path, decision.from_cache, decision.is_compiled, decision.seconds, decision.reason)


def mark_compiled(chosen: ChosenPlan) -> None:
    """Notes that what the plan compiles to is kept; to be called by the first process."""
    write_bytes_atomically(_compiled_path(chosen.path), _compiled_mark(_content(chosen.path)))


def _compiled_path(plan: pathlib.Path) -> pathlib.Path:
    return plan.with_name(plan.name.replace("plan", "compiled", 1))


def _compiled_mark(plan: bytes) -> bytes:
    return _Compiled(plan_sha256=_digest(plan), jax=jax.__version__).model_dump_json().encode()


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A plan that is there: itself if it fits, and else the reason why not, empty if there is none."""

    plan: Plan | StagedPlan | None
    content: bytes
    reason: str

    @classmethod
    def read(cls, path: pathlib.Path, fits: Callable[[Plan | StagedPlan], str | None]) -> "_Kept":
        content, plan = _content(path), None
        while content and plan is None:
            try:
                plan = load(path)
            except AutoshardError as error:
                return cls(None, content, str(error).partition("\n")[0])
            if (now := _content(path)) != content:  # another generation made a new one meanwhile
                content, plan = now, None
        if plan is None:
            return cls(None, b"", "")
        reason = fits(plan)
        return cls(plan if reason is None else None, content, reason or "")


def _content(path: pathlib.Path) -> bytes:
    """The bytes of a file; none if it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_when_seen(path: pathlib.Path, sha256: str) -> Plan | StagedPlan:
    """The plan with that digest, once its file shows."""
    deadline_s = time.monotonic() + _SEEN_WITHIN_S
    while _digest(_content(path)) != sha256:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                "train.output_dir: all processes need the same folder, for plans and checkpoints; "
                f"{path} is not what the first process wrote there. Choose one on a file system that all of them see."
            )
        time.sleep(0.1)
    return load(path)
