"""Describes one request that nothing shortened as calibration reads it: its probes, without text and without its id.

The values are immutable, and the functions are pure.
"""

from __future__ import annotations

import enum
import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime


# Most bytes of a traffic's name, for which an override, a column and an index have room.
MAX_NAME_BYTES = 1024


class Sample(NamedTuple):
    """A measured probe. think_tokens: at its place. arrived_tokens: thinking tokens when the result came. same_answer:
    number of newest probes in a row with the same trial answer. is_read: whether a rule reads probes like this one.
    is_other: whether the request that was probed before has another trial answer."""

    think_tokens: int
    arrived_tokens: int
    eat_nats: float
    cost_tokens: int
    same_answer: int
    is_empty: bool
    is_read: bool
    is_other: bool


class Episode(NamedTuple):
    """A request whose thinking the model itself ended. name: digest of the request's id."""

    name: str
    natural_tokens: int
    samples: tuple[Sample, ...]

    def to_json(self) -> str:
        return json.dumps([self.name, self.natural_tokens, self.samples], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Episode:
        name, natural_tokens, samples = json.loads(text)
        return cls(name, natural_tokens, tuple(Sample(*sample) for sample in samples))


class LeftOut(enum.StrEnum):
    """Why a request that nothing shortened makes no episode, and what helps."""

    UNPROBED = (
        "no probe came before the thinking ended; lower scheduler.min_think_tokens or entropy.eat_probe_interval_tokens"
    )
    FAR = "no probe came near the end of the thinking; lower entropy.eat_probe_interval_tokens, or leave room"
    MANY = "there were too many probes; raise entropy.eat_probe_interval_tokens"
    UNNAMED = "the names of its model and SLO class are too long together, or have a character that no database keeps"
    LOST = "the results of probes were lost with a broken stream"
    NOT_NATURAL = "the model did not end the thinking by itself, or thought again"


class Newest(NamedTuple):
    """The newest episode of a traffic: its number, and when it was stored. Numbers follow the order of storing."""

    number: int = 0
    time: datetime | None = None


def can_be_kept(traffic: str) -> bool:
    """Whether overrides and databases can keep the name of a traffic."""
    return "\0" not in traffic and len(traffic.encode(errors="replace")) <= MAX_NAME_BYTES


def name_of(request_id: str) -> str:
    """Return a name for a request that does not tell its id."""
    return hashlib.blake2b(request_id.encode(errors="replace"), digest_size=8).hexdigest()
