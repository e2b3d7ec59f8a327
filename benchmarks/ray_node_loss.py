"""A run on a Ray cluster of three nodes of this machine, of which one is killed: the run goes on with two.

    python benchmarks/ray_node_loss.py

Prints when what happened, in seconds since the kill. Exits with status 1 if the run does not end well, or a step is
missing. A killed node is a raylet with all of its processes, killed at once; the third node does not come back.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "launch"))
from ray_nodes import kill_node, three_nodes  # noqa: E402

from autoshard.files import yaml_text  # noqa: E402

LIMIT_S = 600
KILL_AT_STEP = 60
CONFIG = {
    "model": {"name": "dlrm"},
    "optimizer": {"name": "sgd", "schedule": "constant", "learning_rate": 0.05},
    "data": {"batch_size": 12},
    "plan": {"time_limit_s": 5},
    "train": {"steps": 600, "log_every": 1, "checkpoint_every": 20},
}
SHOWN = {
    "worker_lost": lambda e: f"worker {e['rank']} at step {e['step']}: {e['cause']}",
    "generation_started": lambda e: f"{e['generation']} with {len(e['workers'])} workers",
    "replanned": lambda e: f"{e['mesh']}, {e['seconds']:.2f} s, {'known before' if e['from_cache'] else 'new'}",
    "restored": lambda e: f"step {e['step']} from {e['source']}, {e['seconds']:.2f} s",
    "finished": lambda e: f"step {e['step']}, loss {e['loss']:.4f}",
    "run_failed": lambda e: e["error"],
}


def lines_of(path: pathlib.Path) -> list[dict]:
    """The whole lines of a JSON-lines file, if it is there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-node-loss-"))
    run_dir = folder / "run"
    (folder / "config.yaml").write_text(yaml_text(CONFIG | {"train": {**CONFIG["train"], "output_dir": str(run_dir)}}))
    arguments = ["launch", str(folder / "config.yaml"), "--engine", "ray", "--workers", "2:3"]
    with three_nodes() as (address, nodes):
        run = subprocess.Popen(
            [sys.executable, "-m", "autoshard", *arguments, "--devices-per-worker", "1"],
            env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
            stdout=subprocess.DEVNULL,
        )
        killed_s = None
        end_s = time.time() + LIMIT_S
        while run.poll() is None and time.time() < end_s:
            time.sleep(0.02)
            if killed_s is None and any(line["step"] >= KILL_AT_STEP for line in lines_of(run_dir / "metrics.jsonl")):
                started = [
                    event for event in lines_of(run_dir / "events.jsonl") if event["kind"] == "generation_started"
                ]
                host = started[-1]["workers"][1]["host"]
                killed_s = time.time()
                kill_node(next(node for node in nodes if host.endswith(node.node_id[:8])))
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
        status = run.wait()
    events, metrics = lines_of(run_dir / "events.jsonl"), lines_of(run_dir / "metrics.jsonl")
    for event in events:
        if killed_s and event["kind"] in SHOWN:
            print(f"{event['time'] - killed_s:+8.2f} s  {event['kind']}: {SHOWN[event['kind']](event)}")
    lost_s = next((e["time"] for e in events if e["kind"] == "worker_lost"), None)
    steps = [line["step"] for line in metrics if line.get("kind") == "train"]
    redone = len(steps) - len(set(steps))
    missing = sorted(set(range(1, CONFIG["train"]["steps"] + 1)) - set(steps))
    print(f"status {status}, noticed {'never' if lost_s is None else f'after {lost_s - killed_s:.2f} s'}, ", end="")
    print(f"{redone} steps logged twice, missing: {missing}; {folder}")
    sys.exit(bool(status or missing or lost_s is None))


if __name__ == "__main__":
    main()
