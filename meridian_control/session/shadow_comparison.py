"""Rules in shadow against what really happened: one engine's running comparison.

Counts a request once its thinking has really ended: only then is it known what a rule would have saved. Knows neither
messages nor time. Used by one session at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from meridian_control.policy.model import Policy

# The section to which the rule of each reason belongs.
SECTIONS = {"soft_close": "scheduler", "hard_cap": "scheduler", "eat": "entropy", "rank": "entropy", "rpdi": "entropy"}


@dataclass
class Tally:
    requests: int = 0
    think_tokens: int = 0


@dataclass
class Saved:
    """Requests that would have been ended, their thinking tokens there, and those that came after."""

    would_end: int = 0
    would_end_think_tokens: int = 0
    saved_tokens: int = 0

    def add(self, there: int, really: int) -> None:
        self.would_end += 1
        self.would_end_think_tokens += there
        self.saved_tokens += really - there


class Comparison:
    """Begins anew with every policy whose rules differ. Slots are those of the session's table."""

    def __init__(self) -> None:
        self._rules: object = None
        self.new_stream()
        self._begin(0)

    def _begin(self, revision: int) -> None:
        self.since_revision = revision
        self._ended: dict[str, Tally] = defaultdict(Tally)
        # By section and reason, of which an empty one is the section as a whole.
        self._saved: dict[tuple[str, str], Saved] = defaultdict(Saved)
        self._fired.clear()

    def new_stream(self) -> None:
        """Slots mean other requests from here on."""
        # By slot: thinking tokens by the reason of a shadowed decision.
        self._fired: dict[int, dict[str, int]] = {}
        self._over: set[int] = set()

    def applied(self, revision: int, policy: Policy) -> None:
        """A policy came into force."""
        rules = (policy.scheduler, policy.entropy, policy.override)
        if rules != self._rules:
            self._rules = rules
            self._begin(revision)

    def opened(self, slot: int) -> None:
        self._fired.pop(slot, None)
        self._over.discard(slot)

    def fired(self, slot: int, reason: str, think_tokens: int) -> None:
        """A shadowed rule would have ended the thinking in a slot here."""
        self._fired.setdefault(slot, {}).setdefault(reason, think_tokens)

    def ended(self, slot: int, think_tokens: int, policy: Policy, cap: int) -> dict[tuple[str, str], int]:
        """Thinking really ended, for the first time. policy: what held for the request; cap: its own or shadowed hard
        cap, negative for none.

        Returns the tokens saved for each section in shadow, under the reason "", and for each of its rules that fired.
        """
        saved: dict[tuple[str, str], int] = {}
        if slot in self._over:
            return saved
        self._over.add(slot)
        fired = self._fired.pop(slot, {})
        if cap >= 0:
            fired["hard_cap"] = cap
        for section in ("scheduler", "entropy"):
            settings = getattr(policy, section)
            if not (settings.enabled and settings.shadow):
                continue
            self._ended[section].requests += 1
            self._ended[section].think_tokens += think_tokens
            earlier = {r: t for r, t in fired.items() if SECTIONS[r] == section and t < think_tokens}
            for reason, there in earlier.items():
                self._saved[section, reason].add(there, think_tokens)
                saved[section, reason] = think_tokens - there
            first = min(earlier.values(), default=think_tokens)
            saved[section, ""] = think_tokens - first
            if earlier:
                self._saved[section, ""].add(first, think_tokens)
        return saved

    def messages(self) -> list[fleet_pb2.ShadowComparison]:
        """Sections that were in shadow when thinking ended, each with the rules that fired."""
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
