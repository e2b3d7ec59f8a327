"""Which of its schedules the compiler is asked for."""

import enum


class Schedule(enum.Enum):
    """The order in which a compiled program runs its kernels and begins its collectives; the values are for people.

    XLA:GPU first makes the schedule that needs the least memory; its latency-hiding scheduler then moves collectives
    away from what waits for them, so that they run behind kernels. XLA:TPU always does so where the plan's orders let
    it. XLA:CPU has one schedule only.
    """

    LEAST_MEMORY = "least memory"
    LATENCY_HIDING = "latency hiding"
