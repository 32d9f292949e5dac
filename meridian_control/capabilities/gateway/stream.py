"""Counts the requests of one engine whose client asked for an SLO class that it may not choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.metric_entry import counter
from meridian_control.common.opened_request import is_new
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from meridian.v1 import agent_pb2

    from meridian_control.engine.part import Stream

REFUSED_TOTAL = "meridian_refused_slo_classes_total"
ENTRIES = (
    counter(
        REFUSED_TOTAL,
        (),
        "Requests whose client asked for an SLO class that it may not choose, because a gateway names another.",
        "Grows: `meridianctl explain` shows a request's wish; let clients choose the class "
        "(`gateway.client_slo_classes`), or correct the client.",
    ),
)


class RefusedClasses(Part):
    """The requests of an engine whose gateway names tenants or SLO classes."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._lists = stream, False

    @classmethod
    def of(cls, stream: Stream) -> RefusedClasses | None:
        return cls(stream) if stream.hello.request_sources else None

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self._lists = True

    def snapshot_ends(self, now: datetime) -> None:
        self._lists = False

    def opened(self, slots: Sequence[int]) -> None:
        # A snapshot lists requests that wait, which were counted when they began. Those that began without a stream are
        # not counted, as in `meridian_requests_total`.
        for slot in slots if not self._lists else ():
            info = self._stream.table.info[slot]
            if info is not None and info.refused_slo_class and is_new(info):
                self._stream.count(REFUSED_TOTAL)
