"""Decides when the requests of one traffic are calibrated, and what follows from each result: a pure state machine.

The module has no clock and does no I/O: the fleet part records, runs the calibration, starts rollouts, and tells the
learner what came of it. So months can be simulated in seconds.
"""

import enum
from datetime import datetime, timedelta
from typing import Any, Self

from meridian_control.common.inference import confidence_of, needed_to_prove
from meridian_control.common.look import percent
from meridian_control.policy.drift_schema import EatBin
from meridian_control.rollout.state import Value

CONFIDENCE = 0.95
# The requests of an attempt are so many times those of the attempt before, so that few attempts share the confidence.
GROWTH = 2
# Most episodes of a traffic that are kept. An attempt that has had so many is followed by one with as many new ones.
MAX_EPISODES = 5_000
# Least time between an attempt with so many and the next, because each attempt takes its share of the confidence.
PAUSE = timedelta(days=1)
# Number of attempts that are kept for people to read.
MAX_TRIED = 8


class State(enum.StrEnum):
    """A state says what the control plane does for a traffic."""

    RECORDING = "recording"
    REFUSED = "nothing is safe"
    ROLLING_OUT = "rolling out"
    IN_FORCE = "in force"
    WITHDRAWN = "withdrawn"


class Rule(Value):
    """An EAT rule, with what was measured on the requests that did not choose it. text: the rule in words. entropy: its
    fields of the policy's entropy section. floor_tokens: thinking tokens before which it ended no thinking. bound:
    upper bound of the share of lost answers, at the confidence of its attempt. saved: share of the thinking that it
    saves. reference: the distribution of the first EAT that it reads of each request."""

    text: str
    entropy: dict[str, Any]
    floor_tokens: int
    bound: float
    saved: float
    reference: tuple[EatBin, ...] = ()


class Tried(Value):
    """An attempt: when, on how many requests, and what came of it in one line."""

    time: datetime
    requests: int
    outcome: str


class Learner(Value):
    """A learner holds what is known of one traffic; each method returns the next value.

    since, why: when the state began, and the reason in one line. failure: the error of the newest calibration, empty if
    it had a result. after: number of the newest episode that no longer counts. probing: how the policy probes the
    episodes after that, in words that only have to differ. needed: episodes without which no attempt is due, whatever
    the policy allows. least: episodes that the next attempt reads at least, because of the newest ones too few could be
    judged. attempts: over the whole life of the traffic, so that with CONFIDENCE none of its rules ever loses more than
    the allowed share. rollout_id: the rollout of the rule.
    """

    traffic: str
    state: State = State.RECORDING
    since: datetime
    why: str = ""
    failure: str = ""
    after: int = 0
    probing: str = ""
    needed: int = 0
    least: int = 0
    attempts: int = 0
    requests: int = 0
    rule: Rule | None = None
    rollout_id: int = 0
    tried: tuple[Tried, ...] = ()

    @classmethod
    def new(cls, traffic: str, now: datetime) -> Self:
        return cls(traffic=traffic, since=now)

    def probed(self, probing: str, newest: int) -> Self:
        """Note how the policy probes now. After a change only later requests count, and no more are needed than for a
        first attempt, because EAT at other places is another EAT. newest: number of the newest episode."""
        if probing == self.probing:
            return self
        return self._with(probing=probing, after=newest if self.probing else self.after, needed=0, least=0, failure="")

    def is_due(self, episodes: int, max_loss: float, now: datetime) -> bool:
        """Return whether so many episodes after `after` are enough for the next attempt, and the last one is over for
        long enough."""
        records = self.rule is None and not self.hopeless(max_loss)
        needs = self.needs(max_loss)
        return records and episodes >= needs and (needs < MAX_EPISODES or now >= self.since + PAUSE)

    def hopeless(self, max_loss: float) -> str:
        """Return why no number of episodes that is kept is enough for the next attempt; empty if one is."""
        least = fewest(self.attempts + 1, max_loss)
        if self.rule is not None or least <= MAX_EPISODES:
            return ""
        return f"entropy.max_loss {max_loss:g} needs {least:,} requests in the next attempt; {MAX_EPISODES:,} are kept"

    def needs(self, max_loss: float) -> int:
        """Return the number of episodes after `after` that the next attempt needs."""
        return min(MAX_EPISODES, max(self.needed, self.reads(max_loss)))

    def reads(self, max_loss: float) -> int:
        """Return the number of episodes that the next attempt reads at least."""
        return max(self.least, fewest(self.attempts + 1, max_loss))

    def unproved(self, probing: str, max_loss: float) -> str:
        """Return why the proof of the rule does not hold under a policy that probes so and allows so much loss; empty
        if it holds."""
        if probing != self.probing:
            return "the policy probes at other places, or otherwise"
        if self.rule is None or self.rule.bound <= max_loss:
            return ""
        return (
            f"the rule is proved to lose at most {percent(self.rule.bound, 2)} of the answers, and entropy.max_loss "
            f"{max_loss:g} allows less"
        )

    def refused(self, requests: int, why: str, newest: int, now: datetime, *, anew: bool = False) -> Self:
        """Note that an attempt on so many judged requests has proved no rule. newest: number of the newest episode.
        anew: whether nothing could be seen on them, so that no rule was tried and only later requests count."""
        needed = MAX_EPISODES if anew else GROWTH * max(requests, self.needed, self.least)
        return self._with(
            state=State.REFUSED,
            since=now,
            why=why,
            failure="",
            after=newest if anew or needed > MAX_EPISODES else self.after,
            needed=min(MAX_EPISODES, needed),
            least=0 if anew else self.least,
            attempts=self.attempts + (not anew),
            requests=requests,
            tried=self._tried(now, requests, why),
        )

    def failed(self, error: str) -> Self:
        """Note that a calibration, or a look at the rule in force, had no result; without an error, that it had one."""
        return self._with(failure=error)

    def short(self, requests: int, read: int, missing: int, newest: int, now: datetime) -> Self:
        """Note that no rule was tried, because only so many of the requests that were read can be judged, and some are
        missing. newest: number of the newest episode."""
        if (least := read + missing) <= MAX_EPISODES:
            return self._with(least=least, failure="")
        why = f"{requests:,} of {read:,} requests can be judged, and {missing:,} more are needed"
        return self.refused(requests, why, newest, now, anew=True)

    def proved(self, rule: Rule, requests: int, rollout_id: int, now: datetime) -> Self:
        """Note that an attempt has proved a rule, whose rollout has begun."""
        tried = self._tried(
            now, requests, f"{rule.text}: saves {percent(rule.saved)}, may lose {percent(rule.bound, 2)}"
        )
        return self._with(
            state=State.ROLLING_OUT,
            since=now,
            why="",
            failure="",
            attempts=self.attempts + 1,
            requests=requests,
            rule=rule,
            rollout_id=rollout_id,
            tried=tried,
        )

    def rolled_out(self, newest: int, now: datetime) -> Self:
        """Note that all engines have the rule. newest: number of the newest episode."""
        return self._with(state=State.IN_FORCE, since=now, why="", after=newest)

    def withdrawn(self, why: str, newest: int, now: datetime) -> Self:
        """Note that the rule is not in force any more. Only later requests count from now on, because the traffic may
        have changed."""
        outcome = f"withdrawn: {why}"
        return self._with(
            state=State.WITHDRAWN,
            since=now,
            why=why,
            failure="",
            after=newest,
            needed=0,
            least=0,
            rule=None,
            rollout_id=0,
            tried=self._tried(now, self.requests, outcome),
        )

    def _tried(self, now: datetime, requests: int, outcome: str) -> tuple[Tried, ...]:
        return (*self.tried, Tried(time=now, requests=requests, outcome=outcome))[-MAX_TRIED:]

    def _with(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)


def fewest(attempt: int, max_loss: float) -> int:
    """Return the fewest requests of which each half can prove a rule without any lost answer in this attempt."""
    if max_loss >= 1:
        return 2
    return 2 * int(needed_to_prove(max_loss, confidence_of(attempt, CONFIDENCE)))
