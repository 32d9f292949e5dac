"""Keeps a SQLite file for one control plane, because two of them would not see each other's changes.

The lock is on the database file itself, so that neither another path to the file nor the removal of any other file
gets around it. The operating system releases the lock when the process ends, however it ends. A file beside the
database names the holder. Programs that only read the database need no lock. Only Linux has locks of this kind, so
on other systems the file is not kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from datetime import UTC, datetime
from pathlib import Path

from meridian_control.common.errors import StoreUnavailable

# The byte of the file that is locked. SQLite locks bytes from 2^30 on (https://www.sqlite.org/lockingv3.html).
LOCKED_BYTE = 1 << 62
HOLDER_SUFFIX = ".holder"


class StoreLock:
    """The lock on a database file, from the constructor to `release`.

    address: the address at which the holder serves. Raises StoreUnavailable if another control plane holds the lock,
    and OSError if the file cannot be locked.
    """

    def __init__(self, database: str, address: str) -> None:
        # A symbolic link names the same database as the file that the link leads to.
        self._holder = Path(os.path.realpath(database) + HOLDER_SUFFIX)
        self._file = os.open(database, os.O_RDWR | os.O_CREAT, 0o644)
        # An open-file-description lock, because SQLite would release an ordinary one when it closes a connection.
        if sys.platform != "linux":
            return
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise StoreUnavailable(
                f"policy store: {database} is in use by {self._described()}; a SQLite file is for one control plane. "
                "Stop that one first, or use postgresql://… for several replicas"
            ) from None
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": address,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._holder.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def _described(self) -> str:
        """Describe the control plane that holds the lock."""
        try:
            told = json.loads(self._holder.read_text(encoding="utf-8"))
            return f"process {told['pid']} on {told['host']}, which serves {told['address']} since {told['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another control plane"

    def release(self) -> None:
        """Release the lock, after all connections to the database are closed."""
        self._holder.unlink(missing_ok=True)
        os.close(self._file)
