"""Three elastic jobs share eight CPU devices of this machine: one arrives, one ends, one is killed.

    python benchmarks/share_demo.py [--steps 240] [--exponent 0.3]

`autoshard share --run` drives three runs of a tiny GPT with seeds of their own, on four workers of two devices in all.
Two begin together; the third arrives when the first has taken a third of its steps; the shortest ends; and the whole
process group of the longest, its supervisor first, is killed with SIGKILL when it has taken half of its steps. Before,
each trains undisturbed, on two workers. Compared are the losses of every step, and the logs are followed: no step
may be left out or counted twice. Writes results/share-demo.md and .json.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import yaml
from faults.injection import memory_folder
from faults.lineage import compared_losses, lineage
from faults.supervised import SupervisedRun

from autoshard.files import yaml_text
from autoshard.launch.events import Drained, Finished, GenerationStarted, Replanned, StepCommitted, read_events
from autoshard.launch.run_lock import holder_of
from autoshard.share.driver.driver_log import read_driver_events

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CLUSTER = ROOT / "configs" / "clusters" / "cpu4x2.yaml"
LIMIT_S = 3600.0
DISK_EVERY, MEMORY_EVERY = 20, 1


class Demo:
    """Three jobs and where they are."""

    def __init__(self, folder: pathlib.Path, steps: int, exponent: float):
        """Args:
        folder: for all that is written.
        steps: of the longest job.
        exponent: of the power law by which jobs are said to gain from devices.
        """
        self.folder, self.exponent = folder, exponent
        self.steps = {"long": steps, "short": steps // 3, "late": steps // 2}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for seed, name in enumerate(self.steps):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(self._config(name, seed)))

    def _config(self, name: str, seed: int) -> dict[str, object]:
        return {
            "model": {"name": "gpt", "preset": "tiny", "overrides": {"num_layers": 1, "context_length": 32}},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "warmup_steps": 5, "schedule": "cosine"},
            "data": {"name": "python_sources", "batch_size": 24, "sequence_length": 32, "seed": seed},
            "train": {
                "steps": self.steps[name],
                "log_every": 1,
                "seed": seed,
                "resume": True,
                "checkpoint_every": DISK_EVERY,
                "memory_every": MEMORY_EVERY,
                "output_dir": str(self.alone(name)),
            },
            "plan": {"work_limit": 1},
        }

    def alone(self, name: str) -> pathlib.Path:
        """The output folder of the undisturbed run."""
        return self.folder / "alone" / name

    def shared(self, name: str) -> pathlib.Path:
        """The output folder of the run that shares."""
        return self.folder / "shared" / name

    def write_jobs(self, names: list[str]) -> pathlib.Path:
        """The jobs file with these jobs."""
        rates = {f"cpu:{n}x2" if n > 1 else "cpu:2": 5.0 * n**self.exponent for n in (1, 2, 3, 4)}
        jobs = [
            {"name": name, "config": f"{name}.yaml", "steps": self.steps[name], "move_s": 10, "rates": rates}
            for name in names
        ]
        path = self.folder / "jobs.yaml"
        path.with_suffix(".new").write_text(yaml_text({"format": "autoshard-jobs", "version": 1, "jobs": jobs}))
        path.with_suffix(".new").rename(path)
        return path

    def step(self, name: str) -> int:
        """The newest step that the shared run has saved."""
        events = read_events(self.shared(name))
        return max((event.step for event in events if isinstance(event, StepCommitted)), default=0)

    def train_alone(self) -> None:
        """One after the other, on two workers each."""
        for name in self.steps:
            forget(self.alone(name))
            options = ("--workers", "2", "--devices-per-worker", "2", "--no-plan-ahead", "--no-standbys")
            run = SupervisedRun(self.folder / f"{name}.yaml", self.alone(name), options)
            run.start()
            ended = run.wait(lambda run=run: any(isinstance(e, Finished) for e in run.events), LIMIT_S)
            run.end()
            if not ended:
                raise SystemExit(f"The undisturbed run did not finish: see {self.alone(name)}")
            print(f"{name} undisturbed: done", flush=True)

    def train_shared(self) -> list[str]:
        """All three under the driver, disturbed; what was done to them."""
        for name in self.steps:
            forget(self.shared(name))
        jobs = self.write_jobs(["long", "short"])
        command = [sys.executable, "-m", "autoshard", "share", str(jobs), "--cluster", str(CLUSTER), "--run"]
        command += ["--devices-per-worker", "2", "--output-dir", str(self.folder / "shared"), "--payback", "600"]
        done: list[str] = []
        driver = subprocess.Popen(command, start_new_session=True)
        disturbing = threading.Thread(target=self._disturb, args=(done,), daemon=True)
        disturbing.start()
        try:
            driver.wait(LIMIT_S)
        finally:
            if driver.poll() is None:
                driver.terminate()
                driver.wait(60)
        if driver.returncode:
            raise SystemExit(f"The driver ended with status {driver.returncode}: see {self.folder / 'shared'}")
        return done

    def _disturb(self, done: list[str]) -> None:
        while self.step("short") < self.steps["short"] // 3:
            time.sleep(0.2)
        self.write_jobs(list(self.steps))
        done.append(f"{clock()}  `late` is added to the jobs file")
        while self.step("long") < self.steps["long"] // 2:
            time.sleep(0.05)
        workers = [e for e in read_events(self.shared("long")) if isinstance(e, GenerationStarted)][-1].workers
        supervisor = holder_of(self.shared("long"))
        if supervisor is None:
            return
        step = self.step("long")
        for pid in (supervisor, *(worker.pid for worker in workers)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        done.append(f"{clock()}  SIGKILL to the supervisor and {len(workers)} workers of `long`, at step {step}")


def forget(run_dir: pathlib.Path) -> None:
    """Removes what an earlier run left in the memory of this host."""
    shutil.rmtree(memory_folder(run_dir).parent, ignore_errors=True)


def clock() -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S")


def main() -> None:
    """Does it, and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--exponent", type=float, default=0.3)
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    folder = arguments.folder or pathlib.Path(tempfile.gettempdir()) / f"autoshard-share-demo-{os.getuid()}"
    demo = Demo(folder, arguments.steps, arguments.exponent)
    demo.train_alone()
    load = os.getloadavg()[0]
    done = demo.train_shared()
    rows, problems = [], []
    for name, steps in demo.steps.items():
        events = list(read_events(demo.shared(name)))
        losses = compared_losses(demo.shared(name), demo.alone(name))
        followed = lineage(events, steps, DISK_EVERY, MEMORY_EVERY)
        problems += [f"{name}: {problem}" for problem in (*losses.problems, *followed.problems)]
        sizes = [2 * len(event.workers) for event in events if isinstance(event, GenerationStarted)]
        rows.append(
            {
                "job": name,
                "steps": steps,
                "devices": sizes,
                "meshes": [event.mesh for event in events if isinstance(event, Replanned)],
                "drained": sum(isinstance(event, Drained) for event in events),
                "steps_taken_again": sum(followed.redone),
                "largest_difference": losses.largest_difference,
                "final_difference": losses.final_difference,
            }
        )
    log = [str(event) for event in read_driver_events(folder / "shared")]
    figures = {"load": load, "jobs": rows, "problems": problems, "disturbed": done, "log": log}
    (RESULTS / "share-demo.json").write_text(json.dumps(figures, indent=1) + "\n")
    (RESULTS / "share-demo.md").write_text(report(arguments.steps, load, rows, problems, done, log))
    print((RESULTS / "share-demo.md").read_text())
    if problems:
        raise SystemExit(1)


def report(
    steps: int, load: float, rows: list[dict[str, object]], problems: list[str], done: list[str], log: list[str]
) -> str:
    """The results in words."""
    lines = [
        "# Three elastic jobs share eight CPU devices",
        "",
        f"`python benchmarks/share_demo.py --steps {steps}`, on {os.cpu_count()} cores with a load of {load:.1f}.",
        "",
        "| job | steps | devices, generation by generation | steps taken again | largest difference of a loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        devices = ", ".join(map(str, row["devices"]))  # pyright: ignore[reportArgumentType]
        lines.append(
            f"| {row['job']} | {row['steps']} | {devices} | {row['steps_taken_again']} | "
            f"{row['largest_difference']:.1e} |"
        )
    lines += ["", "Differences are relative, of any step, from the undisturbed run on four devices."]
    lines += ["", "Problems: " + ("; ".join(problems) or "none: every step of every job is there once, and in turn.")]
    lines += ["", "What was done to them, and the driver's log:", "", "```text", *done, "", *log, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
