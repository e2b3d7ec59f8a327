"""The ways to schedule one program on GPUs, of which the fastest that fits the memory is taken."""

import enum

from autoshard.compiler.options import compiler_options
from autoshard.compiler.schedule import Schedule

_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""How many collectives XLA:GPU's latency-hiding scheduler keeps in flight at once; 1 by default."""
_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
"""The file from which the scheduler takes what instructions cost. Its name must end in `.pbtxt` if it is text: others
are read as binary, and ignored where they are not. XLA keeps what it has read: another profile needs another path.
"""


class Candidate(enum.Enum):
    """One way to schedule a program; the values are for people.

    None is the fastest for every program. XLA's scheduler believes in links of its own; with a profile written by the
    plan's cost model (`hlo/cost_profile.py`) it hides what the plan says can be hidden. Two collectives at once help
    where gathers and reductions are in flight together. The least memory is the first that fits.
    """

    LEAST_MEMORY = "least memory"
    XLA_COSTS = "latency hiding by XLA's costs"
    TWO_AT_ONCE = "latency hiding by XLA's costs, two collectives at once"
    PLAN_COSTS = "latency hiding by the plan's costs"


def candidate_options(platform: str, candidate: Candidate, profile: str | None = None) -> dict[str, bool | int | str]:
    """Compiler options for a candidate, as `jax.jit` takes them.

    Args:
      platform: What JAX calls the devices. candidate: Which.
      profile: The file with the plan's costs, for the one that uses them.
    """
    is_first = candidate is Candidate.LEAST_MEMORY
    schedule = Schedule.LEAST_MEMORY if is_first else Schedule.LATENCY_HIDING
    options: dict[str, bool | int | str] = {**(compiler_options(platform, schedule) or {})}
    if candidate is Candidate.TWO_AT_ONCE:
        options[_OVERLAP_LIMIT] = 2
    if candidate is Candidate.PLAN_COSTS:
        if profile is None:
            raise ValueError(f"`{candidate.value}` needs the file that holds these costs; received none.")
        options[_PROFILE] = profile
    return options
