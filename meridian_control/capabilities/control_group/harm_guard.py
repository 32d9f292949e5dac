"""Withdraws a kind of shortening that harms, and the entropy rules if a signal of live requests is no longer as in the
calibration.

The control group shows the harm. The module owns the tests of harm and of drift. The replica that leads adds up the
counts of all replicas and stores a new policy revision, so that the change reaches all engines and outlives a restart
as every revision does. The evidence itself is in memory: a new leader begins the tests anew with the counts of the
replicas that still run. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import logging
from functools import partial, reduce
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.control_group.experiments import kind_of, rules_of
from meridian_control.capabilities.control_group.savings import DRIFTED, WITHDRAWER, evidence_of, merged
from meridian_control.capabilities.control_group.shown import harm_sentence
from meridian_control.common.drift_bins import SIGNALS, drift_bins, where
from meridian_control.common.errors import EtagMismatch
from meridian_control.common.harm_words import DRIFT, HARM, withdrew_text
from meridian_control.common.inference import SequentialTest, ShiftTest
from meridian_control.policy.shortening_kinds import ENTROPY, Kind, without
from meridian_control.rollout.state import By
from meridian_control.rollout.transitions import abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.driver import Rollouts

logger = logging.getLogger(__name__)

# Largest probability that a kind whose harm is at most max_loss is ever withdrawn for its harm, and that rules are ever
# put into shadow for drift although no signal has drifted; each per set of rules and leader.
FALSE_ALARM_RATE = 0.01


class Watch:
    """The tests of one set of rules over all replicas.

    harm: by kind of shortening, the evidence of its harm, 1 at the level of a withdrawal.
    """

    def __init__(self) -> None:
        self._tests: dict[Kind, SequentialTest] = {}
        self._max_loss = 1.0
        self.harm: dict[Kind, float] = {}
        # By signal that the policy describes.
        self._shifts: dict[str, ShiftTest] = {}
        # Evidence of drift, 1 at the level of a withdrawal; None if the policy describes no signal.
        self.drift: float | None = None
        # The counts of each replica that the test has taken in, by the replica's id.
        self._seen: dict[str, fleet_pb2.Savings] = {}

    def look(self, counts: dict[str, fleet_pb2.Savings]) -> float:
        """Take in the newest counts of each replica, by its id. Return the largest evidence of harm of a kind.

        The test begins anew if a replica has begun to count anew, because a later revision has put the same rules in
        force again. A replica that restarts has a new id, so counts of an id otherwise only grow.
        """
        known = self._seen.keys() & counts.keys()
        again = any(self._seen[key].since_revision != counts[key].since_revision for key in known)
        if again or not self._seen:
            self._seen = {}
            self._tests, self._max_loss = {}, min(savings.max_loss for savings in counts.values())
            # The bins follow from the rules, so they are the same on all replicas.
            bins = drift_bins(next(iter(counts.values())))
            self._shifts = {
                signal: ShiftTest([sample_bin.calibrated for sample_bin in own]) for signal, own in bins.items()
            }
        if self._shifts:
            # A mean of e-values is an e-value, so the rate of false alarms holds for all signals together.
            new = self._new_samples(counts)
            self.drift = fmean(test.add_counts(new[signal]) for signal, test in self._shifts.items()) * FALSE_ALARM_RATE
        self.harm = {}
        for kind, (harmful, judged) in self._new_verdicts(counts).items():
            test = self._tests.setdefault(kind, SequentialTest(self._max_loss))
            self.harm[kind] = test.add_trials(harmful, judged) * FALSE_ALARM_RATE
        self._seen |= counts
        return max(self.harm.values(), default=0.0)

    def _new_verdicts(self, counts: dict[str, fleet_pb2.Savings]) -> dict[Kind, tuple[int, int]]:
        """Return by kind the numbers of harmful and of judged requests that the tests have not taken in."""
        new: dict[Kind, tuple[int, int]] = {}
        for replica_id, savings in counts.items():
            before = {kind_of(harm): harm for harm in self._seen.get(replica_id, fleet_pb2.Savings()).kinds}
            for harm in savings.kinds:
                kind = kind_of(harm)
                seen = before.get(kind, fleet_pb2.ShorteningHarm())
                harmful, judged = new.get(kind, (0, 0))
                new[kind] = harmful + harm.harmful - seen.harmful, judged + harm.judged - seen.judged
        return new

    def _new_samples(self, counts: dict[str, fleet_pb2.Savings]) -> dict[str, list[int]]:
        """Return the number of samples in each bin of each signal that the tests have not taken in."""
        new: dict[str, list[int]] = {}
        for replica_id, savings in counts.items():
            before = drift_bins(self._seen.get(replica_id, fleet_pb2.Savings()))
            for signal, bins in drift_bins(savings).items():
                sums = new.setdefault(signal, [0] * len(bins))
                for index, sample_bin in enumerate(bins):
                    sums[index] += sample_bin.seen - (before[signal][index].seen if signal in before else 0)
        return new


class HarmGuard:
    """Watches the harm while this replica leads.

    counts: returns the counts of each replica by its id, and the ids of the replicas that did not answer. leads:
    whether this replica leads. put_in_force: gives a stored revision to the engines. clock: gives the time of day.
    """

    def __init__(
        self,
        counts: Callable[[], Awaitable[tuple[dict[str, fleet_pb2.GetSavingsResponse], list[str]]]],
        leads: Callable[[], bool],
        rollouts: Rollouts,
        put_in_force: Callable[[StoredRevision], None],
        clock: Callable[[], datetime],
    ) -> None:
        self._counts, self._leads, self._rollouts = counts, leads, rollouts
        self._put_in_force, self._clock = put_in_force, clock
        # By fingerprint of the rules, for the rules that replicas still count.
        self._watches: dict[str, Watch] = {}
        # Rules whose cap does harm and stays, of which the log says so once.
        self._left: set[str] = set()
        # The newest revision known here that withdraws something. Once a later one is in force, no answer names it.
        self._withdrawn_revision = 0
        # The newest look, and its evidence by fingerprint of the rules; none while another replica leads.
        self.newest: fleet_pb2.GetSavingsResponse | None = None
        self.evidence: dict[str, fleet_pb2.Savings] = {}

    async def look(self) -> None:
        """Look at the counts of all replicas, and withdraw what does harm.

        Raises StoreUnavailable, StoredPolicyUnreadable.
        """
        if not self._leads():
            self.newest, self._watches, self.evidence = None, {}, {}
            return
        answers, silent = await self._counts()
        rollout = self._rollouts.newest
        named = (answer.withdrawn_revision for answer in answers.values())
        self._withdrawn_revision = max([self._withdrawn_revision, *named])
        candidate_revision = rollout.candidate_revision if rollout is not None and rollout.active else 0
        answers = without_past(answers, candidate_revision, self._withdrawn_revision)
        newest = merged(answers.values())
        # The evidence against rules that only a silent replica counts is still needed when that replica answers.
        kept = self._watches if silent else {}
        watches = {savings.rules: self._watches.get(savings.rules) or Watch() for savings in newest.savings}
        self._watches = {**kept, **watches}
        for savings in newest.savings:
            parts = {
                replica: part
                for replica, answer in answers.items()
                for part in answer.savings
                if part.rules == savings.rules
            }
            watch = self._watches[savings.rules]
            savings.evidence_ratio = watch.look(parts)
            for harm in savings.kinds:
                harm.evidence_ratio = watch.harm.get(kind_of(harm), 0.0)
            if watch.drift is not None:
                savings.drift_evidence_ratio = watch.drift
        self.newest = newest
        self.evidence = {savings.rules: evidence_of(savings) for savings in newest.savings}
        for savings in newest.savings:
            proved = [harm for harm in savings.kinds if harm.evidence_ratio >= 1 and harm.HasField("harm_ratio")]
            if proved:
                counted = f"counted since revision {savings.since_revision}"
                reason = "; ".join([*(harm_sentence(savings, harm) for harm in proved), counted])
                await self._withdraw(savings, [kind_of(harm) for harm in proved], HARM, reason)
            elif savings.drift_evidence_ratio >= 1:
                await self._withdraw(savings, [ENTROPY], DRIFT, _drift(savings))

    async def _withdraw(self, savings: fleet_pb2.Savings, kinds: list[Kind], cause: str, reason: str) -> None:
        """Withdraw kinds of shortening from the policy if it has the counted rules, and abort an active rollout that
        brings these rules or keeps the policy from being changed.

        A cap is not withdrawn. A rollout from a policy whose cap does harm goes on, because it may mend the harm.
        """
        policies, rollouts = self._rollouts.store.policies, self._rollouts.store
        current = await policies.current()
        harms = current is not None and savings.in_force and rules_of(current.policy) == savings.rules
        if current is not None and harms and reduce(without, kinds, current.policy) == current.policy:
            # Only a cap does harm, which is not withdrawn; the page and the alert show it.
            if savings.rules not in self._left:
                self._left.add(savings.rules)
                logger.warning("the cap stays, although it does harm: %s", reason)
            return
        if (rollout := await rollouts.active()) is not None:
            candidate = (await policies.get(rollout.candidate_revision)).policy
            # Counts from before the candidate belong to an earlier rollout of the same rules.
            tried = savings.since_revision >= rollout.candidate_revision and rules_of(candidate) == savings.rules
            if harms or tried:
                await rollouts.change(rollout, partial(abort, by=By(self._rollouts.clock(), WITHDRAWER, reason)))
                await self._rollouts.look()
                current = await policies.current()
        # Somebody may have changed the rules after the rollout ended.
        if current is None or not harms or rules_of(current.policy) != savings.rules:
            return
        policy = reduce(without, kinds, current.policy)
        try:
            stored = await policies.append(
                policy, etag=current.etag, author=WITHDRAWER, reason=reason, now=self._clock(), cause=cause
            )
        except EtagMismatch:
            # Somebody else has just stored a revision, and the next look judges that revision's rules.
            return
        self._withdrawn_revision = stored.revision
        logger.warning("revision %d %s: %s", stored.revision, withdrew_text(cause), reason)
        # The engines get the revision also if the store cannot be read now.
        self._put_in_force(stored)
        await self._rollouts.look()


def without_past(
    answers: dict[str, fleet_pb2.GetSavingsResponse], candidate_revision: int, withdrawn_revision: int
) -> dict[str, fleet_pb2.GetSavingsResponse]:
    """Return the replicas' counts without those of an earlier time at which the same rules were in force, which a
    replica keeps until it has a newer policy or candidate with these rules. candidate_revision: that of the active
    rollout, 0 for none. withdrawn_revision: the newest that withdraws something, 0 for none; it changes the rules, so
    none that are in force since before it still are."""

    def newness(part: fleet_pb2.Savings) -> int:
        return 2 if part.in_force else int(part.since_revision >= candidate_revision)

    present = {
        replica: [part for part in answer.savings if not part.in_force or part.since_revision >= withdrawn_revision]
        for replica, answer in answers.items()
    }
    newest: dict[str, int] = {}
    for part in chain.from_iterable(present.values()):
        newest[part.rules] = max(newest.get(part.rules, 0), newness(part))
    kept = {}
    for replica, parts in present.items():
        kept[replica] = fleet_pb2.GetSavingsResponse()
        kept[replica].CopyFrom(answers[replica])
        del kept[replica].savings[:]
        kept[replica].savings.extend(part for part in parts if newness(part) == newest[part.rules])
    return kept


def _drift(savings: fleet_pb2.Savings) -> str:
    """Describe the bin that has gained most, of all signals."""
    gains = []
    for signal, bins in drift_bins(savings).items():
        seen, calibrated = (
            sum(sample_bin.seen for sample_bin in bins),
            sum(sample_bin.calibrated for sample_bin in bins),
        )
        shares = ((sample_bin.seen / max(1, seen), sample_bin.calibrated / calibrated) for sample_bin in bins)
        gains += [(live - before, signal, index, seen, calibrated) for index, (live, before) in enumerate(shares)]
    _, signal, index, seen, calibrated = max(gains)
    named, bins = SIGNALS[signal], drift_bins(savings)[signal]
    place = where([sample_bin.max_value for sample_bin in bins], index)
    unit = f" {named.unit}" * bool(named.unit)
    return (
        f"{named.name}{DRIFTED}{savings.since_revision} were calibrated on: {bins[index].seen} of {seen} requests have "
        f"a first sample {place}{unit}, where the calibration had {bins[index].calibrated} of {calibrated}"
    )
