"""Control planes as processes over one PostgreSQL: any of them answers for the whole fleet, also while one is dead and
its engines move."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import grpc
import pytest
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2

from meridian_agent.link import control_stream
from meridian_control.fleet import departed, whole_fleet
from meridian_control.fleet.membership import FORGET_S, LEASE_S, Replica
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.policy import formats
from tests.contract.control.fleet.test_handovers import continued, opened
from tests.contract.control.fleet.test_replicas import leased
from tests.contract.raw_engine import RawEngine
from tests.fakes.control import asking
from tests.fakes.linked import LinkedEngine, until
from tests.processes import BUSY
from tests.replicated import CONNECTED, Client, Replicated, client, until_answer
from tests.unit.control.capabilities.handover.engines import ANSWERING, disagg, hello


async def test_any_replica_answers_for_all_and_tells_of_every_request(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([one.target], "first") as first, LinkedEngine([two.target], "second") as second:
        first.open("here")
        second.open("there", own_cap=7)
        await first.steps_until(first.caps)
        await second.steps_until(second.caps)
        async with client(one) as asked, client(two) as other:
            shown = await asked.engines()
            assert not shown.unreachable_replicas
            # A report may arrive between the two calls.
            while shown.engines != (await other.engines()).engines:
                shown = await asked.engines()
            assert [e.engine_id for e in shown.engines] == ["first", "second"]
            assert len({e.replica for e in shown.engines}) == 2
            assert [e.engine_id for e in (await asked.engines(local_only=True)).engines] == ["first"]
            page = await asked.engines(page_size=1)
            rest = await asked.engines(page_size=1, page_token=page.next_page_token)
            assert [[e.engine_id for e in each.engines] for each in (page, rest)] == [["first"], ["second"]]
            assert await asked.requests() == await other.requests() == ["here", "there"]
            assert await asked.requests(engine_id="second") == ["there"]
            assert await asked.requests(local_only=True) == ["here"]
            watching = asked.fleet.WatchFleet(fleet_pb2.WatchFleetRequest(interval_ms=50))
            state = await watching.read()
            assert [live.request_id for live in state.requests] == ["here", "there"]
            assert [e.engine_id for e in state.engines] == ["first", "second"]
            watching.cancel()
            explained = policy_pb2.ExplainPolicyRequest(request_id="there")
            values = {row.path: (row.value, row.origin) for row in (await asked.policy.ExplainPolicy(explained)).values}
            assert values["scheduler.max_think_tokens"] == ("7", "request")
            for fields in ({"local_only": True}, {"request_id": "nowhere"}):
                message = policy_pb2.ExplainPolicyRequest(**{"engine_id": "second", **fields})  # type: ignore[arg-type]
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await asked.policy.ExplainPolicy(message)
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND

            for each in (asked, other):
                for request_id, engine_id in (("here", "first"), ("there", "second")):
                    wanted = fleet_pb2.ExplainRequestRequest(request_id=request_id)
                    told = await each.fleet.ExplainRequest(wanted)
                    assert (told.life.engine_id, told.live.engine_id) == (engine_id, engine_id)
                caps = await each.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(kind="cap"))
                assert {d.request_id for d in caps.decisions} == {"here", "there"}
                paged = await each.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(kind="cap", page_size=1))
                assert paged.decisions == caps.decisions[:1]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asked.fleet.ExplainRequest(fleet_pb2.ExplainRequestRequest(request_id="there", local_only=True))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND


@asynccontextmanager
async def stepping(*engines: LinkedEngine) -> AsyncIterator[None]:
    """Let the engines make steps in the background."""

    async def step() -> None:
        while True:
            for engine in engines:
                engine.step()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(step())
    try:
        yield
    finally:
        task.cancel()


async def test_a_recording_has_the_engines_of_all(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([one.target], "first") as first, LinkedEngine([two.target], "second") as second:
        async with client(one) as asked:
            recording = asked.fleet.RecordTrace(fleet_pb2.RecordTraceRequest())
            await recording.initial_metadata()
            first.open("a")
            second.open("b")
            opened: dict[str, list[str]] = {}
            async with stepping(first, second):
                while len(opened) < 2:
                    record = (await recording.read()).record
                    if found := [*record.up.snapshot.requests, *record.up.step.opened]:
                        opened.setdefault(record.engine_id, []).extend(o.request_id for o in found)
            assert opened == {"first": ["a"], "second": ["b"]}
            # A replica that starts later is recorded too.
            three = await replicated.started()
            with LinkedEngine([three.target], "third") as third:
                third.open("c")
                async with stepping(third):
                    while (await recording.read()).record.engine_id != "third":
                        pass
            two.kill()
            async with stepping(first):
                while not (response := await recording.read()).unreachable_replicas:
                    pass
            assert response.record.engine_id in {"first", "third"}, "only live replicas are recorded"
            recording.cancel()


async def test_a_request_moves_between_engines_of_two_replicas(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    async with client(one) as asked, client(two) as other:
        await asked.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=formats.to_proto(disagg())))
        a = await RawEngine(asked.channel, hello("a")).connect(revision=2)
        b = await RawEngine(other.channel, hello("b", ANSWERING)).connect(revision=2)
        await a.report(opened=opened("on-a", agent_pb2.PHASE_THINK, hand_over_candidate=True), kv_used=0.95)
        decided = asyncio.create_task(a.hand_over())
        # The replica of the thinking engine hears of the answering engine within a second.
        async with asyncio.timeout(20 * BUSY):
            while not decided.done():
                await a.report(kv_used=0.95)
                await asyncio.sleep(0.05)
        move = decided.result()
        assert move.url == "http://b:8000"
        await continued(a, b, move)
        for each in (asked, other):
            await until_answer(lambda each=each: _handed_over(each, "on-a"), ("handed_over", ["on-b"]))
        listed = {e.engine_id: dict(e.handovers) for e in (await other.engines()).engines}
        assert listed == {"a": {"handed_over": 1}, "b": {}}


async def _handed_over(asked: Client, request_id: str) -> tuple[str, list[str]]:
    """Return the result of a request's handover, and the other lives of the request."""
    told = await asked.fleet.ExplainRequest(fleet_pb2.ExplainRequestRequest(request_id=request_id))
    (made,) = [event.decision for event in told.life.events if event.decision.kind == "hand_over"]
    return made.hand_over.result, [life.request_id for life in told.related]


async def test_a_dead_replica_is_named_and_then_forgotten(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([one.target], "stays"):
        async with client(one) as asked:
            await until_answer(lambda: _ids(asked), (["stays"], 0))
            two.kill()
            shown = await asked.engines()
            assert [e.engine_id for e in shown.engines] == ["stays"], "the list is answered although a replica is dead"
            assert len(shown.unreachable_replicas) == 1
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asked.policy.ExplainPolicy(policy_pb2.ExplainPolicyRequest(engine_id="moved"))
            complaint = f'no engine "moved" is connected; replicas that did not answer: {shown.unreachable_replicas[0]}'
            assert raised.value.details() == complaint
            await replicated.passes(LEASE_S + 1)
            await until(lambda: "is gone" in one.log())
            # It may only hang, with engines that nobody else knows.
            assert await _ids(asked) == (["stays"], 1)
            await replicated.passes(FORGET_S)
            await until_answer(lambda: _ids(asked), (["stays"], 0))


async def _ids(asked: Client) -> tuple[list[str], int]:
    shown = await asked.engines()
    return [e.engine_id for e in shown.engines if e.state == CONNECTED], len(shown.unreachable_replicas)


async def test_engines_spread_and_move_when_a_replica_is_killed(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    rng = random.Random(0)
    names = [f"engine-{number:02}" for number in range(24)]
    with ExitStack() as stack:
        linked = [
            stack.enter_context(LinkedEngine([one.target, two.target], name, shuffle=rng.shuffle)) for name in names
        ]
        async with client(one) as asked:
            await until_answer(lambda: _names(asked), names)
            spread = Counter((await asked.connected()).values())
            (own,) = {e.replica for e in (await asked.engines(local_only=True)).engines}
            assert len(spread) == 2
            assert min(spread.values()) >= 6, "each replica has about half of the engines"
            update = policy_pb2.UpdatePolicyRequest(policy=leased(500))
            await asked.policy.UpdatePolicy(update)
            two.kill()
            await until(lambda: all(engine.link.lease.revision == 2 for engine in linked), 20)
            await asked.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=leased(600)))
            await until(lambda: all(engine.link.lease.revision == 3 for engine in linked), 20)
            assert {engine.link.lease.lease_s for engine in linked} == {0.6}
            await until_answer(lambda: _names(asked), names)
            assert set((await asked.connected()).values()) == {own}
            for engine in linked:
                revisions = [settings.revision for settings in engine.settings]
                assert revisions == sorted(revisions), "revisions never go backwards"


async def _names(asked: Client) -> list[str]:
    return sorted(await asked.connected())


@pytest.fixture
async def leader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[WholeFleet, list[Replica]]]:
    """Yield the fleet as a leader knows it, and the list of the other live replicas."""
    # On a busy machine much time may pass between two questions.
    monkeypatch.setattr(whole_fleet, "FORGET_S", 3600.0)
    others: list[Replica] = []
    async with asking(others) as whole:
        yield whole, others


@pytest.mark.usefixtures("_patient")
async def test_a_silent_replica_counts_with_its_last_answer(
    replicated: Replicated, leader: tuple[WholeFleet, list[Replica]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader does not know all engines if a replica has never answered it, or not for long."""
    one, _ = await replicated.pair()
    whole, others = leader
    others.append(Replica("one", one.target))
    with LinkedEngine([one.target], "first"):
        await until_answer(lambda: _led(whole), {"first": True})
        one.kill()
        assert await _led(whole) == {"first": True}
        others.append(Replica("new", one.target))
        assert await _led(whole) is None
        others.pop()
        assert await _led(whole) == {"first": True}
        monkeypatch.setattr(whole_fleet, "FORGET_S", 0.0)
        assert await _led(whole) is None


@pytest.mark.usefixtures("_patient")
async def test_engines_of_an_ended_replica_are_gone_until_they_connect_again(
    replicated: Replicated, leader: tuple[WholeFleet, list[Replica]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await replicated.pair()
    whole, others = leader
    others += [Replica("one", one.target), Replica("two", two.target)]
    with (
        LinkedEngine([one.target, two.target], "moves", shuffle=lambda addresses: None),
        LinkedEngine([one.target], "dies"),
    ):
        with LinkedEngine([one.target], "ends") as ends:
            await until_answer(lambda: _led(whole), {"dies": True, "ends": True, "moves": True})
            # The replica is another process, which may hear of the stream's end before it has read the goodbye.
            ends.link.stop()
            await until(lambda: not ends.link._thread.is_alive())
        await until_answer(lambda: _led(whole), {"dies": True, "ends": False, "moves": True})
        one.kill()
        others.pop(0)
        await until_answer(lambda: _led(whole), {"dies": False, "ends": False, "moves": True})
        assert {engine.engine_id for engine in await whole.led_engines() or [] if engine.lost} == {"dies"}
        monkeypatch.setattr(departed, "FORGET_AFTER_S", 0.0)
        await until_answer(lambda: _led(whole), {"moves": True})


async def _led(whole: WholeFleet) -> dict[str, bool] | None:
    """Return for each engine that the leader knows whether it is connected, None if the leader does not know all."""
    engines = await whole.led_engines()
    return None if engines is None else {engine.engine_id: engine.state == CONNECTED for engine in engines}


async def test_the_lead_passes_on_at_once_when_the_leader_ends_and_later_when_it_is_killed(
    replicated: Replicated,
) -> None:
    one, two = await replicated.pair()
    address, token = await until_leader(replicated, than=0)
    leading, other = (one, two) if address == one.target else (two, one)
    assert await leading.terminate() == 0
    assert await until_leader(replicated, than=token) == (other.target, token + 1)
    # The database names a leader before its log does.
    await until(lambda: "is gone" in other.log() and f"token {token + 1}" in other.log())
    await leading.started()
    other.kill()
    await replicated.passes(LEASE_S + 1)
    assert await until_leader(replicated, than=token + 1) == (leading.target, token + 2)


async def until_leader(replicated: Replicated, than: int) -> tuple[str, int]:
    """Wait for a leader with a token above `than`, and return its address and its token."""
    async with asyncio.timeout(120):
        while (found := await replicated.leader())[1] <= than:
            await asyncio.sleep(0.1)
    return found


def test_addresses_behind_one_name_are_taken_at_random(replicated: Replicated, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC gets such address lists from DNS, and its own pick_first would connect all engines to the first address."""
    # Engines are processes of their own, which share no connection, as gRPC's channels within one process do.
    alone = [*control_stream.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    monkeypatch.setattr(control_stream, "CHANNEL_OPTIONS", alone)
    one, two = asyncio.run(replicated.pair())
    target = f"ipv4:{one.target},{two.target}"

    async def spread() -> None:
        chosen = Counter[str]()
        with ExitStack() as stack:
            async with client(one) as asked:
                # Chance decides, so engines are added until both replicas have some.
                for number in range(64):
                    stack.enter_context(LinkedEngine([target], f"engine-{number}"))
                    await until_answer(lambda: _count(asked), number + 1)
                    chosen = Counter((await asked.connected()).values())
                    if len(chosen) == 2 and min(chosen.values()) >= 2:
                        break
        assert len(chosen) == 2, chosen

    asyncio.run(spread())


async def _count(asked: Client) -> int:
    return len(await asked.connected())
