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


def compiler_options(platform: str, schedule: Schedule) -> dict[str, bool] | None:
    """Compiler options by which devices of a `platform` get a schedule, as `jax.jit` takes them; None for none."""
    if platform not in GPU_PLATFORMS:
        return None
    hides = schedule is Schedule.LATENCY_HIDING
    return {_SCHEDULER: hides, _ESTIMATOR: hides}
