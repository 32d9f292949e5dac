"""Counts the steps of all requests that generate one token of text a step, at a cost that hardly grows with their
number.

Nearly all tokens belong to such a run. A counted step is applied to a request when a caller reads the request's state
or the request leaves the run, at the latest when it comes near its cap. Requests join and leave one by one, so an end
of one request costs the others nothing. Runs on the engine-core thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.core.request_info import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from meridian_agent.core.live_request import LiveRequest

# The token of a row that has no single new token.
NO_TOKEN = -1
# A character that an id never has if the client has sent it in a header.
SEPARATOR = "\0"


class TextRun:
    """The members of the run of one engine, by the runner's rows; the tracker keeps one object.

    request_ids: ids of the newest step's rows. slots, phases, rows: columns of the members, in the order of the rows;
    these lists never change once they are made. steps: number of steps counted so far. number: a number that changes
    whenever a member, its row or the set of live requests changes.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        # The ids as one text, None if that text could be another list's, too.
        self._joined: str | None = None
        self.slots: list[int] = []
        self.phases: list[int] = []
        self.rows: list[int] = []
        # Sentence and paragraph flags by token id.
        self.boundaries = b""
        self.steps = 0
        self.number = 1
        # Number of members, and whether the newest step had no other live requests.
        self.members = 0
        self.whole = False
        # The member of each row, None for a row whose request is not a member; the newest token of each row.
        self._by_row: list[LiveRequest | None] = []
        self._newest: Sequence[int] = ()
        # Slot and phase of each row's member, and whether the columns are older than the members.
        self._slots: list[int] = []
        self._phases: list[int] = []
        self._stale = False
        # A member may come near a cap, which must be checked, once this many steps are counted.
        self._steps_until_cap = NEVER

    def changed(self) -> None:
        """Note that something has changed for the live requests."""
        self.number += 1

    def arrange(self, request_ids: list[str]) -> None:
        """Give the members the rows that their requests have in a new step, which differ from those in the newest step;
        members without a row there leave."""
        known = self.request_ids
        self.changed()
        self._stale = True
        rows = [row for row, (new, old) in enumerate(zip(request_ids, known, strict=False)) if new != old]
        both = min(len(request_ids), len(known))
        moved = {}
        for row in (*rows, *range(both, len(known))):
            if (live := self._by_row[row]) is not None:
                moved[known[row]] = live
        more = len(request_ids) - both
        newest, was = [*self._newest[:both], *[NO_TOKEN] * more], self._newest
        self._slots, self._phases = [*self._slots[:both], *[0] * more], [*self._phases[:both], *[0] * more]
        by_row: list[LiveRequest | None] = [*self._by_row[:both], *[None] * more]
        for row in (*rows, *range(both, len(request_ids))):
            by_row[row] = live = moved.pop(request_ids[row], None)
            if live is not None:
                newest[row] = was[live.run_row]
                self._slots[row], self._phases[row] = live.slot, int(live.own_state.phase)
                live.move_in_run(row)
        self.members -= len(moved)
        for live in moved.values():
            live.leave_run()
        # The ids are copied, because the runner may change its own list.
        self.request_ids, self._by_row, self._newest = list(request_ids), by_row, newest
        joined = SEPARATOR.join(request_ids)
        self._joined = joined if joined.count(SEPARATOR) < max(1, len(request_ids)) else None

    def join(self, live: LiveRequest, row: int) -> None:
        """Let a request join that has just generated one token of text, unless it is in its prompt, is being ended, or
        is near its cap."""
        if (left := live.text_steps()) <= 0:
            return
        self.changed()
        self._by_row[row], self._stale = live, True
        self._slots[row], self._phases[row] = live.slot, int(live.own_state.phase)
        self.members += 1
        self._steps_until_cap = min(self._steps_until_cap, self.steps + left)
        live.join_run(row, self.steps)

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
            self.rows = [row for row, live in enumerate(self._by_row) if live is not None]
            self.slots = [self._slots[row] for row in self.rows]
            self.phases = [self._phases[row] for row in self.rows]
            self._stale = False
        if self.members == len(self._by_row):
            return []
        return [row for row, live in enumerate(self._by_row) if live is None]

    def _check_caps(self) -> None:
        left = {live: live.text_steps() for live in self._by_row if live is not None}
        for live, steps in left.items():
            if steps <= 0:
                self.leave(live)
        self._steps_until_cap = self.steps + min((steps for steps in left.values() if steps > 0), default=NEVER)

    def count_all(
        self, request_ids: list[str], sampled: Sequence[Sequence[int]], markers: AbstractSet[int]
    ) -> list[int] | None:
        """Count a step that brought the live requests of the newest step, in the same rows, one token of text and
        nothing else, and return these tokens. Return None, and nothing has happened, for any other step, and if one of
        the requests is not a member or is near a cap.

        request_ids: ids in the order of the runner's rows. sampled: the new tokens of each row. markers: the tokens
        that are not text.
        """
        rows = len(request_ids)
        if not self.whole or self._stale or rows != self.members or rows != len(sampled):
            return None
        # To compare one text takes less time than to compare all ids, whose old texts are no longer in the caches.
        if self.steps >= self._steps_until_cap or SEPARATOR.join(request_ids) != self._joined:
            return None
        try:
            tokens = [token for (token,) in sampled]
        except ValueError:
            return None
        if not markers.isdisjoint(tokens):
            return None
        self.steps += 1
        self._newest = tokens
        return tokens

    def count(self, tokens: Sequence[int]) -> Sequence[int]:
        """Count a step; return the members' tokens, in the order of their rows. tokens: by row, one of text for each
        member. Called only after `ready`."""
        self.steps += 1
        self._newest = tokens
        return tokens if self.members == len(tokens) else [tokens[row] for row in self.rows]

    def at_boundaries(self, awaited: Mapping[int, int]) -> list[LiveRequest]:
        """Return the members whose newest counted token has the flags that are awaited in their row."""
        tokens, flags_of, known = self._newest, self.boundaries, len(self.boundaries)
        rows = [row for row, f in awaited.items() if tokens[row] < known and flags_of[tokens[row]] & f == f]
        return [live for row in rows if (live := self._by_row[row]) is not None]

    def newest_boundary(self, row: int) -> int:
        """Return the sentence and paragraph flags of the newest counted token in this row."""
        token = self._newest[row]
        return self.boundaries[token] if token < len(self.boundaries) else 0
