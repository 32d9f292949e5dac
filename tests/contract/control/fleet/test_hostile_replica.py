"""One hostile replica beside a real one: whoever can write to the database can name any address as a replica's. What
that replica answers may be missing or wrong, but the others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import grpc
import pytest
from google.protobuf.message import Message
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.fleet import peers, whole_fleet
from meridian_control.fleet.decision_queries import decisions
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import Peers
from tests.fakes.control import asking
from tests.fakes.linked import LinkedEngine, until
from tests.replicated import CONNECTED, Replicated, client

NAME = "0-hostile"
APPLIED = agent_pb2.OUTCOME_APPLIED


def _no_time() -> list[Message]:
    engine, decision = fleet_pb2.Engine(engine_id="first", state=CONNECTED), fleet_pb2.LoggedDecision()
    engine.connect_time.seconds = decision.time.seconds = 2**62
    return [
        fleet_pb2.ListEnginesResponse(engines=[engine]),
        fleet_pb2.ListDecisionsResponse(decisions=[decision]),
        # No counts can be like these: their sums do not fit, and their loss has no logarithm.
        fleet_pb2.GetSavingsResponse(savings=[fleet_pb2.Savings(max_loss=-5, shadow_saved_tokens=2**64 - 1)] * 2),
    ]


def _endless() -> list[Message]:
    return [
        fleet_pb2.ListEnginesResponse(next_page_token="1"),
        fleet_pb2.ListRequestsResponse(next_page_token="1"),
    ]


# What a replica may answer, by method; a method that is not there gets bytes that are no message.
ANSWERS: dict[str, dict[str, bytes]] = {
    "no message": {},
    "no text": {"ListEngines": b"\x0a\x03\x0a\x01\xff"},
    "no time": {type(m).__name__.removesuffix("Response"): m.SerializeToString() for m in _no_time()},
    # A page that shows such an engine would show nothing.
    "no number": {
        "ListEngines": fleet_pb2.ListEnginesResponse(
            engines=[fleet_pb2.Engine(engine_id="e", kv_used=float("nan"))]
        ).SerializeToString()
    },
    "pages without end": {type(m).__name__.removesuffix("Response"): m.SerializeToString() for m in _endless()},
    "too many engines": {"ListEngines": b"\x0a\x00" * (MAX_SLOTS + 1), "ListRequests": b"\x0a\x00" * (MAX_SLOTS + 1)},
}


class Hostile(grpc.GenericRpcHandler):
    """A replica that answers every call with the bytes in `answers`, each after `page_s` seconds."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.page_s = 0.0
        # Methods that are never answered.
        self.late: set[str] = set()

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]

        async def answer(_request: bytes, _context: Any) -> bytes:
            self.asked[method] += 1
            await asyncio.sleep(600 if method in self.late else self.page_s)
            return self.answers.get(method, b"\xff\xff\xff\xff")

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
async def hostile() -> AsyncIterator[tuple[Hostile, str]]:
    """A hostile replica and its address."""
    handler, server = Hostile(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield handler, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_what_a_hostile_replica_answers_stops_nobody(
    replicated: Replicated, hostile: tuple[Hostile, str]
) -> None:
    handler, address = hostile
    one = await replicated.started()
    connection = await asyncpg.connect(replicated.database)
    await connection.execute("INSERT INTO replicas VALUES ($1, $2, now())", NAME, address)
    await connection.close()
    await until(lambda: f"replica {NAME} at {address} appeared" in one.log())
    with LinkedEngine([one.target], "first") as first:
        first.open("here")
        await first.steps_until(first.caps)
        async with client(one) as asked:
            for name, answers in ANSWERS.items():
                handler.answers = answers
                shown = await asked.engines()
                assert ([e.engine_id for e in shown.engines], list(shown.unreachable_replicas)) == (["first"], [NAME])
                listed = await asked.fleet.ListRequests(fleet_pb2.ListRequestsRequest())
                assert [live.request_id for live in listed.requests] == ["here"], name
                assert list(listed.unreachable_replicas) == [NAME]
                counts = await asked.fleet.GetSavings(fleet_pb2.GetSavingsRequest())
                assert list(counts.unreachable_replicas) == [NAME]
                made = await asked.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest())
                assert list(made.unreachable_replicas) == [NAME]
                # The leader asks for the counts on its own, from time to time.
                if "GetSavings" in answers or not answers:
                    before = handler.asked["GetSavings"]
                    await until(lambda before=before: handler.asked["GetSavings"] > before)  # type: ignore[misc]
        first.open("more")
        await first.steps_until(lambda: len(first.caps()) == 2)
    assert "Traceback" not in one.log()
    assert await one.terminate() == 0


async def test_a_replica_of_another_version_returns_other_outcomes_for_nothing(hostile: tuple[Hostile, str]) -> None:
    """Those of 0.3.0 return decisions of all outcomes, which would take the places of those that are wanted."""
    handler, address = hostile
    made = [fleet_pb2.LoggedDecision(outcome=outcome) for outcome in (agent_pb2.OUTCOME_REFUSED, APPLIED)]
    handler.answers = {"ListDecisions": fleet_pb2.ListDecisionsResponse(decisions=made).SerializeToString()}
    async with asking([Replica(NAME, address)]) as whole:
        listed = await decisions(whole, fleet_pb2.ListDecisionsRequest(outcomes=[APPLIED]))
    assert [decision.outcome for decision in listed.decisions] == [APPLIED]


async def test_a_question_has_one_time_limit_for_all_pages(
    hostile: tuple[Hostile, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that sends page after page, each in time, would otherwise hold its callers for ever."""
    handler, address = hostile
    page = fleet_pb2.ListEnginesResponse(engines=[fleet_pb2.Engine(engine_id="e")], next_page_token="1")
    handler.answers, handler.page_s = {"ListEngines": page.SerializeToString()}, 0.05
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.5)
    async with asking([Replica(NAME, address)]) as whole:
        assert await asyncio.wait_for(whole.engines(), 60) == ([], [NAME])
    assert handler.asked["ListEngines"] > 1


async def test_an_answer_does_not_wait_for_the_reason_why_a_replica_is_silent(
    hostile: tuple[Hostile, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = hostile
    handler.page_s = 600
    found, looked = asyncio.Event(), asyncio.Event()

    async def why(*_: Any) -> str:
        looked.set()
        await found.wait()
        return "the reason"

    monkeypatch.setattr(Peers, "_why", why)
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.1)
    async with asking([Replica(NAME, address)]) as whole:
        assert await asyncio.wait_for(whole.engines(), 60) == ([], [NAME])
        await looked.wait()
        found.set()


async def test_engines_are_shown_although_their_requests_are_late(
    hostile: tuple[Hostile, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica with very many requests may take longer for them than anybody waits."""
    handler, address = hostile
    engine = fleet_pb2.Engine(engine_id="there", state=CONNECTED, replica=NAME)
    handler.answers = {"ListEngines": fleet_pb2.ListEnginesResponse(engines=[engine]).SerializeToString()}
    handler.late = {"ListRequests"}
    for module in (peers, whole_fleet):
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", 4.0)
    async with asking([Replica(NAME, address)]) as whole:
        assert await whole.engines() == ([engine], [])
        for _ in range(2):
            state = await asyncio.wait_for(whole.state(), 60)
            assert ([e.engine_id for e in state.engines], list(state.unreachable_replicas)) == (["there"], [NAME])
