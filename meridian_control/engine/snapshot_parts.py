"""Joins the parts of an agent's snapshot. The code does no I/O; each object belongs to one session."""

from __future__ import annotations

from meridian.v1 import agent_pb2

from meridian_control.common.errors import BadReport
from meridian_control.common.opened_request import MAX_SLOTS

# About how many times its bytes a message takes in memory.
IN_MEMORY = 4


class SnapshotParts:
    """The parts of the snapshot that is arriving on one stream."""

    def __init__(self) -> None:
        self._arriving: agent_pb2.Snapshot | None = None
        # About the memory of the parts.
        self.held_bytes = 0

    def take_part(self, part: agent_pb2.Snapshot) -> agent_pb2.Snapshot | None:
        """Add a part; return the whole snapshot with its last part, else None. Raises BadReport if the part belongs to
        another snapshot than the parts before, or if there are more requests than an engine can have."""
        whole = self._arriving
        if whole is None and not part.continues:
            return part
        if whole is None:
            whole = self._arriving = agent_pb2.Snapshot()
        elif part.step != whole.step:
            raise BadReport(f"a part of the snapshot of step {whole.step} must follow; got step {part.step}")
        whole.MergeFrom(part)
        self.held_bytes += IN_MEMORY * part.ByteSize()
        for name in ("requests", "ended"):
            if (entries := len(getattr(whole, name))) > MAX_SLOTS:
                raise BadReport(f"{name} must have at most {MAX_SLOTS} entries in all parts; got {entries}")
        if part.continues:
            return None
        self._arriving, whole.continues, self.held_bytes = None, False, 0
        return whole

    def check_complete(self) -> None:
        """Raise BadReport if parts of a snapshot are still to come."""
        if self._arriving is not None:
            raise BadReport(f"must not come before the last part of the snapshot of step {self._arriving.step}")
