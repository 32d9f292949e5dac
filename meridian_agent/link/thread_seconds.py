"""Knows the processor time of the threads that an agent has started, its own and gRPC's, as the Linux kernel counts it.

The module owns one open file for each of these threads.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ThreadSeconds:
    """The processor time of some threads, those included that have ended. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Nanoseconds of each thread at the last look, by its file.
        self._spent: dict[int, int] = {}
        self._of_ended = 0

    def watch(self, threads: Iterable[threading.Thread]) -> None:
        """Count these threads from now on. Without a kernel that counts, they count as 0."""
        # While the control plane is away nobody asks for the total, and each attempt to connect has threads of its own.
        self.total()
        for thread in threads:
            try:
                file = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY)
            except OSError:
                continue
            with self._lock:
                self._spent[file] = 0

    def total(self) -> float:
        """Return the seconds of all threads so far."""
        with self._lock:
            for file, spent in [*self._spent.items()]:
                try:
                    self._spent[file] = int(os.pread(file, 64, 0).split()[0])
                except (OSError, ValueError, IndexError):
                    # The thread has ended, or the kernel does not count.
                    del self._spent[file]
                    self._of_ended += spent
                    # Nobody closes the number of a closed file again, which may be another file's by then.
                    os.close(file)
            return (self._of_ended + sum(self._spent.values())) / 1e9
