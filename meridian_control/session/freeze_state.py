"""One engine's freeze, as its session knows it: what it was told, and what it says.

Knows nothing of which engines a freeze is for. Pure: time is passed in; one session at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.fleet.freeze_store import Freeze


class Freezing:
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
        """What the agent was told last, as of now; nonce 0 where that was nothing."""
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
        """What the agent has said last."""
        return agent_pb2.FreezeStatus(nonce=self._nonce, frozen=self.frozen, locally=self.locally)
