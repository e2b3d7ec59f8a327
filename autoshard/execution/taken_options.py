"""Which compiler options a compiler takes: what hides collectives on TPUs is named by options of libtpu, which may have
others from version to version.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compiler.options import TPU_PLATFORM, compiler_options
from autoshard.compiler.schedule import Schedule

Options = Mapping[str, bool | int | float]


def options_on(mesh: Mesh, schedule: Schedule) -> dict[str, bool | int | float] | None:
    """Compiler options by which the devices of a mesh get a schedule, as `jax.jit` takes them; None for none.

    Only libtpu is asked whether it takes them.
    """
    platform = mesh.devices.flat[0].platform
    options = compiler_options(platform, schedule)
    return options if options is None or platform != TPU_PLATFORM else taken_options(options, mesh)


def taken_options(options: Options, mesh: Mesh) -> dict[str, bool | int | float]:
    """Those of the compiler options that the compiler for a mesh's devices takes; a warning names the others.

    It is asked by a program that makes a zero, which takes some milliseconds.
    """
    if not options or _takes(options, mesh) or not _takes({}, mesh):  # else the program itself tells what is wrong
        return dict(options)
    taken = {name: value for name, value in options.items() if _takes({name: value}, mesh)}
    refused = ", ".join(name for name in options if name not in taken)
    warnings.warn(
        f"XLA does not take {refused}, by which collectives are hidden behind computation: kernels may wait for more "
        "of them than the plan says. Plan with schedule=Schedule.LEAST_MEMORY to count none as hidden.",
        stacklevel=2,
    )
    return taken


def _takes(options: Options, mesh: Mesh) -> bool:
    zero = jax.jit(lambda: jnp.zeros(()), out_shardings=NamedSharding(mesh, PartitionSpec()))
    told: dict[str, Any] = dict(options)
    try:
        zero.lower().compile(compiler_options=told)
    except jax.errors.JaxRuntimeError:
        return False
    return True
