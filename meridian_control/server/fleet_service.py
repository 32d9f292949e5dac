"""Implements FleetService over the fleet of all replicas. All methods run on the gRPC server's event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from meridian.v1 import fleet_pb2, fleet_pb2_grpc

from meridian_control.common.errors import InvalidRequest, NotFound
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.common.paging import fitting, page, token_after
from meridian_control.fleet import decision_queries, thinking_ends
from meridian_control.fleet.part import each
from meridian_control.fleet.views import engine_key, request_key
from meridian_control.server.grpc_server import begin_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

    from meridian_control.fleet.whole_fleet import WholeFleet

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

Shown = TypeVar("Shown", bound=Message)
Paged: TypeAlias = fleet_pb2.ListEnginesRequest | fleet_pb2.ListRequestsRequest

WATCH_MS, MIN_WATCH_MS = 1000, 50
# Seconds for which the live requests are kept for further pages.
KEPT_S = 5.0
# Largest number of bytes of a page, because by default gRPC's clients refuse messages above 4 MiB; of a page for
# another replica; and of the only page for a replica of version 0.3.0, which asks for no second one.
PAGE_BYTES, REPLICA_BYTES, ONLY_PAGE_BYTES = 2 << 20, 16 << 20, 60 << 20


class _RequestList:
    """The live requests, of which a list may take a hundred megabytes: one is made at a time, and kept for its further
    pages. look: returns the requests of an engine, empty for all, and the replicas that did not answer.

    The caller holds the lock while it uses a list.
    """

    def __init__(self, look: Callable[[str], Awaitable[tuple[list[fleet_pb2.LiveRequest], list[str]]]]) -> None:
        self.lock, self._look = asyncio.Lock(), look
        self._kept: tuple[str, list[fleet_pb2.LiveRequest], list[str]] | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    async def of(self, engine_id: str, is_further: bool) -> tuple[list[fleet_pb2.LiveRequest], list[str]]:
        """Return the requests and the replicas that did not answer. is_further: for a page that is not the first."""
        if not is_further or self._kept is None or self._kept[0] != engine_id:
            self.forget()
            self._kept = engine_id, *await self._look(engine_id)
            self._forgetting = asyncio.get_running_loop().call_later(KEPT_S, self.forget)
        return self._kept[1:]

    def forget(self) -> None:
        self._kept = None
        if self._forgetting is not None:
            self._forgetting.cancel()


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self, whole: WholeFleet) -> None:
        self._whole, self._stopped = whole, asyncio.Event()
        # A list for another replica does not wait for one that asks the others: two replicas would wait for each
        # other.
        self._lists = {local: _RequestList(partial(whole.requests, local_only=local)) for local in (False, True)}
        # Methods that capabilities answer, by name.
        self._answers = {name: answer for part in whole.fleet.parts.values() for name, answer in part.calls().items()}

    def end_watches(self) -> None:
        """End every call of WatchFleet, because the server stops."""
        self._stopped.set()

    async def ListEngines(  # noqa: N802
        self, request: fleet_pb2.ListEnginesRequest, context: Context
    ) -> fleet_pb2.ListEnginesResponse:
        engines, unreachable = await self._whole.engines(request.local_only)
        shown, token = self._page(engines, engine_key, request)
        answer = fleet_pb2.ListEnginesResponse(engines=shown, next_page_token=token, unreachable_replicas=unreachable)
        if request.local_only and not request.page_token:
            each(self._whole.fleet.parts.values(), lambda part: part.answer_replica(answer, REPLICA_BYTES))
            if request.with_sums:
                answer.sums.CopyFrom(await self._whole.sums())
        return answer

    async def ListRequests(  # noqa: N802
        self, request: fleet_pb2.ListRequestsRequest, context: Context
    ) -> fleet_pb2.ListRequestsResponse:
        kept = self._lists[request.local_only]
        async with kept.lock:
            requests, unreachable = await kept.of(request.engine_id, is_further=bool(request.page_token))
            shown, token = self._page(requests, request_key, request)
            if not token:
                kept.forget()
            del requests
        return fleet_pb2.ListRequestsResponse(requests=shown, next_page_token=token, unreachable_replicas=unreachable)

    @staticmethod
    def _page(entries: list[Shown], key: Callable[[Shown], tuple[str, str]], request: Paged) -> tuple[list[Shown], str]:
        """Return the requested page and the token of the next page. A page for a replica is bounded by its bytes, and
        by the number of entries that the replica reads."""
        if request.local_only and not request.page_size:
            return entries[: fitting(entries, ONLY_PAGE_BYTES)], ""
        begin, end = page(entries, key, request.page_size, request.page_token)
        if request.local_only:
            end = min(len(entries), begin + MAX_SLOTS // 2)
        end = begin + fitting(entries[begin:end], REPLICA_BYTES if request.local_only else PAGE_BYTES)
        return entries[begin:end], token_after(entries, key, end)

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        if request.interval_ms < 0:
            raise InvalidRequest("interval_ms", f"must be at least 0; got {request.interval_ms}")
        interval_s = max(MIN_WATCH_MS, request.interval_ms or WATCH_MS) / 1000
        clock = asyncio.get_running_loop().time
        while not self._stopped.is_set() and not context.cancelled():
            yield await (self._whole.bounded_state(local_only=True) if request.local_only else self._whole.watched())
            # All watchers wake at the same multiples of the interval, so that they share one look at the fleet.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), interval_s - clock() % interval_s)

    async def ExplainRequest(  # noqa: N802
        self, request: fleet_pb2.ExplainRequestRequest, context: Context
    ) -> fleet_pb2.ExplainRequestResponse:
        return await decision_queries.explain(self._whole, request)

    async def ListDecisions(  # noqa: N802
        self, request: fleet_pb2.ListDecisionsRequest, context: Context
    ) -> fleet_pb2.ListDecisionsResponse:
        return await decision_queries.decisions(self._whole, request)

    async def GetSavings(self, request: fleet_pb2.GetSavingsRequest, context: Context) -> Any:  # noqa: N802
        return await self._answered("GetSavings", request)

    async def ListBudgets(self, request: fleet_pb2.ListBudgetsRequest, context: Context) -> Any:  # noqa: N802
        return await self._answered("ListBudgets", request)

    async def ListSelfCalibrations(self, request: fleet_pb2.ListSelfCalibrationsRequest, context: Context) -> Any:  # noqa: N802
        return await self._answered("ListSelfCalibrations", request)

    async def _answered(self, name: str, request: Message) -> Any:
        """Return the answer of the capability that serves a method. Raises NotFound without such a capability."""
        if (answer := self._answers.get(name)) is None:
            raise NotFound(f"no capability of this control plane answers {name}")
        return await answer(request)

    async def EndThinking(  # noqa: N802
        self, request: fleet_pb2.EndThinkingRequest, context: Context
    ) -> fleet_pb2.EndThinkingResponse:
        return await thinking_ends.end_thinking(self._whole, request)

    async def RecordTrace(  # noqa: N802
        self, request: fleet_pb2.RecordTraceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.RecordTraceResponse]:
        logger.info("recording begins: %s", request.engine_id or "all engines")
        try:
            async with self._whole.recording(request.engine_id, request.local_only) as recording:
                # The headers tell the client that the recording has begun.
                await begin_answer(context)
                async for record in recording.records():
                    yield fleet_pb2.RecordTraceResponse(record=record, unreachable_replicas=recording.unreachable)
        finally:
            logger.info("recording ends: %s", request.engine_id or "all engines")
