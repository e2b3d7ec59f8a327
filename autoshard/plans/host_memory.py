"""What a plan needs of the hosts to keep state in their memory, and what is said where they cannot give it."""

import math
from collections.abc import Iterator

from autoshard.cluster import Slice
from autoshard.compiler.backends import copies_from_hosts_in_turn
from autoshard.compiler.host_state import LEAST_BYTES
from autoshard.errors import ClusterError, ConfigError
from autoshard.planner.build import Formulation
from autoshard.planner.estimate import Estimate
from autoshard.plans.options import PlanOptions
from autoshard.printing import amount

ASKED = 'PlanOptions.offload="state" (plan.offload)'


def offloads_state(options: PlanOptions) -> bool:
    """Whether state may lie in the memory of the hosts.

    Raises:
      ConfigError: The option is none, or stands beside one that excludes it.
    """
    if options.offload not in ("never", "state"):
        raise ConfigError(f'PlanOptions.offload is "never" or "state"; received {options.offload!r}. Choose one.')
    if options.offload == "state" and options.adaptive:
        raise ConfigError(
            f"{ASKED} and options.adaptive (stragglers.mode) exclude each other: shares that change while a step runs "
            "need all state on the devices. Leave one of them out."
        )
    return options.offload == "state"


def require_host_link(options: PlanOptions, hardware: Slice, cluster: str) -> None:
    """Refuses to offload to hosts of which nothing is told, and where the compiler brings all back at once.

    Raises:
      ConfigError: As in `offloads_state`.
      ClusterError: The cluster does not say how fast devices reach their hosts, or the devices are TPUs.
    """
    if not offloads_state(options):
        return
    if not copies_from_hosts_in_turn(hardware.device_type):
        raise ClusterError(
            f"{ASKED} is not for TPUs: XLA:TPU copies state from the host long before its update, however it is "
            f"ordered, so that no memory would be saved; received {hardware.device_type.name}. Leave the option out."
        )
    if hardware.host is not None and hardware.host.to_device is not None:
        return
    lacking = "no `host`" if hardware.host is None else "a `host` without `to_device`, the link to its devices"
    raise ClusterError(
        f"{ASKED} needs to know how fast devices copy from the memory of their hosts; group `{hardware.name}` of "
        f"cluster `{cluster}` has {lacking}. Add one to the cluster file (version 4): `host: DGX-H100`, or its figures "
        "as in configs/clusters/h100x8_cpu.yaml; or leave the option out."
    )


def host_warnings(options: PlanOptions, f: Formulation, figures: Estimate) -> Iterator[str]:
    """What the user should know of a plan that may keep state in the memory of the hosts."""
    if not offloads_state(options):
        return
    if not f.updates:
        yield (
            f"{ASKED} found no state that could lie in host memory: that takes donated arguments (donate_argnums) of "
            f"{amount(LEAST_BYTES)} or more that pointwise operations of the update alone read, outside of loops, "
            "conditionals and nested jits."
        )
    host = f.mesh.host
    if host is None:
        return
    per_node = math.prod(level.size for axis in f.mesh.axes for level in axis.levels if level.link.level == 0)
    needed_bytes = per_node * sum(c.wire_bytes for c in figures.host_copies) / 2
    if needed_bytes > host.memory_bytes:
        yield (
            f"The plan keeps {amount(needed_bytes)} of state in the memory of each host, which has "
            f"{amount(host.memory_bytes)}: it will not run. Use more nodes, or shard the state further with pins."
        )
