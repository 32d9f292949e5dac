"""Finds what became of each request that was to be handed over, from the reports of both engines.

A request has exactly one result, whatever the order in which the reports of the two engines arrive. All sessions of a
replica share one `Handovers`. The code does no I/O and reads no clock; the objects belong to one event loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover.rule import KV_PRESSURE, PREEMPTED_ANSWERS, STEP_GAIN
from meridian_control.common.look import counted
from meridian_control.engine import think_ends
from meridian_control.journal.records import Detail

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from datetime import datetime

    from meridian_control.capabilities.handover.rule import Move
    from meridian_control.journal.records import Compared
    from meridian_control.policy.model import Policy

# Results of a request that was to be handed over. HANDED_OVER: the answering engine read the KV blocks. RECOMPUTED: the
# answering engine computed them again. FINISHED: an engine of the thinking pool gave the answer. CLIENT_GONE: no engine
# reported that it continued the request.
HANDED_OVER, RECOMPUTED = "handed_over", "recomputed"
FINISHED, CLIENT_GONE = "finished_on_thinking_engine", "client_gone"
RESULTS = (HANDED_OVER, RECOMPUTED, FINISHED, CLIENT_GONE)
# Time for which an engine may continue a request after it was handed over, or after a stream was lost.
WAIT = timedelta(seconds=60)
# Time for which a request that continues another one is kept after its newest event, and the largest number kept.
KEEP, MAX_CONTINUED = timedelta(seconds=120), 4096
LIVE, GONE = fleet_pb2.CONTINUED_STATE_LIVE, fleet_pb2.CONTINUED_STATE_GONE
COMPLETE = fleet_pb2.CONTINUED_STATE_FINISHED

# Engine id, incarnation and request id.
Key = tuple[str, str, str]


@dataclass(eq=False, slots=True)
class Handover(Detail):
    """A decision to hand a request over, and the result if this decision has it; the decision log shows both."""

    # Without a default, unlike that of the base class.
    ref: str = field()
    move: Move
    result: str = ""
    detail: str = ""

    def compared(self, policy: Policy) -> Iterator[Compared]:
        move, disagg = self.move, policy.disagg
        if move.engine is None:
            return
        threshold = disagg.offload_threshold_blocks
        yield "blocks", move.blocks, ">=", "disagg.offload_threshold_blocks", threshold
        if move.reason == KV_PRESSURE:
            yield "thinking_kv_used", move.thinking_kv_used, ">", "disagg.max_pool_kv_used", disagg.max_pool_kv_used
        elif move.reason == PREEMPTED_ANSWERS:
            yield "waiting_blocks", move.waiting_blocks, ">", "none", 0
        elif move.reason == STEP_GAIN:
            yield "gain_ms", move.gain_ms, ">", "transfer_ms + 2 steps", move.least_gain_ms
        yield "answering_kv_used", move.kv_used, "<=", "disagg.max_pool_kv_used", disagg.max_pool_kv_used

    def fill(self, logged: fleet_pb2.LoggedDecision) -> None:
        message, move = logged.hand_over, self.move
        message.ref, message.result, message.result_detail = self.ref, self.result, self.detail
        message.SetInParent()
        message.blocks, message.why = move.blocks, move.why
        if move.engine is not None:
            message.engine_id = move.engine.engine_id
            for name in ("transfer_ms", "recompute_ms", "gain_ms", "kv_used"):
                setattr(message, name, getattr(move, name))


@dataclass(eq=False, slots=True)
class _Request:
    """A request that was to be handed over. lives: whether it lives on its thinking engine, as far as is known. until:
    time at which nobody continues it any more, None while it lives or an engine of this replica continues it."""

    key: Key
    decisions: list[Handover] = field(default_factory=list)
    lives: bool = True
    until: datetime | None = None
    result: str = ""
    # Id of the engine for which the result counts, empty if that engine is forgotten.
    counted_for: str = field(init=False)

    def __post_init__(self) -> None:
        self.counted_for = self.key[0]


@dataclass(eq=False, slots=True)
class _Continued:
    """A request that continues another one. key: its own key. time: time of its newest event."""

    key: Key
    message: fleet_pb2.ContinuedRequest
    time: datetime


class Handovers:
    """The requests of a replica's engines that were to be handed over, and those that continue such requests.

    `results` counts the results by thinking engine; the empty id stands for all engines that are forgotten.
    """

    def __init__(self) -> None:
        self.results: dict[str, Counter[str]] = {}
        self._requests: dict[Key, _Request] = {}
        self._by_ref: dict[str, tuple[_Request, Handover]] = {}
        # By reference and own key, oldest first; and the same by reference.
        self._continued: dict[tuple[str, Key], _Continued] = {}
        self._continuing: dict[str, dict[Key, _Continued]] = {}

    # -------------------------------------------------------------------------------------------------- thinking engine

    def decided(self, key: Key, decision: Handover) -> None:
        """Note a decision, not in shadow, to hand a request over."""
        request = self._requests.setdefault(key, _Request(key))
        request.decisions.append(decision)
        self._by_ref[decision.ref] = request, decision

    def closed(self, key: Key, closed: agent_pb2.RequestClosed, now: datetime) -> None:
        """Note that a request has ended on its engine."""
        if (request := self._requests.get(key)) is None:
            return
        request.lives = False
        if not request.result and not closed.handed_over:
            aborted = closed.reason == agent_pb2.FINISH_REASON_ABORT
            self._settle(request, CLIENT_GONE if aborted else FINISHED, "ended on the thinking engine")
        elif not request.result and not self._is_continued(request):
            request.until = now + WAIT
        self._drop_if_over(request)

    def relisted(self, engine: tuple[str, str], request_ids: Container[str], now: datetime) -> None:
        """Note the requests that live on an engine, as a snapshot lists them; all others have ended unseen.

        engine: its id and incarnation.
        """
        for key, request in list(self._requests.items()):
            if key[:2] != engine:
                continue
            request.lives = key[2] in request_ids
            if request.lives:
                request.until = None
            elif not self._is_continued(request):
                request.until = request.until or now + WAIT
            self._drop_if_over(request)
        for continued in [entry for entry in self._continued.values() if entry.key[:2] == engine]:
            if continued.message.state == LIVE and continued.key[2] not in request_ids:
                self._change(continued, GONE, now)

    def lost(self, engine: tuple[str, str], now: datetime) -> None:
        """Note that the stream of an engine has ended, so that the ends of its requests may not be reported."""
        self.relisted(engine, (), now)

    # ------------------------------------------------------------------------------------------------- answering engine

    def opened(self, ref: str, key: Key, now: datetime) -> None:
        """Note a request that continues the one of the handover `ref`."""
        continuation = fleet_pb2.ContinuedRequest(ref=ref, engine_id=key[0], request_id=key[2])
        continued = self._continued.setdefault((ref, key), _Continued(key, continuation, now))
        self._continuing.setdefault(ref, {})[key] = continued
        self._change(continued, LIVE, now)
        while len(self._continued) > MAX_CONTINUED:
            self._drop_continued(*next(iter(self._continued)))

    def first_token(self, ref: str, key: Key, transferred_tokens: int, first_token_ms: float, now: datetime) -> None:
        """Note the first token of a request that continues another one, and how many of its tokens came with
        their KV blocks."""
        if (continued := self._continued.get((ref, key))) is not None:
            continued.message.transferred_tokens = transferred_tokens
            continued.message.first_token_ms = first_token_ms
            self._change(continued, continued.message.state, now)

    def continuation_closed(self, ref: str, key: Key, reason: int, now: datetime) -> None:
        """Note that such a request has ended."""
        if (continued := self._continued.get((ref, key))) is not None:
            self._change(continued, COMPLETE if reason in think_ends.FINISHED else GONE, now)

    def _change(self, continued: _Continued, state: fleet_pb2.ContinuedState.ValueType, now: datetime) -> None:
        continued.message.state, continued.time = state, now
        self.take_continuation(continued.message, now)

    def continued(self) -> list[fleet_pb2.ContinuedRequest]:
        """Return the requests of this replica's engines that continue other ones, for the other replicas."""
        return [continued.message for continued in self._continued.values()]

    # ---------------------------------------------------------------------------------------------------------- results

    def take_continuation(self, continuation: fleet_pb2.ContinuedRequest, now: datetime) -> None:
        """Take in what is known of a request that continues another one; the same message may come many times."""
        request, decision = self._by_ref.get(continuation.ref, (None, None))
        if request is None or decision is None or request.result:
            return
        engine = decision.move.engine
        if engine is None or continuation.engine_id != engine.engine_id:
            self._settle(request, FINISHED, f"continued on {continuation.engine_id}", decision)
        elif continuation.HasField("transferred_tokens"):
            where = f"transferred to {continuation.engine_id}, first token after {continuation.first_token_ms:.0f} ms"
            result = HANDED_OVER if continuation.transferred_tokens else RECOMPUTED
            self._settle(request, result, f"{counted(continuation.transferred_tokens, 'token')} {where}", decision)
        elif continuation.state == LIVE:
            # Another replica repeats the message while it lives; if that replica ends, nobody reports the rest.
            request.until = None if request.lives or self._is_continued(request) else now + WAIT
        elif continuation.state == COMPLETE:
            # The report with the number of tokens was lost.
            self._settle(request, RECOMPUTED, f"finished on {continuation.engine_id}, transfer unknown", decision)
        elif not request.lives:
            request.until = request.until or now + WAIT
        self._drop_if_over(request)

    def expire(self, now: datetime) -> None:
        """Settle the requests that nobody has continued in time, and drop what is over."""
        for request in list(self._requests.values()):
            if request.until is not None and now >= request.until:
                if not request.result:
                    self._settle(request, CLIENT_GONE, "no engine reported that it continued the request")
                self._drop(request)
        for place, continued in list(self._continued.items()):
            if now - continued.time > KEEP and continued.message.state != LIVE:
                self._drop_continued(*place)

    def forget(self, engine_ids: Iterable[str]) -> None:
        """Count the results of engines that have gone away under the empty id, also results that come later."""
        if not (forgotten := set(engine_ids)):
            return
        for engine_id in forgotten & self.results.keys():
            self.results.setdefault("", Counter()).update(self.results.pop(engine_id))
        for request in self._requests.values():
            if request.key[0] in forgotten:
                request.counted_for = ""

    def total(self) -> Counter[str]:
        """Return the results of all engines."""
        return sum(self.results.values(), Counter())

    def _is_continued(self, request: _Request) -> bool:
        return any(
            continued.message.state == LIVE
            for decision in request.decisions
            for continued in self._continuing.get(decision.ref, {}).values()
        )

    def _settle(self, request: _Request, result: str, detail: str, decision: Handover | None = None) -> None:
        request.result = result
        decision = decision or request.decisions[-1]
        decision.result, decision.detail = result, detail
        self.results.setdefault(request.counted_for, Counter())[result] += 1

    def _drop_if_over(self, request: _Request) -> None:
        if request.result and not request.lives:
            self._drop(request)

    def _drop(self, request: _Request) -> None:
        self._requests.pop(request.key, None)
        for decision in request.decisions:
            self._by_ref.pop(decision.ref, None)

    def _drop_continued(self, ref: str, key: Key) -> None:
        del self._continued[ref, key], self._continuing[ref][key]
        if not self._continuing[ref]:
            del self._continuing[ref]
