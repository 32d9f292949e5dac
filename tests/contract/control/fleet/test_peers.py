"""A replica asks the others over real connections: one that closes under a call counts as no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from meridian.v1 import fleet_pb2, fleet_pb2_grpc

from meridian_control.capabilities.handover.fleet import FleetHandovers
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.errors import ReplicaUnavailable
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.fleet import peers
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.part import Beside
from meridian_control.fleet.peer_answers import read
from meridian_control.fleet.peers import Peer, Peers
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.policy.model import Policy
from meridian_control.server.fleet_service import FleetService
from tests.contract.proxies import proxy
from tests.fakes.control import utc_now
from tests.patient import LONG_S
from tests.unit.control.capabilities.handover.engines import disagg


class Silent(fleet_pb2_grpc.FleetServiceServicer):
    """A replica that answers ListEngines only once `answers` is set."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def ListEngines(self, _request: Any, _context: Any) -> fleet_pb2.ListEnginesResponse:  # noqa: N802
        self.asked.set()
        await self.answers.wait()
        return fleet_pb2.ListEnginesResponse()


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Silent, list[Replica], Peers]]:
    """A silent replica, the list of live replicas, which has that one, and the clients of these replicas."""
    servicer, server = Silent(), grpc.aio.server()  # type: ignore[abstract]
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
    live = [Replica("other", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")]
    await server.start()
    made = Peers(lambda: live, ClientCredentials())
    yield servicer, live, made
    await made.close()
    await server.stop(0)


async def listed(peer: Peer) -> Any:
    return await peer.fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=600)


async def test_a_replica_that_ends_during_a_call_gives_no_answer(
    silent: tuple[Silent, list[Replica], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.0)
    servicer, live, made = silent
    one, every = asyncio.create_task(made.ask_one("other", listed)), asyncio.create_task(made.ask(listed))
    await servicer.asked.wait()
    live.clear()
    assert await made.ask(listed) == ({}, [])
    with pytest.raises(ReplicaUnavailable, match=r"other \(the connection to it was closed\)"):
        await one
    assert await every == ({}, ["other"])


async def test_a_replica_that_hangs_is_not_waited_for_again(
    silent: tuple[Silent, list[Replica], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question waits for the time limit once, and the next ones only for a part of it until the replica answers."""
    servicer, _, made = silent
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.05)

    async def limited(peer: Peer) -> Any:
        return await peer.fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=0.05)

    assert await made.ask(limited) == ({}, ["other"])
    # This question has no time limit of its own.
    assert await made.ask(listed) == ({}, ["other"])
    servicer.answers.set()
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", LONG_S)
    heard, unreachable = await made.ask(listed)
    assert (list(heard), unreachable) == (["other"], [])


async def test_a_slow_replica_has_the_whole_time_again_and_again(
    silent: tuple[Silent, list[Replica], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that always takes longer than the short time would otherwise be left out for good after one delay."""
    made, patience, timeout = silent[2], [], asyncio.timeout

    def timing(delay: float) -> asyncio.Timeout:
        patience.append(delay)
        return timeout(delay)

    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(asyncio, "timeout", timing)
    for again_s in (LONG_S, LONG_S, 0.0, LONG_S):
        monkeypatch.setattr(peers, "PATIENT_S", again_s)
        assert await made.ask(listed, "engines") == ({}, ["other"])
    assert patience == [0.05, pytest.approx(0.005), 0.05, pytest.approx(0.005)]


@pytest.mark.usefixtures("_patient")
async def test_replicas_that_list_requests_for_each_other_do_not_wait_for_each_other() -> None:
    async with AsyncExitStack() as stack:
        lists: list[list[Replica]] = [[], []]
        stubs = []
        for number, live in enumerate(lists):
            made = Peers(partial(list, live), ClientCredentials())
            stack.push_async_callback(made.close)
            fleet = Fleet(utc_now, capabilities=CAPABILITIES)
            servicer, server = FleetService(WholeFleet(fleet, str(number), made, lambda: True)), grpc.aio.server()
            fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            lists[1 - number].append(Replica(str(number), f"127.0.0.1:{port}"))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            stubs.append(fleet_pb2_grpc.FleetServiceStub(channel))
        answers = await asyncio.gather(*(stub.ListRequests(fleet_pb2.ListRequestsRequest()) for stub in stubs))
    assert [list(answer.unreachable_replicas) for answer in answers] == [[], []]


def test_a_replica_reads_every_page_of_another_one() -> None:
    live = [fleet_pb2.LiveRequest(request_id=f"{number:040}") for number in range(MAX_SLOTS + 1)]
    request, seen = fleet_pb2.ListRequestsRequest(local_only=True, page_size=1000), list[str]()
    while request.page_token or not seen:
        page, request.page_token = FleetService._page(live, lambda one: (one.engine_id, one.request_id), request)
        answer = fleet_pb2.ListRequestsResponse(requests=page, next_page_token=request.page_token)
        given: Any = read(answer.SerializeToString(), fleet_pb2.ListRequestsResponse.FromString)
        seen += [entry.request_id for entry in given.requests]
    assert seen == [entry.request_id for entry in live]


async def test_a_caller_that_hangs_up_ends_the_question(silent: tuple[Silent, list[Replica], Peers]) -> None:
    servicer, _, made = silent
    asking = asyncio.create_task(made.ask_one("other", listed))
    await servicer.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("decides", ["nobody", "policy", "candidate"])
async def test_the_others_are_asked_for_engines_while_a_policy_of_the_fleet_hands_requests_over(
    silent: tuple[Silent, list[Replica], Peers], monkeypatch: pytest.MonkeyPatch, decides: str
) -> None:
    """A rollout judges its candidate by the engines of all replicas."""
    servicer, _, made = silent
    servicer.answers.set()
    policies = [disagg() if decides == name else Policy() for name in ("policy", "candidate")]
    monkeypatch.setattr(Fleet, "policies", policies)
    handovers = Fleet(utc_now, capabilities=CAPABILITIES).part(FleetHandovers)
    unused: Any = None
    handovers.attach(Beside("asking", made, lambda: True, unused, unused, utc_now))
    await handovers.tick()
    assert servicer.asked.is_set() == (decides != "nobody")


async def test_replicas_use_no_proxy(
    silent: tuple[Silent, list[Replica], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, _, made = silent
    servicer.answers.set()
    with proxy() as other:
        for name, value in (other.environment | {"MERIDIAN_PROXY": other.url}).items():
            monkeypatch.setenv(name, value)
        heard, unreachable = await made.ask(listed)
        assert (list(heard), unreachable, other.asked) == (["other"], [], [])
