"""Turns forced ends of thinking into token masks: finds the requests whose end is due in a step, and makes mask rows
that allow only the forced token.

Keeps no state from step to step: `directives` has the forced ends, and vLLM's own masks stay as they are. Runs on the
engine-core thread, between a step's forward pass and its sampling.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_agent.core.phases import Phase
from meridian_agent.core.think_limit import is_limited, limit_in, may_lengthen
from meridian_agent.vllm_adapter import request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.vllm_types import GrammarOutput, SchedulerOutput


class TokenMasks:
    """The token masks of one engine. words: length of a mask row in words of 32 tokens. grammar_covers_thinking: vLLM's
    grammars constrain thinking, too, and not the answer only."""

    def __init__(
        self, tracker: Tracker, directives: Directives, words: int, grammar_covers_thinking: bool = False
    ) -> None:
        self._tracker, self._directives, self._words = tracker, directives, words
        self._grammar_covers_thinking = grammar_covers_thinking

    def waits_for_tokens(self, output: SchedulerOutput) -> bool:
        """Return whether a request may need a forced token in this step once the previous step's output has been
        processed. output: the SchedulerOutput of the step."""
        near = (live for live in self._tracker.due if _waits(live, output) and self._end_is_near(live))
        return any(self._may_end(live, _under_way(live)) and not self._is_under_way(live) for live in near)

    def drop_unknown_drafts(self) -> None:
        """Remove draft tokens that only the workers know from requests near their limit, because such a draft token may
        be the model's own end marker."""
        for live in self._tracker.due:
            if is_limited(live) and any(token < 0 for token in live.ref.spec_token_ids):
                # The request gets a new list, because vLLM shares its list between many requests.
                live.ref.spec_token_ids = []

    def with_ends(
        self, output: SchedulerOutput, base: GrammarOutput | None, *, settled: bool = True
    ) -> GrammarOutput | None:
        """Return the step's token masks with a forced token for every request whose thinking ends now.

        output: the SchedulerOutput of the step. base: vLLM's own masks, or None. settled: the output of all steps
        before this one has been processed; if not, no end is forced in a request that was in one of them.
        """
        forced: dict[str, dict[int, int]] = {}
        for live in [*self._tracker.due, *self._drafted_to_think(output)]:
            request_id = live.info.request_id
            if request_id not in output.num_scheduled_tokens or live.ref.is_prefill_chunk or not self._may_end(live):
                continue
            if not settled and _waits(live, output):
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            tokens = self._directives.forced_tokens(live, 1 + len(drafts), drafts)
            if tokens and not self._grammar_covers_thinking and _is_constrained(output, base, request_id, min(tokens)):
                self._directives.refuse_end(live, "a grammar constrains the answer")
                continue
            # The rest of a marker that the model has begun may have other tokens than the ending that is checked above.
            if (
                tokens
                and (not self._grammar_covers_thinking or _grammar_allows(output, base, live, tokens, drafts))
                and not request_api.never_allows(live.ref, [*tokens.values()])
                and not request_api.not_yet_allows(live.ref, [*tokens.values()], 0)
            ):
                forced[request_id] = tokens
            else:
                live.expected = {}
        return self._merge(output, base, forced) if forced else base

    def may_force(self, live: LiveRequest) -> bool:
        """Return whether a forced end can be written into the thinking of a request: its own parameters allow the
        tokens, and no grammar constrains its thinking, nor the answer whose text has a marker."""
        constrained = self._grammar_covers_thinking and live.ref.structured_output_request is not None
        return not (constrained or request_api.grammar_holds(live.ref)) and self._may_end(live)

    def _may_end(self, live: LiveRequest, unknown: int = 0) -> bool:
        """Return whether the request's own parameters allow the tokens of a forced end, because the only token of a
        mask must be allowed. unknown: number of tokens that the request may have generated in steps whose output is
        still to come."""
        markers, start = self._tracker.markers, live.own_state.start
        if live.checked != (ending := markers.ending_of(start)):
            # A stop token in the closing text would end the request without an answer.
            text = ending[: len(ending) - len(markers.end_of(start))]
            forbidden = request_api.never_allows(live.ref, ending) or request_api.stops_at(live.ref, text)
            live.checked, live.allowed = ending, not forbidden
        return live.allowed and not request_api.not_yet_allows(live.ref, ending, unknown)

    def _is_under_way(self, live: LiveRequest) -> bool:
        """Return whether the previous step certainly writes the last token of a forced end."""
        if live.ending is None or self._tracker.lookahead > 1:
            return False
        return live.ending.position + len(live.expected) == len(live.ending.tokens)

    def _end_is_near(self, live: LiveRequest) -> bool:
        """Return whether a due request's thinking may have to end in the step that was just scheduled, however many
        tokens the previous step brings."""
        limit = limit_in(live, live.state, self._tracker.markers)
        most = live.state.think_tokens + _under_way(live)
        near = limit is not None and most >= limit.tokens - may_lengthen(self._tracker.markers, limit)
        return live.ending is not None or near

    def _drafted_to_think(self, output: SchedulerOutput) -> list[LiveRequest]:
        """Return the requests that do not think now but may begin to think within their draft tokens, where a limit may
        be reached."""
        may_think, drafted = list["LiveRequest"](), output.scheduled_spec_decode_tokens
        starts_and_ends = self._tracker.markers.by_last.keys()
        if starts_and_ends.isdisjoint(chain.from_iterable(drafted.values())):
            return may_think
        for request_id, drafts in drafted.items():
            live = self._tracker.by_id.get(request_id)
            if live is None or not is_limited(live) or live.phase is Phase.THINK:
                continue
            if not starts_and_ends.isdisjoint(drafts):
                may_think.append(live)
        return may_think

    def _merge(
        self, output: SchedulerOutput, base: GrammarOutput | None, forced: dict[str, dict[int, int]]
    ) -> GrammarOutput:
        """Return `base` with rows for the forced requests; a request has one row and another row for each of its draft
        tokens."""
        own = list(base.structured_output_request_ids) if base is not None else []
        words = base.grammar_bitmask.shape[1] if base is not None else self._words
        parts: list[Any] = [base.grammar_bitmask] if base is not None else []
        added = [r for r in forced if r not in own]
        drafts = output.scheduled_spec_decode_tokens
        rows = {r: 1 + len(drafts.get(r, ())) for r in [*own, *added]}
        parts.append(np.full((sum(rows[r] for r in added), words), -1, dtype=np.int32))
        mask = np.concatenate(parts)
        at = 0
        for request_id, count in rows.items():
            for row, token in forced.get(request_id, {}).items():
                mask[at + row] = 0
                mask[at + row, token // 32] = np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)
            at += count
        masks: GrammarOutput = scheduler_api.grammar_output([*own, *added], mask, base)
        return masks


def _under_way(live: LiveRequest) -> int:
    """Return how many tokens may still come before the last token of the step that was just scheduled: the previous
    step's tokens, and the draft tokens of both steps."""
    return max(0, int(live.ref.num_output_placeholders) - 1)


def _waits(live: LiveRequest, output: SchedulerOutput) -> bool:
    """Return whether a request is in the step that was just scheduled, and steps before it may still bring it
    tokens."""
    request_id = live.info.request_id
    own = 1 + len(output.scheduled_spec_decode_tokens.get(request_id, ()))
    return request_id in output.num_scheduled_tokens and (live.preempted or live.ref.num_output_placeholders > own)


def _own_rows(output: SchedulerOutput, base: GrammarOutput | None, request_id: str) -> Any:
    """Return the rows of vLLM's own masks from the first one of a request on; None if the request has none."""
    if base is None or request_id not in (own := base.structured_output_request_ids):
        return None
    drafts = output.scheduled_spec_decode_tokens
    first = sum(1 + len(drafts.get(before, ())) for before in own[: own.index(request_id)])
    return base.grammar_bitmask[first:]


def _is_constrained(output: SchedulerOutput, base: GrammarOutput | None, request_id: str, first: int) -> bool:
    """Return whether a grammar constrains the first row to force. For vLLM such a row belongs to the answer, where a
    grammar that allows the marker, as in a text of JSON, would take it as content. A later row may be constrained only
    because a draft token before it, which the forced token replaces, ends thinking."""
    rows = _own_rows(output, base, request_id)
    return rows is not None and bool((rows[first] != -1).any())


def _grammar_allows(
    output: SchedulerOutput,
    base: GrammarOutput | None,
    live: LiveRequest,
    tokens: dict[int, int],
    drafts: Sequence[int],
) -> bool:
    """Return whether a request's grammar allows the tokens to force in its rows, because vLLM ends a request with an
    error on a token that its grammar rejects. An end that has not begun must be allowed as a whole."""
    rows = _own_rows(output, base, live.info.request_id)
    if rows is None:
        return True
    if not all(rows[row, token // 32] >> token % 32 & 1 for row, token in tokens.items()):
        return False
    if live.ending is None or live.ending.position > 0:
        return True
    whole = [*drafts[: min(tokens)], *live.ending.tokens]
    return request_api.grammar_takes(live.ref, whole)
