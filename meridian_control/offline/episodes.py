"""Reads what the requests of a trace did: their sentence ends with the signals there, as flat NumPy columns.

Owns the way from trace records to columns, and which requests may be used. Knows no rule and no threshold. The columns
mean what those of `requests.RequestTable` mean at the moment in which a live session would decide.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.decisions.request_table import OUTPUT, RANK_HISTORY, THINK
from meridian_control.decisions.token_rows import (
    FLAG_BOUNDARY,
    FLAG_END,
    FLAG_FORCED,
    FLAG_FROM_OUTPUT,
    FLAG_MARKER,
    TAKE_BACK_SHIFT,
)
from meridian_control.offline.trace_file import FileError, read
from meridian_control.session.think_ends import FINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2
    from numpy.typing import NDArray

FLAG_PARAGRAPH = 64
# More than any request thinks or any trace has of reports: keys of (request, number) stay in order.
KEY = 1 << 40


@dataclass(frozen=True)
class Episodes:
    """Requests whose thinking was seen from beginning to natural end; [requests], [boundaries] or [samples].

    A boundary is a sentence end in the thinking after which the end marker's rank became known; a sample is a measured
    EAT probe. Both are sorted by request, then by thinking tokens.
    """

    ids: list[str]
    # Thinking tokens the model took.
    natural_tokens: NDArray[np.int64]
    # By boundary: request, thinking tokens there and when its rank was known (the next token).
    owner: NDArray[np.int64]
    think_tokens: NDArray[np.int64]
    decided_tokens: NDArray[np.int64]
    paragraph: NDArray[np.bool_]
    # End-marker ranks at this and earlier sentence ends, newest first, [boundaries, RANK_HISTORY]; how many there are.
    ranks: NDArray[np.int64]
    rank_count: NDArray[np.int64]
    # Entropy of the newest token; count and sum over the thinking; running sum over all requests, and the place in it.
    entropy_nats: NDArray[np.float64]
    entropy_count: NDArray[np.int64]
    entropy_sum: NDArray[np.float64]
    entropy_place: NDArray[np.int64]
    entropy_running: NDArray[np.float64]
    # By boundary: the first sample from here to the next boundary, -1 for none.
    sample: NDArray[np.int64]
    # By sample: request, thinking tokens where it was placed and when its result came.
    sample_owner: NDArray[np.int64]
    sample_tokens: NDArray[np.int64]
    sample_arrived: NDArray[np.int64]
    eat_nats: NDArray[np.float64]
    cost_tokens: NDArray[np.int64]
    same_answer: NDArray[np.int64]
    empty_answer: NDArray[np.bool_]
    # Every request id in the trace; requests that cannot be used, by reason; the newest policy given to a session.
    seen: frozenset[str]
    left_out: dict[str, int]
    policy: policy_pb2.Policy | None

    def window_sum(self, width: int) -> NDArray[np.float64]:
        """Sum of the newest `width` token entropies, [boundaries]; meaningless before there are as many."""
        running, place = self.entropy_running, self.entropy_place
        total: NDArray[np.float64] = running[place] - running[np.maximum(0, place - width)]
        return total


@dataclass
class _Request:
    request_id: str
    finish: agent_pb2.FinishReason.ValueType | None = None


@dataclass
class _Collector:
    """Rows of all sessions as they come, slots replaced by request numbers."""

    model: str
    requests: list[_Request] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    policy: policy_pb2.Policy | None = None
    # By report: owner, number of the report, columns.
    tokens: list[list[Any]] = field(default_factory=list)
    probes: list[list[Any]] = field(default_factory=list)
    # Per session its model and the request in each slot.
    slots: dict[str, dict[int, int]] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)
    report: int = 0

    def add(self, record: fleet_pb2.TraceRecord) -> None:
        """Raises ValueError for a record that breaks the contract."""
        kind, session = record.up.WhichOneof("message"), record.session_id
        if record.HasField("policy"):
            self.policy = record.policy.policy
        if kind == "hello":
            self.slots[session], self.served[session] = {}, record.up.hello.model
        elif kind is not None and session not in self.slots:
            raise ValueError("its session has no Hello before it")
        elif kind == "snapshot":
            self.slots[session] = {}
            for opened in record.up.snapshot.requests:
                if not opened.think_tokens + opened.output_tokens:
                    self._open(session, opened)
        elif kind == "step":
            self._step(session, record.up.step)

    def _open(self, session: str, opened: agent_pb2.RequestOpened) -> None:
        model = opened.model or self.served[session]
        self.models.add(model)
        if self.model in ("", model):
            self.slots[session][opened.slot] = len(self.requests)
            self.requests.append(_Request(opened.request_id))

    def _step(self, session: str, report: agent_pb2.StepReport) -> None:
        self.report += 1
        slots = self.slots[session]
        for opened in report.opened:
            slots.pop(opened.slot, None)
            self._open(session, opened)
        if report.tokens.slot:
            self.tokens.append(self._rows(slots, report.tokens, TOKEN_COLUMNS))
        if report.probes.slot:
            self.probes.append(self._rows(slots, report.probes, PROBE_COLUMNS))
        for closed in report.closed:
            if (request := slots.pop(closed.slot, None)) is not None:
                self.requests[request].finish = closed.reason

    def _rows(self, slots: dict[int, int], message: Any, columns: dict[str, Any]) -> list[Any]:
        count = len(message.slot)
        owner = np.fromiter((slots.get(slot, -1) for slot in message.slot), np.int64, count)
        rows = [owner, np.full(count, self.report)]
        for name, kind in columns.items():
            # A column that the sender does not know is empty.
            values = getattr(message, name) or [0] * count
            if len(values) != count:
                raise ValueError(f"its columns must have one length; got {count} and {len(values)}")
            rows.append(np.fromiter(values, kind, count))
        return rows


TOKEN_COLUMNS = {"phase": np.int64, "flags": np.int64, "entropy_nats": np.float64, "end_rank": np.int64}
PROBE_COLUMNS = {
    "think_tokens": np.int64,
    "eat_nats": np.float64,
    "cost_tokens": np.int64,
    "same_answer": np.int64,
    "empty_answer": np.bool_,
}


def collect(paths: Iterable[Path], model: str = "") -> Episodes:
    """Read traces. `model` chooses one where they hold several. Raises FileError."""
    collector = _Collector(model)
    path = None
    for path in paths:
        # A session's slots mean nothing in another file.
        collector.slots.clear()
        for number, record in enumerate(read(path)):
            try:
                collector.add(record)
            except ValueError as error:
                raise FileError(path, f" record {number}:", str(error)) from error
    if path is not None and not model and len(collector.models) > 1:
        names = ", ".join(sorted(collector.models))
        raise FileError(path, "", f"holds several models ({names}): choose one with --model")
    return _episodes(collector)


def _grouped(chunks: list[list[Any]], columns: dict[str, Any], numbers: NDArray[np.int64]) -> list[Any]:
    """Owner, report and columns of all rows, grouped by request, each request's in their order.

    `numbers` are the requests' new numbers; rows of requests with -1 are left out.
    """
    kinds = [np.int64, np.int64, *columns.values()]
    parts = [np.concatenate([np.zeros(0, kind), *(c[i] for c in chunks)]) for i, kind in enumerate(kinds)]
    # The last of `numbers` is for owner -1.
    new = numbers[parts[0]]
    order = np.argsort(new, kind="stable")
    order = order[new[order] >= 0]
    return [new[order], *(part[order] for part in parts[1:])]


def _episodes(seen: _Collector) -> Episodes:
    everyone = np.append(np.arange(len(seen.requests)), -1)
    reasons = _reasons(seen, _grouped(seen.tokens, TOKEN_COLUMNS, everyone))
    kept = [number for number, reason in enumerate(reasons) if not reason]
    numbers = np.full(len(everyone), -1)
    numbers[kept] = np.arange(len(kept))
    owner, report, phase, flags, entropy, rank = _grouped(seen.tokens, TOKEN_COLUMNS, numbers)
    begins = np.searchsorted(owner, np.arange(len(kept) + 1))
    think = _within(begins, owner, _counted(phase, flags))

    known = (owner[1:] == owner[:-1]) & (phase[:-1] == THINK) & ((flags[:-1] & FLAG_BOUNDARY) != 0)
    at = np.flatnonzero(known & (phase[1:] == THINK) & (rank[1:] > 0))
    ranks, rank_count = _ranks(owner[at], rank[at + 1])
    # At an end marker a live session decides nothing any more.
    goes_on = (flags[at + 1] & FLAG_END) == 0
    at, ranks, rank_count = at[goes_on], ranks[goes_on], rank_count[goes_on]
    after = at + 1

    measured = (phase == THINK) & ((flags & FLAG_MARKER) == 0) & np.isfinite(entropy)
    running = np.concatenate([[0.0], np.cumsum(np.where(measured, entropy, 0.0)[measured])])
    place = np.cumsum(measured)
    count = _within(begins, owner, place)
    samples = _samples(_grouped(seen.probes, PROBE_COLUMNS, numbers), owner * KEY + report, think)
    return Episodes(
        ids=[seen.requests[number].request_id for number in kept],
        natural_tokens=think[begins[1:] - 1],
        owner=owner[at],
        think_tokens=think[at],
        decided_tokens=think[after],
        paragraph=(flags[at] & FLAG_PARAGRAPH) != 0,
        ranks=ranks,
        rank_count=rank_count,
        entropy_nats=entropy[at],
        entropy_count=count[after],
        entropy_sum=running[place[after]] - running[place[after] - count[after]],
        entropy_place=place[after],
        entropy_running=running,
        sample=_sample_of(owner[at], think[at], samples["sample_owner"], samples["sample_tokens"]),
        **samples,
        seen=frozenset(r.request_id for r in seen.requests),
        left_out=dict(sorted(Counter(filter(None, reasons)).items())),
        policy=seen.policy,
    )


def _samples(rows: list[Any], row_keys: NDArray[np.int64], think: NDArray[np.int64]) -> dict[str, Any]:
    """The probes that were measured, with the thinking tokens their request had when the result came."""
    owner, report, tokens, eat, *others = rows
    order = np.lexsort((tokens, owner))
    order = order[np.isfinite(eat[order])]
    arrived = think[np.searchsorted(row_keys, owner * KEY + report, "right")[order] - 1]
    names = ("sample_owner", "sample_tokens", "eat_nats", "cost_tokens", "same_answer", "empty_answer")
    columns = zip(names, (owner, tokens, eat, *others), strict=True)
    return {name: column[order] for name, column in columns} | {"sample_arrived": arrived}


def _reasons(seen: _Collector, rows: list[Any]) -> list[str]:
    """Why a request cannot be used; empty when it can."""
    count = len(seen.requests)
    owner, _, phase, flags, *_ = rows
    ended, forced, thought, answered = (
        np.bincount(owner[which], minlength=count) > 0
        for which in (
            (flags & FLAG_END) != 0,
            ((flags & FLAG_END) != 0) & ((flags & FLAG_FORCED) != 0),
            (phase == THINK) & ((flags & FLAG_MARKER) == 0),
            phase == OUTPUT,
        )
    )
    reasons = []
    for number, request in enumerate(seen.requests):
        obstacles = (
            (request.finish is None, "begun or finished outside the trace"),
            (request.finish not in FINISHED, "aborted or failed"),
            (not thought[number], "did not think"),
            (forced[number], "thinking was ended by force"),
            (not ended[number] or not answered[number], "thinking never ended"),
        )
        reasons.append(next((reason for holds, reason in obstacles if holds), ""))
    return reasons


def _counted(phase: NDArray[Any], flags: NDArray[Any]) -> NDArray[np.int64]:
    """Running number of thinking tokens over all rows, counted as the request table does."""
    text = (flags & FLAG_MARKER) == 0
    back = np.where((flags & FLAG_FROM_OUTPUT) != 0, 0, flags >> TAKE_BACK_SHIFT)
    counted: NDArray[np.int64] = np.cumsum((text & (phase == THINK)) - back)
    return counted


def _within(begins: NDArray[Any], owner: NDArray[Any], running: NDArray[np.int64]) -> NDArray[np.int64]:
    """A running number over all rows, made to begin at 0 with every request."""
    first = begins[:-1]
    before = np.where(first > 0, running[first - 1], 0)
    within: NDArray[np.int64] = running - before[owner]
    return within


def _ranks(owner: NDArray[Any], rank: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranks at each boundary and those before it in the same request, newest first, and how many there are."""
    number = np.arange(len(owner))
    position = number - np.searchsorted(owner, owner)
    ranks = np.zeros((len(owner), RANK_HISTORY), np.int64)
    for back in range(RANK_HISTORY):
        there = position >= back
        ranks[there, back] = rank[number[there] - back]
    return ranks, position + 1


def _sample_of(
    owner: NDArray[Any], tokens: NDArray[Any], sample_owner: NDArray[Any], sample_tokens: NDArray[Any]
) -> NDArray[np.int64]:
    """The first sample at or after each boundary and before the next one; -1 for none."""
    here = owner * KEY + tokens
    following = np.minimum(np.append(here[1:], np.iinfo(np.int64).max)[: len(here)], (owner + 1) * KEY)
    keys = sample_owner * KEY + sample_tokens
    found = np.searchsorted(keys, here)
    within = found < len(keys)
    within[within] = keys[found[within]] < following[within]
    return np.where(within, found, -1)
