"""Puts the entropy rules into shadow if the control group shows that they do more harm than the policy allows.

The module owns the test of the harm. The replica that leads adds up the counts of all replicas and stores a new policy
revision, so that the change reaches all engines and outlives a restart as every revision does. The evidence itself is
in memory: a new leader begins the test anew with the counts of the replicas that still run. The module runs on the
control plane's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common.errors import EtagMismatch, MeridianError
from meridian_control.common.inference import SequentialTest
from meridian_control.decisions.control_group import in_shadow
from meridian_control.fleet.savings import WITHDRAWER, merged
from meridian_control.rollout.state import By
from meridian_control.rollout.transitions import abort
from meridian_control.session.arms import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from meridian_control.cluster.cluster_fleet import WholeFleet
    from meridian_control.rollout.driver import Rollouts

logger = logging.getLogger(__name__)

# Seconds between two looks at the counts.
LOOK_S = 5.0
# Largest probability that rules whose harm is at most max_loss are ever put into shadow, per set of rules and leader.
FALSE_ALARM_RATE = 0.01


class Watch:
    """The test of one set of rules over all replicas."""

    def __init__(self) -> None:
        self._test = SequentialTest(1.0)
        # The counts of each replica that the test has taken in, by the replica's id.
        self._seen: dict[str, fleet_pb2.Savings] = {}

    def look(self, counts: dict[str, fleet_pb2.Savings]) -> float:
        """Take in the newest counts of each replica, by its id. Return the evidence, 1 at the level of a withdrawal.

        The test begins anew if a replica has begun to count anew, because a later revision has put the same rules in
        force again. A replica that restarts has a new id, so counts of an id otherwise only grow.
        """
        known = self._seen.keys() & counts.keys()
        again = any(self._seen[key].since_revision != counts[key].since_revision for key in known)
        if again or not self._seen:
            self._seen = {}
            self._test = SequentialTest(min(told.max_loss for told in counts.values()))
        judged = harmful = 0
        for replica_id, told in counts.items():
            before = self._seen.get(replica_id, fleet_pb2.Savings())
            judged += told.judged - before.judged
            harmful += told.harmful - before.harmful
        self._seen |= counts
        return self._test.add(harmful, judged) * FALSE_ALARM_RATE


class HarmGuard:
    """Watches the harm while this replica leads. `newest` is its newest look, None while another replica leads."""

    def __init__(self, whole: WholeFleet, rollouts: Rollouts, clock: Callable[[], datetime]) -> None:
        self._whole, self._rollouts, self._clock = whole, rollouts, clock
        # By fingerprint of the rules, for the rules that replicas still count.
        self._watches: dict[str, Watch] = {}
        self.newest: fleet_pb2.GetSavingsResponse | None = None

    async def run(self) -> None:
        """Call `look` every LOOK_S seconds until cancelled."""
        complaint = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                complaint = ""
            except MeridianError as error:
                if complaint != str(error):
                    complaint = str(error)
                    logger.warning("the harm of the entropy rules is not watched: %s", complaint)

    async def look(self) -> None:
        """Look at the counts of all replicas, and put rules that do harm into shadow.

        Raises StoreUnavailable, StoredPolicyUnreadable.
        """
        if not self._whole.leads():
            self.newest, self._watches = None, {}
            return
        heard, _ = await self._whole.heard_savings()
        newest = merged(heard.values())
        self._watches = {savings.rules: self._watches.get(savings.rules) or Watch() for savings in newest.savings}
        for savings in newest.savings:
            parts = {
                replica: part for replica, told in heard.items() for part in told.savings if part.rules == savings.rules
            }
            savings.evidence_ratio = self._watches[savings.rules].look(parts)
        self.newest = newest
        for savings in newest.savings:
            if savings.evidence_ratio >= 1 and savings.HasField("harm_ratio"):
                await self._withdraw(savings)

    async def _withdraw(self, savings: fleet_pb2.Savings) -> None:
        """Abort an active rollout, and put the policy's entropy rules into shadow if these do the harm."""
        policies, rollouts, now = self._rollouts.store.policies, self._rollouts.store, self._clock()
        reason = (
            f"{savings.harmful} of {savings.judged} answers of the control group would have changed under the rules of "
            f"revision {savings.since_revision}, more than entropy.max_loss {savings.max_loss:g} allows"
        )
        candidate = None
        if (rollout := await rollouts.active()) is not None:
            candidate = (await policies.get(rollout.candidate_revision)).policy
        current = await policies.current()
        harms = current is not None and rules_of(current.policy) == savings.rules
        if rollout is not None and (harms or (candidate is not None and rules_of(candidate) == savings.rules)):
            await rollouts.change(rollout, partial(abort, by=By(now, WITHDRAWER, reason)))
            await self._rollouts.look()
            current = await policies.current()
        if current is None or not harms:
            return
        try:
            stored = await policies.append(
                in_shadow(current.policy), etag=current.etag, author=WITHDRAWER, reason=reason, now=now
            )
        except EtagMismatch:
            # Somebody else has just stored a revision, and the next look judges that revision's rules.
            return
        logger.warning("revision %d puts the entropy rules into shadow: %s", stored.revision, reason)
        await self._rollouts.look()
