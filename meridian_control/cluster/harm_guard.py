"""Puts the entropy rules into shadow if they harm, or if a signal of live requests is no longer as in the calibration.

The control group shows the harm. The module owns the tests of harm and of drift. The replica that leads adds up the
counts of all replicas and stores a new policy revision, so that the change reaches all engines and outlives a restart
as every revision does. The evidence itself is in memory: a new leader begins the tests anew with the counts of the
replicas that still run. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common.drift_bins import SIGNALS, drift_bins
from meridian_control.common.errors import EtagMismatch, MeridianError
from meridian_control.common.inference import SequentialTest, ShiftTest
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
# Largest probability that rules whose harm is at most max_loss are ever put into shadow for their harm, and that rules
# are ever put into shadow for drift although no signal has drifted; each per set of rules and leader.
FALSE_ALARM_RATE = 0.01


class Watch:
    """The test of one set of rules over all replicas."""

    def __init__(self) -> None:
        self._test = SequentialTest(1.0)
        # By signal that the policy describes.
        self._shifts: dict[str, ShiftTest] = {}
        # Evidence of drift, 1 at the level of a withdrawal; None if the policy describes no signal.
        self.drift: float | None = None
        # The counts of each replica that the test has taken in, by the replica's id.
        self._seen: dict[str, fleet_pb2.Savings] = {}

    def look(self, counts: dict[str, fleet_pb2.Savings]) -> float:
        """Take in the newest counts of each replica, by its id. Return the evidence of harm, 1 at the level of a
        withdrawal.

        The test begins anew if a replica has begun to count anew, because a later revision has put the same rules in
        force again. A replica that restarts has a new id, so counts of an id otherwise only grow.
        """
        known = self._seen.keys() & counts.keys()
        again = any(self._seen[key].since_revision != counts[key].since_revision for key in known)
        if again or not self._seen:
            self._seen = {}
            self._test = SequentialTest(min(told.max_loss for told in counts.values()))
            # The bins follow from the rules, so they are the same on all replicas.
            bins = drift_bins(next(iter(counts.values())))
            self._shifts = {signal: ShiftTest([each.calibrated for each in own]) for signal, own in bins.items()}
        if self._shifts:
            # A mean of e-values is an e-value, so the rate of false alarms holds for all signals together.
            new = self._new_samples(counts)
            self.drift = fmean(test.add(new[signal]) for signal, test in self._shifts.items()) * FALSE_ALARM_RATE
        judged = harmful = 0
        for replica_id, told in counts.items():
            before = self._seen.get(replica_id, fleet_pb2.Savings())
            judged += told.judged - before.judged
            harmful += told.harmful - before.harmful
        self._seen |= counts
        return self._test.add(harmful, judged) * FALSE_ALARM_RATE

    def _new_samples(self, counts: dict[str, fleet_pb2.Savings]) -> dict[str, list[int]]:
        """Return the number of samples in each bin of each signal that the tests have not taken in."""
        new: dict[str, list[int]] = {}
        for replica_id, told in counts.items():
            before = drift_bins(self._seen.get(replica_id, fleet_pb2.Savings()))
            for signal, bins in drift_bins(told).items():
                sums = new.setdefault(signal, [0] * len(bins))
                for index, each in enumerate(bins):
                    sums[index] += each.seen - (before[signal][index].seen if signal in before else 0)
        return new


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
            self.newest, self._watches, self._whole.evidence = None, {}, {}
            return
        heard, silent = await self._whole.heard_savings()
        newest = merged(heard.values())
        # The evidence against rules that only a silent replica counts is still needed when that replica answers.
        kept = self._watches if silent else {}
        found = {savings.rules: self._watches.get(savings.rules) or Watch() for savings in newest.savings}
        self._watches = {**kept, **found}
        for savings in newest.savings:
            parts = {
                replica: part for replica, told in heard.items() for part in told.savings if part.rules == savings.rules
            }
            watch = self._watches[savings.rules]
            savings.evidence_ratio = watch.look(parts)
            if watch.drift is not None:
                savings.drift_evidence_ratio = watch.drift
        self.newest = newest
        self._whole.evidence = {savings.rules: _evidence(savings) for savings in newest.savings}
        for savings in newest.savings:
            if savings.evidence_ratio >= 1 and savings.HasField("harm_ratio"):
                await self._withdraw(savings, _harm(savings))
            elif savings.drift_evidence_ratio >= 1:
                await self._withdraw(savings, _drift(savings))

    async def _withdraw(self, savings: fleet_pb2.Savings, reason: str) -> None:
        """Abort an active rollout, and put the policy's entropy rules into shadow if these are the counted rules."""
        policies, rollouts, now = self._rollouts.store.policies, self._rollouts.store, self._clock()
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
        # The engines get the revision also if the store cannot be read now.
        self._whole.fleet.set_policy(stored)
        await self._rollouts.look()


def _evidence(savings: fleet_pb2.Savings) -> fleet_pb2.Savings:
    """Return a message with nothing but the evidence."""
    drift = savings.drift_evidence_ratio if savings.HasField("drift_evidence_ratio") else None
    return fleet_pb2.Savings(evidence_ratio=savings.evidence_ratio, drift_evidence_ratio=drift)


def _harm(savings: fleet_pb2.Savings) -> str:
    return (
        f"{savings.harmful} of {savings.judged} answers of the control group would have changed under the rules of "
        f"revision {savings.since_revision}, more than entropy.max_loss {savings.max_loss:g} allows"
    )


def _drift(savings: fleet_pb2.Savings) -> str:
    """Describe the bin that has gained most, of all signals."""
    gains = []
    for signal, bins in drift_bins(savings).items():
        seen, calibrated = sum(each.seen for each in bins), sum(each.calibrated for each in bins)
        shares = ((each.seen / max(1, seen), each.calibrated / calibrated) for each in bins)
        gains += [(live - before, signal, index, seen, calibrated) for index, (live, before) in enumerate(shares)]
    _, signal, index, seen, calibrated = max(gains)
    named, bins = SIGNALS[signal], drift_bins(savings)[signal]
    where = f"above {bins[index - 1].max_value:g}" if index == len(bins) - 1 else f"up to {bins[index].max_value:g}"
    if 0 < index < len(bins) - 1:
        where = f"from {bins[index - 1].max_value:g} to {bins[index].max_value:g}"
    unit = f" {named.unit}" * bool(named.unit)
    return (
        f"{named.name} has left the distribution that the rules of revision {savings.since_revision} were calibrated "
        f"on: {bins[index].seen} of {seen} requests have a first sample {where}{unit}, where the calibration had "
        f"{bins[index].calibrated} of {calibrated}"
    )
