"""Reads and writes trace files: gzip-compressed TraceRecords, each preceded by its length.

The module owns the file format, and counts a trace's requests and steps. The module knows nothing of rules. Files are
read and written as streams.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf import proto
from google.protobuf.message import DecodeError
from meridian.v1 import fleet_pb2

from meridian_control.common.errors import BadReport
from meridian_control.engine.snapshot_parts import SnapshotParts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import IO

# The default level 9 of Python's gzip takes several times as long and saves only a few per cent more.
COMPRESSION = 6
# Compressed bytes after which a gzip member ends. Of a full disk's trace the complete members are kept.
MEMBER_BYTES = 1 << 20
# Format of a gzip member for zlib, and compressed bytes that are decompressed at once.
GZIP, CHUNK_BYTES = zlib.MAX_WBITS + 16, 1 << 16
# Largest record that is read. The agents' own limit is 16 MiB for a message.
MAX_RECORD_BYTES = 64 << 20


class FileError(Exception):
    """A user's file cannot be used. The message names the file, the place in the file and the reason."""

    def __init__(self, path: Path, where: str, reason: str) -> None:
        super().__init__(f"{path}:{where} {reason}")


class TraceWriter:
    """Writes a new trace file and counts its contents. Each method raises FileError if the file cannot be written; the
    file then holds a complete trace without the newest records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._raw = path.open("xb")
        except OSError as error:
            raise FileError(path, "", f"cannot be written: {error.strerror}") from error
        self._begin_member()
        self._is_broken = False
        # Counts of requests that were both opened and closed in the trace, of engine steps, and of records.
        self.requests = self.steps = self.records = 0
        self._open: dict[str, set[int]] = {}

    def write(self, record: fleet_pb2.TraceRecord) -> None:
        try:
            proto.serialize_length_prefixed(record, self._file)  # type: ignore[arg-type]
            if self._raw.tell() - self._kept_bytes > MEMBER_BYTES:
                self._file.close()
                self._raw.flush()
                self._begin_member()
        except OSError as error:
            self._is_broken = True
            raise FileError(self.path, "", f"cannot be written: {error.strerror}") from error
        self.records += 1
        kind = record.up.WhichOneof("message")
        if kind in ("hello", "snapshot"):
            self._open[record.session_id] = set()
        elif kind == "step":
            self._count(record)

    def _begin_member(self) -> None:
        self._kept_bytes = self._raw.tell()
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=COMPRESSION, mtime=0, filename="")

    def _count(self, record: fleet_pb2.TraceRecord) -> None:
        report, opened = record.up.step, self._open.setdefault(record.session_id, set())
        self.steps += report.steps
        opened.update(o.slot for o in report.opened)
        closed = {c.slot for c in report.closed} & opened
        self.requests += len(closed)
        opened -= closed

    @property
    def size_bytes(self) -> int:
        """Compressed bytes in the file, without those that are still buffered."""
        return self.path.stat().st_size

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            try:
                self._file.close()
            finally:
                self._raw.close()
        except OSError as failed:
            self._is_broken = True
            if error is None:
                raise FileError(self.path, "", f"cannot be written: {failed.strerror}") from failed
        finally:
            if self._is_broken:
                with suppress(OSError):
                    os.truncate(self.path, self._kept_bytes)


class _Bounded:
    """A file that refuses to read more bytes at once than a record may have."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if size > MAX_RECORD_BYTES:
            raise ValueError(f"its length is given as {size} bytes")
        return self._file.read(size)


def _whole_bytes(path: Path) -> int:
    """Return the size of the complete gzip members at the beginning of a file, before anything else, such as zeros."""
    size, whole, member = 0, 0, zlib.decompressobj(GZIP)
    with suppress(OSError, zlib.error), path.open("rb") as file:
        while rest := file.read(CHUNK_BYTES):
            size += len(rest)
            while rest:
                member.decompress(rest)
                if rest := member.unused_data:
                    whole, member = size - len(rest), zlib.decompressobj(GZIP)
    return whole


def read(path: Path) -> Iterator[fleet_pb2.TraceRecord]:
    """Yield the records of a trace file, in order. A snapshot that came in parts is one record, in the place of its
    last part.

    Raises FileError with the place at which the file is cut off or is not a trace.
    """
    offset = 0
    snapshots: defaultdict[str, SnapshotParts] = defaultdict(SnapshotParts)
    try:
        with gzip.open(path) as file:
            while True:
                offset = file.tell()
                record = proto.parse_length_prefixed(fleet_pb2.TraceRecord, _Bounded(file))  # type: ignore[arg-type]
                if record is None:
                    if not offset:
                        raise FileError(path, "", "is empty: a trace has records from its beginning on")
                    return
                if not record.session_id or record.WhichOneof("message") is None:
                    reason = "is not a record of a trace, or one of a newer version"
                    raise FileError(path, f" at byte {offset} (uncompressed)", reason)
                if record.up.HasField("hello"):
                    # A recorder that connects again may have missed the rest of a snapshot.
                    snapshots.pop(record.session_id, None)
                if record.up.HasField("snapshot"):
                    if (snapshot := snapshots[record.session_id].take_part(record.up.snapshot)) is None:
                        continue
                    record.up.snapshot.CopyFrom(snapshot)
                yield record
    except gzip.BadGzipFile as error:
        raise FileError(path, f" at byte {offset} (uncompressed)", "is not a trace: not gzip") from error
    except EOFError as error:
        kept = f"; its first {size} bytes are a complete trace" if (size := _whole_bytes(path)) else ""
        reason = f"is cut off: the record is not complete{kept}"
        raise FileError(path, f" at byte {offset} (uncompressed)", reason) from error
    except (BadReport, DecodeError, ValueError, zlib.error) as error:
        raise FileError(path, f" at byte {offset} (uncompressed)", f"is not a record of a trace: {error}") from error
    except OSError as error:
        raise FileError(path, "", f"cannot be read: {error.strerror}") from error
