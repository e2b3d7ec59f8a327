"""PaddlePaddle's cluster JSON: the schema of `paddle.distributed.auto_parallel`'s `Cluster.build_from_file`.

What is made of it:

- Devices of the types GPU, XPU and DCU become the cluster. CPUs do so only if no machine has such an accelerator;
  NICs never do.
- Machines with equal devices and equal links between them form one node group, in order of first appearance; a
  machine with two device models counts as a node of two groups.
- `sp_gflops`, `dp_gflops` and `hp_gflops` are the peaks of float32, of float64, and of float16 and bfloat16; a zero
  stands for a figure that is not known. `memory` is in units of 1e9 bytes.
- The schema has no memory bandwidth and no launch overhead. They come from the catalogue where it knows the model,
  and otherwise are 144e9 bytes/s (the rate at which PaddlePaddle's cost model prices a copy) and 3.8e-6 s.
- A link holds both ways, and of two entries for one pair the slower counts. `bandwidth` is in 1e9 bytes/s one way.
  Its latency is `latency` (milliseconds), plus PaddlePaddle's ring latency for its place (`alpha_latency`: `intra` or
  `inter`, a number of microseconds or a link type; without it, by the link's own type: 3.4 for NVLink, 9.6 for a
  network, 5.7 for all others), plus `hop` times `alpha_latency.switch` (10 microseconds).
- A pair without a link gets what PaddlePaddle gives it: 24e9 bytes/s, through PCIe inside a machine and through the
  network, with one hop, between machines.
- Each place (inside the nodes of a group, between them, between groups) gets the least bandwidth and the greatest
  latency of its pairs, since the slowest pair rules a collective.
- Not used: `alpha_latency.base` and the `tree` figures, host names, addresses, ports, links of a device to itself or
  to devices that are left out.

Keys that the schema does not have are skipped, unless they look like a misspelt key that is missing.
"""

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Iterable

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.checks import require_number, require_whole
from autoshard.cluster.device import DeviceType
from autoshard.cluster.fields import Fields, suggestion
from autoshard.cluster.grouping import PairSpeed, PlacedDevice, grouped_cluster
from autoshard.cluster.node_group import Made, Make
from autoshard.errors import ClusterError, FileFormatError
from autoshard.files import read_json

_ACCELERATORS = ("GPU", "XPU", "DCU")
_DEVICE_KINDS = (*_ACCELERATORS, "CPU", "NIC")
_LINK_KINDS = ("LOC", "SYS", "PHB", "PIX", "PIB", "NVL", "NVB", "NET")

_MACHINE_KEYS = ("hostname", "addr", "port", "devices", "links")
_DEVICE_KEYS = (
    *("global_id", "local_id", "type", "model", "memory", "sp_gflops", "dp_gflops", "hp_gflops"),
    *("arch", "vendor"),
)
_LINK_KEYS = ("source_global_id", "target_global_id", "type", "bandwidth", "latency", "hop")

_DEFAULT_BANDWIDTH_BYTES_PER_S = 24e9
_DEFAULT_MEMORY_BANDWIDTH_BYTES_PER_S = 144e9
_DEFAULT_LAUNCH_OVERHEAD_S = 3.8e-6
_DEFAULT_SWITCH_US = 10.0
_RING_US = {kind: 5.7 for kind in _LINK_KINDS} | {"NVL": 3.4, "NVB": 3.4, "NET": 9.6}

_LINK_SOURCE = "PaddlePaddle cluster file, with PaddlePaddle's defaults for what it lacks"


@dataclasses.dataclass(frozen=True, slots=True)
class _Alpha:
    """The file's latencies of a ring's hop, in microseconds; None where the link's own type decides."""

    intra_us: float | None
    inter_us: float | None
    switch_us: float

    def latency_s(self, *, same_machine: bool, kind: str, latency_ms: float, hop: float) -> float:
        ring_us = self.intra_us if same_machine else self.inter_us
        return latency_ms * 1e-3 + ((_RING_US[kind] if ring_us is None else ring_us) + hop * self.switch_us) * 1e-6

    def default(self, *, same_machine: bool) -> PairSpeed:
        kind, hop = ("PHB", 0) if same_machine else ("NET", 1)
        latency_s = self.latency_s(same_machine=same_machine, kind=kind, latency_ms=0, hop=hop)
        return PairSpeed(latency_s, _DEFAULT_BANDWIDTH_BYTES_PER_S)


def read_paddle_json(path: str | os.PathLike[str], make: Make[Made]) -> Made:
    """Reads PaddlePaddle's cluster JSON, as the module docstring tells.

    Args:
      path: The file; its name without the ending becomes the cluster's name.
      make: What to make of name, groups and the link between them.

    Raises:
      FileFormatError: If the file cannot be read or does not have the schema.
      ClusterError: If its values are out of range or contradict each other.
    """
    shown = os.fsdecode(path)
    data = read_json(path)
    try:
        return _cluster(Fields.of(shown, data), pathlib.Path(shown).stem, make)
    except ClusterError as error:
        raise ClusterError(f"{shown}: {error}") from error


def _cluster(root: Fields, name: str, make: Make[Made]) -> Made:
    _refuse_misspelt(root, ("alpha_latency", "machines"))
    alpha = _alpha(root.fields("alpha_latency"))
    root.required("machines")
    machines = []
    for index, item in enumerate(root.items("machines")):
        machine = Fields.of(f"{root.place}: machines[{index}]", item)
        _refuse_misspelt(machine, _MACHINE_KEYS)
        machines.append(machine)
    listed = [
        (index, Fields.of(f"{machine.place}.devices[{position}]", item))
        for index, machine in enumerate(machines)
        for position, item in enumerate(machine.items("devices"))
    ]
    devices = _devices(listed)
    pairs = _pairs(machines, _machine_of_id(listed), alpha)
    return grouped_cluster(
        name,
        devices,
        pairs,
        default_inside=alpha.default(same_machine=True),
        default_across=alpha.default(same_machine=False),
        source=_LINK_SOURCE,
        make=make,
    )


def _refuse_misspelt(fields: Fields, known: Iterable[str]) -> None:
    missing = [key for key in known if key not in fields.values]
    for key in fields.values:
        if key not in known and (close := difflib.get_close_matches(key[:80], missing, n=1, cutoff=0.8)):
            raise FileFormatError(f"{fields.place} has the unknown key {key!r:.80}. Did you mean {close[0]!r}?")


def _choice(fields: Fields, key: str, choices: tuple[str, ...]) -> str:
    value = fields.text(key)
    if value not in choices:
        raise FileFormatError(
            f"{fields.place}.{key} must be one of {', '.join(choices)}; received {value!r:.60}."
            f"{suggestion(value, choices)}"
        )
    return value


def _alpha(fields: Fields) -> _Alpha:
    _refuse_misspelt(fields, ("base", "intra", "inter", "switch"))
    rings: list[float | None] = []
    for place in ("intra", "inter"):
        figures = fields.fields(place)
        if "ring" not in figures.values:
            rings.append(None)
        elif isinstance(figures.values["ring"], str):
            rings.append(_RING_US[_choice(figures, "ring", _LINK_KINDS)])
        else:
            rings.append(require_number("alpha_latency", f"{place}.ring", figures.number("ring"), zero_allowed=True))
    switch_us = require_number(
        "alpha_latency", "switch", fields.number("switch", _DEFAULT_SWITCH_US), zero_allowed=True
    )
    return _Alpha(rings[0], rings[1], switch_us)


def _machine_of_id(listed: list[tuple[int, Fields]]) -> dict[int, int]:
    result: dict[int, int] = {}
    for machine, fields in listed:
        _refuse_misspelt(fields, _DEVICE_KEYS)
        global_id = fields.whole("global_id")
        if global_id in result:
            raise FileFormatError(f"{fields.place}: each global_id may be given once; {global_id} is given twice.")
        result[global_id] = machine
    return result


def _devices(listed: list[tuple[int, Fields]]) -> list[PlacedDevice]:
    """The devices that become the cluster, in the order of the file."""
    kinds = [_choice(fields, "type", _DEVICE_KINDS) for _, fields in listed]
    wanted = _ACCELERATORS if any(kind in _ACCELERATORS for kind in kinds) else ("CPU",)
    variants: dict[str, list[DeviceType]] = {}
    devices = []
    for (machine, fields), kind in zip(listed, kinds, strict=True):
        if kind in wanted:
            devices.append(
                PlacedDevice(fields.whole("global_id"), machine, _named_once(_device_type(fields, kind), variants))
            )
    return devices


def _device_type(fields: Fields, kind: str) -> DeviceType:
    model = fields.text("model") if "model" in fields.values else kind
    known = catalogue().known_device(model)
    owner = f"device type {model!r:.80}"
    peaks = {"float32": require_number(owner, "sp_gflops", fields.number("sp_gflops")) * 1e9}
    for key, dtypes in (("dp_gflops", ("float64",)), ("hp_gflops", ("float16", "bfloat16"))):
        if rate := require_number(owner, key, fields.number(key, 0.0), zero_allowed=True):
            peaks |= {dtype: rate * 1e9 for dtype in dtypes}
    if known:
        bandwidth, launch = known.device_type.memory_bandwidth_bytes_per_s, known.device_type.launch_overhead_s
        rest = f"autoshard's catalogue, {known.device_type.name}"
    else:
        bandwidth, launch = _DEFAULT_MEMORY_BANDWIDTH_BYTES_PER_S, _DEFAULT_LAUNCH_OVERHEAD_S
        rest = "defaults of autoshard.cluster.paddle"
    memory = require_number(owner, "memory", fields.number("memory"))
    memory_bytes = require_number(owner, "memory x 1e9", memory * 1e9)
    return DeviceType(
        name=model,
        peak_flops_per_s=tuple(peaks.items()),
        memory_bytes=round(memory_bytes),
        memory_bandwidth_bytes_per_s=bandwidth,
        launch_overhead_s=launch,
        source=f"Peaks, Memory: PaddlePaddle cluster file. Memory bandwidth, Launch: {rest}.",
    )


def _named_once(device_type: DeviceType, variants: dict[str, list[DeviceType]]) -> DeviceType:
    """Gives a model that comes with several sets of figures a name for each: `V100`, `V100 #2`, ..."""
    known = variants.setdefault(device_type.name, [])
    for variant in known:
        if dataclasses.replace(device_type, name=variant.name) == variant:
            return variant
    known.append(
        dataclasses.replace(device_type, name=f"{device_type.name} #{len(known) + 1}") if known else device_type
    )
    return known[-1]


def _pairs(machines: list[Fields], machine_of: dict[int, int], alpha: _Alpha) -> dict[tuple[int, int], PairSpeed]:
    """The speed of each pair of global ids (the lesser first) that has a link."""
    pairs: dict[tuple[int, int], PairSpeed] = {}
    for machine in machines:
        for index, item in enumerate(machine.items("links")):
            fields = Fields.of(f"{machine.place}.links[{index}]", item)
            _refuse_misspelt(fields, _LINK_KEYS)
            ends = (fields.whole("source_global_id"), fields.whole("target_global_id"))
            for end in ends:
                if end not in machine_of:
                    raise FileFormatError(
                        f"{fields.place} must join listed devices; no device has the global_id {end}."
                    )
            same_machine = machine_of[ends[0]] == machine_of[ends[1]]
            latency_s = alpha.latency_s(
                same_machine=same_machine,
                kind=_choice(fields, "type", _LINK_KINDS),
                latency_ms=require_number(fields.place, "latency", fields.number("latency", 0.0), zero_allowed=True),
                hop=require_whole(fields.place, "hop", fields.number("hop", 0 if same_machine else 1), least=0),
            )
            bandwidth = require_number(fields.place, "bandwidth", fields.number("bandwidth"))
            speed = PairSpeed(latency_s, bandwidth * 1e9)
            pair = (min(ends), max(ends))
            pairs[pair] = speed.worst(pairs.get(pair, speed))
    return pairs
