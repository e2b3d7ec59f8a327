"""The ways to schedule one program on GPUs, of which the fastest that fits the memory is taken."""

import enum

from autoshard.compiler.options import (
    JOINED_BY_XLA_BYTES,
    JOINED_GATHERS,
    JOINED_REDUCTIONS,
    NEXT_ITERATION,
    PIPELINED_OTHERWISE_SINCE,
    compiler_options,
)
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.versions import jax_version

_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""How many collectives XLA:GPU's latency-hiding scheduler keeps in flight at once; 1 by default."""
_TWO_IN_TURN = 1.5
"""What one of two equal collectives on one link takes in the mean from its begin to its end, as a multiple of its time:
one is sent at once, and one after the other. A Llama with attention in 16 blocks on 16 H100 took 52.4 ms with 1.0, 51.1
with 1.5 and 52.3 with 2.0; 54.7 with one collective at a time. Experts on 16 H100, planned on a mesh of 2 x 4 x 2
and gathered freely, took 10.2 ms with 1.0, 9.6 with 1.5; 10.4 with one at a time."""
_QUEUED = 16
"""How many may be in flight where each begins when the link is free for it. XLA:GPU's scheduler puts off to the very
begin what needs no other collective, such as the gathers of the first layers, unless so many are in flight; with few,
what is needed soon waits for what is not. On 64 H100 a Llama took 45.5 ms with eight, 44.6 with 16 and with 32, and a
GPT with 8 GB 65.9 with eight and 61.9 with 16 (two rounds, gathers joined up to 1 MiB; a script that is not kept)."""

_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
"""The file from which the scheduler takes what instructions cost. Its name must end in `.pbtxt` if it is text: others
are read as binary, and ignored where they are not. XLA keeps what it has read: another profile needs another path.
"""
_MERGED_PRODUCTS = "xla_gpu_dot_merger_threshold_mb"
"""Up to which size of results XLA:GPU makes one of several products of one value (`DotMerger`); 32 MiB by default. It
waits for all the weights to be gathered, has them copied beside each other, and its result taken apart: of programs
compiled for 16 H100s an encoder-decoder took 21.9 ms with it and 21.0 without, a ViT 8.23 and 8.14.
"""
_DOUBLE_BUFFERED = "xla_gpu_enable_while_loop_double_buffering"
"""Doubles the body of a loop, so that nothing is copied between iterations; off by default."""


_SPARED = 0.85
"""Of the budget. Without orders, the programs of `benchmarks/verify_matrix.py` that were tried need 3 to 97 % more."""


class Candidate(enum.Enum):
    """One way to schedule a program; the values are for people.

    None is the fastest for every program. XLA's scheduler believes in links of its own; with a profile written by
    the plan's cost model (`hlo/cost_profile.py`) it hides what the plan says can be hidden. The plan's orders bound the
    memory: a collective gets a few products to hide behind. Orders that follow the plan's own schedule give each what
    it needs, and let weights of checkpointed layers be gathered before the layer begins. Where there is memory to
    spare, weights need not be gathered again for the backward pass: orders of products and their sums alone have
    reductions run behind the products that follow, instead of all at the end, and leave the links to them. All orders
    hinder some fusions: without any a program can be faster still. The order of least memory stays for where nothing
    else fits.

    Each of these can have two collectives in flight. With one, the next begins only at the kernel after which the one
    before is waited for: while kernels take about as long as collectives, the link stands still for much of the time.
    The second queues behind the first: XLA:GPU runs collectives on one stream. This also helps behind loops that only
    compute, such as one over blocks of attention, within which nothing begins. Collectives of a loop, as over scanned
    layers, have little to hide behind within one iteration.

    Or as many as a schedule of the link wants: a program that was scheduled tells when each collective must begin for
    kernels to wait little, and is scheduled once more so (`hlo/queued_collectives.py`).
    """

    LEAST_MEMORY = "least memory"
    XLA_COSTS = "latency hiding by XLA's costs"
    TWO_AT_ONCE = "latency hiding by XLA's costs, two collectives at once"
    PLAN_COSTS = "latency hiding by the plan's costs"
    PLAN_COSTS_AT_ONCE = "latency hiding by the plan's costs, two collectives at once"
    PLAN_COSTS_QUEUED = "latency hiding by the plan's costs, collectives queued for the link"
    PIPELINED_LOOPS = "latency hiding by the plan's costs, collectives of loops pipelined"
    BY_TIME = "latency hiding by the plan's costs, in the order of the plan's own schedule"
    BY_TIME_AT_ONCE = f"{BY_TIME}, two collectives at once"
    BY_TIME_QUEUED = f"{BY_TIME}, collectives queued for the link"
    GATHERED_FREELY = "latency hiding by the plan's costs, gathers without the plan's orders"
    GATHERED_AT_ONCE = f"{GATHERED_FREELY}, two collectives at once"
    GATHERED_QUEUED = f"{GATHERED_FREELY}, collectives queued for the link"
    UNORDERED = "latency hiding by the plan's costs, without the plan's orders"
    UNORDERED_AT_ONCE = f"{UNORDERED}, two collectives at once"
    UNORDERED_QUEUED = f"{UNORDERED}, collectives queued for the link"

    @property
    def by_plan_costs(self) -> bool:
        """Whether XLA's scheduler is handed a profile of the plan's costs (`profile_option`)."""
        return self not in (Candidate.LEAST_MEMORY, Candidate.XLA_COSTS, Candidate.TWO_AT_ONCE)

    @property
    def is_two_at_once(self) -> bool:
        """Whether two collectives may be in flight."""
        return self is Candidate.TWO_AT_ONCE or (self.ordered_as is not self and not self.is_queued)

    @property
    def is_queued(self) -> bool:
        """Whether the profile has collectives begin when the link is free for them, as a schedule of the program of
        its orders that is the fastest so far tells."""
        match self:
            case (
                Candidate.PLAN_COSTS_QUEUED
                | Candidate.BY_TIME_QUEUED
                | Candidate.GATHERED_QUEUED
                | Candidate.UNORDERED_QUEUED
            ):
                return True
        return False

    @property
    def queueing(self) -> float:
        """How many times as long as by itself the profile has a collective take: two at once share a link, on which
        the one waits for the other."""
        return _TWO_IN_TURN if self.is_two_at_once else 1.0

    @property
    def is_bounded(self) -> bool:
        """Whether the program has the orders that bound its memory as the plan predicts: what is scheduled once more,
        to have more collectives in flight, takes more."""
        return self.ordered_as is self and self is not Candidate.BY_TIME and not self.keeps_gathers

    @property
    def keeps_gathers(self) -> bool:
        """Whether what is gathered may stay from the forward to the backward pass, which takes memory to spare."""
        return self.ordered_as in (Candidate.GATHERED_FREELY, Candidate.UNORDERED)

    @property
    def ordered_as(self) -> "Candidate":
        """The way whose orders its program has: its own, but for a program that is scheduled once more, to have more
        collectives in flight."""
        match self:
            case Candidate.PLAN_COSTS_AT_ONCE | Candidate.PLAN_COSTS_QUEUED:
                return Candidate.PLAN_COSTS
            case Candidate.BY_TIME_AT_ONCE | Candidate.BY_TIME_QUEUED:
                return Candidate.BY_TIME
            case Candidate.GATHERED_AT_ONCE | Candidate.GATHERED_QUEUED:
                return Candidate.GATHERED_FREELY
            case Candidate.UNORDERED_AT_ONCE | Candidate.UNORDERED_QUEUED:
                return Candidate.UNORDERED
        return self


def has_room(least_bytes: float, budget_bytes: float | None) -> bool:
    """Whether a device has so much more memory than a program needs that ways which need more (`keeps_gathers`) are
    worth compiling.

    Args:
      least_bytes: What the program needs in the orders that bound its memory.
      budget_bytes: Memory of a device; None for no limit.
    """
    return budget_bytes is None or least_bytes <= _SPARED * budget_bytes


def candidate_options(platform: str, candidate: Candidate) -> dict[str, bool | int | float | str]:
    """Compiler options for a candidate, as `jax.jit` takes them, but for the profile that some need.

    A program is lowered with the options of the plan's schedule, and JAX adds options up when it compiles: what is to
    be otherwise for a candidate must be said.

    `platform`: What JAX calls the devices.
    """
    is_first = candidate is Candidate.LEAST_MEMORY
    schedule = Schedule.LEAST_MEMORY if is_first else Schedule.LATENCY_HIDING
    options: dict[str, bool | int | float | str] = {**(compiler_options(platform, schedule) or {})}
    if NEXT_ITERATION in options and not candidate.ordered_as.is_bounded:
        options[NEXT_ITERATION] = True  # `jax.jit` was told otherwise
    if candidate.is_two_at_once:
        options[_OVERLAP_LIMIT] = 2
    if candidate.is_queued:
        options[_OVERLAP_LIMIT] = _QUEUED
    if candidate.ordered_as is Candidate.UNORDERED:
        options[_MERGED_PRODUCTS] = -1  # orders leave nothing to merge
        for joined in (JOINED_REDUCTIONS, JOINED_GATHERS):  # all come at the ends, the faster for being joined
            options[joined] = JOINED_BY_XLA_BYTES
    if candidate is Candidate.PIPELINED_LOOPS:
        options |= {**pipelined_collectives(), _DOUBLE_BUFFERED: True}
    return options


def pipelined_collectives() -> dict[str, bool | str]:
    """Options that have XLA:GPU gather for the next iteration of a loop in this one, and reduce what the last one made.

    All are among MaxText's flags for GPUs. XLA does the last by default, for reduce-scatters (`NEXT_ITERATION`).
    """
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    if jax_version() >= PIPELINED_OTHERWISE_SINCE:
        return {f"xla_gpu_pipeline_{one}": "COLLECTIVE_PIPELINING_MODE_ON" for one in collectives}
    return {f"xla_gpu_enable_pipelined_{one}": True for one in collectives}


def profile_option(path: str) -> dict[str, str]:
    """The compiler option by which XLA's scheduler reads what instructions cost from a file."""
    return {_PROFILE: path}
