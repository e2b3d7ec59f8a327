"""Busy time counts work of all threads, and not sleep."""

import pathlib
import threading
import time

import pytest

from autoshard.balance.busy_time import BusyTime

pytestmark = pytest.mark.skipif(not pathlib.Path("/proc/self/schedstat").exists(), reason="needs Linux's accounting")


def work() -> None:
    sum(n * n for n in range(300_000))


def test_work_counts_and_sleep_does_not():
    busy = BusyTime()
    assert busy.is_known
    used_s = time.process_time()
    work()
    used_s, worked_s = time.process_time() - used_s, busy.lap_s()
    assert worked_s >= 0.9 * used_s  # and what it waited for a core
    time.sleep(0.3)
    assert busy.lap_s() < 0.15
    busy.close()


def test_work_of_other_threads_counts():
    busy = BusyTime()
    done, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set(), over.wait()))
    busy.lap_s()
    used_s = time.process_time()
    thread.start()
    done.wait()
    used_s, worked_s = time.process_time() - used_s, busy.lap_s()
    assert worked_s >= 0.9 * used_s
    over.set()
    thread.join()
    assert busy.lap_s() >= 0  # also where a thread has ended
    busy.close()
