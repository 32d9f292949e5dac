"""The record of one engine step. The engine-core thread fills it; the link's thread reads it once it is handed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.core.step_signals import SignalBytes


@dataclass(slots=True)
class StepRecord:
    """Everything that one engine step did: plain lists, turned into a StepReport on the link's thread."""

    step: int = 0
    # On the link's clock.
    ended_s: float = 0.0
    step_time_ms: float = 0.0
    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    # meridian.v1.AgentState
    state: int = 0
    opened: list[tuple[Any, ...]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    # In a step of a run: the tokens, instead of flags, and the sentence and paragraph flags by token id.
    text: Sequence[int] = ()
    boundaries: bytes = b""
    # Signals of the step's rows, as the worker told them, and the row each token was drawn from.
    told: SignalBytes | None = None
    rows: list[int] = field(default_factory=list)
    # (decision id, slot, thinking tokens, EAT in nats, cost in tokens, same answers in a row, answer would be empty)
    probes: list[tuple[int, int, int, float, int, int, bool]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    closed: list[tuple[int, int]] = field(default_factory=list)
    # (decision id, outcome, thinking tokens, detail)
    outcomes: list[tuple[int, int, int, str]] = field(default_factory=list)
    counters: tuple[Any, ...] = ()
    # A request has begun or ended to think in it or is held for what is decided from it, or no other step follows.
    urgent: bool = False

    @property
    def presses(self) -> bool:
        """Whether it does not wait for others of its interval: who joins the next steps may follow from it."""
        return self.urgent or bool(self.opened or self.preempted or self.resumed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened in the step to any request or decision."""
        lists = (self.opened, self.slots, self.probes, self.preempted, self.resumed, self.closed, self.outcomes)
        return not any(lists)

    def add_row(self, slot: int, phase: int, flags: int, row: int) -> None:
        """One generated token."""
        self.slots.append(slot)
        self.phases.append(phase)
        self.flags.append(flags)
        self.rows.append(row)

    def row_flags(self) -> list[int]:
        """Flags of each row; in a step of a run, where sentences and paragraphs of thinking end."""
        if not self.text:
            return self.flags
        known, flags = len(self.boundaries), self.boundaries
        rows = zip(self.text, self.phases, strict=True)
        return [flags[token] if phase == Phase.THINK and token < known else 0 for token, phase in rows]
