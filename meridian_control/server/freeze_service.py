"""Implements FreezeService: checks requests for the freeze store. All methods run on the gRPC server's event loop."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meridian.v1 import freeze_pb2, freeze_pb2_grpc

from meridian_control.common.errors import InvalidRequest
from meridian_control.common.look import time_text
from meridian_control.common.paging import checked, newest_page
from meridian_control.common.plain_data import same
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.server.interceptor import said_by
from meridian_control.server.policy_service import check_texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    import grpc

    from meridian_control.fleet.freeze_store import FreezeStore

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

MIN_DURATION, MAX_DURATION = timedelta(seconds=1), timedelta(days=7)
# Largest number of globs and labels of a freeze, and of characters in each.
MAX_PARTS, MAX_CHARS = 100, 256


class FreezeService(freeze_pb2_grpc.FreezeServiceServicer):
    """The servicer. `clock` gives aware time."""

    def __init__(self, store: FreezeStore, clock: Callable[[], datetime]) -> None:
        self._store, self._clock = store, clock

    async def Freeze(  # noqa: N802
        self, request: freeze_pb2.FreezeRequest, context: Context
    ) -> freeze_pb2.FreezeResponse:
        match, duration = _match(request.match), _duration(request)
        check_texts(request)
        stored = await self._store.add_freeze(match, self._clock() + duration, request.author, request.reason)
        logger.warning(
            "freeze %d of %s until %s by %s",
            stored.freeze_id,
            stored.match,
            time_text(stored.end_time),
            said_by(request.author, request.reason),
        )
        return freeze_pb2.FreezeResponse(freeze=_to_message(stored))

    async def Thaw(self, request: freeze_pb2.ThawRequest, context: Context) -> freeze_pb2.ThawResponse:  # noqa: N802
        ended = await self._store.thaw(request.freeze_id)
        for freeze in ended:
            logger.info("freeze %d is thawed by %s", freeze.freeze_id, said_by())
        return freeze_pb2.ThawResponse(freezes=map(_to_message, ended))

    async def ListFreezes(  # noqa: N802
        self, request: freeze_pb2.ListFreezesRequest, context: Context
    ) -> freeze_pb2.ListFreezesResponse:
        limit, before = checked(request.page_size, request.page_token)
        left = [freeze for freeze in await self._store.look() if before is None or freeze.freeze_id < before]
        page, token = newest_page(left, limit, lambda freeze: freeze.freeze_id)
        return freeze_pb2.ListFreezesResponse(freezes=map(_to_message, page), next_page_token=token)


def _duration(request: freeze_pb2.FreezeRequest) -> timedelta:
    """Return the requested duration. Raises InvalidRequest if the duration is out of range."""
    if abs(request.duration.nanos) >= 10**9:
        raise InvalidRequest("duration", f"must have nanos within a second; got {request.duration.nanos}")
    seconds = request.duration.seconds + request.duration.nanos / 1e9
    low, high = MIN_DURATION.total_seconds(), MAX_DURATION.total_seconds()
    if not low <= seconds <= high:
        raise InvalidRequest("duration", f"must be in [{low:.0f}, {high:.0f}] seconds; got {seconds:g}")
    return timedelta(seconds=seconds)


def _match(message: freeze_pb2.FreezeMatch) -> Match:
    """Return the requested match. Raises InvalidRequest if the match has too many parts or an invalid text."""
    if (count := len(message.engine_ids) + len(message.engine_labels)) > MAX_PARTS:
        raise InvalidRequest("match", f"must have at most {MAX_PARTS} globs and labels; got {count}")
    for index, glob in enumerate(message.engine_ids):
        _check_text(f"match.engine_ids[{index}]", glob)
        if not glob:
            raise InvalidRequest(f"match.engine_ids[{index}]", "must not be empty")
    _check_text("match.model", message.model)
    for name, value in message.engine_labels.items():
        _check_text("match.engine_labels", name)
        _check_text("match.engine_labels", value)
        if not name:
            raise InvalidRequest("match.engine_labels", "must not have an empty name")
    return Match(tuple(message.engine_ids), message.model, tuple(sorted(message.engine_labels.items())))


def _check_text(field: str, text: str) -> None:
    """Raise InvalidRequest for a text that is too long or that a database cannot hold."""
    if "\0" in text:
        raise InvalidRequest(field, "must not contain the character U+0000")
    if len(text) > MAX_CHARS:
        raise InvalidRequest(field, f"must have at most {MAX_CHARS} characters; got {len(text)}")


def _to_message(freeze: Freeze) -> freeze_pb2.StoredFreeze:
    match = freeze_pb2.FreezeMatch(
        engine_ids=freeze.match.engine_ids, model=freeze.match.model, engine_labels=dict(freeze.match.engine_labels)
    )
    return freeze_pb2.StoredFreeze(
        match=match, **same(freeze, "freeze_id", "author", "reason", "create_time", "end_time")
    )
