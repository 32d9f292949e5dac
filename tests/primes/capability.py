"""The capability: its section of the policy, its rule, its metric and its row on the status page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2
from pydantic import Field

from meridian_control.common.metric_entry import counter
from meridian_control.engine.part import Capability, Part
from meridian_control.policy.formats import extension
from meridian_control.policy.section import Section

if TYPE_CHECKING:
    from meridian_control.engine.part import Stream, Turn
    from meridian_control.engine.totals import Totals

ENDS = "meridian_prime_ends_total"


class PrimesPolicy(Section):
    enabled: bool = Field(False, description="End thinking at a prime number of tokens.")
    at_least: int = Field(2, ge=2, description="Smallest prime at which thinking ends.")


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


class Primes(Part):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def ends(self, turn: Turn) -> None:
        section, table = extension(turn.policy, "primes", PrimesPolicy), self._stream.table
        for slot in (table.thinking & (table.end_decided == 0)).nonzero()[0].tolist() if section.enabled else ():
            if table.think_tokens[slot] >= section.at_least and is_prime(int(table.think_tokens[slot])):
                reason = agent_pb2.FORCE_REASON_EXTENSION
                self._stream.end_thinking(turn, reason, slot, shadow=False, name="prime")
                self._stream.count(ENDS)


def shown(totals: Totals) -> list[tuple[str, str]]:
    return [("ends at a prime", f"{totals.counted[ENDS, ()]}")]


PRIMES = Capability(
    "primes",
    stream=Primes,
    section=PrimesPolicy,
    metrics=[counter(ENDS, (), "Ends of thinking at a prime number of tokens.", "None.")],
    shown=shown,
)
