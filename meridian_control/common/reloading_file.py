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

from meridian_control.common.complaints import Complaints

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
    files, and again if it was not called for an hour.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        self._paths, self._read = paths, read
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = read()
        # Monotonic time from which on unchanged files are read again.
        self._retry_at = math.inf
        text = "%s changed but cannot be used; the old content stays in use: %s"
        self._complaints = Complaints(logger, text, logging.ERROR, foreseen=(OSError, ValueError))

    def get(self) -> Value:
        """Return the newest usable value. Unchanged files give the same object."""
        with self._lock:
            # The stamps are taken before the files are read, so that the next call notices a change made in between.
            if (stamps := self._stamps()) != self._seen:
                self._seen, self._retry_at = stamps, 0.0
                self._complaints.over()
            if time.monotonic() >= self._retry_at:
                self._try_to_read()
            return self._value

    def _try_to_read(self) -> None:
        try:
            self._value, self._retry_at = self._read(), math.inf
            logger.info("%s changed and was read again", self._names())
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._complaints.log(error, self._names())

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [stamp(path) for path in self._paths]

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, also if a symbolic link in its path is replaced; None for no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
