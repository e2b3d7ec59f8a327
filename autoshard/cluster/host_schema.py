"""Figures of hosts as they stand in files: what cluster files and the catalogue share."""

from autoshard.cluster.device import Link
from autoshard.cluster.host import Host
from autoshard.cluster.schema import Number, Schema, Text, Whole


class HostFigures(Schema):
    """The host of a node, but for its link to the devices."""

    num_cpus: Whole
    """Cores of all processors."""
    memory_bytes: Whole
    source: Text
    """Where the figures come from."""
    memory_bandwidth_bytes_per_s: Number | None = None
    """Of all processors."""
    flops_per_s: Number | None = None
    """Of all cores, at float32."""

    def host(self, to_device: Link | None) -> Host:
        """The host, with that link."""
        rates = self.memory_bandwidth_bytes_per_s, self.flops_per_s
        return Host(self.num_cpus, self.memory_bytes, self.source, *rates, to_device)
