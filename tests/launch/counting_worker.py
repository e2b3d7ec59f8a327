"""A worker without JAX, for tests of the supervisor: it counts steps of 20 ms, and keeps the count in a file.

Like a collective, a step needs all workers: each tells its step in a file, and waits until all have told it. The file
`fail_at` in the run's folder holds a step at which every worker of rank 0 fails; while there is one called `wait`, no
worker begins; and where there is one called `in_memory`, steps are safe in memory only.
"""

import os
import pathlib
import sys
import threading
import time

from autoshard.launch.messages import (
    MESSAGES_FD,
    Committed,
    Drain,
    Drained,
    Failed,
    Finished,
    Heartbeat,
    Phase,
    Ready,
    Restored,
    Tier,
    read_from_supervisor,
)

STEP_S = 0.02


def main(steps: int) -> None:
    descriptor = int(os.environ[MESSAGES_FD])
    tell = lambda message: os.write(descriptor, message.line().encode())
    tell(Ready())
    assignment = read_from_supervisor(sys.stdin.readline())
    is_draining = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if isinstance(read_from_supervisor(line), Drain):
                is_draining.set()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    folder = pathlib.Path(assignment.run_dir)
    saved, fail_at = folder / "saved", folder / "fail_at"
    marks = folder / f"generation-{assignment.generation}"
    marks.mkdir(exist_ok=True)
    step = int(saved.read_text()) if saved.exists() else 0
    is_first = assignment.rank == 0
    while (folder / "wait").exists():
        time.sleep(STEP_S)
    if is_first:
        tell(Restored(step=step, source=Tier.DISK if step else None, seconds=0.0))
    while step < steps:
        if is_first and is_draining.is_set() and not (marks / "drain_at").exists():
            (marks / "drain_at").write_text(str(step + 2))
        if is_first and fail_at.exists() and step == int(fail_at.read_text()):
            tell(Failed(step=step, error="ValueError", message="no such step", traceback=""))
            sys.exit(1)
        time.sleep(STEP_S)
        step += 1
        (marks / f"{assignment.rank}-{step}").touch()
        while any(not (marks / f"{rank}-{step}").exists() for rank in range(assignment.num_workers)):
            tell(Heartbeat(phase=Phase.TRAINING, step=step - 1))
            time.sleep(STEP_S / 4)
        tell(Heartbeat(phase=Phase.TRAINING, step=step))
        if is_first:
            (folder / "saving").write_text(str(step))
            (folder / "saving").rename(saved)
        if (folder / "in_memory").exists():
            tell(Committed(step=step, tier=Tier.MEMORY))
        elif is_first:
            tell(Committed(step=step, tier=Tier.DISK))
        if (marks / "drain_at").exists() and step >= int((marks / "drain_at").read_text() or step + 1):
            tell(Drained(step=step))
            return
    tell(Finished(step=step, loss=1 / step))


if __name__ == "__main__":
    main(int(sys.argv[1]))
