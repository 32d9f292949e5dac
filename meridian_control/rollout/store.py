"""Stores rollouts in the policy database, with the policy revisions that rollouts bring and take back.

The store owns rollout ids, and refuses a change that is based on an outdated state. The store does not know how a
rollout proceeds. All code runs on the control plane's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError

from meridian_control.common.errors import InvalidRequest, NotFound, StoreUnavailable
from meridian_control.policy.store import insert_revision, new_revision
from meridian_control.rollout.state import TAKEN_BACK, By, Rollout
from meridian_control.rollout.transitions import begin
from meridian_control.storage.tables import rollouts as _rollouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import PolicyStore, StoredRevision
    from meridian_control.rollout.plan import Plan
    from meridian_control.storage.database import Fence

MAX_ID = 2**31 - 1


class RolloutStore:
    """The rollouts in the database of the policy revisions. All methods may raise StoreUnavailable."""

    def __init__(self, policies: PolicyStore) -> None:
        self.policies, self.database = policies, policies.database

    async def active(self) -> Rollout | None:
        return await self._one(select(_rollouts).where(_rollouts.c.active == 1))

    async def newest(self) -> Rollout | None:
        """Return the rollout that began last, which is the active rollout if one is active; None before the first."""
        return await self._one(select(_rollouts).order_by(_rollouts.c.rollout_id.desc()).limit(1))

    async def get(self, rollout_id: int) -> Rollout:
        """Return a rollout; 0 stands for the newest. Raises NotFound."""
        query = select(_rollouts).where(_rollouts.c.rollout_id == min(rollout_id, MAX_ID))
        rollout = await self._one(query) if rollout_id else await self.newest()
        if rollout is None:
            raise NotFound(f"there is no rollout {rollout_id}" if rollout_id else "there is no rollout yet")
        return rollout

    async def history(self, limit: int, before: int | None = None) -> list[Rollout]:
        """Return the newest rollouts, newest first; if `before` is given, only rollouts older than that id."""
        query = select(_rollouts).order_by(_rollouts.c.rollout_id.desc()).limit(limit)
        if before is not None:
            query = query.where(_rollouts.c.rollout_id < before)
        async with self.database.reading() as connection:
            return [_read(row) for row in await connection.execute(query)]

    async def answered(self, request_id: str, plan: Plan, policy: Policy) -> Rollout | None:
        """Return the rollout that was started under `request_id`; None if there is none or the id is empty.

        Raises InvalidRequest if that rollout has another policy or plan.
        """
        query = select(_rollouts).where(_rollouts.c.request_id == request_id)
        rollout = await self._one(query) if request_id else None
        if rollout is not None and (
            rollout.plan != plan or (await self.policies.get(rollout.candidate_revision)).policy != policy
        ):
            other = f"started rollout {rollout.rollout_id} with another policy or plan"
            message = f'must be a new one; got "{request_id}", which {other}'
            raise InvalidRequest("request_id", message)
        return rollout

    async def start(self, plan: Plan, policy: Policy, etag: str, by: By) -> tuple[Rollout, StoredRevision]:
        """Store the policy as a candidate, and its rollout; return the rollout and the revision in force, which is read
        first, so that a call that has stored a rollout does not fail. `etag` names that revision, empty for any.

        Raises EtagMismatch, RolloutActive, InvalidRequest, PolicyError, StoredPolicyUnreadable, and NotFound if no
        policy is in force.
        """
        await self.policies.check_policy(policy)
        while True:
            if (earlier := await self.answered(by.request_id, plan, policy)) is not None:
                return earlier, await self.policies.get(earlier.stable_revision)
            in_force = await self.policies.check(etag)
            if not in_force:
                raise NotFound("no policy is stored yet")
            stable = await self.policies.get(in_force)
            async with self.database.reading() as connection:
                newest = await connection.scalar(select(func.max(_rollouts.c.rollout_id))) or 0
            revisions = stable.revision, stable.revision + 1
            rollout = begin(newest + 1, plan, revisions, by, plan.harm_limit(policy))
            reason = by.reason or f"candidate of rollout {rollout.rollout_id}"
            candidate = new_revision(stable.revision + 1, policy, by.author, reason, by.now)
            try:
                async with self.database.writing() as connection:
                    await insert_revision(connection, candidate)
                    await connection.execute(
                        insert(_rollouts).values(_row(rollout) | {"request_id": by.request_id or None})
                    )
            except IntegrityError:
                # Another caller stored a rollout or a revision in the meantime.
                continue
            return rollout, stable

    async def change(self, rollout: Rollout, change: Callable[[Rollout], Rollout]) -> Rollout:
        """Store the rollout that `change` returns, and call `change` again if the stored rollout is newer.

        Raises the errors of `change`.
        """
        while True:
            changed = change(rollout)
            if changed == rollout:
                return rollout
            if (saved := await self.save(changed)) is not None:
                return saved
            rollout = await self.get(rollout.rollout_id)

    async def save(self, rollout: Rollout, fence: Fence | None = None) -> Rollout | None:
        """Store a changed rollout and return it; None if another caller stored the rollout since it was read.

        If the rollout is taken back, its stable policy is stored again as the newest revision. `fence` is called within
        the transaction and raises if this replica may no longer store the rollout.
        """
        taken_back = rollout.state in TAKEN_BACK and not rollout.rollback_revision
        stable = await self.policies.get(rollout.stable_revision) if taken_back else None
        saved = rollout.model_copy(update={"version": rollout.version + 1})
        if stable is not None:
            saved = saved.model_copy(update={"rollback_revision": rollout.candidate_revision + 1})
        same = (_rollouts.c.rollout_id == rollout.rollout_id) & (_rollouts.c.version == rollout.version)
        async with self.database.writing() as connection:
            if fence is not None:
                await fence(connection)
            done = await connection.execute(update(_rollouts).where(same).values(_row(saved)))
            if not done.rowcount:
                return None
            if stable is not None:
                event = saved.events[-1]
                did = saved.state.word.replace("_", " ")
                reason = f"rollout {saved.rollout_id} {did}" + f": {event.reason}" * bool(event.reason)
                again = new_revision(saved.rollback_revision, stable.policy, event.author, reason, event.time)
                await insert_revision(connection, again)
        return saved

    async def _one(self, query: Any) -> Rollout | None:
        async with self.database.reading() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else _read(row)


def _row(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "active": 1 if rollout.active else None,
        "candidate_revision": rollout.candidate_revision,
        "version": rollout.version,
        "rollout": rollout.model_dump_json(exclude_none=True),
    }


def _read(row: Any) -> Rollout:
    try:
        return Rollout.model_validate_json(row.rollout)
    except ValidationError as error:
        # During an upgrade of the control plane, replicas of the newer version go on with the rollout.
        raise StoreUnavailable(f"policy store: rollout {row.rollout_id} was stored by a newer version") from error
