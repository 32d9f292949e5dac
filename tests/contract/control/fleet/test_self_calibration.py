"""The control plane finds a rule by itself, puts it in force in a rollout, and withdraws it.

Store, rollouts and calibration are real; the test moves the clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import fleet_pb2, policy_pb2

from meridian_control.capabilities.control_group.savings import WITHDRAWER
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.self_calibration import fleet, rule
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut
from meridian_control.capabilities.self_calibration.fleet import CalibrationError, SelfCalibration
from meridian_control.capabilities.self_calibration.learner import State, fewest
from meridian_control.capabilities.self_calibration.rule import AUTHOR
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.errors import MeridianError, NotLeading, StoreUnavailable
from meridian_control.engine.totals import Totals
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import Peers
from meridian_control.offline.self_calibration import work
from meridian_control.policy.formats import parse_toml, to_proto
from meridian_control.policy.model import MAX_OVERRIDES, Override, Policy, Who
from meridian_control.policy.schema import TelemetryPolicy
from meridian_control.policy.shortening_kinds import ENTROPY, without
from tests.contract.rollouts import Control, controlling
from tests.fakes.episodes import Traffic
from tests.fakes.linked import LinkedEngine, until

ASKED = parse_toml("[entropy]\nself_calibration = true\nmax_loss = 0.02\nrank_conditions = []")
EASY, MISLED = Traffic(), Traffic(misled=0.3)
WHO = Who("model", slo_class="chat", fingerprint="0123456789abcdef")
OTHER = WHO._replace(slo_class="batch")
ENOUGH = fewest(1, 0.02) + 100
# Time of a rollout's step, in ticks of one second.
STEP_S = 5


@cache
def done(task: str) -> str:
    return json.dumps(work(json.loads(task)))


async def in_process(task: dict[str, Any]) -> dict[str, Any]:
    """Do a task of the calibration without a process of its own, whose start takes seconds. Many tests have the same
    task, which has the same result each time."""
    result: dict[str, Any] = json.loads(done(json.dumps(task)))
    return result


@pytest.fixture
async def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Control]:
    monkeypatch.setattr(rule, "BAKE_S", float(STEP_S))
    async with controlling(f"sqlite+aiosqlite:///{tmp_path / 'm.db'}") as running:
        yield running


@pytest.fixture
async def _engine(control: Control) -> AsyncIterator[None]:
    """Let one engine be connected, to which rollouts bring their candidates."""
    with LinkedEngine([control.target], clock=lambda: 0.0):
        await until(lambda: len(list(control.fleet.connections)) == 1)
        yield


async def apply(control: Control, policy: Policy, author: str = "ann", reason: str = "") -> None:
    stored = await control.store.append(policy, etag="", author=author, reason=reason, now=control.now)
    control.fleet.set_policy(stored)
    await control.rollouts.look()


async def policy_now(control: Control) -> Policy:
    current = await control.store.current()
    assert current is not None
    return current.policy


@cache
def episodes(traffic: Traffic, count: int, seed: int) -> list[Episode]:
    """Return requests of some traffic, of which many tests have the same."""
    return traffic.episodes(random.Random(seed), count)


def record(part: SelfCalibration, traffic: Traffic, count: int, who: Who = WHO, seed: int = 1) -> None:
    for episode in episodes(traffic, count, seed):
        part.record(who.traffic, episode)


async def records(control: Control, traffic: Traffic, count: int, who: Who = WHO, seed: int = 1) -> None:
    part = control.fleet.part(SelfCalibration)
    part.calibrate = in_process
    record(part, traffic, count, who, seed)
    await part.tick()


async def rows(control: Control) -> list[fleet_pb2.SelfCalibration]:
    answer = await control.clients.fleet.ListSelfCalibrations(fleet_pb2.ListSelfCalibrationsRequest())
    return list(answer.self_calibrations)


async def found(control: Control) -> fleet_pb2.SelfCalibration:
    (row,) = [each for each in await rows(control) if each.slo_class == WHO.slo_class]
    return row


async def completes(control: Control) -> None:
    """Let the rollout run to its end on the connected engine, whose control group the candidate does not harm."""
    (session,) = [connection.session for connection in control.fleet.connections]
    rollout = await control.get()
    await until(lambda: control.knows("engine", rollout.candidate_revision))
    await control.ticks()
    session.part(ControlGroup).verdicts["judged"] += 200
    await control.ticks(2 * STEP_S)
    await control.fleet.part(SelfCalibration).tick()


async def in_force(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, ENOUGH)
    await completes(control)


@pytest.mark.usefixtures("_engine")
async def test_a_rule_is_found_rolled_out_watched_and_withdrawn(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, ENOUGH // 2)
    row = await found(control)
    assert (row.state, row.recorded_requests, row.needed_requests) == ("recording", ENOUGH // 2, fewest(1, 0.02))
    assert await policy_now(control) == ASKED
    await records(control, EASY, ENOUGH - ENOUGH // 2, seed=2)
    row = await found(control)
    assert row.state == "rolling out"
    assert (row.model, row.slo_class, row.attempts) == (WHO.model, WHO.slo_class, 1)
    assert await policy_now(control) == ASKED, "the policy in force stays until the rollout is complete"
    await completes(control)
    row = await found(control)
    assert row.state == "in force", row
    assert 0.1 < row.saved_ratio < 1
    assert row.loss_bound <= row.max_loss == pytest.approx(0.02)
    policy = await policy_now(control)
    mine = policy.of(WHO)
    assert not mine.entropy.shadow
    assert mine.entropy.rpdi_threshold == mine.entropy.give_up_tokens == 0, "no other rule comes with it"
    others = (OTHER, WHO._replace(fingerprint="fedcba9876543210"), WHO._replace(model="adapter"), Who())
    assert all(policy.of(who).entropy.shadow for who in others)
    await records(control, EASY, 300, seed=3)
    assert (await found(control)).state == "in force", "harmless traffic leaves the rule in force"
    await records(control, MISLED, 100, seed=4)
    row = await found(control)
    assert row.state == "withdrawn"
    assert row.why.endswith("of 400 answers of the control group")
    assert [tried.outcome.split(":")[0] for tried in row.tried] == [row.tried[0].outcome.split(":")[0], "withdrawn"]
    current = await control.store.current()
    assert current is not None
    assert (current.policy, current.author) == (ASKED, AUTHOR)
    assert row.why in current.reason
    assert (row.recorded_requests, row.needed_requests) == (0, fewest(2, 0.02))


@pytest.mark.parametrize("most_bytes", [fleet.MAX_READ_BYTES, 0], ids=["all are read", "the newest are read"])
async def test_a_request_that_is_recorded_twice_takes_no_attempt(
    control: Control, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """A request may close on two replicas, one of which has lost its stream."""
    await apply(control, ASKED)
    monkeypatch.setattr(fleet, "MAX_READ_BYTES", most_bytes)
    await records(control, EASY, fewest(1, 0.02) - 2)
    for _ in range(2):
        await records(control, EASY, 1, seed=3)
    row = await found(control)
    assert (row.state, row.attempts, row.needed_requests) == ("recording", 0, fewest(1, 0.02) + 1)
    await records(control, EASY, 1, seed=2)
    row = await found(control)
    assert (row.state, row.attempts, row.proved_on_requests) == ("rolling out", 1, fewest(1, 0.02))


async def test_a_tick_makes_one_attempt(control: Control) -> None:
    """Each one takes minutes, in which no rule could be withdrawn."""
    await apply(control, ASKED)
    record(control.fleet.part(SelfCalibration), MISLED, ENOUGH, OTHER)
    await records(control, MISLED, ENOUGH)
    assert sorted(row.state for row in await rows(control)) == ["nothing is safe", "recording"]
    await control.fleet.part(SelfCalibration).tick()
    assert [row.state for row in await rows(control)] == ["nothing is safe"] * 2


async def test_nothing_is_recommended_where_nothing_is_safe(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, MISLED, ENOUGH)
    row = await found(control)
    assert row.state == "nothing is safe"
    assert row.why
    assert row.needed_requests == 2 * ENOUGH
    assert [tried.requests for tried in row.tried] == [ENOUGH]
    assert await policy_now(control) == ASKED
    assert await control.rollouts.store.active() is None


@pytest.mark.usefixtures("_engine", "_patient")
async def test_the_engines_of_all_replicas_count_for_the_steps_of_a_rollout(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "HALVED_FROM", 2)
    live = [Replica("other", "127.0.0.1:1")]
    async with controlling(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}") as other:
        with LinkedEngine([other.target], "second", clock=lambda: 0.0):
            await until(lambda: len(list(other.fleet.connections)) == 1)
            whole = control.parts.whole
            whole.peers = Peers(lambda: live, ClientCredentials())
            await apply(control, ASKED)
            await records(control, EASY, ENOUGH)
            assert (await found(control)).state == "recording", "it is not known how many engines the other has"
            live[:] = [Replica("third", other.target)]
            await control.fleet.part(SelfCalibration).tick()
            assert [step.percent for step in (await control.get()).plan.step] == [50, 100]
            await whole.peers.close()


@pytest.mark.usefixtures("_engine")
async def test_traffic_that_changes_without_harm_starts_over(control: Control) -> None:
    await in_force(control)
    await records(control, Traffic(undecided_nats=2.5), 200, seed=5)
    row = await found(control)
    assert row.state == "withdrawn"
    assert row.why.startswith("the traffic has changed: ")


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (ASKED, "by ann does not have it: back to the file"),
        (parse_toml("[entropy]\nself_calibration = false"), "entropy.self_calibration is false"),
    ],
    ids=["without the rule", "off"],
)
async def test_a_person_may_take_the_rule_out(control: Control, changed: Policy, why: str) -> None:
    await in_force(control)
    kept = (await policy_now(control)).override if "false" in why else ()
    await apply(control, changed.model_copy(update={"override": kept}), reason="back to the file")
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert row.why.endswith(why)
    assert not (await policy_now(control)).override


RANK = {"rank_conditions": [{"max_ranks": [5]}]}
OBSTACLES = pytest.mark.parametrize(
    ("more", "overrides", "why"),
    [
        ({"holdout_share": 0.0}, [], "entropy.holdout_share is 0, so no request is recorded"),
        ({}, [{"effort": "high", "entropy": RANK}], "the override for effort high sets entropy.rank_conditions"),
        (
            {},
            [{"tenant": "a*", "engine_labels": {"zone": "a", "gpu": "l4"}, "entropy": RANK}],
            "the override for tenant a*, engine_labels zone=a gpu=l4 sets entropy.rank_conditions",
        ),
    ],
    ids=["no control group", "another rule for some", "another rule on some engines"],
)


def with_obstacle(policy: Policy, more: dict[str, Any], overrides: list[dict[str, Any]]) -> Policy:
    dumped = {"entropy": {**policy.entropy.model_dump(mode="json"), **more}}
    return Policy.model_validate({**dumped, "override": [*policy.override, *overrides]})


@OBSTACLES
@pytest.mark.parametrize("attempts", [0, 1])
async def test_what_keeps_a_rule_from_being_found_is_said(
    control: Control, attempts: int, more: dict[str, Any], overrides: list[dict[str, Any]], why: str
) -> None:
    if attempts:
        await apply(control, ASKED)
        await records(control, MISLED, ENOUGH)
    await apply(control, with_obstacle(ASKED, more, overrides))
    await records(control, EASY, ENOUGH, seed=2)
    row = await found(control)
    assert (row.state, row.attempts) == ("nothing is safe" if attempts else "recording", attempts)
    assert row.why.startswith(why)


@pytest.mark.usefixtures("_engine")
@OBSTACLES
async def test_what_keeps_a_rule_from_being_found_withdraws_one_in_force(
    control: Control, more: dict[str, Any], overrides: list[dict[str, Any]], why: str
) -> None:
    """Rules that nobody has proved would be in force with it, or nobody would watch it."""
    await in_force(control)
    await apply(control, with_obstacle(await policy_now(control), more, overrides))
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert row.state == "withdrawn"
    assert row.why.startswith(why)
    assert await policy_now(control) == with_obstacle(ASKED, more, overrides)


FULL = tuple(Override(tenant=f"t{number}") for number in range(MAX_OVERRIDES))


async def test_a_policy_without_room_for_a_rule_stays_readable(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ASKED.model_copy(update={"override": FULL})
    await apply(control, full)
    await records(control, EASY, ENOUGH)
    row = await found(control)
    assert (row.state, row.why) == ("recording", "the policy has 256 overrides, and no room for that of a rule")
    monkeypatch.setattr(rule, "MAX_OVERRIDES", 257)
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert (row.state, row.attempts) == ("nothing is safe", 1), "nobody could read a policy that does not fit"
    assert row.why.startswith("the rule cannot be stored: override must have at most 256 entries")
    assert await control.rollouts.store.active() is None
    assert await policy_now(control) == full


async def test_more_loss_needs_fewer_requests_and_other_probes_other_ones(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, 10)
    laxer = ASKED.entropy.model_copy(update={"max_loss": 0.05})
    await apply(control, ASKED.model_copy(update={"entropy": laxer}))
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert (row.recorded_requests, row.needed_requests) == (10, fewest(1, 0.05))
    denser = laxer.model_copy(update={"eat_probe_interval_tokens": 32})
    await apply(control, ASKED.model_copy(update={"entropy": denser}))
    await records(control, EASY, 4, seed=2)
    assert (await found(control)).recorded_requests == 0, "the four may have begun before"
    await records(control, EASY, 4, seed=3)
    assert (await found(control)).recorded_requests == 4


@pytest.mark.usefixtures("_engine")
async def test_a_withdrawn_rule_that_comes_back_is_taken_out(control: Control) -> None:
    await in_force(control)
    with_rule = await control.store.current()
    assert with_rule is not None
    await records(control, MISLED, 200, seed=4)
    assert (await found(control)).state == "withdrawn"
    request = policy_pb2.RollbackPolicyRequest(revision=with_rule.revision, author="ann")
    back = (await control.policy.RollbackPolicy(request)).revision
    assert (await policy_now(control)).override
    await control.fleet.part(SelfCalibration).tick()
    current = await control.store.current()
    assert current is not None
    assert (current.policy, current.author) == (ASKED, AUTHOR)
    row = await found(control)
    assert row.state == "withdrawn"
    assert row.why.startswith(f"revision {back.revision} by ann has it, but self-calibration has withdrawn it")
    assert current.reason == f"withdraws the rule for {WHO.traffic}: {row.why}"


@pytest.mark.usefixtures("_engine")
async def test_a_rule_whose_rollout_outlived_its_leader_is_taken_out(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane may end after a rollout has begun and before it has noted whose rollout it is."""
    await apply(control, ASKED)
    part = control.fleet.part(SelfCalibration)
    await records(control, EASY, 10)
    with monkeypatch.context() as patched:
        patched.setattr(part._store, "save", unavailable)
        with pytest.raises(StoreUnavailable):
            await records(control, EASY, ENOUGH)
    await control.rollouts.look()
    await completes(control)
    assert (await found(control)).state == "withdrawn"
    assert await policy_now(control) == ASKED


@pytest.mark.usefixtures("_engine")
async def test_a_rule_that_the_harm_guard_puts_into_shadow_leaves_the_policy(control: Control) -> None:
    """Its floor would still move the probes of the requests that are recorded from then on."""
    await in_force(control)
    shadowed = without(await policy_now(control), ENTROPY)
    assert shadowed.override
    await apply(control, shadowed, WITHDRAWER, "it harms")
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert row.state == "withdrawn"
    assert row.why.endswith(" by meridian-harm-guard has changed it: it harms")
    assert await policy_now(control) == ASKED


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_rule_that_is_not_known_is_taken_out(control: Control, is_on: bool) -> None:
    entropy = {"self_calibration": is_on}
    foreign = {"traffic": OTHER.traffic, "entropy": {"shadow": False}, "scheduler": {"min_think_tokens": 9}}
    theirs = {"slo_class": "batch", "scheduler": {"min_think_tokens": 8}}
    await apply(control, Policy.model_validate({"entropy": entropy, "override": [foreign, theirs]}))
    part = control.fleet.part(SelfCalibration)
    for _ in range(3):
        await part.tick()
    assert await policy_now(control) == Policy.model_validate({"entropy": entropy, "override": [theirs]})
    assert not await rows(control), "a traffic without requests is forgotten"


@pytest.mark.usefixtures("_engine")
async def test_other_probes_withdraw_a_rule(control: Control) -> None:
    await in_force(control)
    policy = await policy_now(control)
    entropy = policy.entropy.model_copy(update={"eat_probe_interval_tokens": 32})
    await apply(control, policy.model_copy(update={"entropy": entropy}))
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert (row.state, row.why) == ("withdrawn", "the policy probes at other places, or otherwise")
    assert not (await policy_now(control)).override


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(("factor", "state"), [(0.5, "withdrawn"), (1.0, "in force")])
async def test_a_rule_stays_while_it_is_proved_for_what_is_allowed(control: Control, factor: float, state: str) -> None:
    """The sequential test would need days to show that a rule loses too much which was proved for twice the loss."""
    await in_force(control)
    policy, bound = await policy_now(control), (await found(control)).loss_bound
    entropy = policy.entropy.model_copy(update={"max_loss": factor * bound})
    await apply(control, policy.model_copy(update={"entropy": entropy}))
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert (row.state, bool((await policy_now(control)).override)) == (state, state == "in force")
    assert row.why.startswith("the rule is proved to lose at most ") or state == "in force"


async def test_a_rollout_that_is_rolled_back_withdraws_the_rule(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, ENOUGH)
    rollout = await control.get()
    await control.abort(rollout_id=rollout.rollout_id, author="ann", reason="not today")
    await control.fleet.part(SelfCalibration).tick()
    row = await found(control)
    assert (row.state, row.why) == ("withdrawn", f"rollout {rollout.rollout_id} was aborted: not today")


@pytest.mark.usefixtures("_engine")
async def test_a_rule_without_requests_for_long_is_withdrawn(control: Control) -> None:
    """Engines may serve another model for good, and overrides for all models that ever were would fill the policy."""
    await in_force(control)
    await records(control, EASY, 1, seed=2)
    part = control.fleet.part(SelfCalibration)
    control.now += fleet.UNUSED
    await part.tick()
    assert (await found(control)).state == "in force"
    control.now += timedelta(seconds=1)
    await part.tick()
    row = await found(control)
    assert (row.state, row.why) == ("withdrawn", "no request of it was recorded for 30 days")
    assert await policy_now(control) == ASKED


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("ahead", [2 * fleet.UNUSED, -2 * fleet.UNUSED])
async def test_a_clock_that_is_set_withdraws_no_rule_and_stops_no_page(control: Control, ahead: timedelta) -> None:
    await in_force(control)
    await records(control, EASY, 1, seed=2)
    part = control.fleet.part(SelfCalibration)
    before = (await part.show()).tables["self_calibrations"]
    control.ahead = ahead
    await part.tick()
    await records(control, EASY, 1, seed=3)
    control.ahead = timedelta()
    await part.tick()
    assert (await found(control)).state == "in force"
    control.ahead, control.now = ahead, control.now + timedelta(seconds=fleet.SHOWN_S)
    assert (await part.show()).tables["self_calibrations"] != before


async def test_most_requests_that_are_left_out_are_explained(control: Control) -> None:
    """Without that, somebody who has switched it on for short thinking would wait for ever."""
    await apply(control, ASKED)
    part = control.fleet.part(SelfCalibration)
    for _ in range(9):
        part.record(WHO.traffic, LeftOut.UNPROBED)
    part.record(WHO.traffic, LeftOut.FAR)
    row = await found(control)
    assert (row.state, row.recorded_requests) == ("recording", 0)
    assert row.why.startswith("10 of 10 requests are left out: no probe came before the thinking ended; lower ")
    await records(control, EASY, 10)
    assert not (await found(control)).why, "half of them are recorded"
    await records(control, EASY, 1, OTHER)
    await apply(control, ASKED.model_copy(update={"telemetry": TelemetryPolicy(shadow_sample_ratio=1.0)}))
    part.record(WHO.traffic, LeftOut.FAR)
    assert (await found(control)).why.startswith("1 of 1 requests"), "another policy, another count"
    await records(control, MISLED, ENOUGH)
    refused = await found(control)
    assert refused.state == "nothing is safe"
    for _ in range(ENOUGH + 1):
        part.record(WHO.traffic, LeftOut.FAR)
    assert (await found(control)).why.startswith(f"{refused.why}; 468 of 934 requests are left out: ")


async def test_the_metric_counts_traffics_by_state(control: Control) -> None:
    def counted() -> dict[tuple[str, ...], float]:
        ((name, rows),) = control.fleet.part(SelfCalibration).metrics(Totals())
        assert name == "meridian_self_calibrations"
        return {labels: value for labels, value in rows if value}

    assert counted() == {}
    await apply(control, ASKED)
    await records(control, EASY, 5)
    await records(control, MISLED, ENOUGH, OTHER)
    await control.fleet.part(SelfCalibration).tick()
    assert counted() == {("recording",): 1, ("nothing_is_safe",): 1}
    control.leads = False
    await control.fleet.part(SelfCalibration).tick()
    assert counted() == {}


async def test_another_leader_goes_on_where_the_first_stopped(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, ENOUGH // 2)
    await control.kill()
    await control.start()
    assert (await found(control)).recorded_requests == ENOUGH // 2
    await records(control, EASY, ENOUGH - ENOUGH // 2, seed=2)
    assert (await found(control)).state == State.ROLLING_OUT
    await control.kill()
    await control.start()
    await control.fleet.part(SelfCalibration).tick()
    assert (await found(control)).state == State.ROLLING_OUT
    control.leads = False
    await records(control, MISLED, 300, seed=3)
    assert (await found(control)).state == State.ROLLING_OUT, "only the leader decides"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_calibration_decides_nothing_once_another_replica_leads(control: Control, fails: bool) -> None:
    """It takes minutes, and what the new leader has stored meanwhile must stay."""
    await apply(control, ASKED)

    async def outlives_the_lead(task: dict[str, Any]) -> dict[str, Any]:
        control.leads = False
        if fails:
            raise CalibrationError("it took more than 600 s")
        return await in_process(task)

    part = control.fleet.part(SelfCalibration)
    part.calibrate = outlives_the_lead
    record(part, EASY, ENOUGH)
    with suppress(MeridianError):
        await part.tick()
    assert not control.leads
    assert await control.rollouts.store.active() is None
    row = await found(control)
    assert (row.state, row.why) == (State.RECORDING, "")


async def test_a_former_leader_that_does_not_know_it_yet_stores_nothing(control: Control) -> None:
    await apply(control, ASKED)
    part = control.fleet.part(SelfCalibration)

    async def refuses(connection: object) -> None:
        raise NotLeading("another replica has led")

    control.rollouts.fence = refuses
    record(part, EASY, 10)
    with pytest.raises(NotLeading):
        await part.tick()
    assert part._store is not None
    assert await part._store.learners() == {}


async def test_a_replica_that_leads_again_looks_at_what_another_leader_has_left(control: Control) -> None:
    """Also if it found nothing while it led before, and if nobody asks for self-calibration any more."""
    part = control.fleet.part(SelfCalibration)
    await part.tick()
    control.leads = False
    await part.tick()
    other = Control(control.store)
    await other.start()
    try:
        await other.fleet.part(SelfCalibration).tick()
        with LinkedEngine([other.target], clock=lambda: 0.0):
            await until(lambda: len(list(other.fleet.connections)) == 1)
            await in_force(other)
        await apply(other, Policy())
    finally:
        await other.kill()
    assert part._store is not None
    control.leads = True
    await control.rollouts.look()
    await part.tick()
    learner = (await part._store.learners())[WHO.traffic]
    assert (learner.state, learner.why) == (State.WITHDRAWN, "entropy.self_calibration is false")
    assert ((State.WITHDRAWN.value,), 1) in dict(part.metrics(Totals()))[fleet.STATES]
    assert (await part.show()).tables["self_calibrations"]


@pytest.mark.usefixtures("_engine")
async def test_a_calibration_that_fails_keeps_no_other_traffic_from_its_next_step(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, 10, OTHER)
    await in_force(control)
    states = list[str]()

    async def attempts_fail(task: dict[str, Any]) -> dict[str, Any]:
        if "rule" not in task:
            states.append((await found(control)).state)
            control.now += timedelta(seconds=fleet.PATIENCE_S)
            raise CalibrationError("killed")
        return await in_process(task)

    part = control.fleet.part(SelfCalibration)
    part.calibrate = attempts_fail
    for who, traffic, count in ((OTHER, EASY, ENOUGH), (WHO, MISLED, 200)):
        record(part, traffic, count, who, seed=2)
    with pytest.raises(CalibrationError, match="killed"):
        await part.tick()
    assert states == ["withdrawn"], "an attempt may take long, so all rules are looked at first"
    assert [row.why for row in await rows(control) if row.slo_class == OTHER.slo_class] == ["killed"]
    await part.tick()
    assert len(states) == 1, "the calibration that has failed is not tried again at once"
    control.now += timedelta(seconds=fleet.REST_S)
    with pytest.raises(CalibrationError, match="killed"):
        await part.tick()


@pytest.mark.parametrize("slo_class", ["a\0b", "\u20ac" * 400], ids=["U+0000", "many bytes"])
async def test_a_name_that_cannot_be_stored_holds_up_no_other_traffic(address: str, slo_class: str) -> None:
    """Clients choose SLO classes, and an agent may pass on any text."""
    async with controlling(address) as control:
        await apply(control, ASKED)
        await records(control, EASY, 3, WHO._replace(slo_class=slo_class))
        await records(control, EASY, 4)
        by_class = {row.slo_class: row for row in await rows(control)}
        assert by_class[WHO.slo_class].recorded_requests == 4
        assert by_class[slo_class].recorded_requests == 0
        assert by_class[slo_class].why.startswith("3 of 3 requests are left out: the names of its model and SLO class")


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (CalibrationError("it took more than 600 s"), "it took more than 600 s"),
        (OSError(12, "Cannot allocate memory"), "the calibration failed: OSError(12, 'Cannot allocate memory')"),
    ],
)
async def test_a_rule_that_cannot_be_watched_says_so(control: Control, error: Exception, why: str) -> None:
    await in_force(control)
    part = control.fleet.part(SelfCalibration)

    async def fails(_: dict[str, Any]) -> dict[str, Any]:
        raise error

    async def watched(traffic: Traffic) -> fleet_pb2.SelfCalibration:
        record(part, traffic, 100, seed=2)
        with suppress(type(error)):
            await part.tick()
        return await found(control)

    part.calibrate = fails
    row = await watched(EASY)
    assert (row.state, row.why) == ("in force", why)
    part.calibrate = in_process
    control.now += timedelta(seconds=fleet.REST_S)
    row = await watched(EASY)
    assert (row.state, row.why) == ("in force", "")
    part.calibrate = fails
    assert (await watched(EASY)).why == why
    await apply(control, ASKED)
    await part.tick()
    assert (await found(control)).why.endswith("does not have it"), "the reason of the newer state is shown"


async def test_a_calibration_that_the_end_of_the_replica_ends_has_not_failed(control: Control) -> None:
    await apply(control, ASKED)
    await records(control, EASY, ENOUGH - 200)
    part = control.fleet.part(SelfCalibration)
    part.calibrate = part._calibrate
    record(part, EASY, 200, seed=2)
    ticking = asyncio.create_task(part.tick())
    await until(lambda: part._process is not None)
    await part.end()
    with pytest.raises(CalibrationError):
        await ticking
    assert (await found(control)).why == ""


def small_task() -> dict[str, Any]:
    few = [episode.to_json() for episode in episodes(EASY, 40, seed=1)]
    return {"base": ASKED.model_dump_json(), "episodes": few, "max_loss": 0.5, "attempt": 1}


async def test_no_calibration_outlives_the_replica(control: Control) -> None:
    """The end of the event loop would leave the process of a tick behind, or wait for ever while one is started."""
    part = control.fleet.part(SelfCalibration)
    task = small_task()

    async def tick() -> None:
        with pytest.raises(CalibrationError):
            await part._calibrate(task)
        with pytest.raises(CalibrationError):
            await part._calibrate(task)

    part.ticking = asyncio.create_task(tick())
    # The process is being started.
    await asyncio.sleep(0)
    assert part._process is None
    await part.end()
    await part.ticking


async def test_the_calibration_runs_in_a_process_of_its_own(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    part = control.fleet.part(SelfCalibration)
    task = small_task()
    assert await part.calibrate(task) == await in_process(task)
    with pytest.raises(CalibrationError, match="KeyError: 'attempt'"):
        await part.calibrate({name: task[name] for name in ("base", "episodes", "max_loss")})
    monkeypatch.setattr(sys, "executable", "/usr/bin/false")
    with pytest.raises(CalibrationError, match="ended with 1: no error"):
        await part.calibrate(task)


async def test_episodes_are_kept_while_the_store_is_away(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    await apply(control, ASKED)
    await records(control, EASY, 5)
    with monkeypatch.context() as patched:
        patched.setattr(control.store.database, "writing", unavailable)
        with pytest.raises(StoreUnavailable):
            await records(control, EASY, 5, seed=2)
    await control.fleet.part(SelfCalibration).tick()
    assert (await found(control)).recorded_requests == 10


async def test_episodes_that_cannot_be_stored_keep_no_rule_in_force(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {"traffic": OTHER.traffic, "entropy": {"shadow": False}, "scheduler": {"min_think_tokens": 9}}
    await apply(control, ASKED.model_copy(update={"override": Policy.model_validate({"override": [foreign]}).override}))
    part = control.fleet.part(SelfCalibration)
    monkeypatch.setattr(part._store, "add", unavailable)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await records(control, EASY, 5)
    assert await policy_now(control) == ASKED


@pytest.mark.parametrize("name", ["MAX_WAITING", "MAX_WAITING_BYTES"])
async def test_the_oldest_episodes_go_while_the_store_is_away(
    control: Control, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await apply(control, ASKED)
    newest = episodes(EASY, 3, seed=4)
    most_bytes = sum(len(episode.to_json()) for episode in newest)
    monkeypatch.setattr(fleet, name, most_bytes if name.endswith("BYTES") else len(newest))
    with monkeypatch.context() as patched:
        patched.setattr(control.store.database, "writing", unavailable)
        for seed, count in ((2, 5), (3, 2), (4, 3)):
            with pytest.raises(StoreUnavailable):
                await records(control, EASY, count, seed=seed)
    part = control.fleet.part(SelfCalibration)
    await part.tick()
    assert part._store is not None
    assert (await part._store.read(WHO.traffic, 0, 10, 0))[1] == [episode.to_json() for episode in newest]


def unavailable(*_: object, **__: object) -> None:
    raise StoreUnavailable("policy store: away")


@pytest.mark.usefixtures("_engine")
async def test_a_withdrawal_waits_for_a_rollout_of_others(control: Control) -> None:
    """The policy cannot be changed during a rollout, so the rule is withdrawn once it has ended."""
    await in_force(control)
    rollout = await control.begin({"percent": 100.0, "bake_s": 1e6}, policy=to_proto(await policy_now(control)))
    await records(control, MISLED, 200, seed=4)
    assert (await found(control)).state == "in force"
    await control.abort(rollout_id=rollout.rollout_id, author="ann")
    await control.fleet.part(SelfCalibration).tick()
    assert (await found(control)).state == "withdrawn"


async def test_only_the_newest_traffics_are_kept(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may choose SLO classes, so they choose how many traffics there are."""
    monkeypatch.setattr(fleet, "MAX_TRAFFICS", 3)
    await apply(control, ASKED)
    for number in range(6):
        await records(control, EASY, 2, WHO._replace(slo_class=f"c{number}"), seed=number)
    await control.fleet.part(SelfCalibration).tick()
    assert [row.slo_class for row in await rows(control)] == ["c3", "c4", "c5"]
