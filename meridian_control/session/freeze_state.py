"""A freeze, the engines that it matches, and one engine's state: what it was told, and what it says.

Pure: time is passed in; one session at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass(frozen=True)
class Match:
    """The engines that every part matches; an empty part matches all. `engine_ids` and `model` are globs."""

    engine_ids: tuple[str, ...] = ()
    model: str = ""
    engine_labels: tuple[tuple[str, str], ...] = ()

    def matches(self, engine_id: str, model: str, labels: Mapping[str, str]) -> bool:
        if self.engine_ids and not any(fnmatchcase(engine_id, glob) for glob in self.engine_ids):
            return False
        if self.model and not fnmatchcase(model, self.model):
            return False
        return all(labels.get(name) == value for name, value in self.engine_labels)


@dataclass(frozen=True)
class Freeze:
    """Matching engines are frozen from `create_time` until before `end_time`, both UTC."""

    freeze_id: int
    match: Match
    author: str
    reason: str
    create_time: datetime
    end_time: datetime


class FreezeState:
    """`freezes` are to hold; `frozen` is the engine before it has confirmed them, too, and until it has confirmed that
    none is left. `void`: the agent has dropped what it was told, and sends a snapshot once it has thawed."""

    def __init__(self, said: agent_pb2.FreezeStatus) -> None:
        self.freezes: tuple[Freeze, ...] = ()
        self.frozen, self.locally, self.confirmed = said.frozen, said.locally, said.locally
        self.void = False
        self._nonce = 0

    def give(self, freezes: tuple[Freeze, ...], now: datetime) -> agent_pb2.Freeze:
        """The freezes that match the engine from now on; what it is to be told."""
        self.freezes, self.confirmed = freezes, False
        if freezes and not self.frozen:
            self.frozen = self.void = True
        self._nonce += 1
        return self.told(now)

    def told(self, now: datetime) -> agent_pb2.Freeze:
        """The message that the agent was sent last, as of now; nonce 0 where it was sent none."""
        last = max(self.freezes, key=lambda freeze: freeze.end_time, default=None)
        remaining_ms = 0 if last is None else max(0, math.ceil((last.end_time - now).total_seconds() * 1e3))
        return agent_pb2.Freeze(nonce=self._nonce, remaining_ms=remaining_ms, reason=last.reason if last else "")

    def answered(self, status: agent_pb2.FreezeStatus) -> bool:
        """Take in what the agent says; whether it has thawed."""
        if status.nonce != self._nonce:
            return False
        self.confirmed, self.frozen, self.locally = True, status.frozen, status.locally
        return not self.frozen

    def status(self) -> agent_pb2.FreezeStatus:
        """The agent's last answer."""
        return agent_pb2.FreezeStatus(nonce=self._nonce, frozen=self.frozen, locally=self.locally)
