"""Devices that are not there, for ahead-of-time compilation."""

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.errors import MissingExtraError, VerificationError
from autoshard.verify.cuda_plugin import PLUGINS, register
from autoshard.verify.gpus import COMPILER_OPTIONS, GpuTarget
from autoshard.verify.targets import CpuTarget, Target
from autoshard.verify.tpus import TpuTarget

_NODE = 8
"""Devices of a node, where a plan does not tell: those of an NVIDIA HGX board."""
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu else asks the metadata server of a Cloud TPU for, and waits; a topology's name tells the slice. The last
lets several processes compile at once, since none of them touches a TPU.
"""


def devices_for(
    target: Target, axes: Sequence[tuple[str, int]], devices_per_node: int | None, torus: Sequence[int] = ()
) -> Sequence[Any]:
    """As many devices of a kind as a mesh of `axes` (name, size) has, in its order; `torus`: the shape of their slice.

    Raises:
      MissingExtraError: The compiler of this kind is not installed.
      VerificationError: The compiler does not know such a slice, or this process has too few CPU devices.
    """
    num_devices = math.prod(size for _, size in axes)
    match target:
        case GpuTarget():
            return gpu_devices(target, num_devices, min(devices_per_node or _NODE, num_devices))
        case TpuTarget():
            return _tpu_devices(target, axes, num_devices, torus)
        case _:
            return _cpu_devices(num_devices)


def options_for(target: Target) -> dict[str, Any]:
    """The compiler options under which a plan is verified for a kind of devices."""
    return dict(COMPILER_OPTIONS) if isinstance(target, GpuTarget) else {}


def platform_of(target: Target) -> str:
    """What JAX calls the platform."""
    return {GpuTarget: "cuda", TpuTarget: "tpu", CpuTarget: "cpu"}[type(target)]


def gpu_devices(target: GpuTarget, num_devices: int, devices_per_node: int) -> Sequence[Any]:
    """GPUs that are not there, `devices_per_node` to a host.

    Raises:
      MissingExtraError: XLA:GPU is not installed.
      VerificationError: The devices do not fill the nodes, or XLA:GPU refuses.
    """
    if num_devices % devices_per_node:
        raise VerificationError(
            f"GPUs are compiled for by whole nodes; received {num_devices} devices, {devices_per_node} in each node."
        )
    if not any(map(_is_installed, PLUGINS)):
        raise MissingExtraError(
            f"Compiling for {target.name} needs XLA's GPU compiler (no GPU), which is not installed: "
            "pip install 'autoshard[verify-gpu]'"
        )
    topology = f"1x{num_devices // devices_per_node}x{devices_per_node}"
    describe = functools.partial(
        topologies.get_topology_desc, platform="cuda", topology_name="", topology=topology, target_config=target.text
    )
    try:
        try:
            return describe().devices
        except NotImplementedError:  # JAX has left the plugin out
            register()
            return describe().devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise VerificationError(f"XLA:GPU does not compile for {target.name} ({topology}): {_first(error)}") from error


def _tpu_devices(
    target: TpuTarget, axes: Sequence[tuple[str, int]], num_devices: int, torus: Sequence[int]
) -> Sequence[Any]:
    if not _is_installed("libtpu"):
        raise MissingExtraError(
            f"Compiling for {target.name} needs XLA's TPU compiler (no TPU), which is not installed: "
            "pip install 'autoshard[verify-tpu]'"
        )
    for key, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    name = (
        f"{target.generation}:{'x'.join(map(str, torus))}"
        if len(torus) == target.num_dims
        else target.topology(num_devices)
    )
    options = {"chip_config_name": target.chip_config} if target.chip_config else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        mesh = topologies.make_mesh(topology, tuple(n for _, n in axes), tuple(a for a, _ in axes))
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise VerificationError(
            f"XLA:TPU does not compile for {num_devices} x {target.name} as a slice {name}: {_first(error)} If it "
            "knows no such slice, plan for a number of chips that Google offers as one."
        ) from error
    return list(mesh.devices.flat)


def _cpu_devices(num_devices: int) -> Sequence[Any]:
    found = jax.devices("cpu")
    if len(found) < num_devices:
        raise VerificationError(
            f"Compiling for {num_devices} CPU devices needs as many in this process, which has {len(found)}. Before "
            f"JAX's first use: jax.config.update('jax_num_cpu_devices', {num_devices}); `autoshard verify` does so."
        )
    return found[:num_devices]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
