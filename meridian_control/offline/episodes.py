"""Reads the requests of a trace: their sentence ends, with the signals there, as flat NumPy columns.

The module turns trace records into columns, and decides which requests can be used. The module knows no rule, and no
threshold. The columns have the values that a live session's `RequestTable` has at the moment of its decision.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.capabilities.self_calibration.rule import probing as probing_of
from meridian_control.common.errors import BadReport
from meridian_control.common.opened_request import is_under_way
from meridian_control.common.table_columns import CONFIRM_HISTORY, RANK_HISTORY
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.think_ends import FINISHED
from meridian_control.engine.token_rows import (
    FLAG_BOUNDARY,
    FLAG_END,
    FLAG_FORCED,
    FLAG_FROM_OUTPUT,
    FLAG_MARKER,
    TAKE_BACK_SHIFT,
    sentence_goes_on,
)
from meridian_control.offline.trace_file import FileError, read
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2
    from numpy.typing import NDArray

    from meridian_control.policy.model import Policy

FLAG_PARAGRAPH = 64
# Why a request that had not finished when the trace ended, or when its stream broke off, cannot be used.
UNFINISHED = "begun or finished outside the trace"
# Above any number of thinking tokens or reports, so that the keys request * KEY + number sort by request.
KEY = 1 << 40


@dataclass(frozen=True)
class Episodes:
    """Requests whose thinking was recorded from its beginning to its natural end, as columns.

    A boundary is a sentence end in the thinking after which the end marker's rank became known; a sample is a measured
    EAT probe. Columns are [requests], [boundaries] or [samples]; boundaries and samples are sorted by request, then by
    thinking tokens.
    """

    ids: list[str]
    # By request: thinking tokens until the model ended thinking.
    natural_tokens: NDArray[np.int64]
    # By boundary: number of the request, thinking tokens there, and thinking tokens when its rank was known.
    owner: NDArray[np.int64]
    think_tokens: NDArray[np.int64]
    decided_tokens: NDArray[np.int64]
    paragraph: NDArray[np.bool_]
    # End-marker ranks at this and earlier sentence ends, newest first, [boundaries, RANK_HISTORY], and their number.
    ranks: NDArray[np.int64]
    rank_count: NDArray[np.int64]
    # By boundary: count of the request's entropies, and the boundary's place in `entropy_running`, which is the running
    # sum of entropies over all requests.
    entropy_count: NDArray[np.int64]
    entropy_place: NDArray[np.int64]
    entropy_running: NDArray[np.float64]
    # The same counts and places at the sentence ends before the boundary, newest first, [boundaries, CONFIRM_HISTORY -
    # 1]; 0 for none.
    earlier_counts: NDArray[np.int64]
    earlier_places: NDArray[np.int64]
    # By boundary: the first sample between the boundary and the next boundary, -1 for none.
    sample: NDArray[np.int64]
    # By sample: number of the request, thinking tokens at the probe's place, and thinking tokens when the result came.
    sample_owner: NDArray[np.int64]
    sample_tokens: NDArray[np.int64]
    sample_arrived: NDArray[np.int64]
    eat_nats: NDArray[np.float64]
    cost_tokens: NDArray[np.int64]
    same_answer: NDArray[np.int64]
    empty_answer: NDArray[np.bool_]
    # Whether the request that was probed before has another trial answer, 1 or 0; -1 if that is not known.
    other_answer: NDArray[np.int64]
    # Every request id in the trace, the number of unusable requests by reason, the policy with the newest revision, the
    # number of ways in which policies probed the usable requests, and the known fingerprints of their models.
    seen: frozenset[str]
    left_out: dict[str, int]
    policy: policy_pb2.Policy | None
    probings: int = 1
    fingerprints: frozenset[str] = frozenset()

    def entropies(self, count: NDArray[np.int64], place: NDArray[np.int64], width: int) -> tuple[NDArray[Any], ...]:
        """Return the counts, the sum of as many entropies before each place, and the sum of the newest `width` of them,
        [places]; the last is meaningless before `width` entropies."""
        running = self.entropy_running
        return count, running[place] - running[place - count], running[place] - running[np.maximum(0, place - width)]


@dataclass
class _Request:
    # Engine id and incarnation of the process that had the request, because engines may have requests with the same id.
    process: tuple[str, str]
    request_id: str
    unmeasured: bool
    # The engine's fingerprint of its model, and how the policy probes the request; empty if that is not known.
    fingerprint: str
    probing: str
    finish: agent_pb2.FinishReason.ValueType | None = None


# Type codes of the module `array`.
INTEGER, FLOAT = "q", "d"
TOKEN_COLUMNS = {
    "phase": INTEGER,
    "flags": INTEGER,
    "entropy_nats": FLOAT,
    "end_rank": INTEGER,
}
PROBE_COLUMNS = {
    "think_tokens": INTEGER,
    "eat_nats": FLOAT,
    "cost_tokens": INTEGER,
    "same_answer": INTEGER,
    "empty_answer": INTEGER,
    "other_answer": INTEGER,
}
# Values of columns that a sender does not know and leaves empty, if they are not 0 or NaN.
UNKNOWN = {"other_answer": -1}


class _Columns:
    """Rows of all reports, by column: the number of the row's request (-1 if it is not known), the number of the row's
    report, and the values."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.owner, self.report = array(INTEGER), array(INTEGER)
        self.values = {name: array(kind) for name, kind in kinds.items()}

    def add_rows(self, slots: Mapping[int, int], report: int, message: Any) -> None:
        """Add a report's rows, often none. Raises BadReport if the columns of the rows differ in length."""
        if not message.ByteSize():
            return
        count = len(message.slot)
        self.owner.extend([slots.get(slot, -1) for slot in message.slot])
        self.report.extend([report] * count)
        for name, column in self.values.items():
            # A sender leaves a column that it does not know empty, and NaN is a value that was not measured.
            unknown = math.nan if column.typecode == FLOAT else UNKNOWN.get(name, 0)
            values = getattr(message, name, ()) or [unknown] * count
            if len(values) != count:
                raise BadReport(f"its columns must have one length; got {count} and {len(values)}")
            column.extend(values)

    def grouped(self, numbers: NDArray[np.int64]) -> list[Any]:
        """Return request number, report number and columns of all rows, grouped by request, in their original order.

        `numbers` has the requests' new numbers; rows of requests with the new number -1 are left out.
        """
        owner, *rest = (np.array(column) for column in (self.owner, self.report, *self.values.values()))
        # Rows without a known request have owner -1, which selects the last entry of `numbers`.
        new = numbers[owner]
        order = np.argsort(new, kind="stable")
        order = order[new[order] >= 0]
        return [new[order], *(column[order] for column in rest)]


@dataclass
class _Collector:
    """Collects the rows of all sessions in order, with request numbers in place of slots."""

    model: str
    requests: list[_Request] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    newest: fleet_pb2.TracedPolicy | None = None
    tokens: _Columns = field(default_factory=lambda: _Columns(TOKEN_COLUMNS))
    probes: _Columns = field(default_factory=lambda: _Columns(PROBE_COLUMNS))
    # By session: the request in each slot, the engine's Hello, and the policy that the session was given.
    slots: dict[str, dict[int, int]] = field(default_factory=dict)
    hellos: dict[str, agent_pb2.Hello] = field(default_factory=dict)
    given: dict[str, Policy] = field(default_factory=dict)
    report: int = 0

    def add_record(self, record: fleet_pb2.TraceRecord) -> None:
        """Add the next record of a trace. Raises BadReport for a record that breaks the contract."""
        kind, session = record.up.WhichOneof("message"), record.session_id
        # An engine that refuses a revision is given an older one each time that it connects.
        if record.HasField("policy"):
            self.given[session] = forms.from_older_proto(record.policy.policy)[0]
            if self.newest is None or record.policy.revision >= self.newest.revision:
                self.newest = record.policy
        if kind == "hello":
            self.slots[session], self.hellos[session] = {}, record.up.hello
            self.given.pop(session, None)
        elif kind is not None and session not in self.slots:
            raise BadReport("its session has no Hello before it")
        elif kind == "snapshot":
            self.slots[session] = {}
            for opened in record.up.snapshot.requests:
                self._open(session, opened)
        elif kind == "step":
            self._step(session, record.up.step)

    def _open(self, session: str, opened: agent_pb2.RequestOpened) -> None:
        if is_under_way(opened):
            return
        hello = self.hellos[session]
        model = opened.model or hello.model
        self.models.add(model)
        if self.model in ("", model):
            self.slots[session][opened.slot] = len(self.requests)
            facts = model, opened.tenant, opened.slo_class, opened.effort, dict(hello.labels), hello.model_fingerprint
            probing = self._probing(session, Who(*facts))
            process, fingerprint = (hello.engine_id, hello.incarnation), hello.model_fingerprint
            self.requests.append(_Request(process, opened.request_id, opened.unmeasured, fingerprint, probing))

    def _probing(self, session: str, who: Who) -> str:
        policy = self.given.get(session)
        return probing_of(policy, policy.of(who), who) if policy is not None else ""

    def _step(self, session: str, report: agent_pb2.StepReport) -> None:
        self.report += 1
        slots = self.slots[session]
        for opened in report.opened:
            slots.pop(opened.slot, None)
            self._open(session, opened)
        self.tokens.add_rows(slots, self.report, report.tokens)
        self.probes.add_rows(slots, self.report, report.probes)
        for closed in report.closed:
            if (request := slots.pop(closed.slot, None)) is not None:
                self.requests[request].finish = closed.reason


def collect(paths: Iterable[Path], model: str = "") -> Episodes:
    """Read traces; `model` chooses one model if the traces contain several. Raises FileError and PolicyError."""
    collector = _Collector(model)
    path = None
    for path in paths:
        # A session's slots are valid within one file only.
        collector.slots.clear()
        for number, record in enumerate(read(path)):
            try:
                collector.add_record(record)
            except BadReport as error:
                raise FileError(path, f" record {number}:", str(error)) from error
    names = ", ".join(sorted(collector.models))
    if path is not None and not model and len(collector.models) > 1:
        raise FileError(path, "", f"holds several models ({names}): choose one with --model")
    if path is not None and model and names and model not in collector.models:
        raise FileError(path, "", f"holds no request of the model {model!r}, but of {names}")
    episodes = _episodes(collector)
    if path is not None and len(episodes.fingerprints) > 1:
        names = ", ".join(sorted(episodes.fingerprints))
        why = (
            f"holds several models of one name (fingerprints {names}): record each with --engine, and use one's traces"
        )
        raise FileError(path, "", why)
    return episodes


def _episodes(seen: _Collector) -> Episodes:
    everyone = np.append(np.arange(len(seen.requests)), -1)
    reasons = _reasons(seen, seen.tokens.grouped(everyone))
    kept = [number for number, reason in enumerate(reasons) if not reason]
    # A request that has waited through a snapshot has a later entry, too.
    newest_of = {(request.process, request.request_id): number for number, request in enumerate(seen.requests)}
    left_out = Counter(
        reason
        for number, (request, reason) in enumerate(zip(seen.requests, reasons, strict=True))
        if reason and (request.finish is not None or newest_of[request.process, request.request_id] == number)
    )
    numbers = np.full(len(everyone), -1)
    numbers[kept] = np.arange(len(kept))
    owner, report, phase, flags, entropy, rank = seen.tokens.grouped(numbers)
    begins = np.searchsorted(owner, np.arange(len(kept) + 1))
    think = _within(begins, owner, _counted(phase, flags))

    known = (owner[1:] == owner[:-1]) & (phase[:-1] == THINK) & ((flags[:-1] & FLAG_BOUNDARY) != 0)
    at = np.flatnonzero(known & (phase[1:] == THINK) & (rank[1:] > 0) & ~sentence_goes_on(flags[1:]))
    # A live session no longer decides once the end marker has begun, so boundaries before an end marker are left out.
    goes_on = (flags[at + 1] & FLAG_END) == 0
    before, at, after = at, at[goes_on], at[goes_on] + 1

    def newest(values: NDArray[Any], depth: int) -> NDArray[Any]:
        """Return the values at each boundary and at earlier sentence ends, those before an end marker included."""
        window: NDArray[Any] = newest_values(owner[before], values[before + 1], depth)[goes_on]
        return window

    measured = (phase == THINK) & ((flags & FLAG_MARKER) == 0) & np.isfinite(entropy)
    running = np.concatenate([[0.0], np.cumsum(np.where(measured, entropy, 0.0)[measured])])
    place = np.cumsum(measured)
    count = _within(begins, owner, place)
    samples = _samples(seen.probes.grouped(numbers), owner * KEY + report, think)
    return Episodes(
        ids=[seen.requests[number].request_id for number in kept],
        natural_tokens=think[begins[1:] - 1],
        owner=owner[at],
        think_tokens=think[at],
        decided_tokens=think[after],
        paragraph=(flags[at] & FLAG_PARAGRAPH) != 0,
        ranks=newest(rank, RANK_HISTORY),
        rank_count=_numbered(owner[before])[goes_on] + 1,
        entropy_count=count[after],
        entropy_place=place[after],
        entropy_running=running,
        earlier_counts=newest(count, CONFIRM_HISTORY)[:, 1:],
        earlier_places=newest(place, CONFIRM_HISTORY)[:, 1:],
        sample=_sample_of(owner[at], think[at], samples["sample_owner"], samples["sample_tokens"]),
        **samples,
        seen=frozenset(r.request_id for r in seen.requests),
        left_out=dict(sorted(left_out.items())),
        policy=seen.newest.policy if seen.newest is not None else None,
        probings=len({seen.requests[number].probing for number in kept} - {""}),
        fingerprints=frozenset({seen.requests[number].fingerprint for number in kept} - {""}),
    )


def _samples(rows: list[Any], row_keys: NDArray[np.int64], think: NDArray[np.int64]) -> dict[str, Any]:
    """Return the columns of the measured probes, with the request's thinking tokens when each result came."""
    owner, report, tokens, eat, *others = rows
    order = np.lexsort((tokens, owner))
    order = order[np.isfinite(eat[order])]
    arrived = think[np.searchsorted(row_keys, owner * KEY + report, "right")[order] - 1]
    names = ("sample_owner", "sample_tokens", "eat_nats", "cost_tokens", "same_answer", "empty_answer", "other_answer")
    *others, empty, other = others
    columns = zip(names, (owner, tokens, eat, *others, empty != 0, other), strict=True)
    return {name: column[order] for name, column in columns} | {"sample_arrived": arrived}


def _reasons(seen: _Collector, rows: list[Any]) -> list[str]:
    """Return the reason why each request cannot be used; empty for a request that can."""
    count = len(seen.requests)
    owner, _, phase, flags, *_ = rows
    # A request that thinks again, and is cut then, has answered before.
    is_last = np.append(owner[1:] != owner[:-1], np.ones(min(1, len(owner)), bool))
    ended, forced, thought, answered = (
        np.bincount(owner[which], minlength=count) > 0
        for which in (
            (flags & FLAG_END) != 0,
            ((flags & FLAG_END) != 0) & ((flags & FLAG_FORCED) != 0),
            (phase == THINK) & ((flags & FLAG_MARKER) == 0),
            is_last & (phase == OUTPUT),
        )
    )
    reasons = []
    for number, request in enumerate(seen.requests):
        obstacles = (
            (request.finish is None, UNFINISHED),
            (request.finish not in FINISHED, "aborted or failed"),
            (not thought[number], "did not think"),
            (request.unmeasured, "not measured (telemetry.shadow_sample_ratio)"),
            (forced[number], "thinking was ended by force"),
            (not ended[number] or not answered[number], "thinking never ended"),
        )
        reasons.append(next((reason for holds, reason in obstacles if holds), ""))
    return reasons


def _counted(phase: NDArray[Any], flags: NDArray[Any]) -> NDArray[np.int64]:
    """Return the running number of thinking tokens over all rows, counted as in the request table."""
    text = (flags & FLAG_MARKER) == 0
    back = np.where((flags & FLAG_FROM_OUTPUT) != 0, 0, flags >> TAKE_BACK_SHIFT)
    counted: NDArray[np.int64] = np.cumsum((text & (phase == THINK)) - back)
    return counted


def _within(begins: NDArray[Any], owner: NDArray[Any], running: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn a running number over all rows into one that begins at 0 with every request."""
    first = begins[:-1]
    before = np.where(first > 0, running[first - 1], 0)
    within: NDArray[np.int64] = running - before[owner]
    return within


def _numbered(owner: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each entry the number of the owner's earlier entries; `owner` is sorted."""
    number: NDArray[np.int64] = np.arange(len(owner)) - np.searchsorted(owner, owner)
    return number


def newest_values(owner: NDArray[Any], values: NDArray[Any], depth: int) -> NDArray[Any]:
    """Return each value and the owner's earlier values, newest first, [values, depth]; 0, or NaN for floats, for
    none."""
    number, position = np.arange(len(owner)), _numbered(owner)
    newest = np.full((len(owner), depth), np.nan if values.dtype.kind == "f" else 0, values.dtype)
    for back in range(depth):
        there = position >= back
        newest[there, back] = values[number[there] - back]
    return newest


def _sample_of(
    owner: NDArray[Any], tokens: NDArray[Any], sample_owner: NDArray[Any], sample_tokens: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the first sample at or after each boundary and before the next boundary; -1 for none."""
    here = owner * KEY + tokens
    following = np.minimum(np.append(here[1:], np.iinfo(np.int64).max)[: len(here)], (owner + 1) * KEY)
    keys = sample_owner * KEY + sample_tokens
    index = np.searchsorted(keys, here)
    within = index < len(keys)
    within[within] = keys[index[within]] < following[within]
    return np.where(within, index, -1)
