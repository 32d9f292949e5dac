"""The processor time of threads is counted while they run, and kept once they have ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from meridian_agent.link.thread_seconds import ThreadSeconds

SPENT_S = 0.02


def test_a_thread_counts_while_it_runs_and_after_its_end() -> None:
    spent, seconds = threading.Event(), ThreadSeconds()
    ends = threading.Event()

    def work() -> None:
        while time.thread_time() < SPENT_S:
            pass
        spent.set()
        ends.wait()

    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    thread = threading.Thread(target=work)
    thread.start()
    seconds.watch([thread])
    spent.wait()
    counted = seconds.total()
    assert counted >= SPENT_S
    ends.set()
    thread.join()
    task = Path(f"/proc/self/task/{thread.native_id}")
    while task.exists():
        time.sleep(0.001)
    assert seconds.total() >= counted
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
    seconds.watch([thread])
    assert seconds.total() >= counted


def test_threads_that_have_ended_leave_no_file_open() -> None:
    """While the control plane is away, threads are watched at each attempt, and the total is asked for by nobody."""
    seconds, before = ThreadSeconds(), sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(5):
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        seconds.watch([thread])
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            time.sleep(0.001)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 1
