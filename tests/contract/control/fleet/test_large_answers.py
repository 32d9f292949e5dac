"""Answers that grow with the number of live requests: every client gets them in messages that it accepts."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc

from meridian_control.common.paging import fitting
from meridian_control.common.report_bounds import MAX_ID_CHARS
from meridian_control.common.slices import at_once
from meridian_control.fleet import peers, whole_fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import OPTIONS, Peer
from meridian_control.fleet.whole_fleet import WATCH_BYTES
from meridian_control.server import fleet_service
from meridian_control.server.fleet_service import PAGE_BYTES, REPLICA_BYTES
from tests.contract.streams import Control
from tests.fakes.agent import hello
from tests.fakes.parts import engine_view
from tests.processes import BUSY

# Requests that fill more than a message between replicas, and as many as fill several pages.
MANY, SOME, TEXT = 10_000, 2_000, "x" * 500


def connected(control: Control, number: int, **engine: str) -> list[str]:
    """Connect an engine with so many large requests, and return their ids in order."""
    connection = control.fleet.join(hello(**engine))
    requests = [
        agent_pb2.RequestOpened(
            slot=slot,
            request_id=f"{slot:05d}{TEXT}",
            model=TEXT,
            tenant=TEXT,
            slo_class=TEXT,
            effort=TEXT,
            phase=agent_pb2.PHASE_THINK,
            think_tokens=slot,
        )
        for slot in range(number)
    ]
    snapshot = agent_pb2.Snapshot(step=1, requests=requests)
    at_once(control.fleet.receiving(connection, agent_pb2.ConnectRequest(snapshot=snapshot)))
    return [request.request_id for request in requests]


async def all_pages(call: Any, request: Any) -> list[Any]:
    pages = [await call(request)]
    while token := pages[-1].next_page_token:
        request.page_token = token
        pages.append(await call(request))
    return pages


async def test_pages_have_a_bound_in_bytes_and_come_from_one_look(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, looks = connected(control, SOME), list[str]()
    look = control.fleet.views.requests_in_turns

    def counted(engine_id: str) -> Any:
        looks.append(engine_id)
        return look(engine_id)

    monkeypatch.setattr(control.fleet.views, "requests_in_turns", counted)
    # This client has gRPC's own limits.
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        pages = await all_pages(stub.ListRequests, fleet_pb2.ListRequestsRequest(page_size=1000))
        assert (len(pages) > 1, looks) == (True, [""])
        token = (await stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1))).next_page_token
        await stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1, page_token=token, engine_id="other"))
        assert looks == ["", "", "other"]
    assert [live.request_id for page in pages for live in page.requests] == names
    assert max(page.ByteSize() for page in pages) <= PAGE_BYTES + 64


async def test_a_page_continues_where_the_last_one_ended(control: Control) -> None:
    """Neither what comes between two pages nor another caller's list moves the second page."""
    names = connected(control, 3, engine_id="m" * MAX_ID_CHARS)
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        first = await stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1))
        connected(control, 1, engine_id="before")
        connected(control, 1, engine_id="~" * MAX_ID_CHARS)
        assert (await stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1))).requests[0].engine_id == "before"
        request = fleet_pb2.ListRequestsRequest(page_token=first.next_page_token)
        second = (await stub.ListRequests(request)).requests
    assert [live.request_id for live in first.requests] == names[:1]
    assert [(live.engine_id, live.request_id) for live in second] == [
        *(("m" * MAX_ID_CHARS, name) for name in names[1:]),
        ("~" * MAX_ID_CHARS, names[0]),
    ]


async def test_replicas_get_all_requests_in_pages(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    names = connected(control, MANY)
    # This process makes the answers, too, and on a busy machine that may take longer than a replica waits.
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 60 * BUSY)
    async with grpc.aio.insecure_channel(control.target, OPTIONS) as channel:
        peer = Peer(Replica("r", control.target), channel)
        assert [live.request_id for live in await whole_fleet._requests(peer, "")] == names
        assert [engine.engine_id for engine in await whole_fleet._engines(peer)] == ["engine"]
        asked = fleet_pb2.ListRequestsRequest(local_only=True, page_size=1)
        pages = await all_pages(peer.fleet.ListRequests, asked)
        assert len(pages) > 1
        assert max(page.ByteSize() for page in pages) <= REPLICA_BYTES + 64


async def test_a_replica_of_an_older_version_gets_one_page(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    names = connected(control, SOME)
    # The requests do not fit into a page of any other caller.
    monkeypatch.setattr(fleet_service, "REPLICA_BYTES", PAGE_BYTES)
    async with grpc.aio.insecure_channel(control.target, OPTIONS) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        answer = await stub.ListRequests(fleet_pb2.ListRequestsRequest(local_only=True))
        assert ([live.request_id for live in answer.requests], answer.next_page_token) == (names, "")
        monkeypatch.setattr(fleet_service, "ONLY_PAGE_BYTES", 1 << 20)
        answer = await stub.ListRequests(fleet_pb2.ListRequestsRequest(local_only=True))
        assert answer.ByteSize() <= 1 << 20
        assert names[: len(answer.requests)] == [live.request_id for live in answer.requests]


@pytest.mark.parametrize("local_only", [False, True])
async def test_a_watcher_sees_the_requests_that_think_most(control: Control, local_only: bool) -> None:
    names = connected(control, MANY)
    async with grpc.aio.insecure_channel(control.target, [("grpc.max_receive_message_length", 20 << 20)]) as channel:
        call = fleet_pb2_grpc.FleetServiceStub(channel).WatchFleet(fleet_pb2.WatchFleetRequest(local_only=local_only))
        state: Any = await call.read()
        call.cancel()
    assert WATCH_BYTES * 0.9 < state.ByteSize() <= WATCH_BYTES + 64
    shown = len(state.requests)
    assert state.requests_left_out == MANY - shown > 0
    assert [live.request_id for live in state.requests] == names[-shown:], "in the usual order"
    assert len(state.engines) == 1


def test_a_page_has_an_entry_whatever_its_size(control: Control) -> None:
    engine = engine_view(control.fleet.join(hello()).session)
    assert [fitting([engine] * 3, size) for size in (0, 2 * engine.ByteSize() + 20, 1 << 20)] == [1, 2, 3]
    assert fitting([], 10) == 0
