"""How soon a slow device is named, and how often a usual one, by kinds of noise and by the certainty that is asked for.

    python benchmarks/stragglers_detection.py [--runs 15] [--certainties 14,9]

The detector (`autoshard/balance/detect.py`) is told times of 2 and of 8 devices. False alarms: runs of 1,000 steady
steps, with each of the seven kinds of noise of the tests (`tests/balance/noise_traces.py`) and with independent normal
noise of 10 %, in which any device is named; the last device is 5 % slower than the first at all times. Delays: steps
until one of equal devices that becomes 1.3 times slower after 120 steady steps is named, with normal noise of 4 and of
10 %.

Beside them what no test of these ratios can do better in the mean, when the noise is known: to be wrong in at most one
run of 20, the mean time between false alarms must be 20,000 steps or more, for which a change is found after
ln(20,000) / KL steps (Lorden 1971, "Procedures for reacting to a change in distribution"; the limit for rare false
alarms). KL, the mean log-likelihood ratio of one step, is (ln 1.3)^2 / (2 sigma^2), where sigma^2 is the variance of a
device's noise plus that of the mean of the others. Writes results/stragglers-detection.md.
"""

import argparse
import itertools
import math
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent / "tests" / "balance"))

from noise_traces import STEPS, heavy_tailed, lasting, late, normal, shared, spikes, very_noisy  # noqa: E402

from autoshard.balance.detect import Detector  # noqa: E402

WAYS, SLOWDOWN, BEFORE, AFTER = (2, 8), 1.3, 120, 60
ALARM_FREE_STEPS = 20_000


def ten_percent(rng: np.random.Generator, ways: int) -> np.ndarray:
    """Independent normal noise."""
    return np.exp(0.1 * rng.standard_normal((STEPS, ways)))


KINDS = (normal, spikes, heavy_tailed, lasting, shared, late, ten_percent, very_noisy)


def main() -> None:
    """Tries all, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--certainties", default="14,9")
    arguments = parser.parse_args()
    certainties = tuple(map(float, arguments.certainties.split(",")))
    columns = " | ".join(f"{c:g} nats" for c in certainties)
    text = f"""# How soon a slow device is named, and how often a usual one

`python benchmarks/stragglers_detection.py --runs {arguments.runs} --certainties {arguments.certainties}`

Runs of {STEPS} steady steps, of {arguments.runs}, in which any device is named:

| devices | noise | {columns} |
|{" --- |" * (2 + len(certainties))}
"""
    for ways, kind in itertools.product(WAYS, KINDS):
        alarms = [sum(has_alarm(kind, ways, seed, c) for seed in range(arguments.runs)) for c in certainties]
        line = f"| {ways} | {kind.__name__.replace('_', ' ')} | " + " | ".join(map(str, alarms)) + " |"
        print(line, flush=True)
        text += line + "\n"
    text += f"""
Steps until one of equal devices that becomes {SLOWDOWN} times slower is named: mean (least to most), and how often
within five, of {4 * arguments.runs} runs; and the least mean of any test with a mean time of {ALARM_FREE_STEPS:,} steps
between false alarms of a device, if it knew the noise.

| devices | noise | {columns} | possible |
|{" --- |" * (3 + len(certainties))}
"""
    for ways, noise in itertools.product(WAYS, (0.04, 0.1)):
        cells = [f"{ways}", f"{noise:.0%}"]
        for certainty in certainties:
            own = [delay(noise, ways, seed, certainty) for seed in range(4 * arguments.runs)]
            cells.append(f"{np.mean(own):.1f} ({min(own)} to {max(own)}), {np.mean(np.asarray(own) <= 5):.0%}")
        cells.append(f"{least_delay(noise, ways):.1f}")
        line = "| " + " | ".join(cells) + " |"
        print(line, flush=True)
        text += line + "\n"
    (ROOT / "results" / "stragglers-detection.md").write_text(text)


def has_alarm(kind, ways: int, seed: int, certainty: float) -> bool:
    """Whether any device is named in a run of steady steps."""
    known = Detector(certainty=certainty)
    for row in kind(np.random.default_rng((seed, ways)), ways) * np.linspace(1.0, 1.05, ways):
        known = known.then(row)
        if any(known.named):
            return True
    return False


def delay(noise: float, ways: int, seed: int, certainty: float) -> int:
    """Steps until the first device is named after it has become slow; one more than there are if it is not."""
    known, rng = Detector(certainty=certainty), np.random.default_rng((seed, ways, 1))
    for step, row in enumerate(np.exp(noise * rng.standard_normal((BEFORE + AFTER, ways)))):
        row[0] *= SLOWDOWN if step >= BEFORE else 1.0
        known = known.then(row)
        if step >= BEFORE and known.named[0]:
            return step - BEFORE + 1
    return AFTER + 1


def least_delay(noise: float, ways: int) -> float:
    """The least mean delay of any test, in steps; a step is the least."""
    divergence = math.log(SLOWDOWN) ** 2 / (2 * noise**2 * (1 + 1 / (ways - 1)))
    return max(1.0, math.log(ALARM_FREE_STEPS) / divergence)


if __name__ == "__main__":
    main()
