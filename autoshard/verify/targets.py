"""The kinds of devices that a plan can be compiled for while they are not there, by name."""

import dataclasses

from autoshard.errors import VerificationError
from autoshard.plans.program_plan import ProgramPlan
from autoshard.verify.gpus import GPUS, TOO_OLD, GpuTarget
from autoshard.verify.tpus import TPUS, TpuTarget


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTarget:
    """The CPU, which JAX can always compile for."""

    name: str = "CPU-generic"
    aliases: tuple[str, ...] = ("cpu",)


Target = GpuTarget | TpuTarget | CpuTarget
TARGETS: tuple[Target, ...] = (*GPUS, *TPUS, CpuTarget())


def target_named(name: str) -> Target:
    """The target of a name such as `h100`, `tpu-v5e`, `cpu`, or a device type of the catalogue such as `H100-SXM`.

    Raises:
      VerificationError: The compilers know none of that name.
    """
    wanted = name.strip().lower()
    for target in TARGETS:
        if wanted in (target.name.lower(), *target.aliases):
            return target
    known = ", ".join(t.aliases[0] for t in TARGETS)
    if any(old.lower().startswith(wanted) for old in TOO_OLD) and wanted:
        raise VerificationError(
            f"A plan is compiled for devices that XLA's compilers know; CUDA 13 has dropped {name}, whose compute "
            f"capability is below 7.5. Name another target: {known}."
        )
    raise VerificationError(
        f"A plan is compiled for devices that XLA's compilers know; {name!r} is none of them. Name a target with "
        f"--target (`target=` in code): {known}."
    )


def target_of(plan: ProgramPlan) -> Target:
    """The target that a plan was made for.

    Raises:
      VerificationError: The compilers do not know it, such as a device type of the user's own.
    """
    return target_named(plan.device)
