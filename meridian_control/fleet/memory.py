"""Bounds the memory that the sessions of one replica take: of one stream, of one caller's streams, and of all.

Agents choose how many requests they report and how long the texts are, so bounds in numbers bound no memory. The bytes
are estimates that do not lie below what the process takes. All code runs on the server's event loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meridian_control.common.errors import MemoryExceeded

# Bytes that sessions give up before the allocator looks for memory that it can give back, which takes it a moment.
TRIM_BYTES = 32 << 20
# Changes of a session's bytes that count at once; nearly every report makes smaller ones.
STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class MemoryLimits:
    """The bounds in bytes; the defaults leave half of a limit of 1 GiB to everything else."""

    stream: int = 384 << 20
    caller: int = 448 << 20
    all: int = 512 << 20


class Memory:
    """The bytes that sessions take."""

    def __init__(self, limits: MemoryLimits | None = None) -> None:
        self._limits = limits or MemoryLimits()
        self._by_caller: Counter[str] = Counter()
        self.bytes = 0
        # Bytes that sessions no longer take since `trims` last returned true.
        self._given_up = 0

    def trims(self) -> bool:
        """Return whether sessions have given up so much memory since the last time that the allocator should give it
        back to the system."""
        is_due = self._given_up >= TRIM_BYTES
        if is_due:
            self._given_up = 0
        return is_due

    def take(self, who: str, before: int, bytes_now: int) -> None:
        """Note that a session of the caller `who` takes another number of bytes. Raises MemoryExceeded if it takes more
        and a bound is exceeded; the bytes count nevertheless."""
        self.bytes += bytes_now - before
        self._by_caller[who] += bytes_now - before
        if not self._by_caller[who]:
            del self._by_caller[who]
        if bytes_now <= before:
            self._given_up += before - bytes_now
            return
        for taken_bytes, limit, whose, flag in (
            (bytes_now, self._limits.stream, "one stream", "--max-stream-mib"),
            (self._by_caller[who], self._limits.caller, "one caller", "--max-caller-mib"),
            (self.bytes, self._limits.all, "all engines together", "--max-engines-mib"),
        ):
            if taken_bytes > limit:
                raise MemoryExceeded(f"requests of {whose} take more than {limit >> 20} MiB ({flag})")


class Account:
    """The bytes that one session takes."""

    def __init__(self, memory: Memory, who: str) -> None:
        self._memory, self._who, self.bytes = memory, who, 0

    def hold(self, bytes_now: int) -> None:
        """Note the bytes that the session takes now; a small change counts later. Raises MemoryExceeded."""
        if not -STEP_BYTES < bytes_now - self.bytes < STEP_BYTES:
            before, self.bytes = self.bytes, bytes_now
            self._memory.take(self._who, before, bytes_now)

    def close(self) -> None:
        """Note that the session has ended."""
        self._memory.take(self._who, self.bytes, 0)
        self.bytes = 0
