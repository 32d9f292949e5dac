"""Reads files again when one of them has changed; a file that cannot be used changes nothing.

Knows nothing of what the files mean. Usable on any thread: gRPC's handshakes have threads of their own.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """`read` makes the value of `paths`. It raises OSError or ValueError where it cannot: at first to the caller, later
    to the log, once for every change."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        self._paths, self._read = paths, read
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = read()

    def get(self) -> Value:
        """The newest value that could be read; the same object while the files stay as they are."""
        with self._lock:
            # Looked at before they are read: what changes in between is seen the next time.
            if (stamps := self._stamps()) != self._seen:
                self._seen = stamps
                try:
                    self._value = self._read()
                    logger.info("read again: %s", self._names())
                except (OSError, ValueError) as error:
                    logger.error("%s cannot be used, what was read before holds: %s", self._names(), error)
            return self._value

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file, also where a link beside it is renamed; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
