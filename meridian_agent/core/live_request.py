"""Holds one live request as the agent sees it.

Knows no vLLM type beyond opaque references, no policy and no network. Runs on the engine-core thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_BY_CAP, FLAG_BY_RESERVE, FLAG_FORCED, Phase, PhaseState
from meridian_agent.core.request_info import NEVER
from meridian_agent.core.sentences import CERTAIN, newest_end

if TYPE_CHECKING:
    from meridian_agent.core.request_info import RequestInfo
    from meridian_agent.core.sentences import SentenceTable
    from meridian_agent.vllm_types import Request

# Ranks of requests without a decided rank; the control plane's ranks use the same scale (lower is more urgent). If
# phases are not known, all requests have the same rank, so vLLM's own order applies.
PHASE_RANK = {
    Phase.OUTPUT: agent_pb2.PHASE_RANK_UNSPECIFIED,
    Phase.UNKNOWN: agent_pb2.PHASE_RANK_PROMPT,
    Phase.PROMPT: agent_pb2.PHASE_RANK_PROMPT,
    Phase.THINK: agent_pb2.PHASE_RANK_THINK,
}


# Number of ends of thinking for a request whose model has not stopped while it thought.
NEVER_STOPPED = -1


@dataclass(slots=True)
class Cap:
    """A decided cap with its answer reserve, which is 0 for none."""

    decision_id: int
    max_think_tokens: int
    shadow: bool
    answer_reserve_tokens: int = 0
    extended: bool = False
    reported: bool = False


@dataclass(slots=True)
class Ending:
    """A forced end of thinking that has been decided, and how many of its tokens have been generated."""

    tokens: tuple[int, ...]
    decision_id: int
    # A cap or the answer reserve began the forced end: the request's own cap or the control plane's.
    by_cap: bool = False
    # Reason of the forced end, as in ForceEnd; 0 if a cap began it.
    reason: agent_pb2.ForceReason.ValueType = agent_pb2.FORCE_REASON_UNSPECIFIED
    position: int = 0
    # The answer reserve began the forced end, `at_stop` because the model stopped while it thought; `detail` says then
    # how many tokens the end leaves to the answer.
    by_reserve: bool = False
    at_stop: bool = False
    detail: str = ""
    # Number of steps that the end has waited for the end of a number or an abbreviation.
    waited_steps: int = 0

    def advance(self) -> int:
        """Count one more generated token; return the row flags of the last token, and 0 for all others."""
        self.position += 1
        if self.position < len(self.tokens):
            return 0
        by_cap = self.by_cap and not self.at_stop
        return FLAG_FORCED | (FLAG_BY_CAP if by_cap else 0) | (FLAG_BY_RESERVE if self.by_reserve else 0)


class CountedSteps(Protocol):
    """The part of `text_run.TextRun` that its members read."""

    sentences: SentenceTable

    def counted(self, row: int) -> int: ...

    def state(self, row: int) -> int: ...

    def passed(self, row: int, tokens: int, think_tokens: int) -> tuple[int, int] | None: ...


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One live request. `ref` is vLLM's own request object, whose attributes this module does not use."""

    slot: int
    info: RequestInfo
    # Phase and token counts without the counted steps of the run; `state` includes these steps. A run changes no phase.
    own_state: PhaseState
    opened_step: int
    ref: Request
    # Cap and answer reserve (0 for none) from the settings; they apply until the first cap is decided for the request.
    default_cap: int | None = None
    default_reserve: int = 0
    # Whether the request's tokens are measured, and its sentences followed, while it thinks; see Tracker.measure.
    measured: bool = True
    cap: Cap | None = None
    ending: Ending | None = None
    # Tokens of the forced end in the masks of the coming step, by row.
    expected: dict[int, int] = field(default_factory=dict)
    forced: bool = False
    # Number of ends of thinking before the newest thinking in which the model has stopped, NEVER_STOPPED if it has in
    # none.
    stopped_after: int = NEVER_STOPPED
    # A cap or reserve without a decision ended thinking: one of the settings, the request's own, or one from before a
    # freeze or the stream; and the detail of that end.
    capped: bool = False
    capped_detail: str = ""
    # The decided rank; None ranks the request by its phase.
    rank: int | None = None
    # Step of the first report that has the request's current phase; a rank that was decided from an older report is for
    # the previous phase.
    phase_step: int = 0
    # Eviction tier that was decided for the request's KV blocks: (decision id, tier, whether it is in shadow).
    tier: tuple[int, int, bool] | None = None
    preempted: bool = False
    # Time on the lease's clock at which vLLM added the request to its queue; None once the request has joined a step,
    # and if the agent did not see it being added.
    queued_s: float | None = None
    skipped_steps: int = 0
    # Newest step that the request joined, so that requests are left out in fair turns.
    joined_step: int = 0
    # State of the sentence table after the newest token while thinking, else 0, without the counted steps of the run.
    own_sentence: int = 0
    # Number of thinking tokens at the newest known sentence end without a probe, and that token's flags, without the
    # counted steps of the run; used if a step brings several tokens.
    passed: tuple[int, int] = (0, 0)
    # Number of thinking tokens at the newest probe, at which the end of a sentence gets no other one; -1 before the
    # first probe, and if the newest one is not computed after all.
    probed_at: int = -1
    # Number of thinking tokens from which on the coming step may need a forced token.
    watch_from: int = NEVER
    # Number of thinking tokens at which an answer reserve in shadow would have ended thinking.
    shadow_reserved: int = NEVER
    # Likeliest token after the end marker in the newest probe, and the number of probes in a row with this token.
    trial_answer: int = -1
    same_answer: int = 0
    # Time on the monotonic clock until which the request is held for a decision from its probe, and the step of the
    # report with the probe's result, 0 before that report.
    held_until: float = 0.0
    asked_in: int = 0
    # Tokens of the newest forced end that was checked against the request's own parameters, and whether the parameters
    # allow all of them.
    checked: tuple[int, ...] = ()
    allowed: bool = True
    # KV blocks that an answering request had when it was preempted, each with the hash it had then.
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    # The first answer token has been generated; and the thinking tokens that were taken for the count of the engine's.
    answered: bool = False
    taken_think_tokens: int = 0
    # Thinking tokens from before the agent saw the request, and later those that streams have brought.
    told_think_tokens: int = 0
    run: CountedSteps | None = None
    # Row in the run, -1 while the request is not a member; and the tokens counted there that `own_state` includes.
    run_row: int = -1
    applied_tokens: int = 0

    def __post_init__(self) -> None:
        self.told_think_tokens = self.own_state.think_tokens

    @property
    def state(self) -> PhaseState:
        if self.run_row >= 0:
            self._apply_steps()
        return self.own_state

    @property
    def phase(self) -> Phase:
        return self.own_state.phase

    @property
    def _counted_tokens(self) -> int:
        """Number of tokens counted by the run that are not yet applied; reading it costs less than `state`."""
        run, row = self.run, self.run_row
        return run.counted(row) - self.applied_tokens if run is not None and row >= 0 else 0

    @property
    def think_tokens(self) -> int:
        return self.own_state.think_tokens + (self._counted_tokens if self.phase is Phase.THINK else 0)

    @property
    def text_run(self) -> int:
        return self.own_state.text_run + self._counted_tokens

    @property
    def sentence(self) -> int:
        """State of the sentence table after the newest token while thinking, and 0 otherwise."""
        run = self.run
        if run is None or not self._counted_tokens:
            return self.own_sentence
        return run.state(self.run_row) if self.own_state.phase is Phase.THINK else 0

    @property
    def sentence_flags(self) -> int:
        """Flags of the newest token that concern sentences, while thinking, and 0 otherwise."""
        return self.run.sentences.flags[self.sentence] if self.run is not None else 0

    def join_run(self, row: int, tokens: int) -> None:
        """Note that the request is a member of the run from now on. tokens: those counted in its row so far."""
        self.run_row, self.applied_tokens = row, tokens

    def move_in_run(self, row: int) -> None:
        """Note that the request, a member of the run, has another row."""
        # The run keeps the tokens of its newest steps by row.
        self._apply_steps()
        self.run_row = row

    def leave_run(self) -> None:
        """Note that the request is no longer a member of the run."""
        self._apply_steps()
        self.run_row = -1

    def _apply_steps(self) -> None:
        """Apply the counted steps of the run, of which the request is a member."""
        if (tokens := self._counted_tokens) and self.run is not None:
            state, self.own_sentence = self.own_state, self.sentence
            self.applied_tokens += tokens
            state.text_run += tokens
            if state.phase is Phase.THINK:
                state.think_tokens += tokens
                self.passed = self.run.passed(self.run_row, tokens, state.think_tokens) or self.passed
            elif state.phase is Phase.OUTPUT:
                state.output_tokens += tokens
            else:
                state.unknown_tokens += tokens

    def opened_row(self) -> tuple[Any, ...]:
        """Return the fields of RequestOpened, copied so that another thread may read them."""
        s, queued = self.state, self.queued_s is not None
        tokens = int(s.phase), s.think_tokens, s.output_tokens, self.untold_think_tokens
        decided = self.cap is not None and self.cap.extended, self.ending.reason if self.ending else 0
        return (self.slot, self.info, *tokens, *decided, self.forced, self.preempted, queued, not self.measured)

    # ----------------------------------------------------------------------------------------------- caps and endings

    def set_cap(self, cap: Cap | None) -> None:
        """Put a decided cap in force, or no cap if None; the default cap and reserve no longer apply."""
        self.cap, self.default_cap, self.default_reserve = cap, None, 0
        self.shadow_reserved = NEVER

    def note_shadow_reserve(self, think_tokens: int) -> None:
        """Note where the answer reserve in shadow would end the thinking that the request is in, if it was not reached
        before."""
        if self.own_state.think_tokens < self.shadow_reserved:
            self.shadow_reserved = think_tokens

    def void_decisions(self) -> None:
        """Keep the cap and the forced end in force, but detach them from their decisions, so that no outcome is
        reported."""
        if self.cap is not None:
            self.cap.decision_id, self.cap.reported = 0, True
        if self.ending is not None:
            self.ending.decision_id = 0

    @property
    def has_stopped(self) -> bool:
        """Whether the model has stopped in the thinking that the request is in, and that stop was taken back."""
        return self.stopped_after == self.state.ends

    def credit_forced_end(self, decision_id: int) -> None:
        """Attribute a forced end that the default cap began to this decision."""
        if self.ending is not None and self.ending.by_cap and not self.ending.decision_id:
            self.ending.decision_id = decision_id

    def expect_forced_end(self, first_row: int, rows: int) -> dict[int, int]:
        """Note and return the next tokens of the forced end by row, from `first_row` on, for a step with `rows`
        rows."""
        ending = self.ending
        left = ending.tokens[ending.position :] if ending is not None else ()
        self.expected = {first_row + i: token for i, token in enumerate(left) if first_row + i < rows}
        return self.expected

    def complete_forced_end(self) -> None:
        """Note that all tokens of the forced end have been generated."""
        ending, self.ending = self.ending, None
        self.forced, self.capped = True, ending is not None and ending.by_cap and not ending.decision_id
        self.capped_detail = ending.detail if ending is not None else ""

    def drop_forced_end(self) -> None:
        """Drop the forced end; tokens that were written into masks are not counted for it any more."""
        self.ending, self.expected = None, {}

    # ------------------------------------------------------------------------------------------ order, share and tiers

    def enter_phase(self, known_from: int) -> None:
        """Drop the rank, because the phase has changed. known_from: step of the first report that has the new phase."""
        self.rank, self.phase_step = None, known_from

    def count_step(self, step: int, left_out: bool) -> None:
        """Count a step that the request joins, or how many steps in a row have left it out."""
        if left_out:
            self.skipped_steps += 1
        else:
            self.joined_step, self.skipped_steps = step, 0

    def leave_queue(self, now_s: float) -> float | None:
        """Note that the request joins a step; return the seconds that it has waited if that is its first one, and None
        if it has joined a step before or the time is not known. now_s: time at which the step's schedule began."""
        queued_s, self.queued_s = self.queued_s, None
        return None if queued_s is None else max(0.0, now_s - queued_s)

    def take_tier(self) -> tuple[int, int, bool] | None:
        """Clear the eviction tier and return it; None if no tier was decided."""
        tier, self.tier = self.tier, None
        return tier

    # -------------------------------------------------------------------------------------------------------- probes

    def hold_until(self, deadline_s: float) -> None:
        """Hold the request for a decision from its probe, until this time on the monotonic clock at the latest."""
        self.held_until, self.asked_in = deadline_s, 0

    def count_same_answer(self, answer: int) -> int:
        """Note the likeliest token of a probe; return the number of probes in a row with this token."""
        self.same_answer = self.same_answer + 1 if answer == self.trial_answer else 1
        self.trial_answer = answer
        return self.same_answer

    # ------------------------------------------------------------------------------------------------------- tokens

    def take_think_tokens(self) -> int:
        """Return the thinking tokens since the last call; below 0 if a marker has taken tokens back."""
        before, self.taken_think_tokens = self.taken_think_tokens, self.think_tokens
        return self.taken_think_tokens - before

    @property
    def untold_think_tokens(self) -> int:
        """Thinking tokens that no stream before the present one has brought."""
        return max(0, self.think_tokens - self.told_think_tokens)

    def reread(
        self, state: PhaseState, sentence: int, default_cap: int | None, default_reserve: int, *, known_from: int
    ) -> None:
        """Replace the state, because the request's tokens have been read with other markers. sentence: the sentence
        table's state. known_from: step of the first report that has the new phase."""
        self.own_state = state
        self.enter_phase(known_from)
        # The defaults that the request began with may be from settings that are no longer in force.
        self.default_cap, self.default_reserve = (default_cap, default_reserve) if self.cap is None else (None, 0)
        self.own_sentence, self.passed, self.probed_at = sentence, (0, 0), -1

    def since_end(self, flags: int, most: int, enough: int = CERTAIN) -> int | None:
        """Return the number of tokens after the newest end of a sentence with these flags; None if there are more than
        `most`. The end may become known one token later. enough: as in `sentences.newest_end`."""
        if not flags:
            return 0
        newest = newest_end(self.sentence_flags, enough)
        if newest is not None and newest[1] & flags == flags:
            return newest[0] if newest[0] <= most and not self.is_probed(newest[0]) else None
        self._apply_steps()
        at, passed = self.passed
        tokens = self.think_tokens - at
        return tokens if passed & flags == flags and tokens <= most and not self.is_probed(tokens) else None

    def is_probed(self, past: int) -> bool:
        """Return whether a probe has been placed so many tokens before the newest one, or after that."""
        return self.think_tokens - past <= self.probed_at

    def text_tokens(self) -> int:
        """Return how many tokens of text may come before a cap must be checked or a shadowed cap is reached; 0 if that
        may happen with the next token."""
        state, cap = self.state, self.cap
        if state.phase is Phase.PROMPT or self.ending is not None:
            return 0
        if state.phase in (Phase.OUTPUT, Phase.UNKNOWN):
            return NEVER
        if cap is None or not cap.shadow or cap.reported:
            return self.watch_from - state.think_tokens - 1
        return min(self.watch_from, cap.max_think_tokens, self.shadow_reserved) - state.think_tokens - 1

    @property
    def effective_rank(self) -> int:
        rank = self.rank
        return PHASE_RANK[self.own_state.phase] if rank is None else rank

    @property
    def limit(self) -> int | None:
        """The smallest cap in force, in thinking tokens, with or without a stream; None for no cap."""
        policy = self.default_cap if self.cap is None else None if self.cap.shadow else self.cap.max_think_tokens
        own = self.info.max_think_tokens
        return policy if own is None else own if policy is None else min(own, policy)

    @property
    def reserve_tokens(self) -> int:
        """The answer reserve in force, 0 for none."""
        return self.default_reserve if self.cap is None else 0 if self.cap.shadow else self.cap.answer_reserve_tokens


class OtherAnswers:
    """Tells whether the trial answers of different requests differ, and keeps two of them for that."""

    def __init__(self) -> None:
        self._request_id = ""
        # The newest trial answer, and that of the request that was probed before that one; None for none.
        self._newest: int | None = None
        self._before: int | None = None

    def is_other(self, request_id: str, answer: int) -> bool:
        """Note a request's trial answer; return whether the request that was probed before it has another one."""
        if request_id != self._request_id:
            self._request_id, self._before = request_id, self._newest
        self._newest = answer
        return self._before not in (None, answer)
