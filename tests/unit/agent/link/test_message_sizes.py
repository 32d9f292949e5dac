"""Whatever clients choose and however much waits, no message of the agent is larger than its bound, and together the
messages say all that the records say."""

from __future__ import annotations

from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.request_info import RequestInfo, clean
from meridian_agent.core.step_record import COUNTERS, Gauges, StepRecord
from meridian_agent.link.message_sizes import (
    LEAST_BYTES,
    REPORT_BYTES,
    Bounds,
    SnapshotRecord,
    record_bytes,
    reports_of,
)
from meridian_agent.link.messages import opened_message, step_report
from meridian_agent.link.unreported import Group
from meridian_control.engine.token_rows import columns_of

# Every text is taken in through `clean`, so none is longer than the longest text that a row may have.
TEXTS = st.text(max_size=300).map(clean)
NUMBERS = st.integers(0, 2**31 - 1)
SLOTS = st.integers(0, 2**16 - 1)
MS = st.floats(0, 1e9, width=32)
INFOS = st.builds(
    RequestInfo,
    request_id=st.text(max_size=2000),
    model=TEXTS,
    tenant=TEXTS,
    slo_class=TEXTS,
    prompt_tokens=NUMBERS,
    max_tokens=NUMBERS,
    max_think_tokens=st.none() | NUMBERS,
    effort=TEXTS,
    min_think_tokens=st.none() | NUMBERS,
    traceparent=TEXTS,
    remote_decode=st.booleans(),
    handed_over_ref=TEXTS,
    refused_slo_class=TEXTS,
    chat=st.booleans(),
    sleeping_stops=st.booleans(),
)
DECIDED = st.booleans(), st.integers(0, 14)
ROWS = st.tuples(SLOTS, INFOS, st.integers(0, 3), NUMBERS, NUMBERS, NUMBERS, *DECIDED, *[st.booleans()] * 4)
OUTCOMES = st.tuples(st.integers(0, 2**63), st.integers(0, 7), NUMBERS, TEXTS, st.integers(0, 14))
PROBES = st.tuples(st.integers(0, 2**63), SLOTS, NUMBERS, MS, NUMBERS, NUMBERS, st.booleans(), st.booleans())


def many(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Return lists of at most a few hundred entries, most of which repeat a few examples."""
    repeated = st.tuples(st.lists(entries, min_size=1, max_size=3), st.integers(0, 80))
    return st.lists(entries, max_size=4) | repeated.map(lambda drawn: drawn[0] * drawn[1])


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    columns = draw(many(st.tuples(SLOTS, st.integers(0, 3), st.integers(0, 2**31))))
    slots, phases, flags = ([row[n] for row in columns] for n in range(3))
    gauges = Gauges(draw(MS), draw(NUMBERS), draw(NUMBERS))
    record = StepRecord(draw(NUMBERS), 0.0, draw(MS), draw(NUMBERS), 1, gauges=gauges)
    record.slots, record.phases, record.rows, record.flags = slots, phases, list(range(len(slots))), flags
    record.opened, record.outcomes, record.probes = draw(many(ROWS)), draw(many(OUTCOMES)), draw(many(PROBES))
    record.closed = draw(many(st.tuples(SLOTS, st.integers(0, 4))))
    record.handed_over = [slot for slot, reason in record.closed if reason == 1]
    record.preempted, record.resumed = draw(many(SLOTS)), draw(many(SLOTS))
    record.joined, record.loops = draw(many(st.tuples(SLOTS, MS))), draw(many(st.tuples(SLOTS, NUMBERS, NUMBERS)))
    record.continued = draw(many(st.tuples(SLOTS, NUMBERS, MS)))
    record.preemptions = draw(many(st.tuples(NUMBERS, SLOTS, NUMBERS)))
    record.counters = (1,) * len(COUNTERS)
    return record


def said(report: agent_pb2.StepReport) -> dict[str, list[Any]]:
    """Return all rows of a report, by field."""
    found: dict[str, list[Any]] = {
        name: [str(row) for row in getattr(report, name)]
        for name in ("opened", "closed", "outcomes", "preempted", "resumed")
    }
    for name in ("probes", "loops", "continued", "joined", "preemptions"):
        columns = getattr(report, name)
        found[name] = list(zip(*(list(getattr(columns, f.name)) for f in columns.DESCRIPTOR.fields), strict=True))
    found["tokens"] = [tuple(row) for row in columns_of(report.tokens)[0].T.tolist()]
    return found


@given(record=records(), most=st.integers(LEAST_BYTES, 1 << 14), sparse=st.booleans())
def test_the_reports_of_a_step_say_what_one_report_would(record: StepRecord, most: int, sparse: bool) -> None:
    whole = step_report([record], sparse)
    assert whole.ByteSize() <= record_bytes(record) + 512, "a report is never larger than estimated"
    reports = list(reports_of(record, most, sparse))
    largest_row = max((opened_message(row).ByteSize() for row in record.opened), default=0)
    assert max(report.ByteSize() for report in reports) <= max(most, largest_row + 1024)
    rows, wanted = [said(report) for report in reports], said(whole)
    assert {name: list(chain.from_iterable(some[name] for some in rows)) for name in wanted} == wanted
    assert {(r.step, r.running, r.waiting, r.steps) for r in reports} == {(whole.step, whole.running, whole.waiting, 1)}
    assert sum(r.prefill_tokens for r in reports) == whole.prefill_tokens
    assert [r.HasField("counters") for r in reports] == [False] * (len(reports) - 1) + [True]
    kinds = [kind for some in rows for kind in some if some[kind]]
    assert kinds == sorted(kinds, key=ORDER.index), "a report's parts come in the order in which they take effect"


# The order in which `report_intake` takes in the fields of a report.
ORDER = ["opened", "tokens", "joined", "probes", "loops", "preempted", "resumed", "continued", "preemptions"]
ORDER += ["outcomes", "closed"]


@given(rows=many(ROWS), ended=many(st.tuples(st.builds(Group, TEXTS, TEXTS, TEXTS, TEXTS), NUMBERS)))
def test_the_parts_of_a_snapshot_are_the_snapshot(rows: list[Any], ended: list[Any]) -> None:
    most = 8000
    snapshot = SnapshotRecord(7, rows, ended, "session")
    parts = [message.snapshot for message in snapshot.parts(most)]
    assert max(part.ByteSize() for part in parts) <= most
    assert [part.continues for part in parts] == [True] * (len(parts) - 1) + [False]
    whole, left_out = snapshot.whole(1 << 30)
    assert left_out == 0
    joined = agent_pb2.Snapshot()
    for part in parts:
        joined.MergeFrom(part)
    joined.continues = False
    assert joined == whole.snapshot
    short, left_out = snapshot.whole(most)
    assert short.ByteSize() <= most + 16
    assert len(short.snapshot.requests) + left_out == len(rows)


def test_bounds_fall_below_what_was_refused() -> None:
    bounds = Bounds()
    sizes = []
    for _ in range(20):
        sizes.append((bounds.part, bounds.report, bounds.most))
        bounds.shrink(bounds.part)
    assert sizes[0] == (1 << 16, REPORT_BYTES, 15 << 20)
    assert sizes[1] == (1 << 15, 1 << 15, 1 << 15)
    assert sizes[-1] == (LEAST_BYTES,) * 3
