"""Finds where the agent has to end a request's thinking: at the smallest cap in force, or where the answer's reserve of
tokens begins.

All functions are pure. They run on the engine-core thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.phases import FLAG_END, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.phases import Markers, PhaseState


class ThinkLimit(NamedTuple):
    """Number of thinking tokens after which the agent ends thinking. by_reserve: the answer reserve sets the limit, not
    a cap."""

    tokens: int
    by_reserve: bool = False


# A reserve, with the forced end before it, takes at most one token in this many of those that a call may generate.
CALL_SHARE = 4


def held_back(state: PhaseState, markers: Markers, reserve_tokens: int, most_tokens: int) -> int:
    """Return how many tokens of an answer reserve hold in a call that may generate `most_tokens`.

    A call that may generate few tokens keeps three quarters of them for thinking, so that a reserve seldom shortens
    thinking after which the model would have answered in time. A client that samples in pieces makes many calls for one
    answer, as beam search does with a call for each token, so nothing is held back from a call that goes on with the
    thinking of an earlier one.
    """
    if state.continues:
        return 0
    return max(0, min(reserve_tokens, most_tokens // CALL_SHARE - len(markers.ending_of(state.start))))


def reserved_at(state: PhaseState, markers: Markers, reserve_tokens: int, most_tokens: int) -> int:
    """Return the number of thinking tokens after which thinking has to end, so that `reserve_tokens` of the
    `most_tokens` that the request may generate are left after the forced end; at least the thinking tokens of `state`.

    If markers have one token, the number is the same for all states of a run of thinking tokens.
    """
    left = most_tokens - reserve_tokens - _room(state, markers) - state.generated_tokens
    return state.think_tokens + max(0, left)


def _room(state: PhaseState, markers: Markers) -> int:
    """Return the number of tokens for which there must be room in `state`, so that thinking can still end in time if
    the model goes on: at least those of a whole forced end, because the model may break off a marker that it has begun.

    If the model has begun an end marker that may still turn out to be a start marker, the next token may make the
    forced end longer, because a forced end completes a start marker first.
    """
    whole = len(markers.ending_of(state.start))
    if markers.longest == 1:
        return whole
    now = len(state.ending(markers))
    return now if now > whole else whole + max(0, len(state.opening(markers)) - 1)


def may_lengthen(markers: Markers, limit: ThinkLimit) -> int:
    """Return by how many tokens earlier than at `limit` thinking may have to end after the next tokens, because the
    beginning of a marker makes the forced end longer."""
    return markers.longest - 1 if limit.by_reserve else 0


def limit_in(live: LiveRequest, state: PhaseState, markers: Markers) -> ThinkLimit | None:
    """Return the limit of a request if the request is in `state`, with or without a stream; None for no limit. If a cap
    and the answer reserve end thinking at the same token, the cap does."""
    cap, reserve, most = live.limit, live.reserve_tokens, live.info.most_tokens
    if not reserve or not (reserve := held_back(state, markers, reserve, most)):
        return None if cap is None else ThinkLimit(cap)
    reserved = reserved_at(state, markers, reserve, most)
    return ThinkLimit(cap) if cap is not None and cap <= reserved else ThinkLimit(reserved, True)


def is_limited(live: LiveRequest) -> bool:
    """Return whether a cap or an answer reserve is in force for a request."""
    return live.limit is not None or live.reserve_tokens > 0


def watch_shadow(live: LiveRequest, markers: Markers) -> None:
    """Note for a thinking request where an answer reserve in shadow would end its thinking."""
    cap, state, most = live.cap, live.state, live.info.most_tokens
    if cap is None or not cap.shadow or cap.reported:
        return
    if reserve := held_back(state, markers, cap.answer_reserve_tokens, most):
        live.note_shadow_reserve(reserved_at(state, markers, reserve, most))


def first_due_row(
    live: LiveRequest, rows: int, drafts: Sequence[int], markers: Markers
) -> tuple[int, PhaseState, ThinkLimit] | None:
    """Return the first row of a step before which the request thinks and has reached its limit, with its state and its
    limit there; None if no row is known to get there.

    drafts: draft tokens of the rows, negative if only the workers know a draft token.
    """
    state = live.state.copy()
    for row in range(rows):
        limit = limit_in(live, state, markers)
        if limit is not None and state.phase is Phase.THINK and state.think_tokens >= limit.tokens:
            return row, state, limit
        if row == len(drafts) or drafts[row] < 0:
            return None
        state.feed(drafts[row], markers)
    return None


def ending_tokens(state: PhaseState, markers: Markers, most: int) -> tuple[int, ...]:
    """Return the tokens that a forced end writes in `state`.

    most: number of tokens that the answer reserve leaves to the end. A forced end completes a start marker that the
    model has just begun. If these tokens would be missing in the answer, the end is written without them, provided that
    it still reads as one end marker.
    """
    tokens, plain = state.ending(markers), markers.ending_of(state.start)
    return plain if len(tokens) > max(most, len(plain)) and _reads_as_end(state, plain, markers) else tokens


def _reads_as_end(state: PhaseState, tokens: Sequence[int], markers: Markers) -> bool:
    """Return whether these tokens end thinking, and whether no marker is read before their last one."""
    state = state.copy()
    flags = [state.feed(token, markers)[1] for token in tokens]
    return not any(flags[:-1]) and bool(flags[-1] & FLAG_END)


def reserve_note(left_tokens: int, most_tokens: int, reserve_tokens: int) -> str:
    """Return the detail of the outcome of an end that the answer reserve forces. left_tokens: tokens that the end
    leaves to the answer, of the `most_tokens` that the request may generate."""
    left = max(0, left_tokens)
    if left >= reserve_tokens:
        return f"answer_reserve_tokens: {left} of {most_tokens} tokens are left for the answer"
    return f"answer_reserve_tokens: {reserve_tokens} tokens do not fit, {left} of {most_tokens} are left for the answer"


def stop_note(left_tokens: int, most_tokens: int) -> str:
    """Return the detail of the outcome of an end that replaces a stop of the model. Arguments: as in `reserve_note`."""
    return f"the model stopped while it thought, {left_tokens} of {most_tokens} tokens are left for the answer"
