"""The messages that a session accepts and refuses: snapshots, reports, merged steps and broken messages."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import COUNTERS, Gauges, StepRecord
from meridian_agent.link.message_sizes import LEAST_BYTES, reports_of
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.common.errors import InvalidRequest
from meridian_control.common.opened_request import MAX_SLOTS, MAX_TEXT
from meridian_control.common.report_bounds import MAX_EXACT, REFUSED
from meridian_control.engine import decision_ledger as ledger
from meridian_control.engine.merged_steps import MAX_STEPS
from meridian_control.engine.request_table import THINK
from meridian_control.engine.session import Session
from meridian_control.engine.token_rows import MAX_ROWS_PER_SLOT
from meridian_control.fleet.views import each_request_view
from tests.fakes.agent import hello
from tests.fakes.parts import engine_view
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import CALIBRATED, EARLY, NOW, Stream, step_report, stream

KINDS, LONG = "message must be a report, a snapshot or a settings status", "x" * 2000


def snapshot(*requests: Any, **fields: Any) -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=[*requests], **fields))


def test_an_end_under_way_while_the_table_is_told_anew_is_still_the_rules() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a")
    while not made.step().forces:
        pass
    made.agent.say(snapshot=made.agent.snapshot())
    made.pump()
    made.step(20)
    assert made.session.totals.ends == {"eat": 1}
    assert made.session.totals.decisions["force/eat"] == 1


def test_a_snapshot_before_the_first_policy() -> None:
    """Decisions name the step that they were made from; otherwise the agent would take them for old ones."""
    made = Stream()
    made.agent.heard()
    made.agent.engine.step = 70
    made.open("a")
    told = made.agent.snapshot()
    assert told.step == 70
    made.agent.say(snapshot=told)
    made.agent.engine.tracker.take_record()
    directives = made.apply(policy())[-1].directives
    assert (directives.step, [c.slot for c in directives.caps]) == (70, [0])


def test_what_was_decided_for_another_request_is_not_shown() -> None:
    made = stream()
    made.open("a")
    made.step()
    said = snapshot({"slot": 0, "request_id": "b"}, step=9)
    (response,) = made.session.on_message(said, NOW)
    (view,) = each_request_view(made.session)
    assert (view.request_id, view.last_decision.decision_id) == ("b", response.directives.caps[0].decision_id)
    faulted = Session("s", hello(fault="x"), NOW, parts=STREAM_PARTS)
    faulted.on_message(said, NOW)
    assert [r.HasField("last_decision") for r in each_request_view(faulted)] == [False]


def test_probe_results_of_a_request_that_is_gone_are_not_the_next_ones() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a")
    (probe,) = made.step().probes
    opened = [agent_pb2.RequestOpened(slot=probe.slot, request_id="b", phase=agent_pb2.PHASE_THINK)]
    made.session.on_message(step_report(closed=[{"slot": probe.slot}]), NOW)
    made.session.on_message(step_report(opened=opened), NOW)
    made.session.table.probe_open[probe.slot] = True
    probes = agent_pb2.ProbeColumns(
        decision_id=[probe.decision_id], slot=[probe.slot], think_tokens=[1], eat_nats=[0.5], cost_tokens=[1]
    )
    outcomes = [agent_pb2.DecisionOutcome(decision_id=probe.decision_id, outcome=agent_pb2.OUTCOME_APPLIED)]
    made.session.on_message(step_report(probes=probes, outcomes=outcomes), NOW)
    assert made.session.table.eat_count[probe.slot] == 0
    assert made.session.table.probe_open[probe.slot]


def test_a_refused_probe_is_asked_for_again_an_interval_later() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_probe_interval_tokens": 4, "shadow": True}))
    made.open("a")
    made.agent.eat_nats = math.nan
    asked = [bool(made.step().probes) for _ in range(13)]
    assert asked == [at % 4 == 0 for at in range(13)]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (agent_pb2.ConnectRequest(hello=hello()), f"{KINDS}; got hello"),
        (agent_pb2.ConnectRequest(), f"{KINDS}; got None"),
        (step_report(opened=[{"slot": MAX_SLOTS}]), f"step slot must be below {MAX_SLOTS}; got {MAX_SLOTS}"),
        (snapshot({"slot": 2**32 - 1}), f"snapshot slot must be below {MAX_SLOTS}"),
        (step_report(opened=[{}] * (MAX_SLOTS + 1)), f"step opened must have at most {MAX_SLOTS} entries; got 65537"),
        (step_report(closed=[{}] * (MAX_SLOTS + 1)), f"step closed must have at most {MAX_SLOTS} entries; got 65537"),
        (step_report(resumed=[0] * (MAX_SLOTS + 1)), f"step resumed must have at most {MAX_SLOTS} entries; got 65537"),
        (snapshot(*[{}] * (MAX_SLOTS + 1)), f"snapshot requests must have at most {MAX_SLOTS} entries; got 65537"),
        (step_report(tokens=agent_pb2.TokenColumns(slot=[0])), "step token columns must have one length"),
        (step_report(joined={"slot": [0]}), "step joined columns must have one length"),
        (step_report(continued={"slot": [0]}), "step continued columns must have one length"),
        (step_report(preemptions={"decision_id": [1], "slot": [1]}), "step preemption columns must have one length"),
        (step_report(probes=agent_pb2.ProbeColumns(slot=[0])), "step probe columns must have one length"),
        (
            step_report(opened=[{"think_tokens": 2**32 - 1}]),
            "step think_tokens must be at most 2147483647; got 4294967295",
        ),
        (step_report(opened=[{"request_id": LONG}]), "step request_id must have at most 1024 characters; got 2000"),
        (step_report(opened=[{"traceparent": LONG}]), "step traceparent must have at most 1024 characters; got 2000"),
        (
            step_report(opened=[{"slot": 0}], tokens=tokens([(0, THINK, 0, 0.0)] * (MAX_ROWS_PER_SLOT + 1))),
            "step a slot must have at most 16384 rows in a report; got 16385",
        ),
    ],
)
def test_broken_messages(message: agent_pb2.ConnectRequest, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{complaint}"):
        stream().session.on_message(message, NOW)


def test_what_is_not_known_is_no_error() -> None:
    """Outcomes of decisions that were never made, also in a report of no steps, and slots in which nobody lives."""
    made, far = stream(), 2**32 - 1
    for fields in ({}, {"steps": 0, "step": 0}):
        made.session.on_message(step_report(outcomes=[{"decision_id": 999, "outcome": 1}], **fields), NOW)
    assert made.session.totals.unknown_outcomes == 2
    assert not made.session.totals.outcomes
    made.session.on_message(step_report(preempted=[far, 7], resumed=[far], closed=[{"slot": far}, {"slot": 3}]), NOW)
    assert list(each_request_view(made.session)) == []


def test_a_report_of_no_steps_has_no_gauges() -> None:
    made = stream()
    made.session.on_message(step_report(outcomes=[{"decision_id": 1, "outcome": 1}], steps=0, step=0), NOW)
    assert (made.session.open_decisions, made.session.gauges) == ({}, None)


def test_a_part_of_a_large_step_leaves_the_counters_as_they_are() -> None:
    """Only the last report of a step has them, and a counter that falls in between looks like the engine's restart."""
    made = stream()
    whole = StepRecord(step=2, gauges=Gauges(0.5, 1, 2), counters=tuple(range(len(COUNTERS))))
    whole.closed = [(slot, 0) for slot in range(LEAST_BYTES)]
    reports = list(reports_of(whole, LEAST_BYTES, sparse=False))
    assert len(reports) > 2
    made.session.on_message(agent_pb2.ConnectRequest(step=reports[-1]), NOW)
    for report in reports:
        made.session.on_message(agent_pb2.ConnectRequest(step=report), NOW)
        view = engine_view(made.session)
        assert (view.counters, view.kv_used) == (reports[-1].counters, 0.5)


def report_with(path: str, value: float) -> agent_pb2.ConnectRequest:
    """Return a report with one number, which is valid but for the number."""
    report = agent_pb2.StepReport(step=1, steps=1)
    part, _, name = path.rpartition(".")
    if part == "merged":
        columns: dict[str, Any] = {"rows": [0], "step_time_ms": [1.0], "prefill_tokens": [0], "age_ms": [0.0]}
        report.merged.CopyFrom(agent_pb2.StepColumns(**(columns | {name: [value]})))
    else:
        setattr(getattr(report, part) if part else report, name, value)
    return agent_pb2.ConnectRequest(step=report)


FRACTIONS = {
    "step_time_ms",
    "kv_used",
    "merged.step_time_ms",
    "counters.agent_seconds",
    "counters.scheduler_seconds",
    "counters.worker_seconds",
    "counters.thread_seconds",
    "counters.round_trip_ms",
}
WRONG = [
    *((path, value) for path in sorted(FRACTIONS) for value in (-1e-3, 3e38, math.nan)),
    ("kv_used", 1.001),
    *((path, 2**64 - 1 if REFUSED[path][1] == MAX_EXACT else 2**32 - 1) for path in sorted(REFUSED.keys() - FRACTIONS)),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_numbers_out_of_bounds_are_the_agents_fault(path: str, value: float) -> None:
    """The stream ends with an error that names the field and the value, and nothing of the report is shown."""
    made = stream()
    error = rf"^step {re.escape(path)} must be in \[.*\]; got {re.escape(f'{value:g}'[:4])}"
    with pytest.raises(InvalidRequest, match=error):
        made.session.on_message(report_with(path, value), NOW)
    assert made.session.totals.reports == 0
    assert engine_view(made.session).kv_used == 0


def test_the_bounds_themselves_are_no_fault() -> None:
    for path, bound in ((path, bound) for path, bounds in REFUSED.items() for bound in bounds):
        stream().session.on_message(report_with(path, bound if path in FRACTIONS else int(bound)), NOW)


def test_every_number_of_a_report_has_bounds() -> None:
    """A number that is added to the reports needs bounds, or a place here that says where it is checked."""
    elsewhere = {
        "steps",
        "state",
        # By `step_of`, which compares them with the entries that they count, and by `ages_ms`.
        *(f"merged.{name}" for name in ("rows", "age_ms", "probes", "preempted", "resumed", "outcomes")),
    }
    found = set()
    for field in agent_pb2.StepReport.DESCRIPTOR.fields:
        if field.name in ("counters", "merged") and field.message_type is not None:
            found |= {f"{field.name}.{each.name}" for each in field.message_type.fields}
        elif field.message_type is None and not field.is_repeated:
            found.add(field.name)
    assert found - elsewhere == REFUSED.keys()


@pytest.mark.parametrize("step", [2**53 + 1, 2**64 - 1])
def test_a_snapshot_of_an_impossible_step_is_the_agents_fault(step: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^snapshot step must be in \[.*\]; got"):
        stream().session.on_message(snapshot(step=step), NOW)


@pytest.mark.parametrize(("decided_at", "applied_at"), [(10**6, 3), (3, 2**53)])
def test_steps_that_are_counted_wrongly_give_no_age(decided_at: int, applied_at: int) -> None:
    """A negative age would let a counter of all engines fall."""
    made = stream(policy())
    made.open("a")
    made.step(2)
    made.session.on_message(agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=decided_at, steps=1)), NOW)
    ends = made.session.on_end_thinking("a", "", NOW)
    assert ends is not None
    (force,) = ends.responses[0].directives.forces
    before = made.session.totals.staleness_steps.sum
    outcome = agent_pb2.DecisionOutcome(decision_id=force.decision_id, outcome=agent_pb2.OUTCOME_APPLIED)
    report = agent_pb2.StepReport(step=applied_at, steps=1, outcomes=[outcome])
    made.session.on_message(agent_pb2.ConnectRequest(step=report), NOW)
    assert not made.session.open_decisions.keys() & {force.decision_id}
    assert made.session.totals.staleness_steps.sum == before


@pytest.mark.parametrize("value", [-5.0, 2e9, math.nan])
def test_a_measurement_out_of_bounds_is_left_out(value: float) -> None:
    made = stream()
    made.open("a", think=0, handed_over_ref="ref")
    made.say(
        joined=agent_pb2.JoinedColumns(slot=[0], queueing_ms=[value]),
        continued=agent_pb2.ContinuedColumns(slot=[0], transferred_tokens=[10], first_token_ms=[value]),
    )
    assert (made.session.totals.queueing.sum, made.session.totals.ttot.sum) == (0, 0)


@pytest.mark.parametrize("drafted", [1, 3])
def test_the_cost_of_a_step_is_learnt_from_merged_reports_too(drafted: int) -> None:
    """Draft tokens, which give a sequence several rows in a step, change nothing: the cost is per sequence."""
    plain, alone, merged = (stream(policy()) for _ in range(3))
    took_ms, prefill_tokens = [10.0, 40.0, 11.0], [0, 300, 2]
    rows = [[(0, THINK, 0, 1.0)], [(0, THINK, 0, 1.0)], [(0, THINK, 0, 1.0), (1, THINK, 0, 1.0)]]
    for made in (plain, alone, merged):
        made.open("a", think=0)
        made.open("b", think=0)
        made.step()
    for kept, step_ms, prompt in zip(rows, took_ms, prefill_tokens, strict=True):
        plain.say(tokens=tokens(kept), step_time_ms=step_ms, prefill_tokens=prompt)
        alone.say(tokens=tokens(kept * drafted), step_time_ms=step_ms, prefill_tokens=prompt)
    columns = agent_pb2.StepColumns(
        rows=[drafted, drafted, 2 * drafted],
        step_time_ms=took_ms,
        prefill_tokens=prefill_tokens,
        age_ms=[51.0, 11.0, 0.0],
    )
    whole = tokens([row for kept in rows for row in kept * drafted])
    merged.say(3, tokens=whole, step_time_ms=11.0, prefill_tokens=2, merged=columns)
    assert (costs := merged.session._stream.step_cost).steps == 4
    learnt = plain.session._stream.step_cost.coefficients
    assert costs.coefficients == alone.session._stream.step_cost.coefficients == learnt
    # If the agent does not tell merged steps apart, only their number is known, and nothing can be learnt.
    merged.say(2, tokens=tokens(rows[2]), step_time_ms=11.0)
    assert costs.steps == 4


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": [1, 1]}, "columns of merged steps must have one entry for each of 3; got [2, 3, 3, 3]"),
        ({"rows": [1, 1, 1]}, "merged steps must have all of the report's 4 rows; got 3"),
        ({"age_ms": [1.0, -1.0, 0.0]}, "age_ms must be in [0, 86400000]; got -1.0"),
        ({"age_ms": [math.nan, 1.0, 0.0]}, "age_ms must be in [0, 86400000]; got nan"),
        ({"age_ms": [1e9, 1.0, 0.0]}, "age_ms must be in [0, 86400000]; got 1000000000.0"),
    ],
)
def test_merged_steps_that_do_not_fit_are_refused(wrong: dict[str, Any], error: str) -> None:
    made = stream(policy())
    made.open("a", think=0)
    columns: dict[str, Any] = {"rows": [1, 1, 2], "step_time_ms": [1.0] * 3, "prefill_tokens": [0] * 3}
    merged = agent_pb2.StepColumns(**(columns | {"age_ms": [2.0, 1.0, 0.0]} | wrong))
    with pytest.raises(InvalidRequest, match=re.escape(error)):
        made.say(3, tokens=tokens([(0, THINK, 0, 1.0)] * 4), merged=merged)


def test_too_many_merged_steps_are_refused_in_few_words() -> None:
    for steps, error in ((MAX_STEPS, "age_ms must be in"), (MAX_STEPS + 1, f"at most {MAX_STEPS} steps; got 4097")):
        columns: dict[str, Any] = {"rows": [0], "step_time_ms": [1.0], "prefill_tokens": [1], "age_ms": [math.nan]}
        merged = agent_pb2.StepColumns(**{name: value * steps for name, value in columns.items()})
        with pytest.raises(InvalidRequest, match=error) as raised:
            stream().say(steps, merged=merged)
        assert len(str(raised.value)) < 100


def test_of_what_an_agent_says_at_length_only_the_beginning_is_kept() -> None:
    made = stream()
    made.open("a")
    made.step()
    outcomes = [{"decision_id": made_id, "outcome": 6, "detail": "x" * 9999} for made_id in made.session.open_decisions]
    made.say(outcomes=outcomes)
    told = [event.decision for event in made.life("a").events if event.decision.kind in ("cap", "tier")]
    assert [len(decision.detail) for decision in told] == [MAX_TEXT] * 2
    made.agent.refuse_settings = "y" * 9999
    made.apply(policy())
    assert made.session.nack_error == "y" * MAX_TEXT


@pytest.mark.parametrize("kind", ["step", "snapshot", "freeze_status"])
def test_an_agent_that_settles_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ledger, "MAX_OPEN_DECISIONS", 4)
    made = stream()
    opened = [{"slot": slot, "request_id": str(slot)} for slot in range(9)]
    frozen = agent_pb2.ConnectRequest(freeze_status=agent_pb2.FreezeStatus())
    again = {"step": step_report(), "snapshot": snapshot(*opened), "freeze_status": frozen}
    made.session.on_message(step_report(opened=opened), NOW)
    with pytest.raises(InvalidRequest, match=rf"{kind} must leave at most 4 decisions without an outcome; got "):
        made.session.on_message(again[kind], NOW)


def test_a_wall_clock_that_was_set_back_silences_nobody() -> None:
    made = stream()
    made.step()
    made.now -= timedelta(hours=1)
    made.agent.step()
    assert [r.WhichOneof("message") for r in made.pump()] == ["directives"]


def test_an_engine_that_says_too_much_of_itself() -> None:
    with pytest.raises(InvalidRequest, match="hello must be at most 65536 bytes; got 70"):
        Session("s", hello(fault="x" * 70_000), NOW, parts=STREAM_PARTS)
