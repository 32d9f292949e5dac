"""The rollout store on a real SQLite file and a real PostgreSQL: the policy in force, and calls that compete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from meridian_control.common.errors import (
    InvalidRequest,
    PolicyError,
    RolloutActive,
    StoredPolicyUnreadable,
    StoreUnavailable,
)
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import MAX_OVERRIDES, Override, Policy
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.rollout import transitions as rules
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import By, Rollout, State
from meridian_control.rollout.store import RolloutStore
from meridian_control.storage.database import Database

NOW = datetime(2026, 5, 4, 3, 2, 1, 1000, tzinfo=UTC)
OLD, NEW = parse_toml("fallback.lease_ms = 500"), parse_toml("fallback.lease_ms = 600")
PLAN = Plan.model_validate({"step": [{"percent": 10.0}, {"engine_labels": {"pool": "*"}}]})
OTHER_PLAN = Plan.model_validate({"step": [{"percent": 11.0}]})
BY = By(NOW, "ann", "why")


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[RolloutStore]:
    """Yield a rollout store that holds the old policy."""
    store = PolicyStore(await Database.open(address))
    try:
        if await store.current() is None:
            await append(store, OLD)
        yield RolloutStore(store)
    finally:
        await store.database.close()


async def append(store: PolicyStore, policy: Policy = NEW) -> StoredRevision:
    return await store.append(policy, etag="", author="bob", reason="", now=NOW)


async def start(store: RolloutStore, plan: Plan = PLAN, policy: Policy = NEW, etag: str = "", by: By = BY) -> Rollout:
    return (await store.start(plan, policy, etag, by))[0]


async def in_force(store: RolloutStore) -> tuple[int, Policy]:
    current = await store.policies.current()
    assert current is not None
    return current.revision, current.policy


async def test_the_candidate_is_stored_and_not_in_force(address: str) -> None:
    async with opened(address) as store:
        assert await store.active() is None
        made = await start(store)
        assert (made.rollout_id, made.stable_revision, made.candidate_revision) == (1, 1, 2)
        assert await in_force(store) == (1, OLD)
        candidate = await store.policies.get(2)
        assert (candidate.policy, candidate.author, candidate.reason) == (NEW, "ann", "why")
        assert [header.revision for header in await store.policies.history(9)] == [2, 1]
    async with opened(address) as store:
        assert await store.active() == await store.get(1) == await store.get(0) == made


async def test_no_rollout_begins_from_a_policy_to_which_it_could_not_go_back(address: str) -> None:
    async with opened(address) as store:
        async with store.database.writing() as connection:
            await connection.execute(text("UPDATE policy_revisions SET policy = 'later = 1'"))
        with pytest.raises(StoredPolicyUnreadable):
            await start(store)
        assert await store.newest() is None


async def test_a_policy_that_could_not_be_read_again_is_not_stored(address: str) -> None:
    """A policy that is made from another one is not checked by its schema."""
    made = NEW.model_copy(update={"override": (Override(),) * (MAX_OVERRIDES + 1)})
    async with opened(address) as store:
        with pytest.raises(PolicyError, match="override must have at most 256 entries"):
            await start(store, policy=made)
        with pytest.raises(PolicyError, match="override must have at most 256 entries"):
            await append(store.policies, made)
        assert await store.active() is None
        assert await in_force(store) == (1, OLD)


async def test_a_change_is_made_to_what_is_stored(address: str) -> None:
    async with opened(address) as one, opened(address) as two:
        made = await start(one)
        paused = await one.change(made, lambda r: rules.pause(r, BY))
        assert await two.save(made.model_copy(update={"baked_s": 5.0})) is None
        assert await two.get(1) == paused
        aborted = await two.change(made, lambda r: rules.abort(r, BY))
        assert [event.event for event in aborted.events] == ["started", "paused", "aborted"]
        assert (aborted.version, await one.get(1)) == (2, aborted)


async def test_of_those_at_once_one_wins(address: str) -> None:
    """Whichever call comes first, revision numbers have no gap, and a candidate never comes into force by being
    newest."""
    async with opened(address) as one, opened(address) as two:
        attempts = [start(store) for store in (one, two)] + [append(store.policies) for store in (one, two) * 4]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        (made,) = [result for result in results if isinstance(result, Rollout)]
        updated = {result.revision for result in results if isinstance(result, StoredRevision)}
        assert {type(result) for result in results if isinstance(result, Exception)} <= {RolloutActive}
        assert updated | {made.candidate_revision} == set(range(2, len(updated) + 3))
        assert max(updated, default=1) == made.stable_revision == made.candidate_revision - 1
        assert (await in_force(two))[0] == made.stable_revision


async def test_ends_at_once(address: str) -> None:
    async with opened(address) as one, opened(address) as two:
        made = await start(one)
        ended = await asyncio.gather(*(store.change(made, lambda r: rules.abort(r, BY)) for store in (one, two) * 4))
        assert {rollout.rollback_revision for rollout in ended} == {3}
        assert len(await one.policies.history(9)) == 3


async def test_a_request_id_starts_once(address: str) -> None:
    by = By(NOW, "ann", "", "a")
    async with opened(address) as store:
        made = await start(store, by=by)
        assert await start(store, by=by, etag="stale") == made, "a repeated call needs no etag"
        for plan, policy in ((OTHER_PLAN, NEW), (PLAN, OLD)):
            with pytest.raises(
                InvalidRequest, match=r'^request_id must be a new one; got "a", which started rollout 1 '
            ):
                await start(store, plan, policy, by=by)
        await store.change(made, lambda r: rules.abort(r, BY))
        assert (await start(store, by=by)).state is State.ABORTED


async def test_one_of_a_newer_version(address: str) -> None:
    async with opened(address) as store:
        await start(store)
        async with store.database.writing() as connection:
            await connection.execute(text("""UPDATE rollouts SET rollout = '{"plan": {"later": 1}}'"""))
        with pytest.raises(StoreUnavailable, match=r"^policy store: rollout 1 was stored by a newer version$"):
            await store.active()
