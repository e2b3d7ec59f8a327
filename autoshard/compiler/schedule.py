"""Which of its schedules the compiler is asked for."""

import enum


class Schedule(enum.Enum):
    """The order in which a compiled program runs its kernels and begins its collectives; the values are for people.

    XLA:GPU first makes the schedule that needs the least memory; its latency-hiding scheduler then moves collectives
    away from what waits for them, so that they run behind kernels. Other backends have one schedule only.
    """

    LEAST_MEMORY = "least memory"
    LATENCY_HIDING = "latency hiding"
