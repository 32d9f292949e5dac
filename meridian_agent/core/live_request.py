"""One live request as the agent sees it, and runs of steps in which the same requests generate one token of text each.

Nearly all steps are such steps. They are noted as a whole, at a cost that hardly grows with the requests; what they
mean for each request is worked out when somebody looks at the request, at the latest when one of them comes near its
cap. Knows no vLLM type beyond opaque references, no policy and no network. Runs on the engine-core thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_BY_CAP, FLAG_FORCED, Phase, PhaseState

if TYPE_CHECKING:
    from collections.abc import Sequence

# Between plans the phase alone orders requests; the control plane's ranks use the same scale (lower is more urgent).
# Where phases are not known all requests rank alike, so vLLM's own order holds.
PHASE_RANK = {
    Phase.OUTPUT: agent_pb2.PHASE_RANK_UNSPECIFIED,
    Phase.UNKNOWN: agent_pb2.PHASE_RANK_PROMPT,
    Phase.PROMPT: agent_pb2.PHASE_RANK_PROMPT,
    Phase.THINK: agent_pb2.PHASE_RANK_THINK,
}

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The facts of a request that policy may match on; never text."""

    request_id: str
    model: str
    tenant: str
    slo_class: str
    prompt_tokens: int
    max_tokens: int
    max_think_tokens: int | None
    effort: str = ""
    min_think_tokens: int | None = None
    traceparent: str = ""


@dataclass(slots=True)
class Cap:
    decision_id: int
    max_think_tokens: int
    shadow: bool
    reported: bool = False


@dataclass(slots=True)
class Ending:
    """A forced end of thinking under way: which of its tokens come next."""

    tokens: tuple[int, ...]
    decision_id: int
    # Begun by a cap, the request's own or one of the control plane's, not by a force.
    by_cap: bool = False
    # Begun by a soft close, which ends with the order.
    by_order: bool = False
    position: int = 0

    def advance(self) -> int:
        """One more of its tokens was generated; returns row flags once it is complete."""
        self.position += 1
        if self.position < len(self.tokens):
            return 0
        return FLAG_FORCED | (FLAG_BY_CAP if self.by_cap else 0)


class TextRun:
    """The run under way, if any; one object for as long as the tracker.

    request_ids: in the order of the runner's rows; empty while there is no run. slots, phases, rows: columns of each
    step's record, never changed once made. steps: noted and not worked out yet.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.slots: list[int] = []
        self.phases: list[int] = []
        self.rows: list[int] = []
        # Sentence and paragraph flags by token id.
        self.boundaries = b""
        self.steps = 0
        self._tracked: list[LiveRequest] = []
        self._newest: Sequence[int] = ()
        # Steps that may still be noted before one brings a request to where its cap is looked at.
        self._left = 0

    def begin(self, request_ids: list[str], tracked: list[LiveRequest]) -> None:
        """Begin with requests that think or answer, or whose phase is not known, none of them being ended."""
        left = [live.text_steps() for live in tracked]
        if not left or min(left) <= 0:
            return
        self.request_ids, self._tracked, self._left = request_ids, tracked, min(left)
        self.slots = [live.slot for live in tracked]
        self.phases = [int(live.own_state.phase) for live in tracked]
        self.rows = list(range(len(tracked)))

    def end(self) -> None:
        """Something is about to change for one of the requests."""
        if self.request_ids:
            self.spread()
            self.request_ids, self._tracked = [], []

    def note(self, tokens: Sequence[int]) -> bool:
        """Take in a step's tokens, one of text for each request; False, and nothing taken in, where a cap is near."""
        if self._left <= 0:
            return False
        self._left -= 1
        self.steps += 1
        self._newest = tokens
        return True

    def spread(self) -> None:
        """Work out what the noted steps mean for each request."""
        steps, self.steps = self.steps, 0
        if not steps:
            return
        known = len(self.boundaries)
        for live, token in zip(self._tracked, self._newest, strict=True):
            state = live.own_state
            state.text_run += steps
            if state.phase is Phase.THINK:
                state.think_tokens += steps
                live.own_boundary = self.boundaries[token] if token < known else 0
            else:
                state.output_tokens += steps * (state.phase is Phase.OUTPUT)
                live.own_boundary = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One live request. `ref` is vLLM's own request object, opaque here."""

    slot: int
    info: RequestInfo
    # As of the last step that was worked out; `state` is as of the last step.
    own_state: PhaseState
    opened_step: int
    ref: Any
    # Holds until the first cap decision comes.
    default_cap: int | None = None
    cap: Cap | None = None
    ending: Ending | None = None
    # Ending tokens written into this step's masks, by row.
    expected: dict[int, int] = field(default_factory=dict)
    forced: bool = False
    # Thinking was ended by a cap that had no decision of its own yet.
    capped: bool = False
    rank: int | None = None
    # Step of the first report that knows the request's phase: a rank decided from an older one is for another phase.
    phase_step: int = 0
    tier: tuple[int, int, bool] | None = None
    preempted: bool = False
    skipped_steps: int = 0
    # Step the request last joined, for fair rotation of those left out.
    joined_step: int = 0
    # Sentence and paragraph flags of the newest token, while thinking; as of the last step that was worked out.
    own_boundary: int = 0
    # For steps of several tokens: thinking tokens at the last sentence end no probe was placed at, and its flags.
    passed: tuple[int, int] = (0, 0)
    # Thinking tokens from which on the coming step may need a forced token.
    watch_from: int = NEVER
    # Likeliest token after the end marker in the newest probe, and how many probes in a row it has been.
    trial_answer: int = -1
    same_answer: int = 0
    # Waits for what is decided from its probe: until when, on the monotonic clock, and the report that asked for it.
    held_until: float = 0.0
    asked_in: int = 0
    # Tokens of the ending that the request's own parameters were looked at for, and whether they allow all of them.
    checked: tuple[int, ...] = ()
    allowed: bool = True
    # KV blocks an answer had when it was preempted, each with its hash then.
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    run: TextRun | None = None

    @property
    def state(self) -> PhaseState:
        if self.run is not None and self.run.steps:
            self.run.spread()
        return self.own_state

    @property
    def boundary(self) -> int:
        """Sentence and paragraph flags of the newest token, while thinking."""
        if self.run is not None and self.run.steps:
            self.run.spread()
        return self.own_boundary

    # ----------------------------------------------------------------------------------------------- caps and endings

    def set_cap(self, cap: Cap | None) -> None:
        """Put a decided cap in force, or none; the default cap ends with it."""
        self.cap, self.default_cap = cap, None

    def mark_cap_reported(self) -> None:
        """The outcome of the cap has been reported."""
        if self.cap is not None:
            self.cap.reported = True

    def void_decisions(self) -> None:
        """Keep the cap and the ending in force, but report no outcome for them any more."""
        if self.cap is not None:
            self.cap.decision_id, self.cap.reported = 0, True
        if self.ending is not None:
            self.ending.decision_id = 0

    def begin_forced_end(self, ending: Ending) -> None:
        self.ending = ending

    def credit_forced_end(self, decision_id: int) -> None:
        """Report the ending that the default cap began as that of a decision."""
        if self.ending is not None and self.ending.by_cap and not self.ending.decision_id:
            self.ending.decision_id = decision_id

    def rewrite_forced_end(self, tokens: tuple[int, ...]) -> None:
        """Give other tokens to an ending that has not begun."""
        if self.ending is not None:
            self.ending.tokens = tokens

    def expect_forced_end(self, first_row: int, rows: int) -> dict[int, int]:
        """Note and return the ending's next tokens for a step of so many rows, by row from `first_row` on."""
        ending = self.ending
        left = ending.tokens[ending.position :] if ending is not None else ()
        self.expected = {first_row + i: token for i, token in enumerate(left) if first_row + i < rows}
        return self.expected

    def expect_nothing(self) -> None:
        """The masks of the coming step force no token."""
        self.expected = {}

    def complete_forced_end(self) -> None:
        """All tokens of the ending were generated."""
        by_default = self.cap is None and self.ending is not None and self.ending.decision_id == 0
        self.ending, self.forced, self.capped = None, True, by_default

    def drop_forced_end(self) -> None:
        """Give the ending up; masks under way expect nothing of it."""
        self.ending, self.expected = None, {}

    def note_allowed(self, ending: tuple[int, ...], allowed: bool) -> None:
        """Note whether the request's own parameters allow all tokens of an ending."""
        self.checked, self.allowed = ending, allowed

    # ------------------------------------------------------------------------------------------ order, share and tiers

    def set_rank(self, rank: int | None) -> None:
        """Rank the request as decided; by its phase if None."""
        self.rank = rank

    def enter_phase(self, known_from: int) -> None:
        """The phase has changed. known_from: step of the first report that knows."""
        self.rank, self.phase_step = None, known_from

    def mark_preempted(self) -> None:
        self.preempted = True

    def mark_resumed(self) -> None:
        self.preempted = False

    def set_tier(self, decision_id: int, tier: int, shadow: bool) -> None:
        """Note the eviction tier that was decided for the request's KV blocks."""
        self.tier = decision_id, tier, shadow

    def take_tier(self) -> tuple[int, int, bool] | None:
        """Take the eviction tier out, as (decision id, tier, shadow); None if none was decided."""
        tier, self.tier = self.tier, None
        return tier

    def remember_blocks(self, blocks: list[tuple[Any, Any]]) -> None:
        """Note the KV blocks of a preempted answer, each with its hash."""
        self.kept = blocks

    # -------------------------------------------------------------------------------------------------------- probes

    def hold_until(self, deadline_s: float) -> None:
        """Hold the request for a decision, until this time on the monotonic clock; its probe has no result yet."""
        self.held_until, self.asked_in = deadline_s, 0

    def mark_asked(self, step: int) -> None:
        """The report of this step has the result of the probe."""
        self.asked_in = step

    def forget_sentence_end(self) -> None:
        """A probe is placed at the newest sentence end."""
        self.passed = 0, 0

    def count_same_answer(self, answer: int) -> int:
        """Note a probe's likeliest token; returns how many probes in a row it has been."""
        self.same_answer = self.same_answer + 1 if answer == self.trial_answer else 1
        self.trial_answer = answer
        return self.same_answer

    # ------------------------------------------------------------------------------------------------------- tokens

    def reread(self, state: PhaseState, default_cap: int | None, known_from: int) -> None:
        """Go on in another state: the tokens have been read with other markers. known_from: as for `enter_phase`."""
        self.own_state = state
        self.enter_phase(known_from)
        # The cap that it began with may be one of settings that are long gone.
        self.default_cap = default_cap if self.cap is None else None
        self.own_boundary, self.passed = 0, (0, 0)

    def since_boundary(self, flags: int, most: int) -> int | None:
        """Tokens after the newest one that has these flags, None where they are more than `most`: as many as a step may
        have on top of its first."""
        if self.boundary & flags == flags:
            return 0
        at, passed = self.passed
        tokens = self.state.think_tokens - at
        return tokens if passed & flags == flags and tokens <= most else None

    def text_steps(self) -> int:
        """Steps of a token of text each that concern nobody: until the one after which a cap is looked at, or one in
        shadow is reached. 0 where the next may be such a step already."""
        state, cap = self.state, self.cap
        if state.phase is Phase.PROMPT or self.ending is not None:
            return 0
        if state.phase in (Phase.OUTPUT, Phase.UNKNOWN):
            return NEVER
        shadow = cap.max_think_tokens if cap is not None and cap.shadow and not cap.reported else NEVER
        return min(self.watch_from, shadow) - state.think_tokens - 1

    @property
    def effective_rank(self) -> int:
        return PHASE_RANK[self.state.phase] if self.rank is None else self.rank

    @property
    def limit(self) -> int | None:
        """Thinking tokens after which an end is forced here, stream or no stream: the smallest cap that is in force."""
        policy = self.default_cap if self.cap is None else None if self.cap.shadow else self.cap.max_think_tokens
        own = self.info.max_think_tokens
        return policy if own is None else own if policy is None else min(own, policy)


def share_step(sequences: list[LiveRequest], skipped: set[LiveRequest], step: int) -> None:
    """Count the steps that each of these requests is left out of in a row. skipped: those that this step leaves out."""
    for live in sequences:
        if live in skipped:
            live.skipped_steps += 1
        else:
            live.joined_step, live.skipped_steps = step, 0


def opened_row(live: LiveRequest) -> tuple[Any, ...]:
    """The fields of RequestOpened, copied so that another thread may read them."""
    i, s = live.info, live.state
    return (live.slot, i, int(s.phase), s.think_tokens, s.output_tokens, live.forced, live.preempted)
