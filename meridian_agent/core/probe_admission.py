"""Holds the EAT probes that the control plane has asked for, decides which of them may be placed now, and keeps what
each placed probe has cost. Runs on the engine-core thread.

A probe is an internal request over a thinking request's tokens plus the end marker. A probe shares the request's KV
blocks, the last one by copy-on-write. So a probe computes only the request's newest token, which has no KV yet, and the
tokens after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_PARAGRAPH, FLAG_SENTENCE, Phase
from meridian_agent.core.step_record import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_record import Report

# Reasons for refusing a probe of a request that does not think any more, or whose text nearly fills the context.
NOT_THINKING, NO_CONTEXT = "not thinking", "no room in the context"
# Probes of one step take at most 1 / STEP_SHARE of the step's token budget.
STEP_SHARE = 8
# While probes are asked for, admission leaves 1 / PLACE_SHARE of the running places to them, or none if that is fewer
# than 2.
PLACE_SHARE = 32
# Largest number of tokens of a probed request, because vLLM copies and looks up all of them in the step that places the
# probe.
LONGEST_TOKENS = 65_536
# Number of steps for which running places stay reserved after a probe was asked for.
PLACE_STEPS = 256
# Whatever the control plane decides, no probed request waits longer than this many milliseconds, or HOLD_STEPS steps if
# they last longer.
MAX_HOLD_MS = 10_000
# Number of steps that a probed request sits out for its decision even if they last longer than its hold: under
# asynchronous scheduling the probe's own step, the step begun before its result is known, and the step during which
# the control plane decides; one more for a decision that takes longer than that step.
HOLD_STEPS = 4
# Number of steps after which probes that are requests of their own are placed together, counted from the first sentence
# end. Steps with such a probe cost the agent more, and on a GPU they leave vLLM's graphs for steps of one token each.
COLLECT_STEPS = 8
# Reasons for which a probe may wait for the next step if others of its step took the room.
CROWDED = NO_PLACE, NO_BLOCKS, NO_TOKENS = (
    "no running place to spare",
    "no KV blocks to spare",
    "over the step's probe budget",
)
# Flags of the token behind which a request's probe is placed.
PLACEMENT_FLAGS = {agent_pb2.PLACEMENT_SENTENCE: FLAG_SENTENCE, agent_pb2.PLACEMENT_PARAGRAPH: FLAG_PARAGRAPH}

# A probe to place: decision id, request, flags of the token behind which it is placed, milliseconds for which the
# request is then held.
Asked = tuple[int, "LiveRequest", int, int]


class PendingProbes:
    """The probes to place, at most one of each request, oldest first. report: records the outcome of a decision.

    reached: all tokens and thinking tokens that a request had where its probe belongs, while the probe waits for
    others.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._asked: dict[LiveRequest, Asked] = {}
        self.reached: dict[LiveRequest, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._asked.values())

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._asked

    def add(self, probe: agent_pb2.EatProbe, live: LiveRequest) -> None:
        """Note a probe; a probe of the same request that still waits is superseded."""
        if live in self._asked:
            self.drop(Outcome.SUPERSEDED, live)
        flags, hold_ms = PLACEMENT_FLAGS.get(probe.placement, 0), min(probe.hold_ms, MAX_HOLD_MS)
        self._asked[live] = (probe.decision_id, live, flags, hold_ms)

    def take(self, live: LiveRequest) -> Asked:
        """Take out and return the probe of a request, which the caller places, refuses, or puts back."""
        self.reached.pop(live, None)
        return self._asked.pop(live)

    def put_back(self, asked: Asked, past: int | None = None) -> None:
        """Keep a probe that could not be placed yet, as the newest one. past: number of tokens after its place, if the
        request has reached that place."""
        live = asked[1]
        self._asked[live] = asked
        if past is not None:
            self.reached[live] = live.ref.num_tokens - past, live.think_tokens - past

    def reach(self, past: Mapping[LiveRequest, int]) -> bool:
        """Note that these requests have reached the places of their probes, which wait from now on for others. past:
        number of tokens after each place. Return False, and nothing has happened, if one of the probes may not wait."""
        asked = [self._asked[live] for live in past]
        if not all(map(may_wait, asked)):
            return False
        for each in asked:
            self.put_back(each, past[each[1]])
        return True

    def past(self, live: LiveRequest) -> int | None:
        """Return the number of tokens after the place that a request has reached; None, and the probe waits for another
        place, if not all of them are thinking."""
        tokens, think_tokens = self.reached[live]
        past: int = live.ref.num_tokens - tokens
        if past == live.think_tokens - think_tokens:
            return past
        del self.reached[live]
        return None

    def drop(self, outcome: Outcome | None, live: LiveRequest | None = None, detail: str = "") -> None:
        """Drop the probes of one request, or of all requests if `live` is None, with this outcome; None reports no
        outcome."""
        for target in list(self._asked) if live is None else [live] if live in self._asked else ():
            decision_id, *_ = self.take(target)
            if outcome is not None:
                self._report(decision_id, outcome, target, detail)


def may_wait(asked: Asked) -> bool:
    """Return whether a probe may be computed some steps after its request has reached the probe's place."""
    _, _, flags, hold_ms = asked
    # Probes without a place in the text arrive together, and a held request waits for its decision.
    return bool(flags) and not hold_ms


@dataclass(slots=True)
class Placed:
    """A probe in the engine, and the tokens that it has cost so far."""

    decision_id: int
    parent: LiveRequest
    think_tokens: int
    # Number of tokens whose KV the parent request has computed; 0 for a row of its request's own step.
    shared_tokens: int
    cost_tokens: int = 0
    # Flags of the token that the probe was placed behind; 0 if any token would do.
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """The room that the coming step can spare for probes.

    sequences: free running places. blocks: free KV blocks, without the blocks for probes that were placed in the same
    step. tokens: the step's token budget. probe_tokens: tokens that the probes of the step take from the budget.
    """

    sequences: int
    blocks: int
    tokens: int
    prefix_caching: bool
    probe_tokens: int = 0


def reserve(places: int) -> int:
    """Return the number of running places to reserve for probes; a single place is not reserved, since probes never
    take the last one."""
    kept = places // PLACE_SHARE
    return kept if kept > 1 else 0


def free_blocks(cost_tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that must be free for a probe, so that one stays free for every block that the
    probe takes."""
    return 2 * (cost_tokens // block_size + 2)


def refusal(live: LiveRequest, room: Room, block_size: int, cost_tokens: int, left_tokens: int) -> str:
    """Return why a probe of this request cannot be placed now; empty if it can.

    A probe never takes the last running place, and leaves at least one free block for every block that it takes.
    left_tokens: room that the context has behind the probe's tokens, for the one that the probe generates.
    """
    request = live.ref
    obstacles = (
        (left_tokens < 1, NO_CONTEXT),
        (live.phase is not Phase.THINK or live.ending is not None, NOT_THINKING),
        (not room.prefix_caching, "prefix caching is off"),
        (request.num_tokens > LONGEST_TOKENS, f"over {LONGEST_TOKENS} tokens"),
        (getattr(request, "lora_request", None) is not None, "LoRA request"),
        (bool(getattr(request, "mm_features", None)), "multimodal prompt"),
        (getattr(request, "prompt_embeds", None) is not None, "prompt embeddings"),
        (live.preempted or request.is_prefill_chunk or request.num_computed_tokens == 0, "not decoding"),
        # A request that waits for its KV from elsewhere counts the tokens of that KV as computed.
        (request.status.name != "RUNNING", "not decoding"),
        (room.sequences < 2, NO_PLACE),
        (room.blocks < free_blocks(cost_tokens, block_size), NO_BLOCKS),
        (room.probe_tokens + cost_tokens > room.tokens // STEP_SHARE, NO_TOKENS),
    )
    return next((reason for holds, reason in obstacles if holds), "")
