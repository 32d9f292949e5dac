"""Counts the thinking tokens of one engine's requests for the budgets that the requests count towards, and for their
tenants.

The tokens are read from the request table when somebody asks and when a request closes, so a report costs nothing. The
code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from meridian_control.common.errors import BadReport
from meridian_control.common.opened_request import MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meridian.v1 import agent_pb2

    from meridian_control.common.opened_request import Identity, OpenedRequest
    from meridian_control.engine.request_table import RequestTable

K = TypeVar("K")
# A tenant and a model.
Account = tuple[str, str]
# Largest number of accounts of a replica, because clients choose the names; the tokens of all further ones are counted
# together, under OTHER.
MAX_ACCOUNTS = 1000
OTHER: Account = ("(other)", "(other)")


class User(NamedTuple):
    """The facts of a request that budgets match on."""

    model: str
    tenant: str
    slo_class: str
    effort: str


# Number of combinations of budgets above which those that no live request has are dropped.
ROOM = 1024
# The user that stands for all further ones once tokens of ROOM different ones wait for their budgets.
OTHERS = User(*["(other)"] * 4)


class Carried(NamedTuple):
    """The tokens of live requests that an earlier session of the engine has counted."""

    session_id: str
    tokens: Mapping[Identity, int]


NOTHING_CARRIED = Carried("", {})


class Counted(NamedTuple):
    """What a request counts towards: the names of its budgets. counts: whether its tokens count for them here."""

    names: tuple[str, ...]
    counts: bool


class Charges:
    """The tokens that have not been taken yet."""

    def __init__(self, table: RequestTable, carried: Carried = NOTHING_CARRIED) -> None:
        self._table, self._carried = table, carried
        # Whether a policy is in force, so that the budgets of live requests are known.
        self._has_policy = False
        # For each slot of the table an index into the list of combinations of budgets, of which the first has none; and
        # the thinking tokens that were counted of its request.
        self._set, self._charged = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._sets = [Counted((), True)]
        self._indices = {self._sets[0]: 0}
        # Tokens that were counted of each request before a snapshot of which only a part is taken in.
        self._counted: dict[Identity, int] = {}
        self._open: Counter[str] = Counter()
        self._by_tenant: Counter[Account] = Counter()
        # Tokens whose budgets are not known here.
        self._unmatched: Counter[User] = Counter()

    def names(self, slot: int) -> tuple[str, ...]:
        """Return the names of the budgets that the request in a slot counts towards."""
        return self._sets[int(self._set[slot])].names

    def begin_policy(self, *, has_budgets: bool) -> None:
        """Count the tokens of all live requests, because their budgets change. Tokens of requests without a budget will
        not count for a budget that they get now. has_budgets: whether the new policy has any."""
        if self._has_policy:
            self._count()
        self._has_policy = True
        if not has_budgets:
            self._set[:] = 0

    def open(self, slot: int) -> None:
        """Begin to count the tokens of a request that the table has opened, which has no budgets yet."""
        self._fit()
        opened, charged = self._table.info[slot], 0
        if opened is not None and opened.think_tokens:
            # Thinking from before, unless no stream has brought it, has been counted where it happened. The snapshot
            # does not know of reports that were lost with the stream.
            charged = max(0, opened.think_tokens - opened.unreported_think_tokens)
        if opened is not None and self._counted:
            charged = self._counted.pop(opened.identity, charged)
        self._set[slot], self._charged[slot] = 0, charged

    def _fit(self) -> None:
        """Make room for all slots of the table."""
        if more := len(self._table.info) - len(self._set):
            self._set = np.concatenate([self._set, np.zeros(more, np.int64)])
            self._charged = np.concatenate([self._charged, np.zeros(more, np.int64)])

    def assign(self, slot: int, names: tuple[str, ...], *, counts: bool = True) -> None:
        """Note the budgets of a live request, whose tokens for its earlier budgets are settled. counts: whether its
        tokens count for them."""
        wanted = Counted(names, counts or not names)
        if wanted == self._sets[int(self._set[slot])]:
            return
        if wanted not in self._indices:
            if len(self._sets) >= ROOM:
                self._forget_unused()
            self._indices[wanted] = len(self._sets)
            self._sets.append(wanted)
        self._set[slot] = self._indices[wanted]

    def settle(self, slot: int) -> None:
        """Count the tokens of a request that closes, if it is live."""
        table = self._table
        if table.holds(slot) and (new := int(table.think_tokens[slot] - self._charged[slot])):
            self._add(int(self._set[slot]), new)
            self._count_one(slot, new)
            self._charged[slot] = table.think_tokens[slot]

    def _add(self, index: int, tokens: int) -> None:
        if self._sets[index].counts:
            self._open.update(dict.fromkeys(self._sets[index].names, tokens))

    def take_tokens(self) -> Counter[str]:
        """Return the thinking tokens since the last call, by the budget's name."""
        self._count()
        tokens, self._open = _without_debts(self._open)
        return tokens

    def take_unmatched(self) -> Counter[User]:
        """Return the thinking tokens that were counted since the last call for requests whose budgets are not known
        here: no policy was in force yet, or they had ended before the stream began."""
        tokens, self._unmatched = _without_debts(self._unmatched)
        return tokens

    def add_ended(self, ended: agent_pb2.EndedThinking) -> None:
        """Add tokens of requests that ended without a stream. Raises BadReport if a text is too long."""
        user = _user(ended)
        if (length := max(map(len, user))) > MAX_TEXT:
            raise BadReport(f"ended must have texts of at most {MAX_TEXT} characters; got {length}")
        self._by_tenant[user.tenant, user.model] += ended.think_tokens
        self._add_unmatched(user, ended.think_tokens)

    def _add_unmatched(self, user: User, tokens: int) -> None:
        known = user in self._unmatched or len(self._unmatched) < ROOM
        self._unmatched[user if known else OTHERS] += tokens

    def take_by_tenant(self) -> Counter[Account]:
        """Return the thinking tokens since the last call, by tenant and model."""
        self._count()
        tokens, self._by_tenant = _without_debts(self._by_tenant)
        return tokens

    def _count(self) -> None:
        self._fit()
        table = self._table
        slots = (table.live & (table.think_tokens != self._charged)).nonzero()[0]
        if not len(slots):
            return
        new = table.think_tokens[slots] - self._charged[slots]
        sums = np.bincount(self._set[slots], weights=new, minlength=len(self._sets))
        for index in sums.nonzero()[0].tolist():
            self._add(index, int(sums[index]))
        for slot, tokens in zip(slots.tolist(), new.tolist(), strict=True):
            self._count_one(slot, tokens)
        self._charged[slots] = table.think_tokens[slots]

    def _count_one(self, slot: int, tokens: int) -> None:
        opened = self._table.info[slot]
        # The first token of a request that another engine decodes is generated there once more.
        if opened is None or opened.remote_decode:
            return
        if not self._has_policy:
            self._add_unmatched(_user(opened), tokens)
        self._by_tenant[opened.tenant, opened.model] += tokens

    def begin_snapshot(self, reported_session_id: str) -> None:
        """Count the tokens of all live requests, and keep each request's counted tokens for `open`.

        Tokens that no report has contained count too.

        reported_session_id: the field of Snapshot. An earlier session's counts are out of date if a later session has
        counted tokens in the meantime.
        """
        self._count()
        carried, self._carried = self._carried, NOTHING_CARRIED
        self._counted = dict(carried.tokens) if reported_session_id in ("", carried.session_id) else {}
        self._counted |= self._counted_of_live()

    def end_snapshot(self) -> None:
        """Drop what was counted of requests that the snapshot does not list."""
        self._counted = {}

    def hand_on(self, session_id: str) -> Carried:
        """Count the tokens of all live requests; return what the engine's next session must know of this one, or of an
        earlier one if this one has had no snapshot."""
        if self._carried.session_id:
            return self._carried
        self._count()
        return Carried(session_id, self._counted | self._counted_of_live())

    def _counted_of_live(self) -> dict[Identity, int]:
        """Return the tokens that were counted of each live request."""
        table, slots = self._table, self._table.slots()
        rows = zip(map(table.info.__getitem__, slots), self._charged[slots].tolist(), strict=True)
        return {info.identity: tokens for info, tokens in rows if info is not None}

    def _forget_unused(self) -> None:
        """Drop combinations that no live request has. Clients choose which budgets match, so the list could grow."""
        self._fit()
        used = sorted({0, *self._set[self._table.live].tolist()})
        self._set = np.where(self._table.live, np.searchsorted(used, self._set), 0)
        self._sets = [self._sets[index] for index in used]
        self._indices = {combination: index for index, combination in enumerate(self._sets)}


def _user(request: OpenedRequest | agent_pb2.EndedThinking) -> User:
    return User(request.model, request.tenant, request.slo_class, request.effort)


def _without_debts(counts: Counter[K]) -> tuple[Counter[K], Counter[K]]:
    """Return the counts above 0, and those below, which later tokens are set off against.

    A marker of several tokens takes back tokens that were counted as thinking; a counter that falls would look like a
    restart.
    """
    below: Counter[K] = Counter()
    below.subtract(-counts)
    return +counts, below


class TenantUsage:
    """The thinking tokens of each account that a replica has counted since it started."""

    def __init__(self) -> None:
        self.counted: Counter[Account] = Counter()

    def take_charges(self, charges: Charges) -> None:
        """Add what a session has counted since the last call."""
        for account, tokens in charges.take_by_tenant().items():
            known = account in self.counted or len(self.counted) < MAX_ACCOUNTS
            self.counted[account if known else OTHER] += tokens
