"""What the compiler is told, so that a program runs in the order that its plan assumes.

Built from the end, XLA:GPU's latency-hiding scheduler puts what only the update of the state needs last of all,
whatever the memory limit: products that make weight gradients, sums for biases. Each layer's activations and their
gradients would stay until then, in spite of gradient checkpointing (openxla/xla, pull requests 45753 and 45929), if
they were not ordered (`ordering.py`).
"""

from autoshard.compiler.schedule import Schedule
from autoshard.compiler.versions import jax_version
from autoshard.cost.collectives import COMBINED_BYTES

GPU_PLATFORMS = frozenset({"cuda", "rocm", "gpu"})
"""What JAX calls a GPU."""

TPU_PLATFORM = "tpu"
"""What it calls a TPU."""

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
"""Turns XLA:GPU's latency-hiding scheduler on."""

_ESTIMATOR = "xla_gpu_enable_analytical_sol_latency_estimator"
"""Has it estimate by the speed of light of the hardware; turns it on by default on Hopper and later."""

_MEMORY_LIMIT, _TEN_TIMES = "xla_gpu_memory_limit_slop_factor", 1000
"""How many percent XLA:GPU's scheduler, and its rematerialization, allow for temporary buffers of what they believe to
be left: 80 % of a device's memory, where they are not told another size, less arguments and results; 95 by default. A
plan may take 90 % of the memory, and its orders keep to that. Between the two XLA makes some values twice and schedules
for little memory: GPT-3 175B with 24 layers on data=256, tensor=4 of 1,024 H100, in a plan of 69.3 GB, replayed to 2.39
s in the fastest of all ways, and without the limit to 1.97 in one of them; 1.92 are predicted (jax 0.10.2, a script
that is not kept). The limit: OpenXLA, xla/service/gpu/gpu_hlo_schedule.cc, `GetSchedulerMemoryLimit`. What takes more
memory than the plan may is not taken (`execution/candidates.py`)."""

_ASYNC_EXCHANGES = "xla_tpu_enable_async_all_to_all"
"""Has XLA:TPU begin an all-to-all and end it later, with kernels between; by default kernels wait for it (libtpu
0.0.42.1). Sums that are exchanged are hidden so (`exchanged_sums.py`)."""

_OTHERS_LATENCY = "xla_lhs_loop_fusion_latency_multiplier"
"""By how much XLA:TPU's scheduler multiplies what it expects of kernels without a product, when it asks what a
collective is hidden behind. A gather is put into products alone, and one that has only other kernels between its begin
and its end runs by itself: so they count for nothing."""

_PRODUCTS_LATENCY = "xla_lhs_output_fusion_latency_multiplier"
_PRODUCTS_SHARE = 0.5
"""The same for products, a half. That scheduler expects a gather to use all four links of a chip, and gave each the one
product that it thought enough; plans count on one link (`docs/cost_model.md`). GPT of 2 layers on TPU v5e 4 x 4,
replayed: 90 ms as it is, 84 with a half; a quarter took the products of the gathers before, 86 ms."""

_JOINED_SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"
MOST_SCATTERED_BYTES = 2**20
"""Reduce-scatters are joined up to 1 MiB, such as those of biases, and not up to 30 MiB: what has been made would wait
for what is made later, and what waits for the one would wait for the other. GPT of 8 layers on 16 H100, simulated:
9 ms less of 76, with copies begun up to four products ahead."""

JOINED_GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
MOST_GATHERED_BYTES = 2**20
"""The same for all-gathers: of a GPT on 64 H100 a weight that is needed soon was joined with another's gradient, whose
sum comes later. With 6 GB it takes 58.7 ms so, and 60.1 with 30 MiB; a Llama 45.5 and 47.4 (the same plans, a script
that is not kept)."""

JOINED_REDUCTIONS = "xla_gpu_all_reduce_combine_threshold_bytes"
MOST_REDUCED_BYTES = 2**22
"""The same for all-reduces, up to 4 MiB, since each takes more latencies. A Llama on 64 H100, whose gradients are
scattered over some axes and then summed over others, takes 53.2 ms so, 53.7 to 53.8 with 1, 8 or 16 MiB, and 54.6 with
30; a GPT with cuDNN's attention, in the orders that bound its memory, 50.9 ms with 1 MiB and 54.3 with 30."""

JOINED_BY_XLA_BYTES = COMBINED_BYTES + 7
"""What these two options are by default (`kDefaultAllGatherCombineThreshold`, `kDefaultAllReduceCombineThreshold` in
xla/service/collective_utils.h); prices leave out the 7 bytes."""

PIPELINED_OTHERWISE_SINCE = (0, 11, 1)
"""The JAX since which XLA:GPU's options for pipelined collectives have other names, and modes for values."""

NEXT_ITERATION = "xla_gpu_enable_pipelined_reduce_scatter"
"""Has XLA:GPU reduce in a loop what the iteration before made and stacks, which it does by default (jax 0.10.2). What
each device has made of the gradients of one layer of a scan would be there while the gradients of the next are made,
beside those: of a scanned GPT of 8 layers on 16 H100 134 MB of 3.9 GB. Ways that take memory to spare do so: in its
fastest one that GPT replays to 66.0 ms so, and to 68.1 without. From `PIPELINED_OTHERWISE_SINCE` on it is left as it
is: what its other name does was not tried."""


def compiler_options(platform: str, schedule: Schedule) -> dict[str, bool | int | float] | None:
    """Compiler options by which devices of a `platform` get a schedule, as `jax.jit` takes them; None for none."""
    hides = schedule is Schedule.LATENCY_HIDING
    if platform == TPU_PLATFORM and hides:
        return {_ASYNC_EXCHANGES: True, _OTHERS_LATENCY: 0.0, _PRODUCTS_LATENCY: _PRODUCTS_SHARE}
    if platform not in GPU_PLATFORMS:
        return None
    options: dict[str, bool | int | float] = {_SCHEDULER: hides, _ESTIMATOR: hides, _MEMORY_LIMIT: _TEN_TIMES}
    if jax_version() < PIPELINED_OTHERWISE_SINCE:
        options[NEXT_ITERATION] = False
    if hides:
        options |= {
            _JOINED_SCATTERS: MOST_SCATTERED_BYTES,
            JOINED_GATHERS: MOST_GATHERED_BYTES,
            JOINED_REDUCTIONS: MOST_REDUCED_BYTES,
        }
    return options
