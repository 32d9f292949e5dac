"""Holds the counters of a session, which other modules of the package increment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from meridian_control.common.histogram import (
    Histogram,
    queueing_histogram,
    step_histogram,
    time_histogram,
    token_histogram,
)


@dataclass(slots=True)
class Totals:
    """The counters of a session. Their sums over all sessions are the fleet's counters."""

    decisions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    # Latencies in seconds (output_itl, ttot) and lengths in tokens (think_tokens); fleet.proto defines all three.
    output_itl: Histogram = field(default_factory=time_histogram)
    ttot: Histogram = field(default_factory=time_histogram)
    # Queueing times in seconds.
    queueing: Histogram = field(default_factory=queueing_histogram)
    think_tokens: Histogram = field(default_factory=token_histogram)
    # Outcomes by kind of decision; preemptions by phase; thinking tokens that were left before the cap when a rule
    # ended the thinking, by reason.
    settled: Counter[tuple[str, str]] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    below_cap: Counter[str] = field(default_factory=Counter)
    # Thinking tokens of requests while a section was in shadow, by section; thinking tokens that rules in shadow would
    # have saved, by section and reason.
    shadow_think_tokens: Counter[str] = field(default_factory=Counter)
    shadow_saved: Counter[tuple[str, str]] = field(default_factory=Counter)
    staleness_steps: Histogram = field(default_factory=step_histogram)
    # Token rows, and those that are text of the thinking and of answers.
    token_events: int = 0
    thinking_tokens: int = 0
    answer_tokens: int = 0
    reports: int = 0
    requests: int = 0
    unknown_efforts: int = 0
    # Requests whose prompts came as embeddings.
    unread_prompts: int = 0
    unknown_outcomes: int = 0
    nacks: int = 0
    # Values of the counters of capabilities, by the metric's name and its labels.
    counted: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)

    def add(self, other: Totals) -> None:
        for counter in fields(self):
            total = getattr(self, counter.name)
            total += getattr(other, counter.name)
            setattr(self, counter.name, total)
