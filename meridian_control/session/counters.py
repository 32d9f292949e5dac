"""Holds a session's counters. Knows nothing of what is counted or why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from meridian_control.common.histogram import Histogram, step_histogram, time_histogram, token_histogram


@dataclass(slots=True)
class Totals:
    """Sums over sessions are the fleet's counters."""

    decisions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    # Seconds, seconds, tokens; what they measure is said in fleet.proto.
    output_itl: Histogram = field(default_factory=time_histogram)
    ttot: Histogram = field(default_factory=time_histogram)
    think_tokens: Histogram = field(default_factory=token_histogram)
    # Outcomes by what was decided, preemptions by phase, thinking tokens left to the cap at a rule's end by reason.
    settled: Counter[tuple[str, str]] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    below_cap: Counter[str] = field(default_factory=Counter)
    # Thinking tokens of requests that a section was in shadow for; those rules would have saved, by section and reason.
    shadow_think_tokens: Counter[str] = field(default_factory=Counter)
    shadow_saved: Counter[tuple[str, str]] = field(default_factory=Counter)
    staleness_steps: Histogram = field(default_factory=step_histogram)
    token_events: int = 0
    reports: int = 0
    requests: int = 0
    unknown_outcomes: int = 0
    nacks: int = 0

    def add(self, other: Totals) -> None:
        for counter in fields(self):
            total = getattr(self, counter.name)
            total += getattr(other, counter.name)
            setattr(self, counter.name, total)
