"""Decides which requests are handed over to another engine at the end of their thinking. All functions are pure.

A request that is to be handed over stays so when the pressure on its engine ends, and an answering engine may get
fuller than the policy limit by KEEP_MARGIN before it loses its requests, so that noise changes no decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from meridian_control.policy.disagg_schema import CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meridian.v1 import agent_pb2, fleet_pb2

    from meridian_control.policy.disagg_schema import DisaggPolicy

# Reasons for a handover, for moving it to another engine, and for taking it back.
KV_PRESSURE, PREEMPTED_ANSWERS, STEP_GAIN = "kv_pressure", "preempted_answers", "step_gain"
OTHER_ENGINE, TAKEN_BACK = "other_engine", "taken_back"
# Share of the KV cache by which an answering engine may exceed max_pool_kv_used before its requests are taken back.
KEEP_MARGIN = 0.1
# A handover for shorter steps must gain at least its transfer and this many steps of the answering engine.
WAIT_STEPS = 2
# Guesses before an engine has measured: answer tokens of a request, and milliseconds to compute a prompt token.
FIRST_ANSWER_TOKENS, FIRST_PREFILL_TOKEN_MS = 256.0, 0.25


@dataclass(frozen=True, slots=True)
class ThinkingEngine:
    """The engine whose requests may be handed over.

    kv_used: fraction of its KV cache in use. waiting_blocks: blocks that its preempted answers need. running: its
    requests in a step. step_ms, sequence_ms: predicted milliseconds of a step, prompts included, without sequences and
    for each sequence; 0 before enough steps are measured. answer_tokens: mean of recent answers, 0 if there are none.
    """

    hello: agent_pb2.Hello
    kv_used: float = 0.0
    waiting_blocks: int = 0
    running: int = 0
    step_ms: float = 0.0
    sequence_ms: float = 0.0
    answer_tokens: float = 0.0


class Holding(NamedTuple):
    """A thinking request that a relay can continue: its slot, its tokens, and the KV blocks that it holds."""

    slot: int
    tokens: int
    blocks: int


class Move(NamedTuple):
    """A request that is to be handed over to `engine`; None takes the handover back.

    why: why an earlier handover moves to this engine or is taken back, in words; empty for a new handover.
    transfer_ms: predicted time from the arrival on the answering engine to the first token there. recompute_ms:
    predicted time to compute the same tokens there. gain_ms: predicted time by which the answer is shorter, without the
    transfer. least_gain_ms: gain above which the steps alone are a reason, 0 if the steps are not known. kv_used: share
    of the answering engine's KV cache in use or promised. thinking_kv_used: the same of the thinking engine, less the
    blocks of requests that leave it. waiting_blocks: blocks that preempted answers need, less those.
    """

    slot: int
    blocks: int
    reason: str
    engine: fleet_pb2.AnsweringEngine | None = None
    why: str = ""
    transfer_ms: float = 0.0
    recompute_ms: float = 0.0
    gain_ms: float = 0.0
    least_gain_ms: float = 0.0
    kv_used: float = 0.0
    thinking_kv_used: float = 0.0
    waiting_blocks: int = 0


class _Room:
    """An answering engine, with the requests that are promised to it."""

    def __init__(self, engine: fleet_pb2.AnsweringEngine) -> None:
        self.engine = engine
        self.blocks = engine.kv_used * engine.num_blocks + engine.promised.blocks
        self.requests = engine.running + engine.promised.requests

    def promise(self, blocks: int, requests: int = 1) -> None:
        self.blocks += blocks
        self.requests += requests

    def free(self, policy: DisaggPolicy) -> float:
        """Return the number of blocks that may still be promised."""
        return policy.max_pool_kv_used * self.engine.num_blocks - self.blocks

    def order(self, policy: DisaggPolicy) -> tuple[float, str]:
        return self.free(policy), self.engine.engine_id

    def keeps(self, policy: DisaggPolicy) -> bool:
        """Return whether the engine keeps the requests that are promised to it."""
        return self.engine.kv_used <= policy.max_pool_kv_used + KEEP_MARGIN

    @property
    def kv_used(self) -> float:
        return self.blocks / self.engine.num_blocks if self.engine.num_blocks else 1.0

    @property
    def step_ms(self) -> float:
        """The predicted milliseconds of a step with one more request; 0 if they are not known."""
        return step_ms(self.engine.step_ms, self.engine.sequence_ms, self.requests + 1)


class _Rooms:
    """The rooms of a pool's engines. An engine gets its room when the room is needed, because a look at all engines for
    each report would take a replica with hundreds of engines a second of work each second."""

    def __init__(self, policy: DisaggPolicy, pool: Mapping[str, fleet_pb2.AnsweringEngine]) -> None:
        self._policy, self._pool = policy, pool
        self._rooms: dict[str, _Room] = {}

    def of(self, engine_id: str) -> _Room | None:
        if engine_id not in self._rooms and (engine := self._pool.get(engine_id)) is not None:
            self._rooms[engine_id] = _Room(engine)
        return self._rooms.get(engine_id)

    def roomiest(self, but: str = "") -> _Room | None:
        """Return the engine with the most room, apart from `but`; several requests thereby spread over the engines."""
        # Of the engines that have no room here yet, the first one has the most free blocks.
        self.of(next((name for name in self._pool if name not in self._rooms and name != but), ""))
        rooms = (room for name, room in self._rooms.items() if name != but)
        return max(rooms, key=lambda room: room.order(self._policy), default=None)


def decide(
    policy: DisaggPolicy,
    engine: ThinkingEngine,
    pool: Mapping[str, fleet_pb2.AnsweringEngine],
    holding: Sequence[Holding],
    in_force: Mapping[int, Move],
) -> list[Move]:
    """Return the handovers to decide, and those to take back.

    pool: the engines for which `unfit` gives no reason, in the order of `by_room`. holding: the requests that may be
    handed over, including those of `in_force`. in_force: the handovers that are in force, by slot.
    """
    rooms = _Rooms(policy, pool)
    blocks = {slot: move.blocks for slot, move in in_force.items()}
    blocks |= {holds.slot: holds.blocks for holds in holding if holds.slot in in_force}
    for slot, move in in_force.items():
        if (room := rooms.of(_engine_id(move))) is not None:
            room.promise(blocks[slot])
    moves: list[Move] = []
    by_slot = {holds.slot: holds for holds in holding}
    for slot, move in sorted(in_force.items()):
        room = rooms.of(_engine_id(move))
        if room is not None and room.keeps(policy):
            continue
        why = f"{_engine_id(move)} cannot answer any more"
        if room is not None:
            why = f"the KV cache of {_engine_id(move)} is too full"
            room.promise(-blocks[slot], -1)
        moves.append(_other(policy, engine, rooms, by_slot.get(slot), move._replace(why=why)))
    leaving, leaving_blocks, room = len(in_force), sum(blocks.values()), rooms.roomiest()
    # The transfer of a request without tokens takes the least time: if it has no reason to leave, no other request has.
    if room is None or not _pressure(policy, _move(engine, room, Holding(0, 0, 0), "", (leaving, leaving_blocks))):
        return moves
    for holds in sorted(holding, key=lambda holds: (-holds.blocks, holds.slot)):
        if holds.slot in in_force or holds.blocks < policy.offload_threshold_blocks:
            continue
        if room is None or room.free(policy) < holds.blocks:
            continue
        move = _move(engine, room, holds, "", (leaving, leaving_blocks))
        if reason := _pressure(policy, move):
            moves.append(move._replace(reason=reason))
            room.promise(holds.blocks)
            leaving, leaving_blocks = leaving + 1, leaving_blocks + holds.blocks
            room = rooms.roomiest()
    return moves


def by_room(policy: DisaggPolicy, engines: Iterable[fleet_pb2.AnsweringEngine]) -> dict[str, fleet_pb2.AnsweringEngine]:
    """Return answering engines by id, those with the most room first."""
    rooms = sorted(map(_Room, engines), key=lambda room: room.order(policy), reverse=True)
    return {room.engine.engine_id: room.engine for room in rooms}


def unfit(policy: DisaggPolicy, hello: agent_pb2.Hello, engine: fleet_pb2.AnsweringEngine) -> str:
    """Return the reason why no request of the engine with this Hello can be handed over to `engine`; empty if one
    can."""
    if engine.engine_id == hello.engine_id:
        return "it is the engine itself"
    if not policy.answers(engine.labels):
        return "it is not in disagg.answering_pool"
    for name in ("model", "vllm_version", "block_size_tokens"):
        mine, theirs = getattr(hello, name), getattr(engine, name)
        if mine != theirs:
            return f"its {name} is {theirs}, not {mine}"
    return engine.unfit or no_fabric(policy, engine.kv_connector)


def no_fabric(policy: DisaggPolicy, connector: str) -> str:
    """Return the reason why an engine with this KV connector has no part in the policy's fabric; empty if it has."""
    if connector in CONNECTORS[policy.fabric]:
        return ""
    return f'its KV connector "{connector}" is not of disagg.fabric {policy.fabric}' if connector else "no KV connector"


def step_ms(base_ms: float, sequence_ms: float, sequences: int) -> float:
    """Return the predicted milliseconds of a step; 0 if they are not known."""
    return base_ms + sequence_ms * max(1, sequences) if base_ms or sequence_ms else 0.0


def _engine_id(move: Move) -> str:
    return move.engine.engine_id if move.engine is not None else ""


def _other(policy: DisaggPolicy, engine: ThinkingEngine, rooms: _Rooms, holds: Holding | None, move: Move) -> Move:
    """Return the handover to another engine, or the one that takes `move` back if no other engine has room. move: the
    earlier handover, with the reason why its engine is to answer no more."""
    room = rooms.roomiest(but=_engine_id(move))
    if holds is None or room is None or room.free(policy) < holds.blocks:
        return Move(move.slot, move.blocks, TAKEN_BACK, why=move.why)
    replacement = _move(engine, room, holds, OTHER_ENGINE, (0, 0))
    room.promise(holds.blocks)
    return replacement._replace(why=move.why)


def _move(engine: ThinkingEngine, room: _Room, holds: Holding, reason: str, leaving: tuple[int, int]) -> Move:
    """Predict a handover. leaving: number and blocks of the requests that are to leave the thinking engine."""
    answering, (requests, blocks) = room.engine, leaving
    here_ms = step_ms(engine.step_ms, engine.sequence_ms, engine.running - requests)
    there_ms = room.step_ms
    transfer_ms = answering.transfer_ms + answering.transfer_token_ms * holds.tokens
    answer_tokens = answering.answer_tokens or engine.answer_tokens or FIRST_ANSWER_TOKENS
    is_known = bool(here_ms and there_ms)
    num_blocks = engine.hello.num_blocks
    return Move(
        slot=holds.slot,
        blocks=holds.blocks,
        reason=reason,
        engine=answering,
        transfer_ms=transfer_ms,
        recompute_ms=(answering.prefill_token_ms or FIRST_PREFILL_TOKEN_MS) * holds.tokens,
        gain_ms=answer_tokens * (here_ms - there_ms) if is_known else 0.0,
        least_gain_ms=transfer_ms + WAIT_STEPS * there_ms if is_known else 0.0,
        kv_used=room.kv_used,
        thinking_kv_used=engine.kv_used - blocks / num_blocks if num_blocks else 0.0,
        waiting_blocks=engine.waiting_blocks - blocks,
    )


def _pressure(policy: DisaggPolicy, move: Move) -> str:
    """Return the reason for which a request should leave its engine; empty if there is none."""
    if move.thinking_kv_used > policy.max_pool_kv_used:
        return KV_PRESSURE
    if move.waiting_blocks > 0:
        return PREEMPTED_ANSWERS
    return STEP_GAIN if 0 < move.least_gain_ms < move.gain_ms else ""
