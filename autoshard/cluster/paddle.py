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
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import pydantic

from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.checks import require_number, require_whole
from autoshard.cluster.device import DeviceType
from autoshard.cluster.grouping import PairSpeed, PlacedDevice, grouped_cluster
from autoshard.cluster.node_group import ClusterDescription
from autoshard.cluster.schema import Number, Schema, Text, Whole, broken_rule
from autoshard.errors import FileFormatError
from autoshard.files import read_json
from autoshard.suggestions import suggestion

_ACCELERATORS = ("GPU", "XPU", "DCU")
_DEFAULT_BANDWIDTH_BYTES_PER_S = 24e9
_DEFAULT_MEMORY_BANDWIDTH_BYTES_PER_S = 144e9
_DEFAULT_LAUNCH_OVERHEAD_S = 3.8e-6
_RING_US = {
    **dict.fromkeys(("LOC", "SYS", "PHB", "PIX", "PIB"), 5.7),
    **dict.fromkeys(("NVL", "NVB"), 3.4),
    "NET": 9.6,
}
"""Latency of a hop of a ring over links of each type."""
_LinkKind = Literal["LOC", "SYS", "PHB", "PIX", "PIB", "NVL", "NVB", "NET"]

_LINK_SOURCE = "PaddlePaddle cluster file, with PaddlePaddle's defaults for what it lacks"


class _PaddleSchema(Schema):
    """Other keys are skipped, unless one looks like a misspelt key that is missing."""

    model_config = pydantic.ConfigDict(extra="ignore")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        fields = cls.model_fields
        for key in data if isinstance(data, dict) else ():
            missing = [name for name in fields if name not in data]
            if key not in fields and (close := suggestion(key, missing, cutoff=0.8)):
                raise broken_rule(f"has the unknown key {key!r:.80}.{close}")
        return data


class _Ring(_PaddleSchema):
    """Latency of a hop: a figure in microseconds, or the type of link whose latency it is."""

    ring: _LinkKind | Number | None = None

    def latency_us(self, place: str) -> float | None:
        """None where the type of each link decides."""
        if self.ring is None:
            return None
        if isinstance(self.ring, str):
            return _RING_US[self.ring]
        return require_number("alpha_latency", f"{place}.ring", self.ring, zero_allowed=True)


class _AlphaLatency(_PaddleSchema):
    """Latencies of collectives, in microseconds."""

    base: Any = None
    intra: _Ring = _Ring()
    inter: _Ring = _Ring()
    switch: Number = 10.0

    def latency_s(self, *, same_machine: bool, kind: str, latency_ms: float, hop: float) -> float:
        """Of one hop over a link of a kind; `hop` counts switches."""
        own_us = self.intra.latency_us("intra") if same_machine else self.inter.latency_us("inter")
        switch_us = require_number("alpha_latency", "switch", self.switch, zero_allowed=True)
        return latency_ms * 1e-3 + ((_RING_US[kind] if own_us is None else own_us) + hop * switch_us) * 1e-6

    def default(self, *, same_machine: bool) -> PairSpeed:
        """The speed of a pair without a link."""
        kind, hop = ("PHB", 0) if same_machine else ("NET", 1)
        latency_s = self.latency_s(same_machine=same_machine, kind=kind, latency_ms=0, hop=hop)
        return PairSpeed(latency_s, _DEFAULT_BANDWIDTH_BYTES_PER_S)


class _Device(_PaddleSchema):
    """A device. Figures of accelerators and CPUs; rates are in 1e9 operations per second."""

    global_id: Whole
    local_id: Any = None
    type: Literal["GPU", "XPU", "DCU", "CPU", "NIC"]
    model: Text | None = None
    memory: Number | None = None
    sp_gflops: Number | None = None
    dp_gflops: Number = 0.0
    hp_gflops: Number = 0.0
    arch: Any = None
    vendor: Any = None


class _Link(_PaddleSchema):
    """A link between two devices."""

    source_global_id: Whole
    target_global_id: Whole
    type: _LinkKind
    bandwidth: Number
    """In 1e9 bytes per second, one way."""
    latency: Number = 0.0
    """In milliseconds."""
    hop: Number | None = None


class _Machine(_PaddleSchema):
    hostname: Any = None
    addr: Any = None
    port: Any = None
    devices: list[_Device] = []
    links: list[_Link] = []


class _PaddleCluster(_PaddleSchema):
    alpha_latency: _AlphaLatency = _AlphaLatency()
    machines: list[_Machine]


def read_paddle_json(path: str | os.PathLike[str]) -> ClusterDescription:
    """Reads PaddlePaddle's cluster JSON, as the module docstring tells.

    Args:
      path: The file; its name without the ending becomes the cluster's name.

    Raises:
      FileFormatError: If the file cannot be read or does not have the schema.
      ClusterError: If its values are out of range.
    """
    place = os.fsdecode(path)
    found = _PaddleCluster.read(read_json(path), place)
    alpha = found.alpha_latency
    machine_of: dict[int, int] = {}
    for index, machine in enumerate(found.machines):
        for device in machine.devices:
            if device.global_id in machine_of:
                raise FileFormatError(f"{place}: each global_id may be given once; {device.global_id} is given twice.")
            machine_of[device.global_id] = index
    return grouped_cluster(
        pathlib.Path(place).stem,
        list(_placed_devices(found, place)),
        _pairs(found, machine_of, place),
        default_inside=alpha.default(same_machine=True),
        default_across=alpha.default(same_machine=False),
        source=_LINK_SOURCE,
    )


def _placed_devices(found: _PaddleCluster, place: str) -> Iterator[PlacedDevice]:
    """The devices that become the cluster, in the order of the file."""
    kinds = {device.type for machine in found.machines for device in machine.devices}
    wanted = _ACCELERATORS if kinds.intersection(_ACCELERATORS) else ("CPU",)
    variants: dict[str, list[DeviceType]] = {}
    for index, machine in enumerate(found.machines):
        for position, device in enumerate(machine.devices):
            if device.type in wanted:
                own = _device_type(device, f"{place}: machines[{index}].devices[{position}]")
                yield PlacedDevice(device.global_id, index, _named_once(own, variants))


def _device_type(device: _Device, place: str) -> DeviceType:
    for key in ("memory", "sp_gflops"):
        if getattr(device, key) is None:
            raise FileFormatError(f"{place} must have the key {key!r}, which is missing.")
    model = device.type if device.model is None else device.model
    known = catalogue().known_device(model)
    owner = f"device type {model!r:.80}"
    peaks = {"float32": require_number(owner, "sp_gflops", device.sp_gflops) * 1e9}
    for key, dtypes in (("dp_gflops", ("float64",)), ("hp_gflops", ("float16", "bfloat16"))):
        if rate := require_number(owner, key, getattr(device, key), zero_allowed=True):
            peaks |= {dtype: rate * 1e9 for dtype in dtypes}
    if known:
        bandwidth, launch = known.device_type.memory_bandwidth_bytes_per_s, known.device_type.launch_overhead_s
        rest = f"autoshard's catalogue, {known.device_type.name}"
    else:
        bandwidth, launch = _DEFAULT_MEMORY_BANDWIDTH_BYTES_PER_S, _DEFAULT_LAUNCH_OVERHEAD_S
        rest = "defaults of autoshard.cluster.paddle"
    memory = require_number(owner, "memory", device.memory)
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


def _pairs(found: _PaddleCluster, machine_of: dict[int, int], place: str) -> dict[tuple[int, int], PairSpeed]:
    """The speed of each pair of global ids (the lesser first) that has a link."""
    pairs: dict[tuple[int, int], PairSpeed] = {}
    for index, machine in enumerate(found.machines):
        for position, link in enumerate(machine.links):
            owner = f"machines[{index}].links[{position}]"
            ends = (link.source_global_id, link.target_global_id)
            for end in ends:
                if end not in machine_of:
                    raise FileFormatError(
                        f"{place}: {owner} must join listed devices; no device has the global_id {end}."
                    )
            same_machine = machine_of[ends[0]] == machine_of[ends[1]]
            hop = link.hop if link.hop is not None else 0 if same_machine else 1
            latency_s = found.alpha_latency.latency_s(
                same_machine=same_machine,
                kind=link.type,
                latency_ms=require_number(owner, "latency", link.latency, zero_allowed=True),
                hop=require_whole(owner, "hop", hop, least=0),
            )
            speed = PairSpeed(latency_s, require_number(owner, "bandwidth", link.bandwidth) * 1e9)
            pair = (min(ends), max(ends))
            pairs[pair] = speed.worst(pairs.get(pair, speed))
    return pairs
