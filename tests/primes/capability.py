"""The capability: its section of the policy, its rule, its metric and its row on the status page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meridian.v1 import agent_pb2
from pydantic import Field

from meridian_control.common.metric_entry import counter
from meridian_control.engine.part import Capability, Part, Stream, Turn
from meridian_control.engine.totals import Totals
from meridian_control.journal.records import Compared, Detail
from meridian_control.policy.formats import extension
from meridian_control.policy.model import Policy
from meridian_control.policy.section import Section

NAME, ENDS = "primes", "meridian_prime_ends_total"


class PrimesPolicy(Section):
    shadow: bool = Field(description="Count the ends, but make none.")
    at_least: int = Field(2, ge=2, description="Smallest prime at which thinking ends.")
    most_nats: float = Field(0.0, ge=0, description="Largest entropy of the newest token; 0 asks for none.")


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@dataclass(frozen=True, slots=True)
class Prime(Detail):
    number: int

    def compared(self, policy: Policy) -> Iterator[Compared]:
        section = extension(policy, NAME, PrimesPolicy)
        yield "think_tokens", self.number, ">=", "extension.primes.at_least", section.at_least


class Primes(Part):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @classmethod
    def of(cls, stream: Stream) -> Primes | None:
        return cls(stream) if stream.ends_thinking else None

    def reads_signals(self, policy: Policy) -> bool:
        return NAME in policy.extension and extension(policy, NAME, PrimesPolicy).most_nats > 0

    def ends(self, turn: Turn) -> None:
        if NAME not in turn.policy.extension:
            return
        section, table = extension(turn.policy, NAME, PrimesPolicy), self._stream.table
        meant = table.thinking & (table.think_tokens >= section.at_least)
        if section.most_nats:
            meant &= table.entropy_nats <= section.most_nats
        for slot in meant.nonzero()[0].tolist():
            if is_prime(number := int(table.think_tokens[slot])):
                reason, detail = agent_pb2.FORCE_REASON_EXTENSION, Prime(number)
                if self._stream.end_thinking(turn, reason, slot, shadow=section.shadow, name=NAME, detail=detail):
                    self._stream.count(ENDS)


def shown(totals: Totals) -> list[tuple[str, str]]:
    return [("ends at a prime", f"{totals.counted[ENDS, ()]}")]


PRIMES = Capability(
    NAME,
    stream=Primes.of,
    section=PrimesPolicy,
    metrics=[counter(ENDS, (), "Ends of thinking at a prime number of tokens.", "None.")],
    shown=shown,
)
