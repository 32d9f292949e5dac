"""Thinking budgets over a real gRPC server and a real store: two replicas with four engines count exactly, a killed
replica loses only what it had not stored, and stages reach every engine."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import fleet_pb2, policy_pb2

from meridian_control.capabilities.budgets import fleet as fleet_module
from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.session import Session
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED
from meridian_control.policy import formats
from meridian_control.policy.model import Policy
from tests.contract.control.app.test_server import Process
from tests.contract.control.fleet.test_record import Recorder, check_replay
from tests.contract.ctl import ctl
from tests.contract.streams import Control, controlling
from tests.fakes.fleets import engines_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.postgres import Postgres
from tests.replicated import Client, Replicated, client, until_answer

ENGINES, REQUESTS = 4, 3
FLOOR_TOKENS = 8


def budgeted(tokens: int, shadow: bool = False) -> Policy:
    budget = {"name": "acme", "tenant": "acme", "tokens_per_day": tokens, "max_think_tokens": 5000, "shadow": shadow}
    # The rules' floor may be the last stage.
    budget["min_think_tokens"] = 1
    every = {"name": "all", "tokens_per_minute": 10**12}
    limits = {"min_think_tokens": FLOOR_TOKENS, "max_think_tokens": 100_000}
    return policy(scheduler=limits, entropy={"enabled": False}, budget=[budget, every])


def thought(*engines: LinkedEngine, tenant: str = "acme") -> int:
    """Return the thinking tokens of the engines' live requests of a tenant."""
    live = [live for engine in engines for live in engine.engine.live.values()]
    return sum(one.state.think_tokens for one in live if one.info.tenant == tenant)


# --------------------------------------------------------------------------------------------------------- one replica


async def stepped(control: Control, engine: LinkedEngine, steps: int) -> None:
    """Make steps, and wait until the control plane has received them."""
    for _ in range(steps):
        engine.step()
    wanted = engine.engine.step
    await until(lambda: any(shown.step == wanted for shown in engines_of(control.fleet)))


@asynccontextmanager
async def thinking(control: Control, policy: Policy) -> AsyncIterator[LinkedEngine]:
    """Yield an engine with a request that has thought 15 tokens under the policy."""
    await control.set_policy(policy)
    with LinkedEngine([control.target]) as engine:
        await until(lambda: engine.link.lease.revision == control.fleet.revision)
        engine.open("a", tenant="acme")
        await stepped(control, engine, 15)
        yield engine


@contextmanager
def store_away(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def away(*_: Any) -> None:
        raise StoreUnavailable("policy store: away")

    with monkeypatch.context() as patched:
        patched.setattr(control.fleet.part(BudgetSharing)._store, "charge", away)
        yield


async def listed(control: Control) -> fleet_pb2.ListBudgetsResponse:
    return await control.fleet.part(BudgetSharing).listed(fleet_pb2.ListBudgetsRequest())


async def in_stage(control: Control, engine: LinkedEngine, stage: int) -> None:
    """Store the usage and check the stage."""
    await stepped(control, engine, 1)
    await control.fleet.part(BudgetSharing).tick()
    assert control.fleet.part(BudgetSharing).budgets.stages.get("acme", UNSHORTENED) == stage


async def test_a_budget_shortens_requests_until_it_is_raised(control: Control) -> None:
    await control.set_policy(budgeted(80))
    async with Recorder(control) as recorder:
        with LinkedEngine([control.target]) as engine:
            await until(lambda: engine.link.lease.revision == control.fleet.revision)
            engine.open("a", tenant="acme")
            engine.open("b", tenant="other")
            await stepped(control, engine, 20)
            await in_stage(control, engine, UNSHORTENED)
            await stepped(control, engine, 40)
            await in_stage(control, engine, LOWER_CAP)
            await engine.steps_until(lambda: (0, 5000) in engine.caps())
            await stepped(control, engine, 10)
            await in_stage(control, engine, FLOOR)
            # The request has thought longer than its floor, so its thinking ends at once.
            await engine.steps_until(lambda: engine.engine.live["a"].state.output_tokens)
            assert engine.engine.live["b"].state.think_tokens > engine.engine.live["a"].state.think_tokens
            engine.open("late", tenant="acme")
            late = engine.engine.live["late"]
            await engine.steps_until(lambda: late.state.output_tokens)
            assert (late.slot, FLOOR_TOKENS) in engine.caps()

            life = json.loads((await ctl(control, "explain", "a", "-o", "json")).stdout)["life"]
            made = [event["decision"] for event in life["events"] if event["kind"] == "decision"]
            named = [each for each in made if each.get("budget") == "acme"]
            assert [(each["kind"], each["reason"], each["comparisons"][0]["limit_name"]) for each in named] == [
                ("cap", "budget", f"budget acme in stage {stage}") for stage in ("lower_cap", "floor")
            ]
            assert named[-1]["outcome"] == "OUTCOME_APPLIED"
            rows = (await ctl(control, "budgets")).stdout.splitlines()
            assert [row.split()[0:4] for row in rows[1:3]] == [
                ["acme", "tenant", "acme", "floor"],
                ["all", "every", "request", "unshortened,"],
            ]

            await control.set_policy(budgeted(10**9))
            await engine.steps_until(lambda: engine.link.lease.revision == control.fleet.revision)
            await in_stage(control, engine, UNSHORTENED)
            engine.open("last", tenant="acme")
            await engine.steps_until(lambda: engine.caps()[-1][1] == 100_000)
            await stepped(control, engine, 1)
        records = await recorder.finished()
    assert [dict(r.budget_stages.stages) for r in records if r.HasField("budget_stages")] == [
        {"acme": LOWER_CAP},
        {"acme": FLOOR},
        {},
    ]
    check_replay(records)


async def test_usage_outlives_a_restart_and_a_store_that_is_away(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with thinking(control, budgeted(80)) as engine:
        await control.fleet.part(BudgetSharing).tick()
        with store_away(control, monkeypatch):
            await stepped(control, engine, 40)
            await control.fleet.part(BudgetSharing).tick()
            acme, _ = (await listed(control)).budgets
            assert (acme.used_tokens, acme.unsaved_tokens, acme.stage) == (55, 40, SOFT_CLOSE)
        await control.fleet.part(BudgetSharing).tick()
        assert (await listed(control)).budgets[0].unsaved_tokens == 0
        with store_away(control, monkeypatch):
            for _ in range(2):
                await control.fleet.part(BudgetSharing).tick()
        kept = "the usage of thinking budgets is kept in memory: policy store: away"
        assert caplog.messages.count(kept) == 2, "an outage is logged once, and the next one again"
        await control.fleet.part(BudgetSharing).tick()
        await control.kill()
        await control.start()
        acme, _ = (await listed(control)).budgets
        assert (acme.used_tokens, acme.stage) == (55, SOFT_CLOSE)
        await until(lambda: engine.link.lease.revision == control.fleet.revision and control.fleet.connections)


@pytest.mark.parametrize("slow", ["in_turns", "charge"], ids=["usage is collected", "the store is slow"])
async def test_a_budget_that_comes_during_an_exchange_loses_nothing(
    control: Control, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """An engine gets a policy with a new budget, thinks and leaves, while a part of an exchange is under way."""
    sharing, begun, go_on = control.fleet.part(BudgetSharing), asyncio.Event(), asyncio.Event()
    assert sharing._store is not None
    charge = sharing._store.charge

    async def slow_store(*args: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await charge(*args)

    async def slow_turns(sessions: list[Session]) -> AsyncIterator[Session]:
        begun.set()
        await go_on.wait()
        for session in sessions:
            yield session

    await control.set_policy(policy(budget=[{"name": "other", "tokens_per_day": 10**9}]))
    with monkeypatch.context() as patched:
        if slow == "charge":
            patched.setattr(sharing._store, "charge", slow_store)
        else:
            patched.setattr(fleet_module, "in_turns", slow_turns)
        exchange = asyncio.create_task(sharing.tick())
        await begun.wait()
        async with thinking(control, budgeted(80)):
            pass
        await until(lambda: not control.fleet.counted_sessions())
        go_on.set()
        await exchange
    await sharing.tick()
    used = {budget.policy.name: budget.used_tokens for budget in (await listed(control)).budgets}
    assert used == {"acme": 15, "all": 15}


async def test_a_stop_names_the_usage_that_it_cannot_store(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with thinking(control, budgeted(80)):
        with store_away(control, monkeypatch):
            await control.fleet.part(BudgetSharing).end()
    told = [record.getMessage() for record in caplog.records if "loses" in record.getMessage()]
    assert told == [
        f"thinking budget {name} loses 15 tokens, which this replica could not store" for name in ("acme", "all")
    ]


async def test_a_stop_loses_nothing(own: Process) -> None:
    own.module = "tests.patient"
    await own.started()
    with LinkedEngine([own.target]) as engine:
        async with client(own) as asked:
            await put_in_force(asked, budgeted(10**9))
            await until(lambda: engine.link.lease.revision == 2)
            engine.open("a", tenant="acme")
            for _ in range(20):
                engine.step()

            async def received() -> list[int]:
                return [shown.step for shown in (await asked.engines()).engines]

            await until_answer(received, [20])
        assert await own.terminate() == 0
    await own.started()
    async with client(own) as asked:
        answer = await asked.fleet.ListBudgets(fleet_pb2.ListBudgetsRequest())
    assert [int(entry.used_tokens) for entry in answer.budgets] == [thought(engine)] * 2 == [20, 20]
    assert "Traceback" not in own.log()


async def test_an_engine_that_is_sent_away_loses_no_token(control: Control, tmp_path: Path) -> None:
    """Two replicas send an engine to and fro while it thinks, and while it has just fallen idle."""
    async with controlling(tmp_path / "other.db") as other:
        for each in (control, other):
            await each.set_policy(budgeted(10**9))
            await each.fleet.part(BudgetSharing).begin()
        order = [control.target, other.target]
        ended = 0
        with LinkedEngine(order, shuffle=lambda targets: targets.sort(key=order.index)) as engine:
            outbox = engine.link.outbox
            for number in range(8):
                here = other if number % 2 else control
                await engine.steps_until(lambda at=here: at.connected() and outbox.follows)  # type: ignore[misc]
                engine.open(f"a{number}", tenant="acme", max_tokens=100_000)
                engine.open(f"b{number}", tenant="acme", max_tokens=100_000)
                order.reverse()
                # These reports are under way when the replica sends the engine away.
                for _ in range(5):
                    engine.step()
                (connection,) = here.fleet.connections
                here.fleet.send_away(connection, "a test")
                for name in list(engine.engine.live)[: 1 if number % 3 else None]:
                    ended += engine.engine.live[name].state.think_tokens
                    engine.engine.finish(name)
                await engine.steps_until(lambda at=here, gone=connection: gone not in at.fleet.connections)  # type: ignore[misc]
            await engine.steps_until(lambda: control.connected() and outbox.follows)
            made = ended + thought(engine)

            async def counted() -> int:
                for each in (control, other):
                    await each.fleet.part(BudgetSharing).tick()
                return sum(each.fleet.part(BudgetSharing).budgets.counted["acme"] for each in (control, other))

            await until_answer(counted, made)


async def put_in_force(asked: Client, new: Policy) -> None:
    await asked.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=formats.to_proto(new)))


# -------------------------------------------------------------------------------------------------------- two replicas


@pytest.fixture
def replicated(tmp_path: Path, postgres: Postgres) -> Iterator[Replicated]:
    made = Replicated(tmp_path, postgres)
    yield made
    for process in made.processes:
        process.kill()
        assert "Traceback" not in process.log()


class Pair:
    """Two replicas, and four engines of which each replica has two; an engine whose replica dies moves."""

    def __init__(self, replicated: Replicated, ending: ExitStack) -> None:
        self._replicated, self._ending = replicated, ending

    async def begin(self, first: Policy) -> None:
        self.one, self.two = await self._replicated.pair()
        async with client(self.two) as asked:
            await put_in_force(asked, first)
        targets = [self.one.target, self.two.target]
        self.engines = [
            self._ending.enter_context(LinkedEngine(targets if number < 2 else targets[::-1], f"e{number}"))
            for number in range(ENGINES)
        ]
        await until(lambda: all(engine.link.lease.revision == 2 for engine in self.engines))
        for engine in self.engines:
            for number in range(REQUESTS):
                tenant = "acme" if number else "other"
                engine.open(f"{engine.engine_id}-{number}", tenant=tenant, max_tokens=100_000)

    def step(self, steps: int, *engines: LinkedEngine) -> None:
        for _ in range(steps):
            for engine in engines or self.engines:
                engine.step()

    async def used(self, process: Any, name: str = "acme") -> int:
        async with client(process) as asked:
            answer = await asked.fleet.ListBudgets(fleet_pb2.ListBudgetsRequest())
        return {entry.policy.name: int(entry.used_tokens) for entry in answer.budgets}[name]


@asynccontextmanager
async def paired(replicated: Replicated, first: Policy) -> AsyncIterator[Pair]:
    with ExitStack() as ending:
        pair = Pair(replicated, ending)
        await pair.begin(first)
        yield pair


async def test_two_replicas_and_four_engines_count_exactly_and_a_killed_replica_loses_little(
    replicated: Replicated,
) -> None:
    async with paired(replicated, budgeted(10**9, shadow=True)) as pair:
        for _ in range(3):
            pair.step(40)
            told = thought(*pair.engines)
            for process in (pair.one, pair.two):
                # The engines go on while the replicas exchange what they have counted.
                async def caught_up(process: Any = process, told: int = told) -> bool:
                    pair.step(1)
                    used = await pair.used(process)
                    assert used <= thought(*pair.engines)
                    return used >= 0.98 * told

                await until_answer(caught_up, True)
        whole = thought(*pair.engines)
        every = whole + thought(*pair.engines, tenant="other")
        for process in (pair.one, pair.two):
            await until_answer(lambda process=process: pair.used(process), whole)
            await until_answer(lambda process=process: pair.used(process, "all"), every)

        # Nothing that was stored is lost. A replica stores its tokens every second, so that it loses those of one
        # second, and the reports under way.
        assert BudgetSharing.tick_s <= 5
        orphans = pair.engines[:2]
        stored = thought(*orphans)
        pair.step(3, *orphans)
        pair.one.kill()
        async with client(pair.two) as asked:

            async def moved() -> int:
                pair.step(1)
                return len(await asked.requests(local_only=True))

            await until_answer(moved, ENGINES * REQUESTS)
        at_risk = thought(*orphans) - stored
        pair.step(20)

        async def nearly_all() -> bool:
            used = await pair.used(pair.two)
            assert used <= thought(*pair.engines)
            return used >= thought(*pair.engines) - at_risk

        await until_answer(nearly_all, True)
        again = await replicated.started()
        await until_answer(lambda: pair.used(again), await pair.used(pair.two))


async def test_what_engines_think_without_a_stream_counts_at_the_replica_that_takes_them_over(
    replicated: Replicated,
) -> None:
    async with paired(replicated, budgeted(10**9, shadow=True)) as pair:
        pair.step(40)
        stored = thought(*pair.engines)
        await until_answer(lambda: pair.used(pair.two), stored)
        orphans, idle = pair.engines[:2], pair.engines[1]
        # The other replica answers nobody, so no engine finds a stream.
        pair.two.signal(signal.SIGSTOP)
        pair.one.kill()
        await until(lambda: not any(engine.link.lease.connected for engine in orphans))

        ended = 0
        for engine in orphans:
            for number in range(REQUESTS):
                name = f"{engine.engine_id}-brief{number}"
                engine.open(name, tenant="acme", max_tokens=100_000)
                pair.step(50 + number, engine)
                for gone in (name, f"{engine.engine_id}-{number}"):
                    if gone == name or number < 2 or engine is idle:
                        live = engine.engine.live[gone]
                        ended += live.state.think_tokens if live.info.tenant == "acme" else 0
                        engine.engine.finish(gone)
            pair.step(1, engine)
        assert idle.link.lease.idle
        assert not any(engine.link.lease.connected for engine in orphans)
        pair.two.signal(signal.SIGCONT)
        async with client(pair.two) as asked:

            async def moved() -> bool:
                pair.step(1, *orphans[:1])
                told = {name.split("-")[0] for name in await asked.requests(local_only=True)}
                return {engine.engine_id for engine in orphans[:1]} <= told

            await until_answer(moved, True)
        whole = ended + thought(*pair.engines)
        assert whole > 3 * stored
        await until_answer(lambda: pair.used(pair.two), whole)

        def billed() -> int:
            rows = [row for row in pair.two.metrics().splitlines() if row.startswith("meridian_tenant_think_tokens_t")]
            return sum(int(float(row.split()[-1])) for row in rows if 'tenant="acme"' in row)

        # The replica that was killed had counted what its engines had thought before.
        await until(lambda: billed() == whole - stored // 2)


async def test_a_budget_of_the_fleet_shortens_thinking_on_every_replica(replicated: Replicated) -> None:
    async with paired(replicated, budgeted(10**9)) as pair:
        pair.step(40)
        whole = thought(*pair.engines)
        await until_answer(lambda: pair.used(pair.one), whole)
        for tokens, cap in ((whole, FLOOR_TOKENS), (10**9, 100_000)):
            async with client(pair.one) as asked:
                await put_in_force(asked, budgeted(tokens))

            def told(cap: int = cap) -> bool:
                pair.step(1)
                for engine in pair.engines:
                    name = f"{engine.engine_id}-late"
                    if name not in engine.engine.live:
                        engine.open(name, tenant="acme")
                late = [engine.engine.live[f"{engine.engine_id}-late"] for engine in pair.engines]
                return all(one.cap is not None and one.cap.max_think_tokens == cap for one in late)

            await until(told, 60)
