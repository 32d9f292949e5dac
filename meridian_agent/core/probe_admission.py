"""Decides which EAT probes may be placed now, and keeps what each placed probe has cost. Runs on the engine-core
thread.

A probe is an internal request over a thinking request's tokens plus the end marker. A probe shares the request's KV
blocks, the last one by copy-on-write. So a probe computes only the request's newest token, which has no KV yet, and the
tokens after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest

PREFIX = "meridian-probe-"
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


@dataclass(slots=True)
class Placed:
    """A probe in the engine, and the tokens that it has cost so far."""

    decision_id: int
    parent: LiveRequest
    think_tokens: int
    # Number of tokens whose KV the parent request has computed.
    shared_tokens: int
    cost_tokens: int = 0


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


def refusal(live: LiveRequest, room: Room, block_size: int, cost_tokens: int) -> str:
    """Return why a probe of this request cannot be placed now; empty if it can.

    A probe never takes the last running place, and leaves at least one free block for every block that it takes.
    """
    request = live.ref
    obstacles = (
        (live.state.phase is not Phase.THINK or live.ending is not None, "not thinking"),
        (not room.prefix_caching, "prefix caching is off"),
        (request.num_tokens > LONGEST_TOKENS, f"over {LONGEST_TOKENS} tokens"),
        (getattr(request, "lora_request", None) is not None, "LoRA request"),
        (bool(getattr(request, "mm_features", None)), "multimodal prompt"),
        (getattr(request, "prompt_embeds", None) is not None, "prompt embeddings"),
        (live.preempted or request.is_prefill_chunk or request.num_computed_tokens == 0, "not decoding"),
        (room.sequences < 2, "no running place to spare"),
        (room.blocks < free_blocks(cost_tokens, block_size), "no KV blocks to spare"),
        (room.probe_tokens + cost_tokens > room.tokens // STEP_SHARE, "over the step's probe budget"),
    )
    return next((reason for holds, reason in obstacles if holds), "")
