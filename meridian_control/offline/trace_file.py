"""Trace files: gzip over TraceRecords, each behind its length.

Owns the format, and the count of what a trace holds. Knows nothing of rules. Files are read and written as streams.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from google.protobuf import proto
from google.protobuf.message import DecodeError
from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import IO

# gzip's own default of 9 costs several times as much for a few per cent.
COMPRESSION = 6
# The agents' own limit is 16 MiB a message.
MAX_RECORD_BYTES = 64 << 20


class FileError(Exception):
    """A file of the user's that cannot be used: which, where in it, and why."""

    def __init__(self, path: Path, where: str, reason: str) -> None:
        super().__init__(f"{path}:{where} {reason}")


class TraceWriter:
    """Writes a new trace file and counts what is in it. Everything raises FileError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._raw = path.open("xb")
        except OSError as error:
            raise FileError(path, "", f"cannot be written: {error.strerror}") from error
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=COMPRESSION, mtime=0, filename="")
        # Requests that were opened and closed in the trace; engine steps; records.
        self.requests = self.steps = self.records = 0
        self._open: dict[str, set[int]] = {}

    def write(self, record: fleet_pb2.TraceRecord) -> None:
        try:
            proto.serialize_length_prefixed(record, self._file)  # type: ignore[arg-type]
        except OSError as error:
            raise FileError(self.path, "", f"cannot be written: {error.strerror}") from error
        self.records += 1
        kind = record.up.WhichOneof("message")
        if kind in ("hello", "snapshot"):
            self._open[record.session_id] = set()
        elif kind == "step":
            self._count(record)

    def _count(self, record: fleet_pb2.TraceRecord) -> None:
        report, opened = record.up.step, self._open.setdefault(record.session_id, set())
        self.steps += report.steps
        opened.update(o.slot for o in report.opened)
        closed = {c.slot for c in report.closed} & opened
        self.requests += len(closed)
        opened -= closed

    @property
    def size_bytes(self) -> int:
        """Written so far, compressed; lags behind by what the compressor holds."""
        return self._raw.tell()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            try:
                self._file.close()
            finally:
                self._raw.close()
        except OSError as failed:
            if error is None:
                raise FileError(self.path, "", f"cannot be written: {failed.strerror}") from failed


class _Bounded:
    """A file that is never asked for more than a record can hold."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if size > MAX_RECORD_BYTES:
            raise ValueError(f"its length is given as {size} bytes")
        return self._file.read(size)


def read(path: Path) -> Iterator[fleet_pb2.TraceRecord]:
    """The records of a trace file, in order. Raises FileError with the place for one that is cut off or no trace."""
    offset = 0
    try:
        with gzip.open(path) as file:
            while True:
                offset = file.tell()
                record = proto.parse_length_prefixed(fleet_pb2.TraceRecord, _Bounded(file))  # type: ignore[arg-type]
                if record is None:
                    return
                if not record.session_id or record.WhichOneof("message") is None:
                    raise FileError(path, f" at byte {offset} (uncompressed)", "is not a record of a trace")
                yield record
    except gzip.BadGzipFile as error:
        raise FileError(path, f" at byte {offset} (uncompressed)", "is not a trace: not gzip") from error
    except EOFError as error:
        raise FileError(path, f" at byte {offset} (uncompressed)", "is cut off: the record is not complete") from error
    except (DecodeError, ValueError, zlib.error) as error:
        raise FileError(path, f" at byte {offset} (uncompressed)", f"is not a record of a trace: {error}") from error
    except OSError as error:
        raise FileError(path, "", f"cannot be read: {error.strerror}") from error
