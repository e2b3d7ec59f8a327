"""Busy time counts work and not sleep, of threads that live and that ended."""

import pathlib
import threading
import time

import pytest

from autoshard.balance.busy_time import BusyTime

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/task/self/schedstat").parent.parent.exists(), reason="needs Linux's /proc"
)


def work() -> None:
    sum(n * n for n in range(300_000))


def test_work_counts_and_sleep_does_not():
    busy = BusyTime()
    assert busy.is_known
    begin_s, used_s = busy.seconds(), time.process_time()
    work()
    worked_s, used_s = busy.seconds() - begin_s, time.process_time() - used_s
    assert worked_s >= 0.9 * used_s  # and what it waited for a core
    begin_s, used_s = busy.seconds(), time.process_time()
    time.sleep(0.3)
    assert busy.seconds() - begin_s < 0.15
    busy.close()


def test_threads_that_ended_still_count():
    busy = BusyTime()
    begin_s, done, over = busy.seconds(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set(), over.wait()))
    thread.start()
    done.wait()
    counted_s = busy.seconds() - begin_s
    over.set()
    thread.join()
    assert counted_s > 0 and busy.seconds() - begin_s >= counted_s
    busy.close()
