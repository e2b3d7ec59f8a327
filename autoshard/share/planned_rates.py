"""How fast a job runs, from plans: made once for each set of devices, and kept on disk."""

import dataclasses
import hashlib
import json
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence

import pydantic
from pydantic import BaseModel, ConfigDict

from autoshard.api import Plan
from autoshard.cluster import Cluster
from autoshard.errors import FileFormatError, MemoryBudgetError, StageError
from autoshard.files import read_json, write_text_atomically
from autoshard.share.footprint import Footprint, cluster_of
from autoshard.share.rates import Rate, Rates, Source, with_interpolated
from autoshard.train.config import TrainConfig, load_config
from autoshard.train.planning import make_plan
from autoshard.train.registry import train_functions
from autoshard.user_cache import user_cache

_TIMES_SINCE = "0.2.0"
"""The release since which plans tell the same times: changed with the cost model, so that all are made anew."""

_SECTIONS = ("model", "optimizer", "data", "plan")
"""Of a configuration, what a plan depends on."""


class KeptRate(BaseModel):
    """What is kept of a plan: the time of a step, or why there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float | None
    mesh: str
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RateCache:
    """Times of steps on disk.

    Attributes:
        folder: where; None to keep nothing.
    """

    folder: pathlib.Path | None

    def get(self, key: str) -> KeptRate | None:
        """What was kept under a key; a damaged file counts as none."""
        if self.folder is None or not (path := self.folder / f"{key}.json").exists():
            return None
        try:
            return KeptRate.model_validate(read_json(path))
        except (FileFormatError, pydantic.ValidationError):
            return None

    def put(self, key: str, rate: KeptRate) -> None:
        """Keeps it; what cannot be kept is planned again the next time, after a warning."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.folder / f"{key}.json", rate.model_dump_json())
        except (OSError, FileFormatError) as error:
            warnings.warn(f"The speed of a job is not kept for later runs: {error}", stacklevel=2)


def default_rate_cache() -> RateCache:
    """In the user's cache folder."""
    return RateCache(user_cache("rates"))


def planned_rates(
    config: str,
    overrides: Sequence[str],
    cluster: Cluster,
    footprints: Sequence[Footprint],
    interpolates: bool,
    cache: RateCache,
    say: Callable[[str], None],
) -> Rates:
    """The rates of a training configuration.

    Args:
        config, overrides: the configuration.
        cluster: all devices.
        footprints: what the job may run on.
        interpolates: plan only the least size that fits and the greatest, within a node and over nodes of each group,
            and interpolate the rest.
        cache: what was planned before.
        say: told of each plan that is made.

    Returns:
        A rate for each footprint on which the step fits.

    Raises:
        AutoshardError: the configuration cannot be read or planned for another reason than memory.
    """
    known = lambda footprint: _kept_or_planned(config, overrides, cluster, footprint, cache, say).step_s
    if not interpolates:
        return _rates((footprint, known(footprint)) for footprint in footprints)
    planned: dict[Footprint, float | None] = {}
    for line in _lines(footprints):
        for footprint in line:  # the least that fits
            planned[footprint] = known(footprint)
            if planned[footprint] is not None:
                planned[line[-1]] = known(line[-1])
                break
    return with_interpolated(_rates(planned.items()), footprints)


def _rates(steps: Iterable[tuple[Footprint, float | None]]) -> Rates:
    return Rates(tuple(Rate(at, 1.0 / step_s, Source.PLAN) for at, step_s in steps if step_s is not None))


def steps_of(config: str, overrides: Sequence[str]) -> int:
    """The number of the last step that a configuration names."""
    return load_config(config, overrides).train.steps


def _lines(footprints: Sequence[Footprint]) -> tuple[tuple[Footprint, ...], ...]:
    """Footprints between which may be interpolated, by size: those within a node of a group, and those of whole nodes.

    Footprints of several groups are alone.
    """
    lines: dict[object, list[Footprint]] = {}
    for footprint in footprints:
        part, *others = footprint.parts
        within = (part.group, None) if part.num_nodes == 1 else (part.group, part.devices_per_node)
        lines.setdefault(footprint if others else within, []).append(footprint)
    return tuple(tuple(sorted(own, key=lambda footprint: footprint.num_devices)) for own in lines.values())


def _kept_or_planned(
    config: str,
    overrides: Sequence[str],
    cluster: Cluster,
    footprint: Footprint,
    cache: RateCache,
    say: Callable[[str], None],
) -> KeptRate:
    part = cluster_of(footprint, cluster)
    settings = load_config(config, [*overrides, "plan.cluster=null", "devices=null"])
    key = _key(settings, part)
    kept = cache.get(key)
    if kept is None:
        kept = _planned(config, overrides, part)
        told = kept.why if kept.step_s is None else f"a step in {kept.step_s:.4g} s on {kept.mesh}"
        say(f"{pathlib.Path(config).name} on {footprint}: {told}")
        cache.put(key, kept)
    return kept


def _planned(config: str, overrides: Sequence[str], part: Cluster) -> KeptRate:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cluster.yaml"
        part.to_file(path)
        settings = load_config(config, [*overrides, f"plan.cluster={json.dumps(str(path))}", "devices=null"])
        try:
            plan = make_plan(settings, train_functions(settings))
        except (MemoryBudgetError, StageError) as error:
            what = "it does not fit" if isinstance(error, MemoryBudgetError) else "it has no plan"
            return KeptRate(step_s=None, mesh="", why=f"{what}: {str(error).partition('. ')[0]}")
    if isinstance(plan, Plan):
        return KeptRate(step_s=plan.estimate.step_s, mesh=", ".join(f"{name}={size}" for name, size in plan.axes))
    return KeptRate(step_s=plan.step_s, mesh="stages")


def _key(settings: TrainConfig, part: Cluster) -> str:
    """Of all that a plan depends on: the configuration without where it writes, the devices, and the cost model."""
    own = settings.model_dump(mode="json", include=set(_SECTIONS))
    devices = {name: value for name, value in part.to_dict().items() if name != "name"}
    text = json.dumps([_TIMES_SINCE, own, devices], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
