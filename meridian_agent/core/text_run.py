"""Counts the steps of all requests that generate nothing but text, at a cost that hardly grows with their number.

Nearly all tokens belong to such a run. A counted step is applied to a request when a caller reads the request's state
or the request leaves the run, at the latest when it comes near its cap. Requests join and leave one by one, so an end
of one request costs the others nothing. With drafts a step may bring each request several tokens. Runs on the
engine-core thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import add
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from meridian_agent.core.phases import Phase
from meridian_agent.core.request_info import NEVER
from meridian_agent.core.sentences import CERTAIN, ENDED, NO_SENTENCES, NO_STATES, States, StepStates, newest_end

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_signals import SignalBytes

# The token of a row that has no new tokens, or more than a step may bring.
NO_TOKEN = -1
# A plain number, because the members of an enumeration take longer to compare with.
THINK = int(Phase.THINK)
# A character that an id never has if the client has sent it in a header.
SEPARATOR = "\0"

# Number of steps of which nobody need read the sentence table's states. It is larger than the number that a report
# merges by default, because the link's thread reads all steps of a report at once, which costs less than one by one.
MAX_UNREAD_STEPS = 32
# A token that ends a sentence: the number of thinking tokens up to it, and its sentence and paragraph flags.
Passed: TypeAlias = tuple[int, int]
# The flags of a token for which a probe waits; and the flag with which the newest token counts as the end of a
# sentence, as in `sentences.newest_end`.
Awaited: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class Several:
    """The tokens of a step that brought a row several tokens: all of them, and by row their number and the place behind
    the row's last one. states: states of the sentence table after each token."""

    tokens: list[int]
    lengths: list[int]
    ends: list[int]
    states: States = NO_STATES
    # By row in whose tokens a sentence is known to have ended, the number of tokens after the newest such end and its
    # flags; None until somebody asks.
    flagged: dict[int, tuple[int, int]] | None = None
    # Rows whose requests became members after the step, which were looked at one by one in it.
    joined: set[int] = field(default_factory=set)

    def of(self, row: int) -> list[int]:
        return self.tokens[self.ends[row] - self.lengths[row] : self.ends[row]]


def several_of(sampled: Sequence[Sequence[int]]) -> Several:
    """Return the tokens of a step. sampled: the new tokens of each row."""
    lengths = [len(new) for new in sampled]
    # The tokens are copied, because the lists also belong to the outputs for the clients.
    return Several(list(chain.from_iterable(sampled)), lengths, list(accumulate(lengths)))


class TextRun:
    """The members of the run of one engine, by the runner's rows; the tracker keeps one object.

    tokens_per_step: largest number of tokens that a step may bring a request. request_ids: ids of the newest step's
    rows. slots, phases, rows: columns of the members, in the order of the rows; lengths: number of tokens that the
    newest step brought each of them, empty if one each. These lists never change once they are made. steps: number of
    steps counted so far. number: a number that changes whenever a member, its row or the set of live requests changes.
    """

    def __init__(self, tokens_per_step: int = 1) -> None:
        self.tokens_per_step = tokens_per_step
        self.request_ids: list[str] = []
        # The ids as one text, None if that text could be another list's, too.
        self._joined: str | None = None
        self.slots: list[int] = []
        self.phases: list[int] = []
        self.rows: list[int] = []
        self.lengths: Sequence[int] = ()
        # The machine that finds the ends of sentences; its state by row after the row's newest token; and its states
        # after the tokens that the newest counted step brought the members, in the order of these tokens. States are
        # kept while a member thinks; `unread` is the number of newest steps whose states nobody has read.
        self.sentences = NO_SENTENCES
        self._states, self.text_states = NO_STATES, NO_STATES
        self._unread = 0
        # The newest token of each row, and the one before it; None if some row has, or may have, another one.
        self._newest: Sequence[int] | None = None
        self._before: Sequence[int] | None = None
        self.steps = 0
        self.number = 1
        # Number of members, and whether the newest step had no other live requests.
        self.members = 0
        self.whole = False
        # Whether a member thinks that is measured, so that its sentences are followed; and the member of each row, None
        # for a row whose request is not a member.
        self._follows = False
        self._by_row: list[LiveRequest | None] = []
        # With drafts, the newest counted steps, oldest first, None for one that brought each row one token; and by row
        # the counted tokens beyond one in each step.
        self._recent = deque[Several | None](maxlen=tokens_per_step if tokens_per_step > 1 else 0)
        self._beyond: list[int] = []
        # Slot and phase of each row's member, and whether the columns are older than the members.
        self._slots: list[int] = []
        self._phases: list[int] = []
        self._stale = False
        # A member may come near a cap, which must be checked, once this many steps are counted; less as soon as a step
        # has brought several tokens.
        self._steps_until_cap = NEVER

    def changed(self) -> None:
        """Note that something has changed for the live requests."""
        self.number += 1

    def has_rows(self, request_ids: list[str]) -> bool:
        """Return whether these are the ids of the newest step's rows."""
        known = self.request_ids
        if self._joined is None or len(request_ids) != len(known) or not known or request_ids[0] is known[0]:
            # A worker in this process names the same objects again, whose texts need not be read.
            return request_ids == known
        # To compare one text takes less time than to compare all ids, whose old texts are no longer in the caches.
        return SEPARATOR.join(request_ids) == self._joined

    def arrange(self, request_ids: list[str]) -> None:
        """Give the members the rows that their requests have in a new step, which differ from those in the newest step;
        members without a row there leave."""
        known = self.request_ids
        self.changed()
        self._stale, self._newest = True, None
        rows = [row for row, (new, old) in enumerate(zip(request_ids, known, strict=False)) if new != old]
        both = min(len(request_ids), len(known))
        moved = {}
        for row in (*rows, *range(both, len(known))):
            if (live := self._by_row[row]) is not None:
                moved[known[row]] = live
        more = len(request_ids) - both
        beyond = [*self._beyond[:both], *[0] * more]
        had = self._states.get()
        states = np.concatenate((had[:both], np.zeros(max(0, more), np.uint32)))
        self._slots, self._phases = [*self._slots[:both], *[0] * more], [*self._phases[:both], *[0] * more]
        by_row: list[LiveRequest | None] = [*self._by_row[:both], *[None] * more]
        for row in (*rows, *range(both, len(request_ids))):
            by_row[row] = live = moved.pop(request_ids[row], None)
            if live is not None:
                beyond[row] = self._beyond[live.run_row]
                states[row] = had[live.run_row]
                self._slots[row], self._phases[row] = live.slot, int(live.own_state.phase)
                live.move_in_run(row)
        self.members -= len(moved)
        for live in moved.values():
            live.leave_run()
        # The ids are copied, because the runner may change its own list.
        self.request_ids, self._by_row = list(request_ids), by_row
        self._beyond, self._states = beyond, States(states)
        joined = SEPARATOR.join(request_ids)
        self._joined = joined if joined.count(SEPARATOR) < max(1, len(request_ids)) else None

    def join(self, live: LiveRequest, row: int) -> None:
        """Let a request join whose new tokens are read, unless it is in its prompt, is being ended, or is near its
        cap."""
        if (left := live.text_tokens()) < self.tokens_per_step:
            return
        self.changed()
        self._by_row[row], self._stale, self._newest = live, True, None
        self._slots[row], self._phases[row] = live.slot, int(live.own_state.phase)
        self.members += 1
        states = self._states.get().copy()
        states[row] = live.own_sentence
        self._states = States(states)
        if self._recent and (several := self._recent[-1]) is not None:
            several.joined.add(row)
            if several.flagged is not None:
                several.flagged.pop(row, None)
        live.join_run(row, self.counted(row))
        self._watch(left)

    def watch(self, live: LiveRequest) -> None:
        """Let a member leave if it is being ended or near its cap, which may have changed; do nothing if the request is
        not a member."""
        if live.run_row < 0:
            return
        if (left := live.text_tokens()) < self.tokens_per_step:
            self.leave(live)
        else:
            self._watch(left)

    def _watch(self, left: int) -> None:
        """Check the caps before a member has got as many tokens of text as are left to it."""
        self._steps_until_cap = min(self._steps_until_cap, self.steps + left - (self.tokens_per_step - 1))

    def leave(self, live: LiveRequest) -> None:
        """Let a request leave, because something is about to change for it; do nothing if it is not a member."""
        if (row := live.run_row) >= 0:
            live.leave_run()
            self._by_row[row] = None
            self.members -= 1
            self._stale, self.whole = True, False
            self.changed()

    def leave_rows(self, rows: Collection[int]) -> None:
        """Let the members of these rows leave."""
        for row in rows:
            if (live := self._by_row[row]) is not None:
                self.leave(live)

    def end(self) -> None:
        """Let all members leave."""
        self.leave_rows(range(len(self._by_row)))

    def ready(self) -> list[int]:
        """Let the members leave that are near a cap, and bring the columns up to date; return the rows of the newest
        step whose requests are not members."""
        if self.steps >= self._steps_until_cap:
            self._check_caps()
        if self._stale:
            return self._renew_columns()
        return self._others()

    def _others(self) -> list[int]:
        """Return the rows of the newest step whose requests are not members."""
        if self.members == len(self._by_row):
            return []
        return [row for row, live in enumerate(self._by_row) if live is None]

    def _renew_columns(self) -> list[int]:
        """Make the columns anew, and return the rows whose requests are not members, which are few."""
        self._stale, others = False, self._others()
        rows, slots, phases = [*range(len(self._by_row))], [*self._slots], [*self._phases]
        for row in reversed(others):
            del rows[row], slots[row], phases[row]
        self.rows, self.slots, self.phases = rows, slots, phases
        self._follows = any(
            live is not None and live.measured and phase == THINK
            for live, phase in zip(self._by_row, self._phases, strict=True)
        )
        if not self._follows:
            self._states = States(np.zeros(len(self._by_row), np.uint32))
        return others

    def _check_caps(self) -> None:
        left = {live: live.text_tokens() for live in self._by_row if live is not None}
        for live, tokens in left.items():
            if tokens < self.tokens_per_step:
                self.leave(live)
        stay = (tokens for tokens in left.values() if tokens >= self.tokens_per_step)
        self._steps_until_cap = self.steps + min(stay, default=NEVER) - (self.tokens_per_step - 1)

    def count_all(
        self, request_ids: list[str], sampled: Sequence[Sequence[int]], markers: AbstractSet[int]
    ) -> list[int] | None:
        """Count a step that brought the live requests of the newest step, in the same rows, text and nothing else, and
        return its tokens, row by row. Return None, and nothing has happened, for any other step, and if one of the
        requests is not a member or is near a cap.

        request_ids: ids in the order of the runner's rows. sampled: the new tokens of each row. markers: the tokens
        that are not text.
        """
        rows = len(request_ids)
        if not self.whole or rows != self.members or rows != len(sampled):
            return None
        if self.steps >= self._steps_until_cap or not self.has_rows(request_ids):
            return None
        try:
            tokens = [token for (token,) in sampled]
        except ValueError:
            return self._count_all_several(several_of(sampled), markers)
        if not markers.isdisjoint(tokens):
            return None
        if self._stale:
            self._renew_columns()
        self.count_text(tokens)
        return tokens

    def count_text(self, tokens: Sequence[int]) -> None:
        """Count a step with the rows of the newest step, all of them members, that brought each of them one token of
        text. tokens: by row."""
        self._count_one_each(tokens)
        self.text_states = self._states

    def steps_to_cap(self) -> int:
        """Return the number of coming steps with one token in each row in which no member comes near a cap."""
        return self._steps_until_cap - self.steps

    def _count_one_each(self, tokens: Sequence[int]) -> None:
        self.steps += 1
        self._before, self._newest = self._newest, tokens
        if self._follows:
            self._add_states(StepStates(self._states, self.sentences, tokens))
        if self.tokens_per_step > 1:
            self.lengths = ()
            self._recent.append(None)

    def _count_all_several(self, several: Several, markers: AbstractSet[int]) -> list[int] | None:
        tokens, lengths = several.tokens, several.lengths
        if min(lengths) < 1 or max(lengths) > self.tokens_per_step or not markers.isdisjoint(tokens):
            return None
        if self._stale:
            self._renew_columns()
        self._count_several(several)
        self.lengths, self.text_states = lengths, several.states
        return tokens

    def _count_several(self, several: Several) -> None:
        self.steps += 1
        self._newest = None
        self._steps_until_cap -= max(several.lengths) - 1
        several.states, states = self._read_several(several, self._states)
        self._add_states(states)
        self._beyond = [tokens - 1 for tokens in map(add, self._beyond, several.lengths)]
        self._recent.append(several)

    def _add_states(self, states: States) -> None:
        """Note the rows' states after a step. They are read when somebody asks, or at last when many steps are
        unread."""
        self._states = states
        self._unread += 1
        if self._unread > MAX_UNREAD_STEPS:
            self.read()

    def read(self) -> None:
        """Compute the rows' states after the newest step."""
        self._states.get()
        self._unread = 0

    def _read_several(self, several: Several, before: States) -> tuple[States, States]:
        """Return the states after each token of a step, and after the newest token of each row. before: the rows'
        states before the step."""
        if not self._follows:
            return States(np.zeros(len(several.tokens), np.uint32)), before
        table, most = self.sentences, self.tokens_per_step

        def each(states: NDArray[np.uint32]) -> NDArray[np.uint32]:
            after, states = np.zeros(len(several.tokens), np.uint32), states.copy()
            classes, lengths = table.classes_of(several.tokens), np.array(several.lengths)
            begins = np.array(several.ends) - lengths
            for place in range(min(most, lengths.max())):
                rows = (lengths > place).nonzero()[0]
                at = begins[rows] + place
                states[rows] = after[at] = table.steps(states[rows], classes[at])
            return after

        def newest(after: NDArray[np.uint32]) -> NDArray[np.uint32]:
            states, lengths = before_step.get().copy(), np.array(several.lengths)
            rows = (lengths > 0).nonzero()[0]
            states[rows] = after[np.array(several.ends)[rows] - 1]
            return states

        before_step = before
        after = States(None, before, each)
        return after, States(None, after, newest)

    def count(self, tokens: Sequence[int], several: Several | None = None) -> Sequence[int]:
        """Count a step; return the members' tokens, in the order of their rows. tokens: the newest token of each row,
        of text for each member. several: all tokens, None if each row has one. Called only after `ready`."""
        if several is not None:
            self._count_several(several)
            self.lengths = [several.lengths[row] for row in self.rows]
            spans = [(several.ends[row] - several.lengths[row], several.ends[row]) for row in self.rows]
            places = [at for begin, end in spans for at in range(begin, end)]
            self.text_states = States(None, several.states, lambda states: states[places])
            return [several.tokens[at] for at in places]
        self._count_one_each(tokens)
        if self.members == len(tokens):
            self.text_states = self._states
            return tokens
        rows = self.rows
        self.text_states = States(None, self._states, lambda states: states[rows])
        return [tokens[row] for row in self.rows]

    def lengths_for(self, signals: SignalBytes | None) -> Sequence[int]:
        """Return the lengths of the newest step for its record. signals: the worker's; if they have a row for each
        draft token, too, the record needs lengths even if each member has one token."""
        return self.lengths or ([1] * self.members if isinstance(signals, tuple) else ())

    def counted(self, row: int) -> int:
        """Return the number of tokens that are counted for a member in this row, from a beginning that is the same as
        long as it is a member."""
        return self.steps + self._beyond[row]

    def passed(self, row: int, tokens: int, think_tokens: int) -> Passed | None:
        """Return the newest known end of a sentence in those steps that brought the member in this row several tokens;
        None if there is none in the newest steps. tokens: newest tokens of the request to look at. think_tokens: its
        thinking tokens, the newest included."""
        at = think_tokens
        for several in reversed(self._recent):
            if think_tokens - at >= tokens:
                break
            length = 1 if several is None else several.lengths[row]
            if several is not None and length > 1 and (place := self._flagged(several).get(row)) is not None:
                return at - place[0], place[1]
            at -= length
        return None

    def _flagged(self, several: Several) -> dict[int, tuple[int, int]]:
        if several.flagged is None:
            ends, states, flags_of = several.ends, several.states.get(), self.sentences.flags
            several.flagged = {}
            for at in self.sentences.ends(states, CERTAIN | ENDED).tolist():
                row, place = bisect_right(ends, at), newest_end(flags_of[states[at]])
                if place is not None and row not in several.joined:
                    several.flagged[row] = ends[row] - 1 - at + place[0], place[1]
        return several.flagged

    def flagged_rows(self) -> set[int]:
        """Return the rows with a known end of a sentence in those of the newest steps that brought several tokens."""
        return {row for several in self._recent if several is not None for row in self._flagged(several)}

    def may_end(self, rows: Iterable[int], newest: Sequence[int], before: Sequence[int] | None = None) -> list[int]:
        """Return those of the rows whose newest token may be, or follow, the end of a sentence. newest, before: the
        newest token of each row and the one before it; None for the newest counted step's."""
        may_end, before = self.sentences.may_have_ended, self._newest if before is None else before
        return [row for row in rows if before is None or may_end(before[row], newest[row])]

    def at_ends(self, awaited: Mapping[int, Awaited]) -> dict[LiveRequest, int]:
        """Return the members that have reached, in the newest counted step, the end of a sentence or a paragraph that
        is awaited in their row, each with the number of tokens after that end."""
        reached: dict[LiveRequest, int] = {}
        newest, before = self._newest, self._before
        if newest is not None and before is not None:
            # Most steps bring none of these rows an end, and then nobody need read the states of all rows.
            awaited = {row: awaited[row] for row in self.may_end(awaited, newest, before)}
            if not awaited:
                return reached
        several = self._recent[-1] if self._recent else None
        flagged = {} if several is None else self._flagged(several)
        flags = self.sentences.flags_of(self._states.get())
        for row, (wanted, enough) in awaited.items():
            place = flagged.get(row) or newest_end(flags[row], enough)
            live = self._by_row[row]
            if live is not None and place is not None and place[1] & wanted == wanted and not live.is_probed(place[0]):
                reached[live] = place[0]
        return reached

    def state(self, row: int) -> int:
        """Return the sentence table's state after the newest counted token in this row."""
        return int(self._states.get()[row])
