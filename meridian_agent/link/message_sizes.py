"""Keeps each message of the agent below a number of bytes, because gRPC refuses larger messages: splits snapshots and
the records of single steps. Pure; runs on the link's threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.request_info import MAX_ID
from meridian_agent.link.messages import opened_message, step_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meridian_agent.core.step_record import Record, StepRecord
    from meridian_agent.link.unreported import Group

# Bytes of a part of a snapshot, and of a report. A single row of either is smaller. Some implementations of gRPC, which
# proxies may use, refuse messages above 4 MiB.
PART_BYTES, REPORT_BYTES = 1 << 16, 1 << 20
# Bytes of a snapshot for a control plane that does not read parts and accepts messages of 16 MiB.
WHOLE_BYTES = 15 << 20
# Smallest number of bytes to which a bound is lowered after a refusal; one row may have more.
LEAST_BYTES = 1 << 12
# Largest numbers of bytes: of the numbers and tags of a row of each kind, without its texts.
TOKEN_BYTES, PROBE_BYTES, SLOT_BYTES, OUTCOME_BYTES, OPENED_BYTES = 32, 64, 24, 40, 160
STEP_BYTES, REPORT_HEAD_BYTES = 64, 512
# Fields of a record with an entry for each token, request or decision; and the fields that only one of the reports of a
# step has, as the others have them.
ENTRIES = (
    *("slots", "phases", "rows", "text", "flags", "opened", "joined", "probes", "looks", "loops"),
    *("preempted", "resumed", "continued", "preemptions", "outcomes", "closed"),
)
NOTHING_ONCE: dict[str, Any] = {"prefill_tokens": 0, "counters": ()}


@dataclass(slots=True)
class Bounds:
    """The bounds of one link, in bytes. most: bound of every message, which falls each time that one is refused for its
    size."""

    most: int = WHOLE_BYTES

    def shrink(self, refused_bytes: int) -> None:
        """Let no message have more than half as many bytes as the one that was refused."""
        self.most = max(LEAST_BYTES, min(self.most, refused_bytes) // 2)

    @property
    def part(self) -> int:
        return min(PART_BYTES, self.most)

    @property
    def report(self) -> int:
        return min(REPORT_BYTES, self.most)


@dataclass(slots=True)
class SnapshotRecord:
    """A snapshot to send: the rows of its requests, and the unreported thinking tokens of ended ones. session_id:
    session of the newest stream that has brought tokens."""

    step: int
    rows: list[tuple[Any, ...]]
    ended: list[tuple[Group, int]]
    session_id: str

    def parts(self, most_bytes: int) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield the messages of the snapshot, each of at most `most_bytes` unless a single row has more."""
        part = self._part()
        used = part.ByteSize()
        for kind, row in self._entries():
            size = row.ByteSize() + 8
            if used + size > most_bytes and (part.requests or part.ended):
                part.continues = True
                yield agent_pb2.ConnectRequest(snapshot=part)
                part = self._part()
                used = part.ByteSize()
            getattr(part, kind).append(row)
            used += size
        yield agent_pb2.ConnectRequest(snapshot=part)

    def whole(self, most_bytes: int) -> tuple[agent_pb2.ConnectRequest, int]:
        """Return the snapshot as one message of at most `most_bytes`, and the number of requests that are left out."""
        parts = self.parts(most_bytes)
        first = next(parts)
        first.snapshot.continues = False
        return first, sum(len(part.snapshot.requests) for part in parts)

    def _part(self) -> agent_pb2.Snapshot:
        return agent_pb2.Snapshot(step=self.step, reported_session_id=self.session_id)

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for group, think_tokens in self.ended:
            yield "ended", agent_pb2.EndedThinking(think_tokens=think_tokens, **group._asdict())
        for row in self.rows:
            yield "requests", opened_message(row)


def record_bytes(record: Record) -> int:
    """Return at least as many bytes as the record adds to a report."""
    size = STEP_BYTES + TOKEN_BYTES * _tokens(record)
    if record.is_text:
        return size
    size += sum([_opened_bytes(row) for row in record.opened])
    size += sum([OUTCOME_BYTES + _bytes(detail) for *_, detail, _ in record.outcomes])
    slots = len(record.preempted) + len(record.resumed) + len(record.closed) + len(record.loops)
    size += SLOT_BYTES * (slots + len(record.joined) + len(record.continued) + len(record.preemptions))
    return size + PROBE_BYTES * len(record.probes)


def reports_of(record: StepRecord, most_bytes: int, sparse: bool) -> Iterator[agent_pb2.StepReport]:
    """Yield the reports of one step that are together what `step_report` makes of its record, in the order in which a
    control plane takes in the parts of a report. A control plane of any version takes each for a report of its own: the
    last has the record's number, and those with openings or tokens have the same.

    Each has at most `most_bytes`, unless a single row has more.
    """
    record.spread()
    flags, most = record.row_flags(), most_bytes - REPORT_HEAD_BYTES - STEP_BYTES
    for some in _chunks(record.opened, [_opened_bytes(row) for row in record.opened], most):
        yield step_report([_like(record, opened=some)], sparse)
    rows = len(record.slots)
    at_once = max(1, most // TOKEN_BYTES)
    for begin in range(0, rows, at_once):
        cut = slice(begin, min(rows, begin + at_once))
        part = _like(
            record, slots=record.slots[cut], phases=record.phases[cut], rows=record.rows[cut], flags=flags[cut]
        )
        # The control plane estimates the time of a step from its tokens.
        part.step_time_ms = record.step_time_ms * (cut.stop - cut.start) / rows
        yield step_report([part], sparse)
    for name in ("joined", "probes", "loops", "preempted", "resumed", "continued", "preemptions"):
        for some in _chunks(listed := getattr(record, name), [PROBE_BYTES] * len(listed), most):
            yield step_report([_like(record, **{name: some})], sparse)
    sizes = [OUTCOME_BYTES + _bytes(detail) for *_, detail, _ in record.outcomes]
    for some in _chunks(record.outcomes, sizes, most):
        yield step_report([_like(record, outcomes=some)], sparse)
    chunks = list(_chunks(record.closed, [SLOT_BYTES] * len(record.closed), most)) or [[]]
    for some in chunks[:-1]:
        yield step_report([_like(record, closed=some)], sparse)
    once = {name: getattr(record, name) for name in NOTHING_ONCE}
    yield step_report([_like(record, closed=chunks[-1], **once)], sparse)


def _like(record: StepRecord, **fields: Any) -> StepRecord:
    """Return the record with these entries in place of its own."""
    return replace(record, **{**{name: [] for name in ENTRIES}, **NOTHING_ONCE, **fields})


def _chunks(entries: Sequence[Any], sizes: Sequence[int], most_bytes: int) -> Iterator[list[Any]]:
    """Yield the entries in lists whose sizes add up to at most `most_bytes`, or of one entry."""
    chunk: list[Any] = []
    used = 0
    for entry, size in zip(entries, sizes, strict=True):
        if chunk and used + size > most_bytes:
            yield chunk
            chunk, used = [], 0
        chunk.append(entry)
        used += size
    if chunk:
        yield chunk


def _tokens(record: Record) -> int:
    """Return the number of the record's token rows, also before `StepRecord.spread`."""
    return len(record.slots) + sum(record.lengths) - len(record.lengths)


def _opened_bytes(row: tuple[Any, ...]) -> int:
    info = row[1]
    names = info.model, info.tenant, info.slo_class, info.refused_slo_class, info.effort
    texts = (*names, info.traceparent, info.handed_over_ref)
    # The id is cleaned only when its message is made.
    plain = info.request_id.isascii() and info.request_id.isprintable()
    return OPENED_BYTES + (len(info.request_id[:MAX_ID]) if plain else 4 * MAX_ID) + sum([_bytes(t) for t in texts])


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
