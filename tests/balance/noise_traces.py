"""Times of the same work on equal devices, by several kinds of noise: (steps, devices)."""

import itertools

import numpy as np

STEPS = 1000


def normal(rng: np.random.Generator, ways: int) -> np.ndarray:
    return np.exp(0.04 * rng.standard_normal((STEPS, ways)))


def spikes(rng: np.random.Generator, ways: int) -> np.ndarray:
    """One time in twenty is 1.5 to 4 times as long."""
    tall = np.where(rng.random((STEPS, ways)) < 0.05, rng.uniform(1.5, 4, (STEPS, ways)), 1)
    return np.exp(0.03 * rng.standard_normal((STEPS, ways))) * tall


def heavy_tailed(rng: np.random.Generator, ways: int) -> np.ndarray:
    return np.exp(0.04 * rng.standard_t(3, (STEPS, ways)))


def lasting(rng: np.random.Generator, ways: int) -> np.ndarray:
    """What a step adds fades by a fifth a step."""
    rows = list(itertools.accumulate(0.015 * rng.standard_normal((STEPS, ways)), lambda old, new: 0.8 * old + new))
    return np.exp(np.asarray(rows))


def shared(rng: np.random.Generator, ways: int) -> np.ndarray:
    """All devices become several times slower and faster together."""
    together = np.exp(np.cumsum(0.1 * rng.standard_normal((STEPS, 1)), axis=0))
    return together * np.exp(0.04 * rng.standard_normal((STEPS, ways)))


def late(rng: np.random.Generator, ways: int) -> np.ndarray:
    """Never early, sometimes late."""
    return 1 + rng.exponential(0.04, (STEPS, ways))


def very_noisy(rng: np.random.Generator, ways: int) -> np.ndarray:
    return np.exp(0.2 * rng.standard_normal((STEPS, ways)))
