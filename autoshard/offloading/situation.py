"""What is placed on what: tables with their look-ups, the rest of the step, accelerators and hosts."""

import dataclasses
import math

from autoshard.cluster import Cluster, Host, Link, LogicalMesh, NodeGroup
from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ClusterError, ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class TableUse:
    """An embedding table and how a step uses it.

    Attributes:
      path: Of the parameter.
      num_rows: Its rows.
      row_bytes: Of a row of the parameter.
      state_bytes: Of a row of the parameter and of all that the optimizer keeps for it.
      num_ids: Rows that a step reads, over all devices, duplicates included.
      ids: How often each row is read.
      num_sums: Sums of these rows that a step makes, over all devices, to read nothing else of them; 0: the host cannot
        make them.
    """

    path: str
    num_rows: int
    row_bytes: int
    state_bytes: int
    num_ids: int
    ids: IdDistribution = IdDistribution()  # noqa: RUF009 - frozen
    num_sums: int = 0

    @property
    def size_bytes(self) -> int:
        """Of the table with the optimizer's state."""
        return self.num_rows * self.state_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class HostCut:
    """A value of the loss behind which the accelerators can go on, if the host has the rows that it is made of.

    Attributes:
      tables: Paths of the tables. params: Paths of the other parameters, which then live at the host.
      value_bytes: Of the value, over all devices; its gradient has as many.
      flops: Floating-point operations that make it. dtype: Its type.
      state_bytes: Of the other parameters and of all that the optimizer keeps for them.
    """

    tables: tuple[str, ...]
    params: tuple[str, ...]
    value_bytes: int
    flops: float
    dtype: str
    state_bytes: int

    @property
    def paths(self) -> frozenset[str]:
        """Of all its parameters."""
        return frozenset((*self.tables, *self.params))


@dataclasses.dataclass(frozen=True, slots=True)
class DenseWork:
    """The step without its tables, as it runs on all accelerators.

    Attributes:
      step_s: Its time.
      memory_bytes: What it needs on each device at its peak.
      flops: Floating-point operations of all devices.
    """

    step_s: float
    memory_bytes: float
    flops: float


@dataclasses.dataclass(frozen=True, slots=True)
class HostRates:
    """What one CPU does in a second; estimates, which a measurement should replace.

    Attributes:
      batch_s, table_s, worker_s: What the runtime's own thread takes for a batch, for each table in host memory, and
        for each worker: Python, copies to and from the devices, messages. Measured by `benchmarks/host_batches.py`.
      id_s: To find an id among those of a batch, or to add it to them.
      line_s: To read or write a cache line of 64 bytes at a random place: a latency of memory of about 100 ns, shared
        by the 10 lines that a core can wait for at once (Intel, Optimization Reference Manual, line fill buffers).
      flops_share: Of the peak, what the dense part reaches on CPUs.
      read_s: To read and parse an example, where the hosts of the accelerators do that; ahead of the step in any mode.
    """

    id_s: float = 20e-9
    line_s: float = 10e-9
    flops_share: float = 0.5
    read_s: float = 0.0
    batch_s: float = 0.8e-3
    table_s: float = 0.1e-3
    worker_s: float = 0.25e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """All that placements are priced by.

    Attributes:
      tables: To be placed.
      dense: The rest of the step.
      batch_size: Examples of a step.
      mesh: The accelerators, over one axis.
      num_nodes: Nodes that they are in.
      host: Of each node; its rates and its link are known.
      budget_bytes: Memory of each accelerator that may be used.
      host_budget_bytes: Memory of each host that may be used.
      rates: Of a CPU.
      between_nodes: The link between nodes; None for one node.
      updates_all_rows: Whether the update of a table on accelerators goes over all of its rows, as in a step that keeps
        it whole (`autoshard.HostTables`, `autoshard.plan`), or over those of the batch alone, as TorchRec's and
        `autoshard.tables.sparse_on_devices` do.
      cuts: Behind which accelerators may go on, in the order of the loss.
    """

    tables: tuple[TableUse, ...]
    dense: DenseWork
    batch_size: int
    mesh: LogicalMesh
    num_nodes: int
    host: Host
    budget_bytes: float
    host_budget_bytes: float
    rates: HostRates = HostRates()  # noqa: RUF009 - frozen
    between_nodes: Link | None = None
    updates_all_rows: bool = False
    cuts: tuple[HostCut, ...] = ()

    @property
    def num_devices(self) -> int:
        """Accelerators."""
        return self.mesh.num_devices

    @property
    def devices_per_node(self) -> int:
        """Accelerators of a host."""
        return self.num_devices // self.num_nodes

    @property
    def most_workers(self) -> int:
        """CPUs of a host that can serve tables; one for each accelerator is left to feed it."""
        return max(self.host.num_cpus - self.devices_per_node, 1)

    @property
    def reading_s(self) -> float:
        """To read and parse the examples of a step on the CPUs of a host, as if there were one."""
        return self.batch_size / self.num_nodes * self.rates.read_s

    @property
    def host_bytes_per_s(self) -> float:
        """Of the host's memory."""
        assert self.host.memory_bandwidth_bytes_per_s is not None
        return self.host.memory_bandwidth_bytes_per_s

    @property
    def host_flops_per_s(self) -> float:
        """What dense layers reach on all CPUs of a host."""
        assert self.host.flops_per_s is not None
        return self.host.flops_per_s * self.rates.flops_share

    @property
    def to_device(self) -> Link:
        """Between the host and each accelerator."""
        assert self.host.to_device is not None
        return self.host.to_device


HOST_RESERVE = 0.1
"""Share of the host's memory that is left to the system and to reading data."""


def situation(
    cluster: Cluster,
    tables: tuple[TableUse, ...],
    dense: DenseWork,
    batch_size: int,
    *,
    budget_bytes: float | None = None,
    rates: HostRates | None = None,
    updates_all_rows: bool = False,
    cuts: tuple[HostCut, ...] = (),
) -> Situation:
    """Tables and a step on a cluster with hosts.

    Args:
      cluster: Devices of one kind, whose hosts are described.
      tables, dense, batch_size: See `Situation`.
      budget_bytes: Of each accelerator; None for nine tenths of its memory.
      rates: Of a CPU; None for estimates.
      updates_all_rows, cuts: See `Situation`.

    Raises:
      ClusterError: There is no host, its rates or links are not known, or devices are of several kinds.
      ConfigError: There is no table.
    """
    if not tables:
        raise ConfigError("Tables are placed; the step has none. Plan it as it is.")
    group, host = described_host(cluster)
    part = cluster.slices()[0]
    memory_bytes = part.device_type.memory_bytes
    return Situation(
        tables,
        dense,
        batch_size,
        part.logical_mesh({"data": part.num_devices}),
        group.num_nodes,
        host,
        0.9 * memory_bytes if budget_bytes is None else min(budget_bytes, memory_bytes),
        (1 - HOST_RESERVE) * host.memory_bytes,
        rates or HostRates(),
        group.inter_node if group.num_nodes > 1 else None,
        updates_all_rows,
        cuts,
    )


def described_host(cluster: Cluster) -> tuple[NodeGroup, Host]:
    """The only node group of a cluster and its host, whose rates and links are known.

    Raises:
      ClusterError: There is no host, its rates or links are not known, or there are several groups.
    """
    if len(cluster.groups) != 1:
        raise ClusterError(
            f"Tables are placed on devices of one kind in one node group; {cluster.name!r} has {len(cluster.groups)} "
            "groups. Plan for one of them."
        )
    (group,) = cluster.groups
    host = group.host
    needed = ("memory_bandwidth_bytes_per_s", "flops_per_s", "to_device")
    missing = ["host"] if host is None else [f"host.{name}" for name in needed if getattr(host, name) is None]
    if host is None or missing:
        raise ClusterError(
            f"Where tables live can only be decided for described hosts; node group {group.name!r} of "
            f"{cluster.name!r} lacks {', '.join(missing)}. Add it, as in configs/clusters/h100x8_cpu.yaml."
        )
    return group, host


def lines(size_bytes: float) -> int:
    """Cache lines of 64 bytes."""
    return math.ceil(size_bytes / 64)
