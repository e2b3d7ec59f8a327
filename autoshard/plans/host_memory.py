"""What a plan needs of the hosts to keep tensors in their memory, and what is said where they cannot give it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import get_args

from autoshard.cluster import Slice
from autoshard.compiler.backends import copies_from_hosts_in_turn
from autoshard.compiler.host_state import LEAST_BYTES
from autoshard.cost.host_copies import Offload
from autoshard.errors import ClusterError, ConfigError
from autoshard.planner.build import Formulation
from autoshard.planner.estimate import Estimate
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds


def asked_for(options: PlanOptions) -> str:
    """The option, for people."""
    return f"PlanOptions.offload={options.offload!r} (plan.offload)"


def is_offloading(options: PlanOptions) -> bool:
    """Whether anything may lie in the memory of the hosts.

    Raises:
      ConfigError: The option is none, or stands beside one that excludes it.
    """
    known = get_args(Offload)
    if options.offload is None:
        return False
    if options.offload not in known:
        raise ConfigError(
            f"PlanOptions.offload is one of {', '.join(map(repr, known))}, or None; received {options.offload!r}. "
            "Choose one."
        )
    if options.offload != "never" and options.adaptive:
        raise ConfigError(
            f"{asked_for(options)} and options.adaptive (stragglers.mode) exclude each other: shares that change while "
            "a step runs need everything on the devices. Leave one of them out."
        )
    return options.offload != "never"


def require_host_link(options: PlanOptions, hardware: Slice, cluster: str) -> None:
    """Refuses to offload to hosts of which nothing is told, and where the compiler brings all back at once.

    Raises:
      ConfigError: As in `is_offloading`.
      ClusterError: The cluster does not say how fast devices reach their hosts, or the devices are TPUs.
    """
    if not is_offloading(options):
        return
    if not copies_from_hosts_in_turn(hardware.device_type):
        raise ClusterError(
            f"{asked_for(options)} is not for TPUs: XLA:TPU copies from the host long before that is read, however it "
            f"is ordered, so that no memory would be saved; received {hardware.device_type.name}. Leave the option out."
        )
    if _has_link(hardware):
        return
    lacking = "no `host`" if hardware.host is None else "a `host` without `to_device`, the link to its devices"
    raise ClusterError(
        f"{asked_for(options)} needs to know how fast devices copy from the memory of their hosts; group "
        f"`{hardware.name}` of cluster `{cluster}` has {lacking}. Add one to the cluster file (version 4): "
        "`host: DGX-H100`, or its figures as in configs/clusters/h100x8_cpu.yaml; or leave the option out."
    )


def may_offload_instead(options: PlanOptions, hardware: Slice) -> bool:
    """Whether host memory can be tried where a program does not fit the devices: the option leaves that open, and hosts
    are described from which the compiler copies in turn."""
    is_open = options.offload is None and not options.adaptive
    return is_open and _has_link(hardware) and copies_from_hosts_in_turn(hardware.device_type)


def offloaded_instead(plan: ProgramPlan) -> ProgramPlan:
    """A plan that was made since none fits the devices' memory alone, with a warning that says so."""
    figures = plan.estimate
    held_bytes = sum(copy.held_bytes for copy in figures.host_copies)
    warning = (
        f"No plan was found that fits the memory of the devices alone: {amount(held_bytes)} of each lie in the memory "
        f"of its host, and {seconds(figures.host_exposed_s)} of the step wait for copies. To be told how much memory "
        'the devices would need, forbid it: PlanOptions(offload="never").'
    )
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


def _has_link(hardware: Slice) -> bool:
    """Whether the hosts are described with their links to the devices."""
    return hardware.host is not None and hardware.host.to_device is not None


def host_warnings(options: PlanOptions, f: Formulation, figures: Estimate) -> Iterator[str]:
    """What the user should know of a plan that may keep tensors in the memory of the hosts."""
    if not is_offloading(options):
        return
    may_state, may_activations = options.offload in ("state", "all"), options.offload in ("activations", "all")
    is_found = may_state and bool(f.updates) or may_activations and bool(f.all_residuals)
    if may_state and not is_found:
        yield (
            f"{asked_for(options)} found no state that could lie in host memory: that takes donated arguments "
            f"(donate_argnums) of {amount(LEAST_BYTES)} or more that pointwise operations of the update alone read, "
            "outside of loops, conditionals and nested jits."
        )
    if may_activations and not is_found:
        yield (
            f"{asked_for(options)} found no activation that could lie in host memory: that takes values of "
            f"{amount(LEAST_BYTES)} or more that are made outside of loops and read again many products later, under "
            "another name by nothing in between. Layers under jax.checkpoint have such inputs: plan a TrainStep with "
            'PlanOptions(remat="search"), or apply jax.checkpoint to the layers.'
        )
    host = f.mesh.host
    if host is None:
        return
    per_node = math.prod(level.size for axis in f.mesh.axes for level in axis.levels if level.link.level == 0)
    needed_bytes = per_node * sum(c.held_bytes for c in figures.host_copies)
    if needed_bytes > host.memory_bytes:
        yield (
            f"The plan keeps {amount(needed_bytes)} in the memory of each host, which has "
            f"{amount(host.memory_bytes)}: it will not run. Use more nodes, or shard the state further with pins."
        )
