"""A dry run leaves to the next generation of its size all that this needs: its plan, and every compiled program."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from autoshard.elastic.plan_store import PLAN, PLANS
from autoshard.files import write_text_atomically, yaml_text
from autoshard.launch.messages import MESSAGES_FD, Assignment

TIMEOUT_S = 300
STEPS = 3

CONFIG = {
    "model": {"name": "dlrm"},
    "optimizer": {"name": "sgd", "schedule": "constant", "learning_rate": 0.05},
    "data": {"batch_size": 8},
    "plan": {"time_limit_s": 2},
    "train": {"steps": STEPS, "log_every": 1, "eval_every": 2, "eval_batches": 1},
}


def generation(folder: pathlib.Path, number: int, is_dry_run: bool) -> tuple[list[dict], list[str]]:
    """What the first of two workers says, and what each prints; fails unless both end well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, "-c", "from autoshard.cli import main; main()", "train", str(folder / "run.yaml")]
    workers, said, threads = [], ([], []), []
    for rank in range(2):
        ours, theirs = os.pipe()
        environment = os.environ | {MESSAGES_FD: str(theirs), "JAX_EXPLAIN_CACHE_MISSES": "1"}
        worker = subprocess.Popen(
            command,
            env=environment,
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
        threads.append(threading.Thread(target=lambda r=ours, to=said[rank]: to.extend(os.fdopen(r))))
        threads[-1].start()
        workers.append(worker)
    try:
        statuses = [worker.wait(TIMEOUT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for thread in threads:
        thread.join()
    printed = [(folder / f"{number}-{rank}.log").read_text() for rank in range(2)]
    assert statuses == [0, 0], "\n\n".join(printed)
    return [json.loads(line) for line in said[0]], printed


@pytest.mark.slow
def test_what_a_dry_run_leaves_is_all_that_a_generation_plans_and_compiles(tmp_path):
    write_text_atomically(tmp_path / "run.yaml", yaml_text(CONFIG))
    (tmp_path / "run").mkdir()
    said, printed = generation(tmp_path, 1, is_dry_run=True)
    assert not {"planned", "restored", "committed", "finished"} & {message["kind"] for message in said}
    assert all("PERSISTENT COMPILATION CACHE MISS" in text for text in printed)
    assert "jit_train_step" in printed[0] and "jit_train_step" not in printed[1]  # the second finds the first one's
    assert not (tmp_path / "run" / PLAN).exists() and len(list((tmp_path / "run" / PLANS).iterdir())) == 1
    said, printed = generation(tmp_path, 2, is_dry_run=False)
    (planned, finished) = (message for message in said if message["kind"] in ("planned", "finished"))
    assert planned["from_cache"] and finished["step"] == STEPS
    misses = [line for text in printed for line in text.splitlines() if "PERSISTENT COMPILATION CACHE MISS" in line]
    assert misses == []
    assert (tmp_path / "run" / PLAN).read_bytes() == pathlib.Path(planned["plan"]).read_bytes()
