"""Defines freezes and which engines they match, and keeps one engine's freeze state.

The code does no I/O and reads no clock; each `FreezeState` belongs to one session.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass(frozen=True)
class Match:
    """Matches an engine if every field matches; an empty field matches all. `engine_ids` and `model` are globs."""

    engine_ids: tuple[str, ...] = ()
    model: str = ""
    engine_labels: tuple[tuple[str, str], ...] = ()

    def matches(self, engine_id: str, model: str, labels: Mapping[str, str]) -> bool:
        if self.engine_ids and not any(fnmatchcase(engine_id, glob) for glob in self.engine_ids):
            return False
        if self.model and not fnmatchcase(model, self.model):
            return False
        return all(labels.get(name) == value for name, value in self.engine_labels)

    def __str__(self) -> str:
        """Return whom the freeze concerns, in words."""
        parts = (*self.engine_ids, *([f"model {self.model}"] if self.model else []))
        return ", ".join((*parts, *(f"{name}={value}" for name, value in self.engine_labels))) or "every engine"


@dataclass(frozen=True)
class Freeze:
    """A freeze of the matching engines from `create_time` (inclusive) to `end_time` (exclusive), both UTC."""

    freeze_id: int
    match: Match
    author: str
    reason: str
    create_time: datetime
    end_time: datetime

    def remaining(self, now: datetime) -> timedelta:
        """Return the time that is left of the freeze, never more than its whole duration, whatever `now` is."""
        return max(timedelta(), min(self.end_time - now, self.end_time - self.create_time))


def _spelled(freeze: Freeze) -> str:
    by = f" by {freeze.author}" * bool(freeze.author)
    return f"freeze {freeze.freeze_id}{by}" + f": {freeze.reason}" * bool(freeze.reason)


class FreezeState:
    """The freeze state of one engine, as the control plane sees it.

    `freezes` are the freezes that match the engine. `frozen` holds from the first freeze that was sent until the agent
    confirms the thaw. `paused`: vLLM was paused when the agent confirmed. `void`: the agent has dropped all decisions
    and sends a snapshot after the thaw.
    """

    def __init__(self, status: agent_pb2.FreezeStatus) -> None:
        self.freezes: tuple[Freeze, ...] = ()
        self.frozen, self.locally, self.confirmed = status.frozen, status.locally, status.locally
        self.void = self.paused = False
        self._nonce = 0

    def set_freezes(self, freezes: tuple[Freeze, ...], now: datetime) -> agent_pb2.Freeze:
        """Set the freezes that match the engine and return the message for the agent."""
        self.freezes, self.confirmed = freezes, False
        if freezes and not self.frozen:
            self.frozen = self.void = True
        self._nonce += 1
        return self.message(now)

    def message(self, now: datetime) -> agent_pb2.Freeze:
        """Return the message that was sent last, with the time that remains now; its nonce is 0 if none was sent."""
        last = max(self.freezes, key=lambda freeze: freeze.end_time, default=None)
        remaining_ms = 0 if last is None else math.ceil(last.remaining(now).total_seconds() * 1e3)
        return agent_pb2.Freeze(nonce=self._nonce, remaining_ms=remaining_ms, reason=last.reason if last else "")

    def take_confirmation(self, status: agent_pb2.FreezeStatus) -> bool:
        """Take in the agent's confirmation and return whether the engine has thawed."""
        if status.nonce != self._nonce:
            return False
        self.confirmed, self.frozen, self.locally, self.paused = True, status.frozen, status.locally, status.paused
        return not self.frozen

    @property
    def why(self) -> str:
        """The freezes that match the engine, in words; empty for none."""
        return "; ".join(map(_spelled, self.freezes))

    def status(self) -> agent_pb2.FreezeStatus:
        """Return the agent's last confirmation."""
        return agent_pb2.FreezeStatus(nonce=self._nonce, frozen=self.frozen, locally=self.locally)
