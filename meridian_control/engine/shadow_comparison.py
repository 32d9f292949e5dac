"""Compares the rules in shadow on one engine with the real ends of thinking.

A request is counted when its thinking really ends, because only then the tokens are known that a rule would have saved.
The module knows neither messages nor time. Each object serves one session at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common.enum_names import ENTROPY_REASONS

if TYPE_CHECKING:
    from meridian_control.policy.model import Policy

# Policy section of each rule, by the rule's reason. The give-up rule has a shadow of its own, so it counts as a
# section. All entries of a section that shortens in stages count as one rule, whose reason is the section's name, with
# the caps that they would set. The section and the reason of a capability of one's own have its name.
SECTIONS = {
    **dict.fromkeys(("soft_close", "hard_cap", "answer_reserve", "premature_stop"), "scheduler"),
    **dict.fromkeys(ENTROPY_REASONS, "entropy"),
    "give_up": "give_up",
    "loop": "loop",
}
# Sections whose rules do not see requests that are not measured.
READ_SIGNALS = frozenset(("entropy", "give_up"))


@dataclass
class Tally:
    requests: int = 0
    think_tokens: int = 0


@dataclass
class Saved:
    """Counts for one rule in shadow.

    would_end: requests whose thinking the rule would have ended. would_end_think_tokens: their thinking tokens when the
    rule fired. saved_tokens: thinking tokens that they generated after that.
    """

    would_end: int = 0
    would_end_think_tokens: int = 0
    saved_tokens: int = 0

    def add(self, there: int, really: int) -> None:
        self.would_end += 1
        self.would_end_think_tokens += there
        self.saved_tokens += really - there


class Comparison:
    """The comparison for one engine, which starts again with every policy whose rules differ.

    Slots are those of the session's table.
    """

    def __init__(self) -> None:
        self._rules: object = None
        self.new_stream()
        self._begin(0)

    def _begin(self, revision: int) -> None:
        self.since_revision = revision
        self._ended: dict[str, Tally] = defaultdict(Tally)
        # By section and reason; the empty reason stands for all rules of the section together.
        self._saved: dict[tuple[str, str], Saved] = defaultdict(Saved)
        self._fired.clear()
        self._caps.clear()

    def new_stream(self) -> None:
        """Forget the requests of the previous stream, because a new stream assigns the slots again."""
        # For each slot, the thinking tokens at which each rule in shadow fired, by the rule's reason.
        self._fired: dict[int, dict[str, int]] = {}
        self._over: set[int] = set()
        # For each slot and section, the cap that the section's entries in shadow would set.
        self._caps: dict[int, dict[str, int]] = {}

    def applied(self, revision: int, rules: object) -> None:
        """Note the rules of the policy that comes into force, before it changes what holds for the requests, and start
        again if they differ from the previous ones."""
        if rules != self._rules:
            self._rules = rules
            self._begin(revision)

    def opened(self, slot: int) -> None:
        self._fired.pop(slot, None)
        self._caps.pop(slot, None)
        self._over.discard(slot)

    def shortened(self, section: str, slot: int, think_tokens: int, cap: int | None) -> None:
        """Note the cap that a section's entries in shadow would set for a request from now on; None if none is in
        shadow for it."""
        before = self._caps[slot].pop(section, None) if slot in self._caps else None
        if before is not None and think_tokens >= before:
            self.fired(slot, section, before)
        if cap is not None:
            self._caps.setdefault(slot, {})[section] = cap
            if think_tokens >= cap:
                self.fired(slot, section, think_tokens)

    def fired(self, slot: int, reason: str, think_tokens: int) -> None:
        """Note the number of thinking tokens at which a rule in shadow would have ended a request's thinking."""
        self._fired.setdefault(slot, {}).setdefault(reason, think_tokens)

    def ended(
        self, slot: int, think_tokens: int, policy: Policy, cap: int, *, measured: bool = True
    ) -> dict[tuple[str, str], int]:
        """Count the first real end of a request's thinking.

        policy: policy that held for the request. measured: whether rules could read its signals. cap: newest hard cap
        in shadow, negative for none, which counts unless the agent has reported that a cap would have ended the
        thinking. Return the tokens that each section in shadow would have saved, under the reason "", and each of its
        rules that fired, under its reason.
        """
        saved: dict[tuple[str, str], int] = {}
        if slot in self._over:
            return saved
        self._over.add(slot)
        fired = self._fired.pop(slot, {})
        if cap >= 0:
            fired.setdefault("hard_cap", cap)
        sections = [s for s in _in_shadow(policy) if measured or s not in READ_SIGNALS]
        for section, shadow_cap in self._caps.pop(slot, {}).items():
            fired.setdefault(section, shadow_cap)
            sections.append(section)
        for section in sections:
            self._ended[section].requests += 1
            self._ended[section].think_tokens += think_tokens
            earlier = {r: t for r, t in fired.items() if SECTIONS.get(r, r) == section and t < think_tokens}
            for reason, there in earlier.items():
                self._saved[section, reason].add(there, think_tokens)
                saved[section, reason] = think_tokens - there
            first = min(earlier.values(), default=think_tokens)
            saved[section, ""] = think_tokens - first
            if earlier:
                self._saved[section, ""].add(first, think_tokens)
        return saved

    def messages(self) -> list[fleet_pb2.ShadowComparison]:
        """Return the counts of each section that was in shadow when thinking ended, and of its rules that fired."""
        rows = []
        for section, ended in sorted(self._ended.items()):
            reasons = sorted({"", *(reason for of, reason in self._saved if of == section)})
            for reason in reasons:
                saved = self._saved.get((section, reason), Saved())
                rows.append(
                    fleet_pb2.ShadowComparison(
                        section=section,
                        reason=reason,
                        since_revision=self.since_revision,
                        **vars(ended),
                        **vars(saved),
                    )
                )
        return rows


def _in_shadow(policy: Policy) -> list[str]:
    """Return the sections that are on and in shadow."""
    shadowed = {name: getattr(policy, name).shadow for name in ("scheduler", "entropy", "loop")}
    sections = [name for name, shadow in shadowed.items() if shadow and getattr(policy, name).enabled]
    entropy = policy.entropy
    gives_up = entropy.enabled and entropy.give_up_tokens > 0 and (entropy.shadow or entropy.give_up_shadow)
    return [*sections, *(["give_up"] if gives_up else []), *policy.extensions_on(shadow=True)]
