"""The catalogue of known device types, links and hosts, read from `catalogue.yaml` beside this file."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.device_schema import DeviceTypeSchema, LinkSchema
from autoshard.cluster.host import Host
from autoshard.cluster.host_schema import HostFigures
from autoshard.cluster.schema import Number, Schema, Text, Whole
from autoshard.errors import ClusterError
from autoshard.files import read_yaml
from autoshard.suggestions import suggestion

_PATH = pathlib.Path(__file__).with_name("catalogue.yaml")


class GpuDescription(Schema):
    """A GPU as XLA:GPU describes it (OpenXLA, `GpuDeviceInfoProto` in xla/stream_executor/device_description.proto)."""

    compute_capability: tuple[Whole, Whole]
    """Major and minor."""
    num_cores: Whole
    """Streaming multiprocessors."""
    fpus_per_core: Whole
    """FP32 units of a multiprocessor."""
    clock_ghz: Number
    """Boost clock."""
    reported_memory_bytes: Whole
    """Memory that a driver reports; the vendor's nominal figure is `DeviceType.memory_bytes`."""
    l2_cache_bytes: Whole
    shared_memory_per_core_bytes: Whole
    """Of a multiprocessor."""
    shared_memory_per_block_bytes: Whole
    """The most that a block may opt in to."""
    threads_per_core: Whole
    """Most threads that reside on a multiprocessor."""
    source: Text
    """Where the figures come from."""


class KnownTorus(Schema):
    """How chips of a kind are wired where they form a grid."""

    link: Text
    """Name of the link that is a ring along an axis that closes."""
    closes_at_multiples_of: Whole
    """Lengths of axes that close; of a grid with three axes, all must be such."""

    def wraps(self, shape: Sequence[int]) -> tuple[bool, ...]:
        """For each axis of a grid of this shape, whether it closes."""
        closes = tuple(size % self.closes_at_multiples_of == 0 for size in shape)
        return (all(closes),) * len(shape) if len(shape) > 2 else closes


@dataclasses.dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device type of the catalogue, with what `Cluster.detect` needs to know about it.

    Attributes:
      device_type: The device type.
      device_kinds: What `jax.Device.device_kind` reads for it; for a GPU, the first is CUDA's name.
      intra_node: Name of the link that usually joins such devices inside a node.
      inter_node: Name of the link that usually joins their nodes.
      to_host: Name of the link that joins one to the memory of its host; None where it is not known.
      gpu: What XLA:GPU must know to compile for it while it is not there; None where it cannot.
      torus: How its chips are wired where they tell their coordinates; None where they are behind switches.
    """

    device_type: DeviceType
    device_kinds: tuple[str, ...]
    intra_node: str
    inter_node: str
    to_host: str | None = None
    gpu: GpuDescription | None = None
    torus: KnownTorus | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Catalogue:
    """All known device types and links.

    Attributes:
      devices: The device types.
      links: The links by name; the level that each has here is 0, and `link` sets the right one.
      hosts: The hosts by name.
    """

    devices: tuple[KnownDevice, ...]
    links: tuple[tuple[str, Link], ...]
    hosts: tuple[tuple[str, Host], ...] = ()

    def device_type(self, name: str) -> DeviceType:
        """The device type called `name`.

        Raises:
          ClusterError: If there is none.
        """
        return self.device(name).device_type

    def device(self, name: str) -> KnownDevice:
        """The device whose type is called `name`; errors as of `device_type`."""
        for device in self.devices:
            if device.device_type.name == name:
                return device
        names = [device.device_type.name for device in self.devices]
        raise ClusterError(
            f"the catalogue has no device type {name!r:.80}.{suggestion(name, names)} It has {', '.join(names)}; "
            "describe any other under device_types in the cluster file."
        )

    def link(self, name: str, level: int) -> Link:
        """The link called `name`, at the given level.

        Raises:
          ClusterError: If there is none.
        """
        for known, link in self.links:
            if known == name:
                return dataclasses.replace(link, level=level)
        names = [known for known, _ in self.links]
        raise ClusterError(
            f"the catalogue has no link {name!r:.80}.{suggestion(name, names)} It has {', '.join(names)}; "
            "describe any other under links in the cluster file."
        )

    def host(self, name: str) -> Host:
        """The host called `name`.

        Raises:
          ClusterError: If there is none.
        """
        hosts = dict(self.hosts)
        if name not in hosts:
            raise ClusterError(
                f"the catalogue has no host {name!r:.80}.{suggestion(name, list(hosts))} It has {', '.join(hosts)}; "
                "describe any other in its place in the cluster file."
            )
        return hosts[name]

    def known_device(self, device_kind: str) -> KnownDevice | None:
        """The device that calls itself `device_kind`, or None."""
        for device in self.devices:
            if device_kind.strip().lower() in map(str.lower, device.device_kinds):
                return device
        return None


class _KnownDeviceSchema(DeviceTypeSchema):
    """A device type of the catalogue."""

    device_kinds: list[Text]
    intra_node: Text
    inter_node: Text
    to_host: Text | None = None
    gpu: GpuDescription | None = None
    torus: KnownTorus | None = None


class _KnownHostSchema(HostFigures):
    """A host of the catalogue."""

    to_device: Text


class _CatalogueSchema(Schema):
    """`catalogue.yaml`."""

    device_types: dict[str, _KnownDeviceSchema]
    links: dict[str, LinkSchema]
    hosts: dict[str, _KnownHostSchema]


@functools.cache
def catalogue() -> Catalogue:
    """The shipped catalogue."""
    read = _CatalogueSchema.read(read_yaml(_PATH), _PATH.name)
    return Catalogue(
        tuple(
            KnownDevice(
                own.device_type(name),
                tuple(own.device_kinds),
                own.intra_node,
                own.inter_node,
                own.to_host,
                own.gpu,
                own.torus,
            )
            for name, own in read.device_types.items()
        ),
        tuple((name, own.link(level=0)) for name, own in read.links.items()),
        tuple((name, own.host(read.links[own.to_device].link(level=0))) for name, own in read.hosts.items()),
    )
