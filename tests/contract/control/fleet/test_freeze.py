"""The kill switch end to end: freezes in a real store, a real server, agents on their real link, and meridianctl."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from meridian.v1 import fleet_pb2, freeze_pb2

from meridian_control.cli import expected
from meridian_control.cli import freeze as cli_freeze
from meridian_control.cli.console import Client
from meridian_control.common.errors import NotFound, StoreUnavailable
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.fleet import catching_up
from meridian_control.fleet.freeze_store import FreezeStore
from meridian_control.storage.database import Database
from tests.contract.clients import calling
from tests.contract.ctl import FAILED, INVALID, OK, run
from tests.contract.lost_store import lost_after
from tests.contract.streams import Clock, Control, refusal
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.replicated import Replicated

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


# ------------------------------------------------------------------------------------------------------------ matches


@pytest.mark.parametrize(
    ("match", "matches"),
    [
        (Match(), True),
        (Match(("rack-*",)), True),
        (Match(("other", "rack-7")), True),
        (Match(("other",)), False),
        (Match(model="Qwen/*"), True),
        (Match(model="llama"), False),
        (Match(engine_labels=(("zone", "a"),)), True),
        (Match(engine_labels=(("zone", "a"), ("tier", "x"))), False),
        (Match(("rack-*",), "llama"), False),
        (Match(("rack-*",), "Qwen/*", (("zone", "a"),)), True),
    ],
)
def test_matches(match: Match, matches: bool) -> None:
    assert match.matches("rack-7", "Qwen/Qwen3-8B", {"zone": "a"}) is matches


# -------------------------------------------------------------------------------------------------------------- store


class Stored:
    """A freeze store whose clock the test sets; that of the database's server stands still."""

    def __init__(self, database: Database) -> None:
        self.now = NOW
        database.now = self._server_now  # type: ignore[method-assign]
        self.told: list[tuple[Freeze, ...]] = []
        self.store = FreezeStore(database, lambda: self.now, self.told.append)

    async def _server_now(self) -> datetime:
        return NOW


@asynccontextmanager
async def stored(address: str) -> AsyncIterator[Stored]:
    database = await Database.open(address)
    try:
        yield Stored(database)
    finally:
        await database.close()


async def test_a_freeze_is_kept_until_its_time_is_over(address: str) -> None:
    match = Match(("a*", "b"), "m", (("zone", "a"),))
    async with stored(address) as one:
        made = await one.store.add_freeze(match, NOW + MINUTE, "ann", "döner\n")
        assert made == Freeze(1, match, "ann", "döner\n", NOW, NOW + MINUTE)
        assert one.told == [(made,)]
    async with stored(address) as again:
        assert await again.store.look() == (made,), "a freeze outlives a restart"
        again.now = NOW + MINUTE - timedelta(microseconds=1)
        assert await again.store.look() == (made,)
        again.now = NOW + MINUTE
        assert await again.store.look() == ()
        with pytest.raises(NotFound, match="freeze 1 is not in force"):
            await again.store.thaw(1)


async def test_thawing_ends_one_or_all(address: str) -> None:
    async with stored(address) as one:
        made = [await one.store.add_freeze(Match(), NOW + n * MINUTE, "", str(n)) for n in (1, 2, 3)]
        assert [freeze.freeze_id for freeze in made] == [1, 2, 3]
        assert [f.freeze_id for f in await one.store.thaw(2)] == [2]
        assert [f.freeze_id for f in one.told[-1]] == [3, 1]
        assert [f.freeze_id for f in await one.store.thaw(0)] == [3, 1]
        assert one.told[-1] == ()
        assert await one.store.thaw(0) == []
        assert (await one.store.add_freeze(Match(), NOW + MINUTE, "", "")).freeze_id == 4, "ids are not used again"


async def test_a_thawed_freeze_stays_thawed_whatever_the_clocks_say(address: str) -> None:
    async with stored(address) as one:
        await one.store.add_freeze(Match(), NOW + MINUTE, "", "")
        one.now = NOW + MINUTE / 2
        (thawed,) = await one.store.thaw(0)
        assert thawed.end_time == one.now
        one.now = NOW - timedelta(hours=1)
        assert await one.store.look() == ()


@pytest.mark.parametrize("back", [MINUTE / 2, timedelta(days=400)], ids=str)
async def test_a_clock_that_was_set_back_before_a_restart_adds_at_most_the_freezes_own_duration(
    address: str, back: timedelta
) -> None:
    async with stored(address) as one:
        await one.store.add_freeze(Match(), NOW + MINUTE, "", "short")
        await one.store.add_freeze(Match(), NOW + 2 * MINUTE, "", "long")
    async with stored(address) as again:
        again.now = start = NOW - back
        found = await again.store.look()
        assert [freeze.remaining(again.now) for freeze in found] == [2 * MINUTE, MINUTE]
        again.now = start + MINUTE / 2
        assert [f.remaining(again.now) for f in await again.store.look()] == [1.5 * MINUTE, MINUTE / 2]
        again.now = start + MINUTE
        assert [freeze.reason for freeze in await again.store.look()] == ["long"]
        assert [freeze.reason for freeze in await again.store.thaw(0)] == ["long"]
        again.now = start + 2 * MINUTE
        assert await again.store.look() == ()


async def test_a_replica_whose_clock_is_behind_freezes_for_no_longer(address: str) -> None:
    async with stored(address) as ahead, stored(address) as behind:
        behind.now = NOW - timedelta(hours=1)
        await ahead.store.add_freeze(Match(), NOW + MINUTE, "", "")
        (freeze,) = await behind.store.look()
        assert freeze.remaining(behind.now) == MINUTE
        behind.now += MINUTE / 2
        assert (await behind.store.look())[0].remaining(behind.now) == MINUTE / 2
        behind.now += MINUTE / 2
        assert await behind.store.look() == ()


async def test_two_at_once_have_two_numbers(address: str) -> None:
    async with stored(address) as one, stored(address) as two:
        stores = [one.store, two.store] * 4
        made = await asyncio.gather(*(store.add_freeze(Match(), NOW + MINUTE, "", "") for store in stores))
        assert sorted(freeze.freeze_id for freeze in made) == list(range(1, 9))


# ------------------------------------------------------------------------------------------------------------- stream


def order(seconds: float = 600, **match: Any) -> freeze_pb2.FreezeRequest:
    request = freeze_pb2.FreezeRequest(match=freeze_pb2.FreezeMatch(**match), reason="test")
    request.duration.FromMilliseconds(int(seconds * 1000))
    return request


async def freeze(target: str, seconds: float = 600, **match: Any) -> Any:
    async with calling(target) as clients:
        return (await clients.freeze.Freeze(order(seconds, **match))).freeze


async def thaw(target: str, freeze_id: int = 0) -> list[int]:
    async with calling(target) as clients:
        return [f.freeze_id for f in (await clients.freeze.Thaw(freeze_pb2.ThawRequest(freeze_id=freeze_id))).freezes]


def confirmed(control: Control, engine_id: str = "engine") -> bool:
    return bool(control.engine(engine_id).freeze.confirmed)


async def freeze_briefly(control: Control, *others: int) -> None:
    """Freeze the engine for a second, beside other freezes, until the engine has confirmed it.

    On a busy machine so short a freeze may be over before; the next attempt is longer.
    """
    for seconds in (1, 4, 16, 64):
        made = await freeze(control.target, seconds)
        end = made.end_time.ToDatetime(UTC)

        def seen(wanted: int = made.freeze_id) -> bool:
            return list(control.engine().freeze.freeze_ids) == [wanted, *others] and confirmed(control)

        if await until(lambda: (seen() and "seen") or (utc_now() > end and "over")) == "seen":  # noqa: B023
            return
    raise AssertionError("no freeze was seen")


async def test_a_recording_of_a_frozen_engine_begins_with_that(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        await freeze(control.target)
        await engine.steps_until(lambda: confirmed(control))
        recorded = [fleet_pb2.TraceRecord.FromString(each) for each in control.fleet.record("")._waiting]
        assert [r.up.WhichOneof("message") or r.down.WhichOneof("message") or "policy" for r in recorded] == [
            "hello",
            "freeze",
            "freeze_status",
            "policy",
        ]
        assert 0 < recorded[1].down.freeze.remaining_ms <= 600_000
        assert recorded[2].up.freeze_status.frozen


async def test_frozen_and_thawed(control: Control) -> None:
    """While an engine is frozen nothing is decided, and every open decision gets its outcome; after the thaw the
    control plane sends all decisions again."""
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        made = await freeze(control.target)
        await until(lambda: engine.link.mailbox.arrived)
        assert not confirmed(control), "a freeze takes effect in the next step"
        await engine.steps_until(lambda: confirmed(control))
        shown = control.engine().freeze
        assert (list(shown.freeze_ids), shown.end_time) == ([1], made.end_time)
        engine.open("b")
        told = len(engine.taken)
        await engine.steps_until(lambda: control.names() == ["a", "b"])
        await engine.steps_until(lambda: not control.engine().open_decisions)
        assert not [d for d in engine.taken[told:] if d.caps or d.forces or d.tiers or d.HasField("plan")]
        assert control.engine().outcomes["agent_off"]
        seen = control.engine().token_events
        await engine.steps_until(lambda: control.engine().token_events > seen)
        assert await thaw(control.target) == [1]
        await engine.steps_until(lambda: sorted(engine.caps()) == [(0, 600), (0, 600), (1, 600)])
        assert not control.engine().HasField("freeze")
        for name in list(engine.engine.live):
            engine.engine.finish(name)
        await engine.steps_until(lambda: not control.engine().open_decisions)
        (connection,) = control.fleet.connections
        assert connection.session.totals.unknown_outcomes == 0


async def test_a_change_reaches_the_engines_though_the_store_is_lost_once_it_is_stored(control: Control) -> None:
    kept = await freeze(control.target, engine_ids=["other"])
    with LinkedEngine([control.target]) as engine:
        await until(control.connected)
        with lost_after(control.store.database, "INSERT INTO freezes"):
            made = await freeze(control.target)
            await until(engine.link.lease.frozen)
            assert [f.freeze_id for f in control.fleet.freezes.in_force] == [made.freeze_id, kept.freeze_id]
        with lost_after(control.store.database, "UPDATE freezes"):
            assert await thaw(control.target, made.freeze_id) == [made.freeze_id]
            await until(lambda: not engine.link.lease.frozen())
            assert [f.freeze_id for f in control.fleet.freezes.in_force] == [kept.freeze_id]


async def test_only_what_matches_is_frozen(control: Control) -> None:
    with (
        LinkedEngine([control.target], "one", labels={"zone": "a"}) as one,
        LinkedEngine([control.target], "two", labels={"zone": "b"}) as two,
    ):
        await until(lambda: len(control.fleet.connections) == 2)
        await freeze(control.target, engine_labels={"zone": "b"})
        await until(lambda: confirmed(control, "two"))
        assert (one.link.lease.frozen(), two.link.lease.frozen()) == (False, True)
        await freeze(control.target, engine_ids=["o*"])
        await until(lambda: confirmed(control, "one"))
        assert await thaw(control.target, 1) == [1]
        await until(lambda: not two.link.lease.frozen())
        assert one.link.lease.frozen()


async def test_an_engine_is_frozen_until_the_last_freeze_ends(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        await until(control.connected)
        await freeze_briefly(control)
        await until(lambda: not control.engine().HasField("freeze"))
        assert not engine.link.lease.frozen()
        long = (await freeze(control.target, 600)).freeze_id
        await freeze_briefly(control, long)
        await until(lambda: list(control.engine().freeze.freeze_ids) == [long] and confirmed(control))
        assert engine.link.lease.frozen()
        await thaw(control.target, long)
        await until(lambda: not engine.link.lease.frozen())


async def test_a_freeze_can_be_shortened(control: Control) -> None:
    """Of two freezes the longer one is thawed, and then the control plane dies: the engine is frozen until the end of
    the shorter one."""
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        await until(lambda: control.fleet.connections)
        long = await freeze(control.target, 600)
        await freeze(control.target, 60)
        await until(lambda: confirmed(control))
        assert await thaw(control.target, long.freeze_id) == [long.freeze_id]
        await until(lambda: list(control.engine().freeze.freeze_ids) == [2] and confirmed(control))
        await control.kill()
        await until(lambda: not engine.link.lease.connected)
        assert engine.link.lease.frozen()
        clock.now = 60.0
        assert not engine.link.lease.frozen()
        await control.start()


async def test_a_restart_forgets_no_freeze(control: Control) -> None:
    """Neither a restart of the control plane nor one of the engine ends a freeze. A thaw that comes while engine and
    control plane are apart takes effect when they connect again."""
    with LinkedEngine([control.target]) as engine:
        await until(control.connected)
        await freeze(control.target)
        await until(lambda: confirmed(control))
        await control.kill()
        await until(lambda: not engine.link.lease.connected)
        assert engine.link.lease.frozen()
        await control.start()
        await until(lambda: control.connected() and confirmed(control))
    with LinkedEngine([control.target]) as engine:
        await until(engine.link.lease.frozen)
        await control.kill()
        await FreezeStore(control.store.database, control.fleet.clock, lambda _: None).thaw(0)
        await control.start()
        await until(lambda: not engine.link.lease.frozen())
        await until(lambda: control.connected() and not control.engine().HasField("freeze"))


@pytest.mark.parametrize("away", [0, 2])
async def test_a_replica_that_does_not_know_a_freeze_yet_does_not_end_it(
    control: Control, away: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another replica has frozen the engine, which then connects to this one, perhaps while the store is away."""
    monkeypatch.setattr(catching_up, "RETRY_S", 0.01)
    look, failing, shown = control.parts.freezes.look, iter(range(away)), []

    async def looks() -> tuple[Freeze, ...]:
        for _ in failing:
            shown.append(control.engine().HasField("freeze"))
            raise StoreUnavailable("policy store: away")
        return await look()

    monkeypatch.setattr(control.fleet.freezes, "look", looks)
    other = FreezeStore(control.store.database, control.fleet.clock, lambda _: None)
    made = await other.add_freeze(Match(), utc_now() + 10 * MINUTE, "ann", "incident")
    engine = LinkedEngine([control.target])
    engine.link.lease.freeze_for(600)
    received: list[float] = []
    freeze_for = engine.link.lease.freeze_for

    def freezes_for(seconds: float) -> None:
        received.append(seconds)
        freeze_for(seconds)

    monkeypatch.setattr(engine.link.lease, "freeze_for", freezes_for)
    with engine:
        await engine.steps_until(lambda: control.connected() and confirmed(control))
        assert list(control.engine().freeze.freeze_ids) == [made.freeze_id]
        assert engine.link.lease.frozen()
        assert 0 not in received, "the engine was thawed"
        await thaw(control.target)
        await engine.steps_until(lambda: not control.engine().HasField("freeze"))
    assert shown == [True] * away
    assert [r.message for r in caplog.records if "stays frozen" in r.message] == [
        "engine engine stays frozen, by freezes that this replica does not know: policy store: away"
    ][:away]


async def test_frozen_by_its_own_environment(control: Control) -> None:
    """Neither the control plane nor time ends a freeze that the engine's own environment sets."""
    engine = LinkedEngine([control.target])
    engine.link.lease.freeze_for(float("inf"))
    with engine:
        engine.open("a")
        await engine.steps_until(lambda: control.names() == ["a"] and control.engine().acked_revision == 1)
        # The control plane reads the store first, which may have a freeze that it does not know.
        await engine.steps_until(lambda: confirmed(control))
        shown = control.engine().freeze
        assert (shown.confirmed, list(shown.freeze_ids), shown.HasField("end_time")) == (True, [], False)
        await freeze(control.target)
        await engine.steps_until(lambda: list(control.engine().freeze.freeze_ids) == [1] and confirmed(control))
        await thaw(control.target)
        await engine.steps_until(lambda: not control.engine().freeze.freeze_ids and confirmed(control))
        assert engine.link.lease.frozen()
        assert not engine.caps()


# ------------------------------------------------------------------------------------------------- service, meridianctl


REFUSED = [
    (order(0), "duration must be in [1, 604800] seconds; got 0"),
    (order(604801), "duration must be in [1, 604800] seconds; got 604801"),
    (order(engine_ids=[""]), "match.engine_ids[0] must not be empty"),
    (order(engine_labels={"": "a"}), "match.engine_labels must not have an empty name"),
    (order(engine_ids=["x" * 257]), "match.engine_ids[0] must have at most 256 characters; got 257"),
    (order(engine_ids=["x"] * 101), "match must have at most 100 globs and labels; got 101"),
    (order(model="a\0"), "match.model must not contain the character U+0000"),
    (
        freeze_pb2.FreezeRequest(duration=duration_pb2.Duration(seconds=5), reason="a\0"),
        "reason must not contain the character U+0000",
    ),
    (freeze_pb2.FreezeRequest(), "duration must be in [1, 604800] seconds; got 0"),
    (
        freeze_pb2.FreezeRequest(duration=duration_pb2.Duration(seconds=5, nanos=-(2**31))),
        "duration must have nanos within a second; got -2147483648",
    ),
]


async def test_a_page_continues_after_the_last_freeze_shown(control: Control) -> None:
    for seconds in (600, 500, 400):
        await freeze(control.target, seconds)
    async with calling(control.target) as clients:
        first = await clients.freeze.ListFreezes(freeze_pb2.ListFreezesRequest(page_size=1))
        await thaw(control.target, 3)
        await freeze(control.target, 300)
        await freeze(control.target, 200)
        request_ = freeze_pb2.ListFreezesRequest(page_token=first.next_page_token)
        second = await clients.freeze.ListFreezes(request_)
    assert [[one.freeze_id for one in page.freezes] for page in (first, second)] == [[3], [2, 1]]
    assert not second.next_page_token


async def test_what_cannot_be_asked_for(control: Control) -> None:
    for request_, said in REFUSED:
        async with calling(control.target) as clients:
            assert await refusal(clients.freeze.Freeze(request_)) == (grpc.StatusCode.INVALID_ARGUMENT, said)


async def test_meridianctl(control: Control) -> None:
    server = control.target
    with LinkedEngine([server], "rack-1", labels={"zone": "a"}), LinkedEngine([server], "rack-2") as two:
        await until(lambda: len(control.fleet.connections) == 2)
        command = ("freeze", "--for", "10m", "--wait", "600")
        result = await run(*command, "--reason", "looks wrong", "--engine", "rack-*", server=server)
        assert result.exit_code == OK, result.output
        assert "2 of 2 connected engines confirmed" in result.output
        result = await run("freezes", server=server)
        assert "rack-*" in result.output
        assert "looks wrong" in result.output
        assert "ann" in result.output
        shown = (await run("engines", server=server)).output
        assert "rack-1, rack-2 (frozen): runs as stock vLLM for 10 min longer\n" in shown
        result = await run("thaw", "1", server=server)
        assert (result.exit_code, result.output) == (OK, "freeze 1 has ended\n")
        await until(lambda: not two.link.lease.frozen())
        result = await run(*command, "--reason", "x", "--label", "zone=a", server=server)
        assert "1 of 1 connected engines confirmed" in result.output
        assert not two.link.lease.frozen()
        assert (await run("thaw", server=server)).output == "freeze 2 has ended\n"
        absent = "no connected engine matches; engines that match are frozen as soon as they connect\n"
        result = await run(*command, "--reason", "x", "--engine", "rak-*", "--allow-none", server=server)
        assert result.exit_code == OK
        assert result.output.endswith(absent)
        assert (await run("thaw", server=server)).output == "freeze 3 has ended\n"
        result = await run(*command, "--reason", "x", "--engine", "rak-*", "--wait", "0", server=server)
        assert (result.exit_code, result.stderr) == (FAILED, "no engine is connected; --allow-none accepts that\n")
        assert result.stdout.endswith(absent)
        assert (await run("thaw", server=server)).output == "freeze 4 has ended\n"
        assert (await run("thaw", server=server)).output == "no freeze is in force\n"
        result = await run("thaw", "7", server=server)
        assert (result.exit_code, result.stderr) == (FAILED, "NOT_FOUND: freeze 7 is not in force\n")
        assert "rack" not in (await run("freezes", server=server)).output


async def test_meridianctl_says_who_has_not_confirmed(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has live requests and makes no step cannot confirm a freeze."""
    listed, is_heard = expected.all_engines, threading.Event()

    def noted(client: Client, timeout_s: float) -> tuple[list[fleet_pb2.Engine], list[str]]:
        found = listed(client, timeout_s)
        if any(engine.engine_id == "idle" and engine.freeze.confirmed for engine in found[0]):
            is_heard.set()
        return found

    # The wait is over once the command has heard of the one confirmation, however long that takes on a busy machine.
    monkeypatch.setattr(cli_freeze, "all_engines", noted)
    clock = SimpleNamespace(monotonic=lambda: 60.0 * is_heard.is_set(), sleep=time.sleep)
    monkeypatch.setattr(cli_freeze, "time", clock)
    with LinkedEngine([control.target], "stuck") as stuck, LinkedEngine([control.target], "idle"):
        stuck.open("a")
        await until(lambda: len(control.fleet.connections) == 2)
        command = ("freeze", "--for", "1m", "--reason", "x", "--wait", "0.5")
        result = await run(*command, server=control.target)
        assert result.exit_code == FAILED
        assert "1 of 2 connected engines confirmed" in result.stdout
        assert (
            result.stderr
            == "stuck has not confirmed: none of its steps has begun since; its last report is still to come\n"
        )


def thaw_once(
    monkeypatch: pytest.MonkeyPatch,
    shown: Callable[[fleet_pb2.Engine], bool],
    over: Callable[[fleet_pb2.Engine], bool],
) -> None:
    """Let `meridianctl freeze` find its freeze taken back once `shown` holds for the one engine, and its waiting time
    past once `over` holds after that."""
    listed, is_thawed, is_over = expected.all_engines, threading.Event(), threading.Event()

    def thawed(client: Client, timeout_s: float) -> tuple[list[fleet_pb2.Engine], list[str]]:
        ((engine,), silent) = listed(client, timeout_s)
        if shown(engine) and not is_thawed.is_set():
            is_thawed.set()
            client.freeze.Thaw(freeze_pb2.ThawRequest())
        elif is_thawed.is_set() and over(engine):
            is_over.set()
        return [engine], silent

    monkeypatch.setattr(cli_freeze, "all_engines", thawed)
    clock = SimpleNamespace(monotonic=lambda: 60.0 * is_over.is_set(), sleep=time.sleep)
    monkeypatch.setattr(cli_freeze, "time", clock)


async def test_meridianctl_says_that_a_freeze_was_over_before_an_engine_confirmed(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    thaw_once(
        monkeypatch, lambda engine: bool(engine.freeze.freeze_ids), over=lambda engine: not engine.freeze.freeze_ids
    )
    with LinkedEngine([control.target], "stuck") as stuck:
        stuck.open("a")
        await until(lambda: len(control.fleet.connections) == 1)
        result = await run("freeze", "--for", "1m", "--reason", "x", "--wait", "0.5", server=control.target)
    assert result.exit_code == FAILED
    assert result.stderr == "stuck has not confirmed: the freeze was over or taken back before\n"


async def test_meridianctl_counts_engines_that_confirmed_before_the_freeze_was_over(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    thaw_once(monkeypatch, lambda engine: engine.freeze.confirmed, over=lambda engine: not engine.HasField("freeze"))
    with LinkedEngine([control.target], "idle"):
        await until(lambda: len(control.fleet.connections) == 1)
        command = ("freeze", "--for", "1m", "--reason", "x", "--wait", "0.5", "--engines", "2")
        result = await run(*command, server=control.target)
    assert (result.exit_code, result.stderr) == (FAILED, "1 engines are connected, of at least 2\n")
    assert result.stdout.endswith("1 of 1 connected engines confirmed\n")


async def test_meridianctl_names_paused_engines(control: Control) -> None:
    with LinkedEngine([control.target], "paused") as paused, LinkedEngine([control.target], "other"):
        paused.link._is_paused = lambda: True
        await until(lambda: len(control.fleet.connections) == 2)
        result = await run("freeze", "--for", "1m", "--reason", "x", "--wait", "600", server=control.target)
    assert result.exit_code == OK
    assert result.output.endswith(
        "2 of 2 connected engines confirmed\nvLLM is paused on paused: the freeze is in force from its first step on\n"
    )


@pytest.mark.parametrize("text", ["10", "m", "", "-1m", "1w", "1.5h"])
async def test_meridianctl_refuses_times_it_cannot_read(text: str) -> None:
    result = await run("freeze", "--for", text, "--reason", "x", server="127.0.0.1:1")
    assert result.exit_code == INVALID


# ----------------------------------------------------------------------------------------------------------- replicas


async def test_a_freeze_reaches_the_engines_of_every_replica(replicated: Replicated) -> None:
    one, two = await replicated.pair()
    with LinkedEngine([two.target]) as engine:
        await until(lambda: engine.link.lease.revision == 1)
        await freeze(one.target)
        await until(engine.link.lease.frozen)
        two.kill()
        await two.started()
        await until(lambda: engine.link.lease.connected and engine.link.lease.frozen())
        await thaw(one.target)
        await until(lambda: not engine.link.lease.frozen())
    for process in (one, two):
        assert await process.terminate() == 0
