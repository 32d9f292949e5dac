"""Guardrails of rollouts, on a real server and real links: a violated guardrail rolls back or halts the rollout."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from meridian.v1 import freeze_pb2, rollout_pb2

from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet import whole_fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import Peers
from tests.contract.rollouts import ALL, CANARY, HALTED, ROLLED_BACK, RUNNING, Control, Engine, controlling
from tests.fakes.engine import END, START, TEXT
from tests.fakes.fleets import engines_of
from tests.fakes.linked import until


async def answers(control: Control, engine: Engine, gap_s: float) -> None:
    """Let the engine give ten answer tokens, `gap_s` apart."""
    engine.open("answering", prompt=(TEXT,))
    for _ in range(11):
        await control.step(engine, gap_s, answering=TEXT)
    # Without a live request the engine applies a new policy at once, instead of at its next step.
    engine.engine.finish("answering")
    await control.step(engine, gap_s)


async def thinks(control: Control, engine: Engine, wait_s: float, answer_tokens: int, rounds: int = 1) -> None:
    """Let five requests think and answer after a wait; in further rounds they think again."""
    for number in range(5):
        name = f"r{number}"
        engine.open(name)
        await control.step(engine, 0.02, **{name: TEXT})
        for again in range(rounds):
            if again:
                await control.step(engine, 0.02, **{name: START})
            await control.step(engine, 0.02, **{name: END})
            await control.step(engine, wait_s, **{name: TEXT})
        for _ in range(answer_tokens - 1):
            await control.step(engine, 0.02, **{name: TEXT})
        engine.engine.finish(name)
        await control.step(engine, 0.02)


async def slow_answers(control: Control, a: Engine, b: Engine) -> None:
    await answers(control, a, 0.2)
    await answers(control, b, 0.02)


async def late_answers(control: Control, a: Engine, b: Engine) -> None:
    await thinks(control, a, 0.5, 3)
    await thinks(control, b, 0.02, 3)


async def empty_answers(control: Control, a: Engine, b: Engine) -> None:
    await thinks(control, a, 0.02, 1)
    await thinks(control, b, 0.02, 3)


async def reentries(control: Control, a: Engine, b: Engine) -> None:
    await thinks(control, a, 0.02, 2, rounds=2)
    await thinks(control, b, 0.02, 2)


async def gone(control: Control, a: Engine, _: Engine) -> None:
    await a.lose()
    # The candidate's lease is 6 s.
    await control.ticks(6)


# Every measurement once, against a limit of its own or against the other engines.
CASES: list[Any] = [
    ({"output_itl_p99_ratio": 2.0}, slow_answers, 5, 15),
    ({"ttot_p99_ms": 100.0}, late_answers, 400, 630),
    ({"empty_answer_rate_increase": 0.5}, empty_answers, 1, 1),
    ({"reentry_rate": 0.5}, reentries, 1, 1),
    ({"degraded_engines": 0}, gone, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: next(iter(case[0])))
async def test_a_guardrail_takes_the_candidate_back(
    control: Control, case: tuple[dict[str, float], Any, float, float], caplog: pytest.LogCaptureFixture
) -> None:
    limits, traffic, low, high = case
    ((name, limit),) = limits.items()
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await control.begin(CANARY, ALL, guardrails={**limits, "min_observations": 5})
        await a.has(2)
        await b.has(1)
        assert control.active_seqs() == {"a": 2, "b": 8}
        assert (await control.ticks(1)).state == RUNNING
        await traffic(control, a, b)
        found = await control.ticks(2)
        assert (found.state, found.violation.guardrail, found.violation.limit) == (ROLLED_BACK, name, limit)
        assert low <= found.violation.value <= high
        assert found.events[-1].reason.startswith(f"{name} is ")
        await b.has(found.rollback_revision)
        assert b.settings[-1].lease_ms == 5000
        assert (await control.in_force()).reason == f"rollout 1 rolled back: {found.events[-1].reason}"
        if name != "degraded_engines":
            await a.has(3)
            assert a.settings[-1].lease_ms == 5000
            assert control.active_seqs() == {"a": 8, "b": 8}
    assert [r.levelname for r in caplog.records if "rolled_back" in r.message] == ["WARNING"]


async def test_a_frozen_engine_tries_no_candidate(control: Control) -> None:
    """Stock vLLM's answers say nothing about the candidate, which comes into force with the thaw."""
    with Engine(control, "a", "canary") as a:
        await control.begin(CANARY, ALL, guardrails={"empty_answer_rate": 0.1, "min_observations": 5})
        await a.has(2)
        await control.ticks(1)
        freeze = freeze_pb2.FreezeRequest(duration=Duration(seconds=600), reason="incident")
        begun = (await control.clients.freeze.Freeze(freeze)).freeze
        await until(lambda: [e.freeze.confirmed for e in engines_of(control.fleet) if e.freeze.freeze_ids] == [True])
        await control.ticks(1)
        baked_s = control.newest.baked_s
        await thinks(control, a, 0.02, 3)
        await control.ticks(4)
        frozen = control.newest
        assert (frozen.step, frozen.waiting_for, frozen.baked_s) == (1, "1 engine to thaw", baked_s)
        assert [reading.observations for reading in frozen.guardrails if reading.limit == 0.1] == [0]
        await control.clients.freeze.Thaw(freeze_pb2.ThawRequest(freeze_id=begun.freeze_id))
        await until(lambda: not engines_of(control.fleet)[0].HasField("freeze"))
        await control.ticks(1)
        await thinks(control, a, 0.02, 3)
        assert (await control.ticks(3)).step == 2


NOBODY = "127.0.0.1:1"


@pytest.mark.usefixtures("_patient")
async def test_an_engine_that_dies_with_its_replica_takes_the_candidate_back(
    postgres_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine much time may pass between two questions.
    monkeypatch.setattr(whole_fleet, "FORGET_S", 3600.0)
    async with controlling(postgres_address) as one, AsyncExitStack() as stack:
        two = await stack.enter_async_context(controlling(postgres_address, leads=False))
        live = [Replica("two", two.target)]
        peers = Peers(lambda: live, ClientCredentials())
        one.rollouts.engines = whole_fleet.WholeFleet(one.fleet, "one", peers, lambda: True).led_engines
        with Engine(one, "a", "canary") as a, Engine(two, "b", "canary") as b:
            await one.begin(CANARY, ALL, guardrails={"degraded_engines": 0})
            await a.has(2)
            await b.has(2)
            await one.ticks(1)
            assert one.newest.candidate_engines == 2
            b.link._targets[:] = [NOBODY]
            await stack.aclose()
            live.clear()
            # The candidate's lease is 6 s.
            await one.ticks(6)
            assert one.newest.waiting_for == "1 engine to connect again"
            found = await one.ticks(2)
            assert (found.state, found.violation.guardrail) == (ROLLED_BACK, "degraded_engines")
        await peers.close()


@pytest.mark.parametrize("before", [True, False])
async def test_an_engine_that_does_not_come_back_after_a_restart_takes_the_candidate_back(
    control: Control, before: bool
) -> None:
    """The engine is lost before the control plane is, or with it."""
    with Engine(control, "a", "canary") as a, Engine(control, "b", "canary") as b:
        await control.begin(CANARY, ALL, guardrails={"degraded_engines": 0})
        await a.has(2)
        await b.has(2)
        if before:
            await a.lose()
        a.link._targets[:] = [NOBODY]
        await control.parts.known.store()
        await control.kill()
        await until(lambda: not b.link.lease.connected)
        await control.start()
        await b.has(2)
        await control.ticks(6)
        assert control.newest.waiting_for == "1 engine to connect again"
        found = await control.ticks(2)
        assert (found.state, found.violation.guardrail) == (ROLLED_BACK, "degraded_engines")


async def test_a_refusal_halts(control: Control) -> None:
    """A refusal halts the rollout, and the engine is not sent the refused revision again. After a resume the same
    refusal halts the rollout once more."""
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await a.has(1)
        await b.has(1)
        a.refusal = "no such parser"
        await control.begin(CANARY, ALL, on_violation="halt")
        await until(lambda: [s.revision for s in a.settings] == [1, 2])
        await until(lambda: [e.nack_error for e in engines_of(control.fleet)] == ["no such parser", ""])
        await control.ticks(1)
        halted = await control.ticks(10)
        assert (halted.state, halted.step, halted.violation.guardrail) == (HALTED, 1, "nacks")
        assert (a.link.lease.revision, b.link.lease.revision) == (1, 1)
        await control.stub.ResumeRollout(rollout_pb2.ResumeRolloutRequest())
        assert (await control.ticks(1)).state == HALTED
        await control.abort()
        a.refusal = ""
        await b.has(3)
        await until(lambda: [s.revision for s in a.settings] == [1, 2, 3])


async def test_an_end_that_could_not_be_stored_is_stored_later(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observations that led to the end come only once."""
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await control.begin(CANARY, ALL, guardrails={"output_itl_p99_ms": 100.0, "min_observations": 5})
        await a.has(2)
        await b.has(1)
        await control.ticks(1)
        await slow_answers(control, a, b)

        async def away(*_: Any) -> None:
            raise StoreUnavailable("policy store: away")

        with monkeypatch.context() as patched:
            patched.setattr(control.rollouts.store, "save", away)
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await control.ticks(1)
        assert (await control.get()).state == RUNNING
        found = await control.ticks(1)
        assert (found.state, found.violation.guardrail) == (ROLLED_BACK, "output_itl_p99_ms")
        await a.has(3)


async def test_a_clock_that_is_set_back_lets_a_step_bake_no_longer(control: Control) -> None:
    with Engine(control, "a", "canary") as a, Engine(control, "b", "main") as b:
        await control.begin(CANARY, ALL)
        await a.has(2)
        await b.has(1)
        await control.ticks(1)
        control.now -= timedelta(hours=1)
        assert (await control.ticks(1)).step == 1
        assert (await control.ticks(2)).step == 2, "the step bakes for two seconds"


async def test_a_clock_that_is_set_forward_ends_no_lease(control: Control) -> None:
    with Engine(control, "b", "main") as b, Engine(control, "a", "canary") as a:
        await b.has(1)
        await control.begin(CANARY, ALL, guardrails={"degraded_engines": 0})
        await a.has(2)
        await control.ticks(1)
        await a.lose()
        await control.ticks(1)
        control.now += timedelta(minutes=1)
        found = await control.ticks(1)
        assert (found.state, found.waiting_for) == (RUNNING, "1 engine to connect again")
