"""Keeps a file for one control plane, because two of them would undo each other's changes to it.

The operating system releases the lock when the process ends, however it ends. A file beside the locked one names the
holder. Programs that only read the file need no lock. Only Linux has locks of this kind, so on other systems the file
is not kept.
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

# The byte of the file that is locked. SQLite locks bytes from 2^30 on (https://www.sqlite.org/lockingv3.html).
LOCKED_BYTE = 1 << 62
HOLDER_SUFFIX = ".holder"


class FileInUseError(Exception):
    """Another control plane holds the lock; the message describes that control plane."""


class FileLock:
    """The lock on a file, from the constructor to `release`. The file is made if it does not exist.

    address: the address at which the holder serves. Raises FileInUseError, and OSError if the file cannot be locked.
    """

    def __init__(self, file: str, address: str) -> None:
        # A symbolic link names the same file as the path that the link leads to.
        self._holder = Path(os.path.realpath(file) + HOLDER_SUFFIX)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
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
            raise FileInUseError(self._described()) from None
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
            holder = json.loads(self._holder.read_text(encoding="utf-8"))
            return (
                f"process {holder['pid']} on {holder['host']}, which serves {holder['address']} since {holder['since']}"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return "another control plane"

    def release(self) -> None:
        """Release the lock, after all other uses of the file have ended."""
        self._holder.unlink(missing_ok=True)
        os.close(self._file)
