"""An engine without vLLM: the agent's real tracker and directives over tokens that a test makes up.

The fake calls tracker and directives in the same order as `meridian_agent.engine.agent`. Masks, draft tokens and
acceptance work as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.directives import Directives
from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.phases import Markers, Phase, begin
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.step_record import Gauges, Outcome, StepRecord, Tier
from meridian_agent.core.tracker import Tracker

START, END, TEXT = 1, 2, 90
MARKERS = Markers(((START,),), ((END,),))
STOP, LENGTH, ABORT = 1, 2, 3
FINISH_REASONS = {STOP: "stop", LENGTH: "length", ABORT: "abort"}


def opened(
    tracker: Tracker,
    name: str,
    prompt: Sequence[int] = (START,),
    own_cap: int | None = None,
    ref: Any = None,
    **own: Any,
) -> LiveRequest:
    """Let a tracker open a request that an engine has admitted. own: further fields of RequestInfo."""
    info = RequestInfo(name, "model", "tenant", "slo", 7, 1000, own_cap, **own)
    return tracker.open(info, list(prompt), 0, ref or SimpleNamespace())


class FakeEngine:
    """One engine. `outcomes` has all outcomes ever reported: decision id to outcomes, in order."""

    def __init__(self, markers: Markers = MARKERS, lookahead: int = 0) -> None:
        self.tracker = Tracker(markers)
        self.tracker.lookahead = lookahead
        self.directives = Directives(self.tracker)
        self.outcomes: dict[int, list[Outcome]] = {}
        self.step = 0
        self.records: list[StepRecord] = []
        self._masks: dict[str, dict[int, int]] = {}
        # Receives each request that ends, as the link does from the agent.
        self.ending: Callable[[LiveRequest], None] = lambda _: None

    @property
    def live(self) -> dict[str, LiveRequest]:
        return self.tracker.by_id

    def open(
        self,
        name: str,
        prompt: Sequence[int] = (START,),
        own_cap: int | None = None,
        tenant: str = "tenant",
        max_tokens: int = 1000,
        *,
        queued_s: float | None = None,
        **own: Any,
    ) -> LiveRequest:
        info = RequestInfo(name, "model", tenant, "slo", len(prompt), max_tokens, own_cap, **own)
        ref = SimpleNamespace(is_prefill_chunk=False, num_computed_tokens=len(prompt))
        state = begin(self.tracker.markers, list(prompt), self.tracker.supports_think_disable)
        return self.tracker.enter(info, state, self.step, ref, queued_s=queued_s)

    def join(self, live: LiveRequest, now_s: float) -> None:
        """Note that a request is in the step that began at a time."""
        self.tracker.join_step(live, now_s)

    def accept(self, message: agent_pb2.Directives) -> None:
        self.directives.accept(message)

    def schedule(self) -> None:
        """Begin a step; waiting probes are refused here, because this engine has no model to measure them with."""
        self.step += 1
        self.directives.active_plan()
        for decision_id, tr, *_ in list(self.directives.probes):
            self.directives.probes.take(tr)
            self.directives.report(decision_id, Outcome.REFUSED, tr, "no engine")

    def mask(self, drafts: Mapping[str, Sequence[int]] | None = None) -> dict[str, dict[int, int]]:
        """Return the forced tokens of this step's rows, by request."""
        self._masks = {}
        for tr in self.tracker.due:
            known = (drafts or {}).get(tr.info.request_id, ())
            if forced := self.directives.forced_tokens(tr, 1 + len(known), known):
                self._masks[tr.info.request_id] = dict(forced)
        return self._masks

    def sample(self, name: str, wanted: Sequence[int], drafts: Sequence[int] = ()) -> list[int]:
        """Return the engine's output if the model wants these tokens, one per row; masks win, a wrong draft ends it."""
        mask, tokens = self._masks.get(name, {}), []
        for row in range(1 + len(drafts)):
            tokens.append(mask.get(row, wanted[row]))
            if row < len(drafts) and drafts[row] != tokens[-1]:
                break
        return tokens

    def feed(self, name: str, tokens: Sequence[int]) -> None:
        tr = self.live[name]
        ended = self.tracker.feed(tr, tokens, 0)
        if ended or tr.ending is not None or (tr.cap is not None and tr.cap.shadow):
            self.directives.after_tokens(tr, ended)
        if ended and self.directives.hand_overs.of(tr) is None:
            self.directives.hand_overs.ended_thinking(tr)

    def finish(
        self, name: str, reason: int = STOP, *, keeps_blocks: bool = False, handed_over: int | None = None
    ) -> None:
        """End a request. keeps_blocks: a KV connector keeps the request's blocks until `free`. handed_over: number of
        blocks that it keeps for another engine, which continues the request."""
        tr = self.live[name]
        if not keeps_blocks:
            self.free(name)
        self.directives.close(tr)
        self.directives.hand_overs.close(tr, FINISH_REASONS[reason], handed_over)
        self.ending(tr)
        self.tracker.close(tr, reason)

    def abort(self, name: str) -> None:
        """End a request because its client has gone."""
        self.tracker.record.clients_gone.append(self.live[name].slot)
        self.finish(name, ABORT)

    def free(self, name: str) -> None:
        """Free the blocks of a request that ends or has ended."""
        tr = self.tracker.freeing(name)
        if tr is not None and (decided := tr.take_tier()) is not None:
            decision_id, tier, shadow = decided
            shadowed = shadow and tier == Tier.UNREACHABLE
            self.directives.report(decision_id, Outcome.SHADOWED if shadowed else Outcome.APPLIED)

    def take(self) -> StepRecord:
        """End the step and return its record."""
        self.tracker.record.step = self.step
        self.tracker.record.gauges = Gauges(running=len(self.live))
        record = self.tracker.take_record()
        for decision_id, outcome, *_ in record.outcomes:
            self.outcomes.setdefault(decision_id, []).append(Outcome(outcome))
        self.records.append(record)
        return record

    def run(self, wanted: Mapping[str, int]) -> StepRecord:
        """Run a whole step of one token for each request."""
        self.schedule()
        self.mask()
        for name, token in wanted.items():
            self.feed(name, self.sample(name, [token]))
        return self.take()

    def thinking(self, name: str) -> bool:
        return self.live[name].state.phase is Phase.THINK
