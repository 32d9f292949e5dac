"""Reads files again when one of them has changed, and keeps the last usable value if the new files cannot be used.

The module knows nothing about the meaning of the files. A value is usable on any thread, because gRPC performs
handshakes on threads of its own. A look at the files' stamps at each use is enough, so nothing watches the files: a
watcher would need a task, and a handshake soon after a change would still get the old certificate.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# Seconds after a failed read until the files are read again although they are unchanged: `read` may also need other
# files, which may come later.
RETRY_S = 10.0


class Reloaded(Generic[Value]):
    """A value read from the files `paths` by `read`, which raises OSError or ValueError if the files cannot be used.

    The constructor passes errors on. `get` logs each error, also one that nobody foresaw, once for every change of the
    files, and again if the next try ends with another error.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        self._paths, self._read = paths, read
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = read()
        # Monotonic time from which on unchanged files are read again, and the error of the newest read.
        self._retry_at, self._complaint = math.inf, ""

    def get(self) -> Value:
        """Return the newest usable value. Unchanged files give the same object."""
        with self._lock:
            # The stamps are taken before the files are read, so that the next call notices a change made in between.
            if (stamps := self._stamps()) != self._seen:
                self._seen, self._retry_at, self._complaint = stamps, 0.0, ""
            if time.monotonic() >= self._retry_at:
                self._try_to_read()
            return self._value

    def _try_to_read(self) -> None:
        try:
            self._value, self._retry_at = self._read(), math.inf
            logger.info("%s changed and was read again", self._names())
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_S
            if (complaint := f"{type(error).__name__}: {error}") != self._complaint:
                self._complaint = complaint
                said = "%s changed but cannot be used; the old content stays in use: %s"
                cause = None if isinstance(error, (OSError, ValueError)) else error
                logger.error(said, self._names(), error, exc_info=cause)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, also if a symbolic link in its path is replaced; None for no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
