"""Whether a run has as many devices as the cluster file of its configuration describes."""

from autoshard.cluster import Cluster
from autoshard.errors import ConfigError


def check_devices(cluster_file: str | None, least: int, most: int, whose: str) -> None:
    """Looks before anything is planned, which may take long.

    Args:
        cluster_file: `plan.cluster` of the configuration.
        least, most: the devices that the run has, or may have.
        whose: what has them, for the message.

    Raises:
        ConfigError: they are not those that the file describes.
        FileFormatError, ClusterError: the file cannot be read.
    """
    if cluster_file is None:
        return
    described = Cluster.from_file(cluster_file).num_devices
    if not least == most == described:
        found = str(least) if least == most else f"{least} to {most}"
        raise ConfigError(
            f"plan.cluster: a run needs as many devices as its cluster file has; {cluster_file} describes {described}, "
            f"and {whose} {found}. Add plan.cluster=null to plan for the devices that are there, or change the number."
        )
