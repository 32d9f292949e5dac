"""Holds this engine's name among the processes of its host, so that no two engines of one host share a name.

The module owns the claim on the name: an address in Linux's abstract namespace of sockets, which the kernel gives to
one process at a time and takes back when the process ends, however it ends. The namespace belongs to the network, so
containers that share their host's network, and with it the host's name, see each other's claims. Runs at the engine's
start and at its end; never waits.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import sys
import weakref
from typing import TYPE_CHECKING

from meridian_agent.link.identity import wanted_name
from meridian_agent.link.settings_file import command_of, kept_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

logger = logging.getLogger("vllm.meridian")

# Largest number of engines of one host that may want the same name.
MAX_SAME = 256

_held: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go() -> None:
    """Give up the claims in a child process, which may outlive its parent."""
    for claim in _held:
        claim.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class EngineName:
    """The name of an engine, and the claim on it until `release`, or until nothing holds the object any more.

    name: the engine's id in its messages. file_name: the name of the engine's settings file, which no other engine of
    the host uses; it differs from `name` only if MERIDIAN_ENGINE_ID gives several engines one name.
    """

    def __init__(self, folder: Path | None, data_parallel_rank: int = 0) -> None:
        """folder: the folder of the settings files, which tell which name this command line had at its last start."""
        wanted, chosen = wanted_name(data_parallel_rank)
        self._release: Callable[[], object] | None = None
        self.name = self.file_name = wanted
        for name in _in_order(wanted, folder):
            if self._claimed(name):
                self.file_name = name
                break
        if chosen and self.file_name != wanted:
            logger.warning(
                "meridian: another engine on this host has the name %s too: give each engine a MERIDIAN_ENGINE_ID of "
                "its own, because the control plane cannot tell them apart; this engine keeps its settings as %s",
                ascii(wanted),
                ascii(self.file_name),
            )
        elif not chosen:
            self.name = self.file_name

    def _claimed(self, name: str) -> bool:
        """Claim a name; return whether no other process holds it. A host that knows no claims gives every name."""
        if sys.platform != "linux":
            return True
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0meridian-engine-{hashlib.sha256(name.encode()).hexdigest()[:32]}")
        except OSError as error:
            claim.close()
            return error.errno != errno.EADDRINUSE
        _held.add(claim)
        # A server may build engines in its own process, and drop them without an end.
        self._release = weakref.finalize(self, claim.close)
        return True

    def release(self) -> None:
        """Let other processes have the name."""
        if self._release is not None:
            self._release()


def _in_order(wanted: str, folder: Path | None) -> Iterator[str]:
    """Yield the names for an engine, best first: the name that an engine with this command line has had before, so that
    several servers of one host keep their names over restarts, then the others in the order of their numbers.

    No host's name has the underscore that separates a number.
    """
    names = [wanted, *(f"{wanted}_{number}" for number in range(2, MAX_SAME + 1))]
    mine = command_of()
    # Names before it may have no file here, because the engines that had them keep theirs in other folders.
    known = [name for name in names if kept_command(folder, name) == mine]
    yield from dict.fromkeys((*known, *names))
