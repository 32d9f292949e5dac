"""The processor time of threads is counted while they run, and kept once they have ended."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from meridian_agent.link.thread_seconds import ThreadSeconds

SPENT_S = 0.02


def open_files_of(*threads: threading.Thread) -> int:
    """Return the number of open files with the processor time of these threads. Links of earlier tests may open and
    close other files of this process at any time."""
    files = {f"/task/{thread.native_id}/schedstat" for thread in threads}
    paths = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(file in path for path in paths for file in files)


def test_a_thread_counts_while_it_runs_and_after_its_end() -> None:
    spent, seconds = threading.Event(), ThreadSeconds()
    ends = threading.Event()

    def work() -> None:
        while time.thread_time() < SPENT_S:
            pass
        spent.set()
        ends.wait()

    thread = threading.Thread(target=work)
    thread.start()
    seconds.watch([thread])
    spent.wait()
    counted = seconds.total()
    assert counted >= SPENT_S
    assert open_files_of(thread) == 1
    ends.set()
    thread.join()
    task = Path(f"/proc/self/task/{thread.native_id}")
    while task.exists():
        time.sleep(0.001)
    assert seconds.total() >= counted
    assert open_files_of(thread) == 0
    seconds.watch([thread])
    assert seconds.total() >= counted


def test_threads_that_have_ended_leave_no_file_open() -> None:
    """While the control plane is away, threads are watched at each attempt, and the total is asked for by nobody."""
    seconds, threads = ThreadSeconds(), [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(5)]
    for thread in threads:
        thread.start()
        seconds.watch([thread])
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            time.sleep(0.001)
    assert open_files_of(*threads) <= 1
