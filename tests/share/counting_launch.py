"""`autoshard launch` with workers that count steps of 20 ms, without JAX: its configuration is the number of steps."""

import argparse
import pathlib
import sys

from autoshard.launch.engines.local import LocalEngine
from autoshard.launch.launching import launch_run
from autoshard.launch.settings import LaunchSettings
from autoshard.launch.supervisor import Ending

WORKER = pathlib.Path(__file__).parents[1] / "launch" / "counting_worker.py"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps")
    parser.add_argument("output_dir", type=lambda text: pathlib.Path(text.removeprefix("train.output_dir=")))
    parser.add_argument("--workers")
    parser.add_argument("--engine")
    parser.add_argument("--devices-per-worker", type=int)
    given = parser.parse_args()
    if not given.steps.isdecimal():
        raise SystemExit(f"error: {given.steps} is no configuration")
    least, _, most = given.workers.partition(":")
    settings = LaunchSettings(
        run_dir=given.output_dir,
        least_workers=int(least),
        most_workers=int(most or least),
        devices_per_worker=given.devices_per_worker,
        arguments=(sys.executable, str(WORKER), given.steps),
        plans_ahead=False,
        has_standbys=False,
    )
    outcome = launch_run(settings, lambda: LocalEngine(settings.run_dir, settings.most_workers), print)
    raise SystemExit({Ending.FINISHED: 0, Ending.STOPPED: 130}.get(outcome.ending, 1))


if __name__ == "__main__":
    main()
