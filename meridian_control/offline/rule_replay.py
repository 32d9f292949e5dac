"""Finds the places at which a rule would have stopped the requests of a trace, with the code that decides live.

One call of `entropy.rule` evaluates every sentence end of every request at once, because the table that it reads has a
slot for each sentence end. The module knows no statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.capabilities.entropy import rule as entropy_rule
from meridian_control.common.table_columns import CONFIRM_HISTORY
from meridian_control.engine.request_table import THINK, RequestTable
from meridian_control.engine.signals import rpdi
from meridian_control.offline.episodes import KEY, newest_values
from meridian_control.policy import effects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from meridian_control.offline.correctness import Judge
    from meridian_control.offline.episodes import Episodes
    from meridian_control.policy.model import Policy

# Families of rules, and the signals that each family uses.
EAT_SENTENCE, EAT_PARAGRAPH, EAT_SETTLED = "EAT", "EAT at paragraphs", "EAT settled"
EAT_GATED, GIVE_UP = "EAT gated by rank", "give up"
RANK, RPDI, SOFT, CAP = "rank", "RPDI", "soft close", "fixed cap"
SIGNALS = {
    EAT_SENTENCE: ("EAT",),
    EAT_PARAGRAPH: ("EAT",),
    EAT_SETTLED: ("EAT",),
    EAT_GATED: ("EAT", "rank"),
    RANK: ("rank",),
    RPDI: ("RPDI",),
    GIVE_UP: ("EAT",),
    SOFT: ("rank",),
    CAP: (),
}
# Families whose rules read probes.
PROBED = frozenset(family for family, signals in SIGNALS.items() if "EAT" in signals)
# Sets of probes whose EAT is kept for the next rules, as many as gates are tried: each takes 72 bytes a sentence end.
STATES = 8
# Columns of the request table from which RPDI follows.
ENTROPIES = ("entropy_count", "entropy_sum", "entropy_window_sum")


@dataclass(frozen=True)
class StoppingRule:
    """The policy fields of one rule, or of several rules of which any stops thinking."""

    family: str
    entropy: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    either: tuple[StoppingRule, ...] = ()

    @property
    def parts(self) -> tuple[StoppingRule, ...]:
        return self.either or (self,)

    @property
    def signals(self) -> set[str]:
        return {signal for part in self.parts for signal in SIGNALS[part.family]}

    def __str__(self) -> str:
        return " or ".join(part._text() for part in self.parts)

    def _text(self) -> str:
        wanted = self.entropy.get("confirm_sentence_ends", 1) if self.family != GIVE_UP else 1
        return self._once() + (f", {wanted} times in a row" if wanted > 1 else "")

    def _once(self) -> str:
        e, s = self.entropy, self.scheduler
        if self.family in SPELLED:
            return SPELLED[self.family](e, s)
        text = f"EAT < {e['eat_level_threshold_nats']:g} nats"
        if self.family == EAT_SETTLED:
            text += f", variance < {e['eat_ema_variance_threshold']:g} (alpha {e['ema_alpha']:g})"
        if self.family == EAT_GATED:
            text += f" where the end marker <= {e['eat_probe_max_rank']}"
        return text + (" at a paragraph" if e["eat_probe_placement"] == "paragraph" else "")


# How the families other than those of the EAT rule are spelled, from their fields of `entropy` and `scheduler`.
SPELLED: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    CAP: lambda _, s: f"at {s['max_think_tokens']} tokens",
    SOFT: lambda _, s: f"end marker <= {s['soft_close_rank']} from {s['soft_think_tokens']} tokens on",
    RPDI: lambda e, _: f"RPDI > {e['rpdi_threshold']:g}",
    GIVE_UP: lambda e, _: f"EAT >= {e['give_up_eat_nats']:g} nats from {e['give_up_tokens']} tokens on",
    RANK: lambda e, _: f"end marker <= {list(e['rank_conditions'][0].max_ranks)}",
}


def either(first: StoppingRule, second: StoppingRule) -> StoppingRule:
    return StoppingRule(
        f"{first.family} or {second.family}",
        {**first.entropy, **second.entropy},
        {**first.scheduler, **second.scheduler},
        (*first.parts, *second.parts),
    )


@dataclass(frozen=True)
class Stops:
    """The effect of a rule on each request, [requests].

    `at_tokens` is the number of thinking tokens at which the rule ends thinking, infinity if the model ends thinking.
    `right` is the probability that the answer after this end is right. `first_tokens` is the number of thinking tokens
    known when the end was decided. `probes` counts the EAT probes requested until the end.
    """

    at_tokens: NDArray[np.float64]
    right: NDArray[np.float64]
    first_tokens: NDArray[np.float64]
    probes: NDArray[np.int64]


class Replay:
    """Tries rules on a trace.

    A stop takes effect `delay_tokens` after the sentence end that it is decided from. A stop that is decided from a
    probe takes effect at the probe's place if the base policy holds probed requests.
    """

    def __init__(self, episodes: Episodes, judge: Judge, base: Policy, delay_tokens: int) -> None:
        self.episodes, self.judge, self.base = episodes, judge, base
        self._late = delay_tokens - 1
        self.cost_tokens = float(np.median(episodes.cost_tokens)) if len(episodes.cost_tokens) else 0.0
        self.window_tokens = self._window(base.entropy.rpdi_window_tokens)
        self._table = self._boundary_table()
        sample = episodes.sample
        has = sample >= 0
        self.eat_nats = np.where(has, episodes.eat_nats[sample] if len(episodes.eat_nats) else np.nan, np.nan)
        self.right = self._judged(episodes.owner, episodes.think_tokens, episodes.decided_tokens + self._late)
        placed = np.where(has, episodes.sample_tokens[sample], 0) if len(episodes.sample_tokens) else sample * 0
        self._table.put(slice(len(sample)), eat_think_tokens=placed)
        # A held request generates no thinking token between its probe and the decision from the probe.
        held = base.entropy.eat_hold_ms > 0
        arrived = episodes.sample_arrived[sample] if len(episodes.sample_arrived) else sample
        places = np.where(has, placed if held else arrived + self._late, KEY >> 1)
        # With a gate, a probe is requested only once the rank is known, so the probe comes some tokens later.
        asked = episodes.decided_tokens - episodes.think_tokens + (self._late if held else 0)
        both = ((False, places), (True, places + asked))
        self._eat = {gated: (at, self._judged(episodes.owner, placed, at)) for gated, at in both}
        self._eat_state = lru_cache(STATES)(self._eat_state_of)
        self._subset = lru_cache(STATES)(self._subset_of)

    def _judged(
        self, owner: NDArray[np.int64], seen_at: NDArray[np.int64], stops_at: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Judge the trial answer at `seen_at` if the judge is the proxy, else the answer after a stop at `stops_at`."""
        return self.judge.right_at(owner, seen_at if self.judge.is_proxy else stops_at)

    def _window(self, wanted: int) -> int:
        """Return the policy's RPDI window if the median thinking is twice as long, else a quarter of the median."""
        natural = self.episodes.natural_tokens
        typical = int(np.median(natural)) if len(natural) else 0
        return wanted if typical >= 2 * wanted else max(4, typical // 4)

    def _boundary_table(self) -> RequestTable:
        episodes, count = self.episodes, len(self.episodes.owner)
        table = RequestTable.without_windows(self.window_tokens, max(1, count))
        table.put(slice(count), live=True, phase=THINK, boundary_now=True, think_tokens=episodes.decided_tokens)
        table.put(slice(count), boundary_ranks=episodes.ranks, boundary_count=episodes.rank_count)
        ratios = np.full((count, CONFIRM_HISTORY), np.nan)
        for age in range(CONFIRM_HISTORY - 1, 0, -1):
            earlier = episodes.earlier_counts[:, age - 1], episodes.earlier_places[:, age - 1]
            entropies = episodes.entropies(*earlier, self.window_tokens)
            table.put(slice(count), **dict(zip(ENTROPIES, entropies, strict=True)))
            ratios[:, age] = rpdi(table)[:count]
        newest = episodes.entropies(episodes.entropy_count, episodes.entropy_place, self.window_tokens)
        table.put(slice(count), **dict(zip(ENTROPIES, newest, strict=True)))
        ratios[:, 0] = rpdi(table)[:count]
        table.put(slice(count), boundary_rpdi=ratios)
        return table

    @property
    def rpdi(self) -> NDArray[np.float64]:
        return rpdi(self._table)[: len(self.episodes.owner)]

    # ---------------------------------------------------------------------------------------------------------- rules

    def policy(self, rule: StoppingRule) -> Policy:
        """Return the base policy with a rule's fields."""
        entropy = self.base.entropy.model_copy(update={**rule.entropy, "rpdi_window_tokens": self.window_tokens})
        scheduler = self.base.scheduler.model_copy(update=dict(rule.scheduler))
        return self.base.model_copy(update={"entropy": entropy, "scheduler": scheduler})

    def stops(self, rule: StoppingRule) -> Stops:
        """Return the effect that a rule would have had."""
        parts = [self._stops(part) for part in rule.parts]
        at = np.minimum.reduce([part.at_tokens for part in parts])
        right, first = parts[0].right, parts[0].first_tokens
        # In reverse order, so that of rules that stop at the same token the first one counts.
        for part in parts[:0:-1]:
            sooner = (part.at_tokens == at) & (part.at_tokens < parts[0].at_tokens)
            right, first = np.where(sooner, part.right, right), np.where(sooner, part.first_tokens, first)
        return Stops(at, right, first, self._probes(rule, at))

    def _stops(self, rule: StoppingRule) -> Stops:
        natural = self.episodes.natural_tokens
        everyone, none = np.arange(len(natural)), np.zeros(len(natural), np.int64)
        if rule.family == CAP:
            at = np.full(len(natural), rule.scheduler["max_think_tokens"])
            right, first = self.judge.right_at(everyone, at), at.astype(float)
        else:
            place, places, rights, decided = self._fires(rule)
            fired = place >= 0
            at = np.where(fired, places[place], KEY) if len(places) else np.full(len(natural), KEY)
            right = rights[place] if len(rights) else self.judge.natural
            first = np.where(fired, decided[place], KEY) if len(places) else at
        stopped = at < natural
        return Stops(
            np.where(stopped, at, np.inf),
            np.where(stopped, right, self.judge.natural),
            np.where(stopped, first, np.inf),
            none,
        )

    def _fires(self, rule: StoppingRule) -> tuple[NDArray[Any], ...]:
        """Return each request's first boundary at which a rule fires, -1 for none.

        The other arrays have, by boundary, where a stop decided there takes effect, the probability that the answer is
        right then, and the thinking tokens at the decision.
        """
        episodes, table, policy, count = self.episodes, self._table, self.policy(rule), len(self.episodes.owner)
        places, right = episodes.decided_tokens + self._late, self.right
        if "EAT" in SIGNALS[rule.family]:
            samples, means, variances = self._eat_state(policy.entropy.ema_alpha, *self._probing(rule))
            table.put(slice(count), eat_count=samples, eat_ema_nats=means[:, 0], eat_ema_variance=variances[:, 0])
            table.put(slice(count), earlier_eat_ema_nats=means[:, 1:], earlier_eat_ema_variance=variances[:, 1:])
            ends = entropy_rule.given_up if rule.family == GIVE_UP else entropy_rule.eat_converged
            fires, (places, right) = ends(policy.entropy, table), self._eat[effects.is_gated(policy.entropy)]
            if effects.extends_empty_answers(policy) and len(episodes.empty_answer):
                # Rules on EAT fire only at boundaries that have a sample.
                fires[:count] &= ~episodes.empty_answer[episodes.sample]
        elif rule.family == RANK:
            fires = entropy_rule.rank_reached(policy.entropy, table)
        elif rule.family == RPDI:
            fires = entropy_rule.rpdi_exceeded(policy.entropy, table)
        else:
            fires = entropy_rule.soft_closed(policy.scheduler, table)
        return self._first(episodes.owner, np.flatnonzero(fires[:count])), places, right, episodes.decided_tokens

    def _first(self, owner: NDArray[np.int64], places: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the first place of each request, -1 for none. places: ascending indices into `owner`."""
        first = np.full(len(self.episodes.ids), -1)
        # In reverse order, so that each request's earliest place is written last and overwrites later ones.
        first[owner[places[::-1]]] = places[::-1]
        return first

    # ------------------------------------------------------------------------------------------------------------ EAT

    def _probing(self, rule: StoppingRule) -> tuple[bool, int, int]:
        """Return whether a rule's probes are placed at paragraphs only, the highest rank that their gate allows, and
        the thinking tokens from which on the rule needs probes."""
        e, own, since = rule.entropy, self.policy(rule).entropy, 0
        if effects.only_gives_up(own):
            since = max(0, own.give_up_tokens - effects.probe_lead_tokens(own))
        return e["eat_probe_placement"] == "paragraph", e["eat_probe_max_rank"], since

    def _subset_of(self, paragraph: bool, max_rank: int, since: int) -> NDArray[np.intp]:
        """Return the boundaries at which EAT probes are requested."""
        episodes = self.episodes
        wanted = (episodes.paragraph | (not paragraph)) & (episodes.think_tokens >= since)
        if max_rank:
            wanted &= episodes.ranks[:, 0] <= max_rank
        return np.flatnonzero(wanted)

    def first_samples(self, rule: StoppingRule, from_tokens: int) -> NDArray[np.float64]:
        """Return the first EAT sample at or after `from_tokens` thinking tokens that the rule's probes measure of each
        request, in nats, [requests]; NaN for none."""
        episodes = self.episodes
        first = np.full(len(episodes.ids), np.nan)
        asked = self._subset(*self._probing(rule))
        asked = asked[np.isfinite(self.eat_nats[asked])]
        # The boundaries are in reverse order, so each request's earliest boundary is written last.
        asked = asked[episodes.sample_tokens[episodes.sample[asked]] >= from_tokens][::-1]
        first[episodes.owner[asked]] = self.eat_nats[asked]
        return first

    def _probes(self, rule: StoppingRule, at_tokens: NDArray[np.float64]) -> NDArray[np.int64]:
        # Rules of which one policy consists read the same probes.
        probed = {self._probing(part) for part in rule.parts if part.family in PROBED}
        count = np.zeros(len(self.episodes.ids), np.int64)
        for probing in probed:
            asked = self._subset(*probing)
            keys = self.episodes.owner[asked] * KEY + self.episodes.think_tokens[asked]
            begins = np.arange(len(count)) * KEY
            until = np.minimum(at_tokens, self.episodes.natural_tokens).astype(np.int64)
            count += np.searchsorted(keys, begins + until, side="right") - np.searchsorted(keys, begins)
        return count

    def _eat_state_of(self, alpha: float, *probing: Any) -> tuple[NDArray[Any], ...]:
        """Return the number of EAT samples, and their moving means and variances after this and earlier samples, newest
        first, at each boundary that has a sample. `probing` is as `_probing` returns it.

        The values are those of `signals.add_eat_samples`. Other boundaries get 0 samples, because the EAT rule can fire
        only on a new sample.
        """
        owner, eat = self.episodes.owner, self.eat_nats
        count, mean, variance = np.zeros(len(owner), np.int64), np.zeros(len(owner)), np.zeros(len(owner))
        sampled = self._subset(*probing)
        sampled = sampled[np.isfinite(eat[sampled])]
        position = np.arange(len(sampled)) - np.searchsorted(owner[sampled], owner[sampled])
        count[sampled] = position + 1
        now = sampled[position == 0]
        mean[now] = eat[now]
        for number in range(1, int(position.max(initial=0)) + 1):
            later = np.flatnonzero(position == number)
            now, before = sampled[later], sampled[later - 1]
            mean[now] = alpha * eat[now] + (1 - alpha) * mean[before]
            variance[now] = alpha * (eat[now] - mean[now]) ** 2 + (1 - alpha) * variance[before]
        means, variances = np.full((2, len(owner), CONFIRM_HISTORY), np.nan)
        means[sampled] = newest_values(owner[sampled], mean[sampled], CONFIRM_HISTORY)
        variances[sampled] = newest_values(owner[sampled], variance[sampled], CONFIRM_HISTORY)
        return count, means, variances
