"""What the compiler is told, so that a program runs in the order that its plan assumes.

Built from the end, XLA:GPU's latency-hiding scheduler puts what only the update of the state needs last of all,
whatever the memory limit: products that make weight gradients, sums for biases. Each layer's activations and their
gradients would stay until then, in spite of gradient checkpointing (openxla/xla, pull requests 45753 and 45929), if
they were not ordered (`ordering.py`).
"""

from autoshard.compiler.schedule import Schedule

GPU_PLATFORMS = frozenset({"cuda", "rocm", "gpu"})
"""What JAX calls a GPU."""

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
"""Turns XLA:GPU's latency-hiding scheduler on."""

_ESTIMATOR = "xla_gpu_enable_analytical_sol_latency_estimator"
"""Has it estimate by the speed of light of the hardware; turns it on by default on Hopper and later."""


_JOINED_BYTES = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_MOST_JOINED_BYTES = 2**20
"""Reduce-scatters are joined up to 1 MiB, such as those of biases, and not up to 30 MiB: what has been made would wait
for what is made later, and what waits for the one would wait for the other. GPT of 8 layers on 16 H100, simulated:
9 ms less of 76, with copies begun up to four products ahead."""


def compiler_options(platform: str, schedule: Schedule) -> dict[str, bool | int] | None:
    """Compiler options by which devices of a `platform` get a schedule, as `jax.jit` takes them; None for none."""
    if platform not in GPU_PLATFORMS:
        return None
    hides = schedule is Schedule.LATENCY_HIDING
    options: dict[str, bool | int] = {_SCHEDULER: hides, _ESTIMATOR: hides}
    return {**options, _JOINED_BYTES: _MOST_JOINED_BYTES} if hides else options
