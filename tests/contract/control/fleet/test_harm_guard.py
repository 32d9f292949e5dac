"""The control plane withdraws rules that do harm: a revision in a real store, on every replica and after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group.cohorts import LENGTH
from meridian_control.capabilities.control_group.experiments import Experiment
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.control_group.savings import WITHDRAWER, cause_of, harming
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.part import Beside
from meridian_control.fleet.peers import Peers
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_kinds import CAP, ENTROPY, LOOP, SOFT_CLOSE, Kind
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import By, Rollout, State
from tests.contract.clients import calling
from tests.contract.ctl import ctl
from tests.contract.streams import Control
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of
from tests.fakes.linked import LinkedEngine
from tests.fakes.tables import policy
from tests.primes.capability import PrimesPolicy

RULES = policy(entropy={"shadow": False})
OTHER_RULES = policy(entropy={"shadow": False, "rpdi_threshold": 3.0})
SAME_RULES = policy(entropy={"shadow": False}, kv_memory={"enabled": False})


@pytest.fixture
def control(control: Control) -> Control:
    """Return a control plane that has the capability of an extension."""
    control.store.extensions = {"primes": PrimesPolicy}
    return control


def harm(control: Control, harmful: int = 20, of: int = 40) -> None:
    """Count requests of the control group under the policy in force."""
    stored = control.fleet.policy
    assert stored is not None
    judge(control.fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy), harmful, of)


def judge(experiment: Experiment, harmful: int, of: int, kind: Kind = ENTROPY) -> None:
    """Count judged requests of the control group that the kind would have ended."""
    experiment.counts.control.requests += of
    for counts in (experiment.counts, experiment.kinds[kind]):
        counts.judged += of
        counts.judged_stops += of
        counts.harmful += harmful


def has(control: Control, revision: int) -> bool:
    return [engine.acked_revision for engine in engines_of(control.fleet)] == [revision]


async def savings(control: Control) -> fleet_pb2.GetSavingsResponse:
    async with calling(control.target) as clients:
        answer: fleet_pb2.GetSavingsResponse = await clients.fleet.GetSavings(fleet_pb2.GetSavingsRequest())
        return answer


async def test_rules_that_do_harm_go_into_shadow_until_the_next_revision(control: Control) -> None:
    before = await control.set_policy(RULES)
    guard = control.fleet.part(Comparisons)
    with LinkedEngine([control.target]) as engine:
        await engine.steps_until(lambda: has(control, before.revision))
        harm(control, harmful=0)
        await guard.tick()
        assert control.fleet.revision == before.revision, "no harm, no withdrawal"
        harm(control)
        await guard.tick()
        stored = await control.store.current()
        assert stored is not None
        assert (stored.revision, stored.author) == (before.revision + 1, WITHDRAWER)
        assert stored.policy == policy(entropy={"shadow": True})
        assert "20 of 80 answers of the control group" in stored.reason
        assert stored.reason.endswith(f"; counted since revision {before.revision}")
        await engine.steps_until(lambda: has(control, stored.revision))
        assert control.engine().withdrawn == stored.reason
        told = await savings(control)
        assert (told.withdrawn_revision, told.withdrawn_reason) == (stored.revision, stored.reason)
        assert told.withdrawn_cause == cause_of(replace(stored, cause="")) == "harm"
        assert [(row.harmful, row.in_force) for row in told.savings] == [(0, True), (20, False)]
        await guard.tick()
        assert control.fleet.revision == stored.revision, "withdrawn once"

        again = await control.set_policy(RULES)
        await guard.tick()
        assert control.fleet.revision == again.revision, "the old counts do not count against a new revision"
        assert (await savings(control)).withdrawn_revision == 0
        await engine.steps_until(lambda: has(control, again.revision))
        assert control.engine().withdrawn == ""
        harm(control)
        await guard.tick()
        assert control.fleet.revision == again.revision + 1


ACME: dict[str, Any] = {"name": "acme", "tokens_per_day": 1, "shadow": False}
BUSY: dict[str, Any] = {"name": "busy", "ttot_p99_ms": 1.0, "shadow": False, "entropy_in_force": True}
# Every kind of shortening is in force.
ALL_KINDS: dict[str, Any] = {
    "scheduler": {"max_think_tokens": 4000, "soft_think_tokens": 3000},
    "entropy": {"shadow": False},
    "loop": {"shadow": False},
    "budget": [ACME, {**ACME, "name": "other"}],
    "pressure": [BUSY],
    "extension": {"primes": {"shadow": False}},
    "override": [{"tenant": "a", "loop": {"shadow": False}, "scheduler": {"soft_think_tokens": 9}}],
}
SHADOWED_LOOP: dict[str, Any] = {**ALL_KINDS["override"][0], "loop": {"shadow": True}}
NO_SOFT_CLOSE: dict[str, Any] = {**ALL_KINDS["override"][0], "scheduler": {"soft_think_tokens": 0}}


@pytest.mark.parametrize(
    ("kind", "withdrawn"),
    [
        (Kind("budget", "acme"), {"budget": [{**ACME, "shadow": True}, {**ACME, "name": "other"}]}),
        (Kind("pressure", "busy"), {"pressure": [{**BUSY, "shadow": True}]}),
        (ENTROPY, {"entropy": {"shadow": True}, "pressure": [{**BUSY, "entropy_in_force": False}]}),
        (LOOP, {"loop": {"shadow": True}, "override": [SHADOWED_LOOP]}),
        (SOFT_CLOSE, {"scheduler": {"max_think_tokens": 4000}, "override": [NO_SOFT_CLOSE]}),
        (Kind("primes"), {"extension": {"primes": {"shadow": True}}}),
    ],
)
async def test_only_the_kind_that_does_harm_is_withdrawn(
    control: Control, kind: Kind, withdrawn: dict[str, Any]
) -> None:
    before = await control.set_policy(policy(**ALL_KINDS))
    for each in (ENTROPY, CAP):
        judge(control.fleet.part(Comparisons).experiments.experiment_of(before.revision, before.policy), 0, 40, each)
    judge(control.fleet.part(Comparisons).experiments.experiment_of(before.revision, before.policy), 20, 40, kind)
    await control.fleet.part(Comparisons).tick()
    stored = await control.store.current()
    assert stored is not None
    assert stored.policy == policy(**{**ALL_KINDS, **withdrawn})
    assert stored.author == WITHDRAWER
    assert stored.reason.startswith(f"{kind.text} would have changed 20 of ")
    assert "\n" not in stored.reason


async def test_rules_are_withdrawn_although_a_capability_is_gone(control: Control) -> None:
    await control.set_policy(policy(entropy={"shadow": False}, extension={"primes": {"shadow": True}}))
    control.store.extensions = {}
    harm(control)
    await control.fleet.part(Comparisons).tick()
    stored = await control.store.current()
    assert stored is not None
    assert stored.policy == policy(entropy={"shadow": True}, extension={"primes": {"shadow": True}})


async def test_a_cap_that_does_harm_stays_and_its_harm_is_shown(control: Control) -> None:
    before, guard = await control.set_policy(policy(**ALL_KINDS)), control.fleet.part(Comparisons)
    judge(guard.experiments.experiment_of(before.revision, before.policy), 2, 8, CAP)
    await guard.tick()
    assert harming((await savings(control)).savings, [before.policy]) == [], "one of many looks sees as much by chance"
    judge(guard.experiments.experiment_of(before.revision, before.policy), 18, 32, CAP)
    for _ in range(2):
        await guard.tick()
    assert control.fleet.revision == before.revision
    told = await savings(control)
    found = harming(told.savings, [before.policy])
    assert [(harm.kind, harm.evidence_ratio >= 1) for _, harm in found] == [("cap", True)]
    assert harming(told.savings, [policy()]) == [], "no engine has these rules"


def drift(control: Control, *seen: int) -> None:
    """Count requests under the policy in force by the bin of their first EAT sample."""
    stored = control.fleet.policy
    assert stored is not None
    experiment = control.fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy)
    experiment.samples["eat"] = [before + new for before, new in zip(experiment.samples["eat"], seen, strict=True)]


async def test_rules_whose_signal_drifts_go_into_shadow(control: Control, caplog: pytest.LogCaptureFixture) -> None:
    bins = [{"max_nats": edge, "requests": 50} for edge in (0.1, 0.5, 2.0)]
    rules = policy(entropy={"shadow": False, "holdout_share": 0.0, "eat_reference": bins})
    before = await control.set_policy(rules)
    guard = control.fleet.part(Comparisons)
    drift(control, 30, 40, 30)
    await guard.tick()
    assert control.fleet.revision == before.revision, "no drift, no withdrawal"
    assert guard.newest is not None
    assert 0 < guard.newest.savings[0].drift_evidence_ratio < 1
    (told,) = (await savings(control)).savings
    assert told.drift_evidence_ratio == guard.newest.savings[0].drift_evidence_ratio
    assert told.HasField("evidence_ratio")
    drift(control, 200, 0, 0)
    await guard.tick()
    stored = await control.store.current()
    assert stored is not None
    assert (stored.revision, stored.author) == (before.revision + 1, WITHDRAWER)
    assert stored.policy == policy(entropy={"shadow": True, "holdout_share": 0.0, "eat_reference": bins})
    assert "230 of 300 requests have a first sample up to 0.1 nats" in stored.reason
    withdrawal = await savings(control)
    assert (withdrawal.withdrawn_reason, withdrawal.withdrawn_cause) == (stored.reason, stored.cause)
    # A version before this one has stored no cause.
    assert stored.cause == cause_of(replace(stored, cause="")) == "drift"
    # Drift is no harm.
    did = f"revision {stored.revision} put the entropy rules into shadow"
    assert f"{did}: {stored.reason}" in caplog.messages
    assert f"; {did}" in (await ctl(control, "status")).stdout
    await guard.tick()
    assert control.fleet.revision == stored.revision, "withdrawn once"


async def test_a_withdrawal_reaches_engines_although_the_store_is_away_after_it(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await control.set_policy(RULES)
    with LinkedEngine([control.target]) as engine:
        await engine.steps_until(lambda: has(control, before.revision))
        harm(control)

        async def away() -> None:
            raise StoreUnavailable("policy store: away")

        with monkeypatch.context() as patched:
            patched.setattr(control.parts.rollouts, "look", away)
            with pytest.raises(StoreUnavailable):
                await control.fleet.part(Comparisons).tick()
        await control.fleet.part(Comparisons).tick()
        await engine.steps_until(lambda: has(control, before.revision + 1))


async def test_a_withdrawal_outlives_a_restart_and_the_counts_do_not(control: Control) -> None:
    await control.set_policy(RULES)
    harm(control)
    await control.fleet.part(Comparisons).tick()
    revision = control.fleet.revision
    await control.kill()
    await control.start()
    told = await savings(control)
    assert told.withdrawn_revision == control.fleet.revision == revision
    assert [(row.judged, row.in_force) for row in told.savings] == [(0, True)]


async def test_unmeasured_harm_withdraws_nothing(control: Control) -> None:
    await control.set_policy(RULES)
    harm(control)
    experiment = control.fleet.part(Comparisons).experiments.newest()[0]
    experiment.counts.unjudged = experiment.kinds[ENTROPY].unjudged = 41
    await control.fleet.part(Comparisons).tick()
    assert control.fleet.policy is not None
    assert control.fleet.policy.policy == RULES


async def test_a_replica_that_does_not_lead_withdraws_nothing(control: Control) -> None:
    await control.set_policy(RULES)
    harm(control)
    guard = control.fleet.part(Comparisons)
    guard.attach(Beside("follows", None, lambda: False, control.parts.rollouts, control.store.database, utc_now))
    await guard.tick()
    assert guard.newest is None
    assert control.fleet.policy is not None
    assert control.fleet.policy.policy == RULES


async def start(control: Control, candidate: Policy) -> int:
    """Start a rollout, and return the candidate's revision."""
    plan = Plan.model_validate({"step": [{"percent": 100}]})
    rollouts = control.parts.rollouts
    rollout, _ = await rollouts.store.start(plan, candidate, "", By(utc_now(), "ann"))
    await rollouts.look()
    return rollout.candidate_revision


async def newest_rollout(control: Control) -> Rollout:
    newest = await control.parts.rollouts.store.newest()
    assert newest is not None
    return newest


@asynccontextmanager
async def rolling_out(control: Control, candidate: Policy = OTHER_RULES) -> AsyncIterator[int]:
    """Yield the candidate's revision of a rollout, which is aborted in the block. The machine's clock is behind that of
    the rollout."""
    rollouts, database = control.parts.rollouts, control.store.database
    behind = Beside("alone", None, lambda: True, rollouts, database, lambda: utc_now() - timedelta(days=1))
    control.fleet.part(Comparisons).attach(behind)
    yield await start(control, candidate)
    newest = await newest_rollout(control)
    assert newest.state is State.ABORTED
    started, aborted = newest.events
    assert (aborted.author, aborted.time >= started.time) == (WITHDRAWER, True)


async def test_harm_during_a_rollout_aborts_it_and_withdraws_the_rules(control: Control) -> None:
    await control.set_policy(RULES)
    async with rolling_out(control):
        harm(control)
        await control.fleet.part(Comparisons).tick()
    assert control.fleet.policy is not None
    assert control.fleet.policy.author == WITHDRAWER
    assert control.fleet.policy.policy == policy(entropy={"shadow": True})


async def test_a_policy_that_comes_during_a_withdrawal_stays(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the rollout is aborted, somebody stores other rules, of which no harm is known."""
    await control.set_policy(RULES)
    look = control.parts.rollouts.look

    async def look_and_store() -> None:
        monkeypatch.undo()
        await look()
        await control.set_policy(OTHER_RULES)

    async with rolling_out(control):
        harm(control)
        monkeypatch.setattr(control.parts.rollouts, "look", look_and_store)
        await control.fleet.part(Comparisons).tick()
    current = await control.store.current()
    assert current is not None
    assert (current.author, current.policy) == ("test", OTHER_RULES)


async def test_harm_of_a_candidate_aborts_its_rollout_only(control: Control) -> None:
    await control.set_policy(RULES)
    async with rolling_out(control) as revision:
        experiment = control.fleet.part(Comparisons).experiments.experiment_of(revision, OTHER_RULES)
        judge(experiment, harmful=20, of=40)
        await control.fleet.part(Comparisons).tick()
    assert control.fleet.policy is not None
    assert control.fleet.policy.policy == RULES


async def test_counts_of_a_rollout_do_not_count_against_the_next_one_with_the_same_rules(control: Control) -> None:
    """The counts stay until an engine has the new candidate, and longer on a replica that no engine of it comes to."""
    await control.set_policy(RULES)
    guard = control.fleet.part(Comparisons)
    async with rolling_out(control) as first:
        judge(guard.experiments.experiment_of(first, OTHER_RULES), harmful=20, of=40)
        await guard.tick()
    second = await start(control, OTHER_RULES)
    await guard.tick()
    assert (await newest_rollout(control)).state is State.RUNNING
    mine = guard.local_counts()
    assert guard.guard is not None

    async def counts() -> tuple[dict[str, fleet_pb2.GetSavingsResponse], list[str]]:
        return {"alone": guard.local_counts(), "older": mine}, []

    guard.guard._counts = counts
    judge(guard.experiments.experiment_of(second, OTHER_RULES), harmful=0, of=40)
    await guard.tick()
    assert (await newest_rollout(control)).state is State.RUNNING
    assert guard.newest is not None
    assert [row.judged for row in guard.newest.savings if row.since_revision == second] == [40]
    judge(guard.experiments.experiment_of(second, OTHER_RULES), harmful=20, of=40)
    await guard.tick()
    assert (await newest_rollout(control)).state is State.ABORTED


async def test_rules_are_not_withdrawn_again_for_counts_of_replicas_that_do_not_know_they_are_back(
    control: Control,
) -> None:
    await control.set_policy(RULES)
    guard = control.fleet.part(Comparisons)
    harm(control)
    await guard.tick()
    assert guard.guard is not None
    late = guard.local_counts()
    assert [(row.harmful, row.in_force) for row in late.savings if row.judged] == [(20, False)]

    async def counts() -> tuple[dict[str, fleet_pb2.GetSavingsResponse], list[str]]:
        return {"late": late} | ({"alone": guard.local_counts()} if known else {}), []

    guard.guard._counts, known = counts, False
    again = await control.set_policy(RULES)
    await guard.tick()
    known = True
    harm(control, harmful=0)
    await guard.tick()
    assert control.fleet.revision == again.revision


@pytest.mark.parametrize("candidate", [OTHER_RULES, SAME_RULES])
async def test_a_rollout_from_a_policy_whose_cap_harms_goes_on(control: Control, candidate: Policy) -> None:
    """The candidate may mend the harm. It is aborted only if its own rules do harm."""
    before = await control.set_policy(RULES)
    guard, revision = control.fleet.part(Comparisons), await start(control, candidate)
    judge(guard.experiments.experiment_of(before.revision, RULES), harmful=20, of=40, kind=CAP)
    await guard.tick()
    assert (await newest_rollout(control)).state is State.RUNNING
    judge(guard.experiments.experiment_of(revision, candidate), harmful=20, of=40, kind=CAP)
    await guard.tick()
    assert ((await newest_rollout(control)).state is State.ABORTED) == (candidate is OTHER_RULES)


@pytest.mark.usefixtures("_patient")
async def test_counts_of_two_replicas_add_up_to_a_withdrawal(control: Control) -> None:
    """Neither replica's counts suffice alone."""
    stored = await control.set_policy(RULES)
    harm(control, harmful=2, of=8)
    peers = Peers(lambda: [Replica("other", control.target)], ClientCredentials())
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    fleet.set_policy(stored)
    mine = fleet.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy)
    judge(mine, harmful=2, of=8)
    guard, alone = fleet.part(Comparisons), control.fleet.part(Comparisons)
    guard.attach(Beside("leads", peers, lambda: True, control.parts.rollouts, control.store.database, utc_now))
    await alone.tick()
    assert alone.newest is not None
    assert alone.newest.savings[0].evidence_ratio < 1
    await guard.tick()
    await peers.close()
    assert guard.newest is not None
    assert (guard.newest.savings[0].judged, guard.newest.savings[0].harmful) == (16, 4)
    assert control.fleet.policy is not None
    assert control.fleet.policy.author == WITHDRAWER


@pytest.mark.usefixtures("_patient")
async def test_a_replica_that_does_not_answer_takes_no_saved_tokens_back(control: Control) -> None:
    """The requests that it has counted are missing, and come back with its next answer."""
    stored = await control.set_policy(RULES)
    other, silent = Replica("other", control.target), list[str]()
    peers = Peers(lambda: [] if silent else [other], ClientCredentials(), lambda: silent)
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    fleet.set_policy(stored)
    for parts in (fleet, control.fleet):
        counts = parts.part(Comparisons).experiments.experiment_of(stored.revision, stored.policy).counts
        for arm, tokens in ((counts.treated, 50), (counts.control, 100)):
            arm.requests, arm.think_tokens, arm.think_tokens_squares = 40, 40 * tokens, 41.0 * tokens**2
    part = fleet.part(Comparisons)
    part.attach(Beside("leads", peers, lambda: True, control.parts.rollouts, control.store.database, utc_now))
    saved = []
    for ids in ([], [], ["other"], []):
        silent[:] = ids
        saved.append((await part.point()).get("saved_tokens_per_s"))
    await peers.close()
    assert saved == [None, 0, None, 0]


async def test_saved_tokens_count_when_their_requests_close(control: Control) -> None:
    """The comparison counts them together, once a long request that began before them has ended."""
    stored, part = await control.set_policy(RULES), control.fleet.part(Comparisons)
    experiment = part.experiments.experiment_of(stored.revision, stored.policy)
    for arm, tokens in ((experiment.counts.treated, 50), (experiment.counts.control, 100)):
        arm.requests, arm.think_tokens, arm.think_tokens_squares = 40, 40 * tokens, 41.0 * tokens**2
    long, short = (experiment.cohorts.join(utc_now() + after) for after in (timedelta(), LENGTH))
    await part.point()
    short.counts.treated.requests += 4
    short.leave()
    assert (await part.point())["saved_tokens_per_s"] > 0
    long.leave()
    assert experiment.counts.treated.requests == 44
    assert (await part.point())["saved_tokens_per_s"] == 0
