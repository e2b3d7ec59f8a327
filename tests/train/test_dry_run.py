"""A dry run leaves to the next generation of its size all that this needs: its plan, and every compiled program."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading

import pytest

from autoshard.elastic.plan_store import PLAN, PLANS
from autoshard.files import write_text_atomically, yaml_text
from autoshard.launch.messages import MESSAGES_FD, Assignment

TIMEOUT_S = 300

CONFIG = {
    "model": {"name": "dlrm"},
    "optimizer": {"name": "sgd", "schedule": "constant", "learning_rate": 0.05},
    "data": {"batch_size": 8},
    "plan": {"time_limit_s": 2},
    "train": {"steps": 100_000, "eval_every": 50_000, "eval_batches": 1},
}


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the first of two workers said, by kind of message, and what each printed."""

    said: dict[str, dict]
    printed: tuple[str, str]

    def misses(self, rank: int) -> list[str]:
        """Programs that were not in the cache, of one worker."""
        return re.findall(r"PERSISTENT COMPILATION CACHE MISS for '(\w+)'", self.printed[rank])


def run_generation(folder: pathlib.Path, number: int, is_dry_run: bool) -> Generation:
    """A generation of two workers, until they end or have committed their first step; fails if they end badly."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{found.getsockname()[1]}"
    started = [start(folder, number, rank, coordinator, is_dry_run) for rank in range(2)]
    said: dict[str, dict] = {}
    watch = threading.Timer(TIMEOUT_S, lambda: [worker.kill() for worker, _ in started])
    watch.start()
    try:
        with os.fdopen(started[0][1]) as messages:
            for line in messages:
                message = json.loads(line)
                said[message["kind"]] = message
                if message["kind"] == "committed":
                    break
        if "committed" not in said:
            assert [worker.wait() for worker, _ in started] == [0, 0]
    finally:
        watch.cancel()
        for worker, _ in started:
            worker.kill()
            worker.wait()
        os.close(started[1][1])
    first, second = ((folder / f"{number}-{rank}.log").read_text() for rank in range(2))
    return Generation(said, (first, second))


def start(
    folder: pathlib.Path, number: int, rank: int, coordinator: str, is_dry_run: bool
) -> tuple[subprocess.Popen, int]:
    """A worker that has its assignment, and the pipe on which it speaks."""
    command = [sys.executable, "-c", "from autoshard.cli import main; main()", "train", str(folder / "run.yaml")]
    ours, theirs = os.pipe()
    worker = subprocess.Popen(
        command,
        env=os.environ | {MESSAGES_FD: str(theirs), "JAX_EXPLAIN_CACHE_MISSES": "1"},
        pass_fds=[theirs],
        stdin=subprocess.PIPE,
        stdout=(folder / f"{number}-{rank}.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    os.close(theirs)
    assignment = Assignment(
        run_id="0" * 32,
        run_dir=str(folder / "run"),
        generation=number,
        rank=rank,
        num_workers=2,
        coordinator=coordinator,
        slot=rank,
        host="here",
        memory_dir=str(folder / "memory"),
        devices_per_worker=1,
        is_dry_run=is_dry_run,
    )
    assert worker.stdin is not None
    worker.stdin.write(assignment.line().encode())
    worker.stdin.flush()
    return worker, ours


@pytest.mark.slow
def test_what_a_dry_run_leaves_is_all_that_a_generation_plans_and_compiles(tmp_path):
    write_text_atomically(tmp_path / "run.yaml", yaml_text(CONFIG))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    dry = run_generation(tmp_path, 1, is_dry_run=True)
    assert set(dry.said) <= {"ready", "heartbeat"}
    assert "jit_train_step" in dry.misses(0) and dry.misses(1)
    assert "jit_train_step" not in dry.misses(1)  # it finds what the first one compiled
    assert not (run_dir / PLAN).exists() and len(list((run_dir / PLANS).iterdir())) == 1
    real = run_generation(tmp_path, 2, is_dry_run=False)
    assert real.said["planned"]["from_cache"] and real.said["committed"]["step"] == 1
    assert real.misses(0) == real.misses(1) == []
    assert (run_dir / PLAN).read_bytes() == pathlib.Path(real.said["planned"]["plan"]).read_bytes()
