"""Writes each decision, once its outcome is known, as a JSON line to a file that is rotated by size.

The event loop only queues decisions; a separate thread formats and writes them. If that thread falls behind, decisions
are left out of the file, and a line in the log says so. The event loop never waits for the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from queue import Full, Queue
from time import monotonic
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from meridian_control.common.file_lock import FileInUseError, FileLock
from meridian_control.journal.messages import decision_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meridian_control.journal.records import Decision

logger = logging.getLogger(__name__)

MAX_BYTES, OLD_FILES = 64 << 20, 4
# Largest number of decisions that wait to be written.
WAITING = 10_000
# Seconds for which nothing more is logged about decisions that are missing in the file.
LOG_EVERY_S = 60.0


@contextmanager
def decision_file(
    path: Path | None, max_bytes: int = MAX_BYTES, *, serves: str = ""
) -> Iterator[Callable[[Decision], None] | None]:
    """Open the file and yield the function that takes settled decisions, None without a path.

    Decisions that wait are written before the file is closed. serves: the address of the control plane that writes the
    file. Raises ValueError, which names the flag, if the file cannot be opened or another control plane writes it.
    """
    if path is None:
        yield None
        return
    with _kept(path, serves), _writing(path, max_bytes) as take:
        yield take


@contextmanager
def _kept(path: Path, serves: str) -> Iterator[None]:
    """Keep the file for this process, because two processes would rotate it against each other. The lock is on a file
    beside it, which is not renamed. A device or a pipe is not rotated and needs no lock."""
    if path.exists() and not path.is_file():
        yield
        return
    try:
        lock = FileLock(f"{os.path.realpath(path)}.lock", serves)
    except FileInUseError as error:
        raise ValueError(
            f"--decision-log: {path} is in use by {error}; name another file for each control plane"
        ) from None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _unusable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"--decision-log: {path} cannot be written: {error.strerror}")


@contextmanager
def _writing(path: Path, max_bytes: int) -> Iterator[Callable[[Decision], None]]:
    waiting: Queue[Any] = Queue(WAITING)
    try:
        file = _File(path, maxBytes=max_bytes, backupCount=OLD_FILES, encoding="utf-8")
    except OSError as error:
        raise _unusable(path, error) from error
    file.setFormatter(_Lines())
    listener = _Listener(waiting, file)
    queue = _Queue(waiting)
    listener.start()
    try:
        yield lambda made: queue.emit(logging.makeLogRecord({"msg": made}))
    finally:
        listener.stop()
        file.close()


class _Listener(QueueListener):
    def enqueue_sentinel(self) -> None:
        # The queue may be full, and its decisions are still to be written.
        self.queue.put(self._sentinel)  # type: ignore[attr-defined]


class _Losses:
    """Counts the decisions that are missing in the file, and logs them at most once in LOG_EVERY_S."""

    def __init__(self) -> None:
        self._count, self._logged_at = 0, -math.inf

    def add(self, level: int, text: str, *, exc_info: bool = False) -> None:
        self._count += 1
        if (now := monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.log(level, "%s; missing so far: %d", text, self._count, exc_info=exc_info)


class _Queue(QueueHandler):
    def __init__(self, queue: Queue[Any]) -> None:
        super().__init__(queue)
        self._losses = _Losses()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            text = "the decision log file is written too slowly, and decisions are left out of the file"
            self._losses.add(logging.WARNING, text)


class _File(RotatingFileHandler):
    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._losses = _Losses()
        # A kill or a full disk leaves a line without its end, which must not spoil the next one. An empty file has no
        # last byte.
        with suppress(OSError):
            if self.stream is not None and path.is_file():
                with path.open("rb") as written:
                    written.seek(-1, os.SEEK_END)
                    if written.read() != b"\n":
                        self.stream.write("\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        text = f"{self.baseFilename}: decisions cannot be written to this file"
        self._losses.add(logging.ERROR, text, exc_info=True)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        decision: Any = record.msg
        fields = json_format.MessageToDict(decision_message(decision), preserving_proto_field_name=True)
        return json.dumps(fields, separators=(",", ":"))
