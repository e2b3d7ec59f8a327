"""`autoshard.calibrate`: time every probe on the live devices, fit figures, and write them as a cluster file."""

import dataclasses
import datetime
import os
import statistics
from collections.abc import Callable, Iterator

import jax

from autoshard.calibration.figures import measured_cluster
from autoshard.calibration.pairs import are_alike, exchange, missing, pair_speeds, pairs_of
from autoshard.calibration.partial import Setting, Times, read_times, side_file, write_times
from autoshard.calibration.probes import ROW_BY_ROW, Measures, Probe, probes
from autoshard.calibration.programs import Program, program, typical_and_spread
from autoshard.cluster import Calibration, Cluster, PairSpeeds, Slice
from autoshard.errors import ClusterError, FileFormatError
from autoshard.interrupts import StopRequest, stop_on_signals

PASSES, REPEATS, TARGET_S = 3, 3, 0.03
"""How often all probes are gone through, how often each is then timed, and how long one timing takes. Passes, since the
machine may be disturbed for a while; what is typical is found over all of them."""
QUICK_PASSES, QUICK_TARGET_S = 1, 0.015
IDLE = "idle"
"""The name under which the loop without an operation is timed."""


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """How far a calibration is: timings made, of how many, and the probe that is next."""

    done: int
    total: int
    probe: str


@dataclasses.dataclass(frozen=True, slots=True)
class Calibrated:
    """The outcome of a calibration.

    Attributes:
      cluster: The devices with measured figures. before: With the figures that they had.
      seconds: The typical time of each probe that was timed, and its spread (range between the quartiles as a share).
    """

    cluster: Cluster
    before: Cluster
    seconds: tuple[tuple[Probe, float, float], ...]


def calibrate(
    out: str | os.PathLike[str],
    *,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    quick: bool = False,
    pairs: bool = False,
    on_progress: Callable[[CalibrationProgress], None] | None = None,
) -> Calibrated:
    """Measures the live devices and writes a cluster file with the measured figures.

    Takes a few minutes. While it runs, timings are kept in a file beside `out`; if it is stopped, the same call goes on
    from there. The file disappears once `out` is written.

    Args:
      out: The cluster file to write.
      cluster: What the devices are, with the figures that stand where nothing is measured; a `Cluster`, a cluster file,
        or None to recognise them by the catalogue.
      quick: Fewer sizes and repetitions: sooner, and less sure.
      pairs: Also measure every pair of devices, for plans to decide which device is where (`docs/guide_placement.md`).
        The file has them only if they differ.
      on_progress: Called as the work goes on.

    Returns:
      The cluster, and what was timed.

    Raises:
      ClusterError: If the devices are of no known kind or of several, if `cluster` describes another number of them, or
        if they belong to several processes.
      FileFormatError: If a file cannot be read or written, or the side file is damaged or belongs to something else.
      KeyboardInterrupt: If Ctrl-C stopped it; what was timed is kept.
    """
    before, hardware = _hardware(cluster)
    if pairs:
        _check_one_group(before)
    if os.path.isdir(out):
        raise FileFormatError(f"{os.fsdecode(out)}: the cluster file to write is a folder. Name a file in it.")
    devices = jax.devices()
    dtypes = _dtypes(hardware, devices[0].platform)
    setting = Setting(jax.__version__, devices[0].device_kind, len(devices), quick, dtypes)
    path = side_file(out)
    times = read_times(path, setting)
    write_times(path, setting, times)  # a folder that cannot be written to is known now, not in minutes
    wanted = probes(hardware, dtypes, quick)
    with stop_on_signals() as stop:
        for name, seconds in _timed(wanted, times, hardware, quick, stop, on_progress):
            times[name] = (*times.get(name, ()), *seconds)
            write_times(path, setting, times)
        for name, pair, size_bytes in missing(times, len(devices)) if pairs else ():
            if stop.requested:
                break
            if on_progress is not None:
                on_progress(CalibrationProgress(len(times), len(wanted) + 1 + len(pairs_of(len(devices))), name))
            times[name] = exchange(devices, pair, size_bytes).seconds(QUICK_TARGET_S, REPEATS)
            write_times(path, setting, times)
        if stop.requested:
            raise KeyboardInterrupt
    found = _summary(wanted, times)
    spread = round(statistics.median(spread for _, _, spread in found), 3)
    calibration = Calibration(datetime.date.today().isoformat(), jax.__version__, devices[0].device_kind, spread)
    after = measured_cluster(before, found, calibration)
    if pairs:
        speeds = pair_speeds(times, len(devices), calibration.date)
        after = after if are_alike(speeds) else _with_pairs(after, speeds)
    after.to_file(out)
    path.unlink(missing_ok=True)
    return Calibrated(after, before, found)


def _check_one_group(cluster: Cluster) -> None:
    if len(cluster.groups) != 1:
        raise ClusterError(
            f"pairs are measured of the devices of one node group; cluster {cluster.name!r} has {len(cluster.groups)}. "
            "Leave --pairs out, or calibrate each group alone."
        )


def _with_pairs(cluster: Cluster, speeds: PairSpeeds) -> Cluster:
    """A cluster of one group with the speeds of its devices, which take the place of all links."""
    own = dataclasses.replace(cluster.groups[0], pairs=speeds, tiers=(), rails=None, torus=None)
    return dataclasses.replace(cluster, groups=(own,))


def _hardware(cluster: Cluster | str | os.PathLike[str] | None) -> tuple[Cluster, Slice]:
    """The description of the live devices, and the one slice that they form."""
    if jax.process_count() > 1:
        raise ClusterError(
            f"calibration measures the devices of one process; this run has {jax.process_count()}. Calibrate one node "
            "alone, and copy its device type and intra_node link into the file of the whole cluster."
        )
    if cluster is None:
        cluster = Cluster.detect()
    elif not isinstance(cluster, Cluster):
        cluster = Cluster.from_file(cluster)
    slices = cluster.slices()
    if len(slices) != 1:
        kinds = ", ".join(f"{s.num_devices} x {s.device_type.name}" for s in slices)
        raise ClusterError(
            f"calibration measures devices of one kind; cluster {cluster.name!r} has {kinds}. Make only those of one "
            "kind visible, as with CUDA_VISIBLE_DEVICES."
        )
    if cluster.num_devices != jax.device_count():
        raise ClusterError(
            f"the cluster must describe the live devices: {cluster.name!r} has {cluster.num_devices}, and JAX sees "
            f"{jax.device_count()} ({jax.devices()[0].platform}). Pass the file of these devices, or none; on a CPU, "
            "--devices sets their number."
        )
    return cluster, slices[0]


def _dtypes(hardware: Slice, platform: str) -> tuple[str, ...]:
    """Dtypes of which products are measured: float32, and on accelerators the 16-bit ones that they are built for."""
    if platform == "cpu":
        return ("float32",)
    named = {dtype for dtype, _ in hardware.device_type.peak_flops_per_s}
    return ("float32", *(dtype for dtype in ("bfloat16", "float16") if dtype in named))


def _timed(
    wanted: tuple[Probe, ...],
    times: Times,
    hardware: Slice,
    quick: bool,
    stop: StopRequest,
    on_progress: Callable[[CalibrationProgress], None] | None,
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Goes through all probes, pass by pass, and leaves out what is in `times`; ends early if a stop is requested."""
    passes, target_s = (QUICK_PASSES, QUICK_TARGET_S) if quick else (PASSES, TARGET_S)
    listed = [(None, IDLE), *((probe, probe.name) for probe in wanted)]
    devices, done = jax.devices(), 0
    total = passes * len(listed)
    programs: dict[str, Program] = {}
    for turn in range(1, passes + 1):
        for probe, name in listed:
            if stop.requested:
                return
            done += 1
            if len(times.get(name, ())) >= turn * REPEATS:
                continue
            if on_progress is not None:
                on_progress(CalibrationProgress(done, total, name))
            if name not in programs:
                programs[name] = program(probe, hardware, devices)
            yield name, programs[name].seconds(target_s, REPEATS)


def _summary(wanted: tuple[Probe, ...], times: Times) -> tuple[tuple[Probe, float, float], ...]:
    """Typical time and spread of each probe, less what the loop takes without its operation.

    The idle loop has a kernel of hardly any work, which takes as long as a launch, in the place of the kernel that
    changes an element behind each operation. Loops over rows have none to subtract.
    """
    idle_s, _ = typical_and_spread(times[IDLE])
    alone = {probe: typical_and_spread(times[probe.name]) for probe in wanted}
    less = lambda seconds, more_s: max(seconds - more_s, 0.1 * seconds, 1e-9)
    launch_s = next(less(s, idle_s) for probe, (s, _) in alone.items() if probe.measures is Measures.LAUNCH)
    return tuple(
        (probe, less(seconds, max(idle_s - launch_s, 0.0) if probe.measures in ROW_BY_ROW else idle_s), spread)
        for probe, (seconds, spread) in alone.items()
    )
