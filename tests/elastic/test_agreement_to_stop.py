"""All workers of a generation stop after the same step, also where no collective of a step holds them together."""

import random
import threading
import time

import pytest

from autoshard.elastic.coordination import Coordination
from autoshard.elastic.worker import Worker
from autoshard.interrupts import StopRequest


class Service:
    """JAX's coordination service as far as a generation needs it, for threads in the place of processes."""

    def __init__(self, num_workers: int):
        self._barrier, self._lock, self._values = threading.Barrier(num_workers), threading.Lock(), {}
        self.of_reader = threading.local()  # what a thread does before it reads
        self.behind_writing = lambda: None

    def key_value_set(self, key, value, allow_overwrite):
        with self._lock:
            if key in self._values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self._values[key] = value
        self.behind_writing()

    def key_value_try_get(self, key):
        getattr(self.of_reader, "pause", lambda: None)()
        if key not in self._values:
            raise RuntimeError("NOT_FOUND")
        return self._values[key]

    def wait_at_barrier(self, name, timeout_ms):
        self._barrier.wait(5)


def in_threads(loop, num_workers):
    """Runs `loop(rank)` for each rank in a thread of its own, to the end."""
    threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("seed", range(5))
def test_workers_whose_steps_take_different_times_stop_after_the_same_step(seed):
    service, stops = Service(3), [StopRequest() for _ in range(3)]
    stopped, draws = {}, random.Random(seed)
    asked = draws.randrange(3)
    pauses_s = [[draws.random() * scale for _ in range(40)] for scale in (0.0, 0.001, 0.004)]

    def loop(rank: int) -> None:
        worker = Worker(None, None, Coordination(service), stops[rank])
        while worker.step < 40 and not worker.should_stop():
            time.sleep(pauses_s[rank][worker.step])
            if worker.step == 17 and rank == asked:
                stops[rank].is_asked = True
            worker.stepped(worker.step + 1)
        stopped[rank] = worker.step, worker.should_stop()

    in_threads(loop, 3)
    assert stopped == dict.fromkeys(range(3), (18, True))


def test_who_reads_late_meets_the_others_once_more():
    """Rank 1 reads behind step 17 only when rank 0 has taken step 18 and written it; both stop after 18."""
    service, stops = Service(2), [StopRequest() for _ in range(2)]
    has_written, stopped = threading.Event(), {}

    def loop(rank: int) -> None:
        worker = Worker(None, None, Coordination(service), stops[rank])
        while worker.step < 40 and not worker.should_stop():
            if (rank, worker.step) == (0, 17):
                stops[rank].is_asked = True
            if (rank, worker.step) == (1, 16):
                service.of_reader.pause = lambda: has_written.wait(5)
            worker.stepped(worker.step + 1)
        stopped[rank] = worker.step, worker.should_stop()

    service.behind_writing = has_written.set
    in_threads(loop, 2)
    assert stopped == dict.fromkeys(range(2), (18, True))
