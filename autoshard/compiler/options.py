"""What the compiler is told, so that the memory that a plan predicts is the memory that its program takes."""

from collections.abc import Mapping

GPU_PLATFORMS = frozenset({"cuda", "rocm", "gpu"})
"""What JAX calls a GPU."""

_IN_PROGRAM_ORDER: Mapping[str, bool] = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
"""Keeps XLA:GPU's schedule for least memory.

On Hopper and later XLA reorders that schedule to hide collectives (its latency-hiding scheduler, gated by this flag).
Built from the end, it puts the products that make weight gradients last of all, whatever the memory limit, so that each
layer's activations and their gradients stay until then, in spite of gradient checkpointing (openxla/xla, pull requests
45753 and 45929). What is lost is overlap: without it hardly any kernel runs between the begin and the end of a
collective (docs/cost_model.md tells how many), so that times add up, as plans assume by default.
"""


def compiler_options(platform: str) -> dict[str, bool] | None:
    """Compiler options for the devices of a `platform`, as `jax.jit` takes them; None for none.

    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true asks for that scheduler all the same, by XLA's source; this
    was not tried.
    """
    return dict(_IN_PROGRAM_ORDER) if platform in GPU_PLATFORMS else None
