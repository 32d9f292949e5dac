"""Settings on the stream: an agent applies, acknowledges or refuses each policy that the control plane sends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link.inbox import INBOX_MESSAGES
from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet import policy_delivery
from meridian_control.policy.store import StoredRevision
from meridian_control.rollout.state import Rollout
from tests.contract.streams import Control, Scripted
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy


async def test_settings_round_trip(control: Control, engine: LinkedEngine) -> None:
    engine.refusal = "reasoning parser 'x': unknown"
    await control.set_policy(policy(fallback={"lease_ms": 500}))
    await until(lambda: control.engine().nack_error)
    shown = control.engine()
    assert (shown.revision, shown.acked_revision, shown.nack_error) == (2, 1, engine.refusal)
    assert (engine.link.lease.revision, engine.link.lease.lease_s) == (1, 30.0)
    engine.refusal = ""
    await control.set_policy(policy(fallback={"lease_ms": 700}, telemetry={"report_interval_steps": 3}))
    await until(lambda: control.engine().acked_revision == 3)
    assert control.engine().nack_error == ""
    assert (engine.link.lease.revision, engine.link.lease.lease_s, engine.link.lease.report_interval_steps) == (
        3,
        0.7,
        3,
    )
    assert [s.revision for s in engine.settings] == [1, 2, 3]
    assert (await control.fleet.totals()).nacks == 1


async def test_changes_in_a_row_are_sent_as_one(
    control: Control, engine: LinkedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the last change lets the timer run, however long the pauses between changes are on a busy machine.
    monkeypatch.setattr(policy_delivery, "QUIET_S", 3600.0)
    monkeypatch.setattr(policy_delivery, "MAX_WAIT_S", 3600.0)
    for lease_ms in range(500, 510):
        if lease_ms == 509:
            monkeypatch.setattr(policy_delivery, "QUIET_S", 0.0)
        await control.set_policy(policy(fallback={"lease_ms": lease_ms}))
    await until(lambda: control.engine().acked_revision == 11)
    assert [s.revision for s in engine.settings] == [1, 11]


async def test_changes_without_end_are_sent_all_the_same(
    control: Control, engine: LinkedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: control.fleet._policies._timer is None)
    # Only MAX_WAIT_S ends the wait.
    monkeypatch.setattr(policy_delivery, "QUIET_S", 60.0)
    monkeypatch.setattr(policy_delivery, "MAX_WAIT_S", 0.3)
    latest_s, due_s = list[float](), list[float]()
    # No timer runs between these changes.
    for revision in range(2, 12):
        control.fleet.set_policy(StoredRevision(revision, "", "", "", utc_now(), policy()))
        timer = control.fleet._policies._timer
        assert timer is not None
        due_s.append(timer.when())
        latest_s.append(asyncio.get_running_loop().time() + policy_delivery.MAX_WAIT_S)
    assert max(due_s) <= min(latest_s), "the later changes put off the first one"
    await until(lambda: len(engine.settings) > 1)
    assert [s.revision for s in engine.settings] == [1, 11]


async def test_a_refused_revision_is_sent_again_on_no_stream(control: Control, engine: LinkedEngine) -> None:
    """The engine keeps the last good revision instead, also under a restarted control plane, which does not know of the
    refusal."""
    engine.refusal = "no"
    stored = await control.set_policy(policy(scheduler={"max_think_tokens": 100}))
    await until(lambda: control.engine().nack_error)
    engine.refusal = ""
    control.fleet.set_policy(stored)
    control.fleet._policies.send()
    for restart in (engine.link.restart, control.kill):
        streams = engine.streams
        if restart is control.kill:
            await control.kill()
            await control.start()
        else:
            engine.link.restart()
        engine.open(f"after {streams}")
        await engine.steps_until(
            lambda before=streams: engine.streams > before and control.engine().acked_revision == 1  # type: ignore[misc]
        )
        await engine.steps_until(engine.caps)
        shown = control.engine()
        assert (shown.revision, shown.acked_revision, shown.nack_error) == (2, 1, "no")
        assert {cap for _, cap in engine.caps()} == {600}
    assert [s.revision for s in engine.settings] == [1, 2, 1, 1]
    await control.set_policy(policy(scheduler={"max_think_tokens": 200}))
    await engine.steps_until(lambda: control.engine().acked_revision == 3)
    assert control.engine().nack_error == ""


async def test_a_new_incarnation_is_asked_again(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.refusal = "no"
        await until(lambda: control.connected() and control.engine().nack_error)
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.engine().acked_revision == 1)


async def test_an_engine_that_cannot_honour_a_policy_keeps_the_one_before(control: Control) -> None:
    poor = agent_pb2.Capabilities(force_end=True, dispatch=True)
    with LinkedEngine([control.target], capabilities=poor) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
        await control.set_policy(policy(scheduler={"max_think_tokens": 100}, entropy={"shadow": False}))
        await until(lambda: control.engine().nack_error)
        shown = control.engine()
        assert (shown.revision, shown.acked_revision) == (2, 1)
        assert "the engine lacks eat_probe, needed for entropy.eat_level_threshold_nats" in shown.nack_error
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        engine.link.restart()
        await engine.steps_until(lambda: engine.streams == 2 and len(engine.caps()) == 2)
        assert [s.revision for s in engine.settings] == [1, 1]
        await control.set_policy(policy(entropy={"shadow": True}))
        await engine.steps_until(lambda: control.engine().acked_revision == 3)


async def test_limits_of_the_engine_are_shown_as_the_agent_has_bounded_them(
    control: Control, engine: LinkedEngine
) -> None:
    def shown() -> tuple[int, int]:
        (row,) = control.engine().engine_limits
        return row.wanted, row.in_force

    assert shown() == (0, 8)
    for revision, (wanted, in_force) in enumerate(((3, 3), (500, 16), (0, 8)), start=2):
        await control.set_policy(policy(engine={"max_num_active_seqs": wanted}))
        await until(lambda revision=revision: control.engine().acked_revision == revision)  # type: ignore[misc]
        assert shown() == (wanted, in_force)
    await control.set_policy(policy(engine={"long_prefill_token_threshold": 64}))
    await until(lambda: control.engine().nack_error)
    refused = "the engine cannot change engine.long_prefill_token_threshold: its agent does not know this limit"
    assert (control.engine().acked_revision, control.engine().nack_error) == (4, refused)
    assert [s.revision for s in engine.settings] == [1, 2, 3, 4]


async def test_an_ack_waits_for_the_step_that_applies(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: control.connected() and control.engine().acked_revision == 1)
        await control.set_policy(policy(fallback={"lease_ms": 500}))
        await until(lambda: len(engine.settings) == 2 and engine.link.mailbox.arrived)
        await asyncio.sleep(0.1)
        assert (control.engine().acked_revision, engine.link.lease.revision, engine.kept) == (1, 1, [1])
        engine.step()
        await until(lambda: control.engine().acked_revision == 2)
        assert (engine.link.lease.revision, engine.kept) == (2, [1, 2])


async def test_every_setting_is_answered_once_whichever_thread_does(scripted: Scripted) -> None:
    """The engine becomes idle and wakes again and again, while settings and freezes arrive."""
    with LinkedEngine([scripted.target]) as engine:
        await until(lambda: engine.link.lease.connected)
        for number in range(1, 401):
            scripted.say(settings={"nonce": number, "revision": number, "lease_ms": 30_000})
            scripted.say(freeze={"nonce": number})

        def wake_and_sleep() -> bool:
            engine.open("a")
            engine.step()
            engine.engine.abort("a")
            engine.step()
            return len([k for k in scripted.kinds() if k in {"settings_status", "freeze_status"}]) >= 800

        await until(wake_and_sleep, 60)
        for kind in ("settings_status", "freeze_status"):
            assert sorted(status.nonce for status in scripted.heard(kind)) == list(range(1, 401))
        assert engine.link.lease.revision == 400


async def test_an_ack_of_one_stream_says_nothing_on_the_next(scripted: Scripted) -> None:
    """Nonces begin anew with every stream, so an ACK of the old stream must not be sent on the new one."""
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        for revision in (7, 8):
            scripted.say(settings={"nonce": 1, "revision": revision, "lease_ms": 3_600_000})
            await until(lambda wanted=revision: [s.revision for s in engine.settings][-1:] == [wanted])  # type: ignore[misc]
            if revision == 7:
                engine.link.restart()
                await until(lambda: scripted.kinds().count("hello") == 2)
        await engine.steps_until(lambda: "settings_status" in scripted.kinds())
        assert [status.revision for status in scripted.heard("settings_status")] == [8]


async def test_who_connects_meanwhile_gets_the_newest_at_once_and_once(control: Control) -> None:
    await control.set_policy(policy(fallback={"lease_ms": 500}))
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 2)
        await until(lambda: control.fleet._policies._timer is None)
        engine.take_inbox()
        assert [s.revision for s in engine.settings] == [2]


async def test_settings_that_nothing_could_live_under(scripted: Scripted) -> None:
    """The agent refuses such settings and the stream goes on; a lease of 0, for example, would be over before any
    answer."""
    absurd: list[dict[str, Any]] = [
        {},
        {"lease_ms": 1},
        {"lease_ms": 1000, "entropy_lease_ms": 1},
        {"lease_ms": 1000, "report_interval_steps": 1 << 31},
        {"lease_ms": 1000, "closing_text": "x" * 100_000},
        {"lease_ms": 1000, "think_end_token_ids": [1] * 1000},
    ]
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        for nonce, fields in enumerate(absurd, 1):
            scripted.say(settings={"nonce": nonce, "revision": 7, **fields})
            await engine.steps_until(lambda wanted=nonce: scripted.kinds().count("settings_status") == wanted)  # type: ignore[misc]
        told = scripted.heard("settings_status")
        assert [(status.nonce, status.revision) for status in told] == [(nonce, 0) for nonce in range(1, 7)]
        assert all(" must " in status.error for status in told)
        reports = scripted.kinds().count("step")
        await engine.steps_until(lambda: scripted.kinds().count("step") > reports + 5)
        assert scripted.kinds().count("hello") == 1
        assert engine.settings == []
        assert engine.link.refused == {}, "settings that no policy can contain mark no revision as refused"


async def test_settings_for_an_idle_engine(scripted: Scripted) -> None:
    """While an engine is idle or its agent is off, only the newest settings are kept, and each settings message is
    answered."""
    with LinkedEngine([scripted.target]) as engine:
        for nonce in range(1, INBOX_MESSAGES + 3):
            scripted.say(settings={"nonce": nonce, "revision": nonce, "lease_ms": 30_000})
        await until(lambda: engine.link.lease.revision == INBOX_MESSAGES + 2, 30)
        await until(lambda: scripted.kinds().count("settings_status") == INBOX_MESSAGES + 2, 30)
        assert (len(engine.link.mailbox.arrived), scripted.kinds().count("hello")) == (0, 1)
        engine.open("a")
        engine.step()
        assert engine.link.lease.held is not None
        assert engine.link.lease.held[0].revision == INBOX_MESSAGES + 2


@pytest.mark.parametrize(("ahead", "given"), [(2, 2), (9, 2)], ids=["of this replica", "of the store"])
async def test_an_engine_that_is_ahead_gets_what_the_store_has(control: Control, ahead: int, given: int) -> None:
    """Either another replica stored a revision that this replica has not heard of, or the store was created anew."""
    await control.store.append(policy(), etag="", author="", reason="", now=utc_now())
    engine = LinkedEngine([control.target])
    engine.link.lease.revision = ahead
    with engine:
        await until(lambda: control.connected() and control.engine().acked_revision == given)
        assert [settings.revision for settings in engine.settings] == [given]


async def test_an_engine_that_is_ahead_keeps_what_it_has_while_the_store_is_away(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_delivery, "RETRY_S", 0.01)
    refusals = 0
    away = True

    store = control.parts.rollouts.store
    stored = store.active

    async def active() -> Rollout | None:
        nonlocal refusals
        if away:
            refusals += 1
            raise StoreUnavailable("away")
        return await stored()

    monkeypatch.setattr(store, "active", active)
    engine = LinkedEngine([control.target])
    engine.link.lease.revision = 3
    with engine, LinkedEngine([control.target], "other") as other:
        await until(lambda: refusals > 2 and other.settings)
        await control.set_policy(policy())
        await until(lambda: other.link.lease.revision == 2)
        assert not engine.settings
        await control.store.append(policy(), etag="", author="", reason="", now=utc_now())
        away = False
        await until(lambda: engine.settings and other.link.lease.revision == 3)
        assert [settings.revision for settings in engine.settings] == [3]
