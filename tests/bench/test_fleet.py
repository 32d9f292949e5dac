"""The tapes of the fleet benchmark, the outcomes of its engines, its arithmetic, and a small fleet on real replicas."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import Outcome
from meridian_control.engine.merged_steps import ages_ms
from meridian_control.engine.settings_delivery import USUAL_INTERVAL_STEPS
from meridian_control.table.token_rows import spell_out
from tests.bench import fleet_report
from tests.bench.fleet_engines import STEP_TAG, Decisions, varint
from tests.bench.fleet_report import Beside, Setting
from tests.bench.fleet_rig import Rig, Silence, Usage, Windows, cost_s, measure
from tests.bench.fleet_tape import ENGINE, Report, made

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import Postgres

REQUESTS, STEPS = 4, 600
KEYS = {
    "engines",
    "replicas",
    "engines_per_core",
    "mb_per_engine",
    "decision_steps_p99",
    "delivery_p95_s",
    "lost",
}


@pytest.fixture(scope="module")
def tape() -> list[Report]:
    return made(1, REQUESTS, 20.0, STEPS, 1000)


def test_a_tape_holds_reports_of_requests_that_come_and_go(tape: list[Report]) -> None:
    for before, report in pairwise(tape):
        message = agent_pb2.StepReport.FromString(report.body)
        spell_out(message.tokens)
        assert len(message.tokens.slot) == REQUESTS * report.steps
        assert 1 <= message.steps == report.steps <= USUAL_INTERVAL_STEPS
        assert len(ages_ms(message)) == len(message.tokens.slot)
        assert all(ENGINE in opened.request_id for opened in message.opened)
        assert set(report.opened) == set(before.closed), "a place that is free is taken at once"
        for slot in set(range(REQUESTS)) - set(report.opened):
            tokens = message.tokens.slot[:].count(slot)
            now, then = (each.thinks[slot] + each.answers[slot] for each in (report, before))
            # The marker that ends thinking is neither thinking nor answer.
            assert now == then + tokens - (slot in report.ended)
    assert sum(len(report.closed) for report in tape) > 0
    assert sum(len(report.ended) for report in tape) > 0


def test_a_snapshot_has_the_requests_that_no_later_report_opens(tape: list[Report]) -> None:
    at, report = next((n, r) for n, r in enumerate(tape) if r.closed)
    found = report.snapshot("000007", 9)
    assert {request.slot for request in found.requests} == set(range(REQUESTS)) - set(tape[at + 1].opened)
    assert {request.request_id.split("-")[1] for request in found.requests} == {"000007"}
    assert all(r.think_tokens == report.thinks[r.slot] for r in found.requests)


def test_probes_are_spread_over_the_slots(tape: list[Report]) -> None:
    spread = next(report for report in tape if not report.closed).spread()
    message = agent_pb2.StepReport.FromString(spread.body)
    assert list(message.tokens.slot) == [slot for slot in range(REQUESTS) for _ in range(slot)]
    assert {len(column) for _, column in message.tokens.ListFields()} == {REQUESTS * (REQUESTS - 1) // 2}


def report(**fields: tuple[int, ...]) -> Report:
    """Return a report of two thinking requests."""
    empty: dict[str, tuple[int, ...]] = {"opened": (), "ended": (), "closed": ()}
    state = {"numbers": (1, 2), "phases": (agent_pb2.PHASE_THINK,) * 2, "thinks": (50, 60), "answers": (0, 0)}
    return Report(1, b"", **(empty | state | fields))


def outcomes(added: agent_pb2.StepReport) -> dict[int, int]:
    return {outcome.decision_id: outcome.outcome for outcome in added.outcomes}


def test_every_decision_has_one_outcome() -> None:
    decisions, rng = Decisions(), random.Random(1)
    first = agent_pb2.Directives(step=1)
    for slot in (0, 1):
        first.caps.add(decision_id=1 + slot, slot=slot, max_think_tokens=100)
        first.tiers.add(decision_id=3 + slot, slot=slot, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    first.probes.add(decision_id=5, slot=0)
    first.forces.add(decision_id=6, slot=1, reason=agent_pb2.FORCE_REASON_EAT, shadow=True)
    first.plan.decision_id = 7
    decisions.accept(first, report())
    added = decisions.play(report(), 2, rng)
    assert outcomes(added) == {5: Outcome.APPLIED, 6: Outcome.SHADOWED, 7: Outcome.APPLIED}
    assert (added.step, list(added.probes.decision_id), list(added.probes.think_tokens)) == (2, [5], [50])
    assert decisions.open == 4

    second = agent_pb2.Directives(step=2)
    second.caps.add(decision_id=8, slot=1, max_think_tokens=90)
    second.plan.decision_id = 9
    second.probes.add(decision_id=10, slot=0)
    decisions.accept(second, report())
    answers = (agent_pb2.PHASE_OUTPUT, agent_pb2.PHASE_THINK)
    ended = report(ended=(0,), closed=(1,), phases=answers)
    assert outcomes(decisions.play(ended, 3, rng)) == {
        1: Outcome.ENDED_NATURALLY,
        2: Outcome.SUPERSEDED,
        4: Outcome.APPLIED,
        8: Outcome.REQUEST_GONE,
        9: Outcome.APPLIED,
        10: Outcome.REFUSED,
    }
    assert decisions.open == 1

    late = agent_pb2.Directives(step=2)
    late.caps.add(decision_id=11, slot=1, max_think_tokens=90)
    decisions.accept(late, ended)
    opened = report(opened=(1,))
    assert outcomes(decisions.play(opened, 4, rng)) == {11: Outcome.REQUEST_GONE}
    older = agent_pb2.Directives(step=3)
    older.caps.add(decision_id=12, slot=1, max_think_tokens=90)
    decisions.accept(older, opened)
    assert outcomes(decisions.play(report(), 5, rng)) == {12: Outcome.REQUEST_GONE}, "made for the request before"
    decisions.begin(report())
    assert outcomes(decisions.play(report(), 6, rng)) == {3: Outcome.APPLIED}
    assert decisions.open == 0


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16_383, 16_384, 1 << 20])
def test_a_report_is_put_together_from_its_parts(number: int) -> None:
    body = agent_pb2.StepReport(steps=2, kv_used=0.5).SerializeToString()
    added = agent_pb2.StepReport(step=9)
    added.outcomes.add(decision_id=3, detail="x" * number)
    encoded = added.SerializeToString()
    message = agent_pb2.ConnectRequest.FromString(STEP_TAG + varint(len(body) + len(encoded)) + body + encoded)
    assert (message.step.steps, message.step.step, message.step.kv_used) == (2, 9, 0.5)
    assert len(message.step.outcomes[0].detail) == number


def test_silence_and_looks_do_not_count_as_work() -> None:
    """Replicas use 0.2 cores for silent engines, so 2 s of 10 s, and 0.5 s for a look; 5.5 s are left."""
    used = Usage((5.0, 3.0), 1.0, 1.0, 10.0)
    assert cost_s(used, Silence(0.2, 0.5), 150.0) == pytest.approx(5.5 / 150)


def setting(engines: int, replicas: int) -> Setting:
    names = [name for name, kind in Setting.__annotations__.items() if kind == "float"]
    figures = dict.fromkeys(names, 10.0)
    return Setting(engines=engines, replicas=replicas, latency_ms=(5.0, 30.0), lost=0, **figures)  # type: ignore[arg-type]


def test_the_last_line_is_that_of_the_largest_setting(tmp_path: Path) -> None:
    found = json.loads(fleet_report.last_line(setting(5000, 4)))
    assert found.keys() == KEYS
    assert (found["engines"], found["engines_per_core"], found["decision_steps_p99"]) == (5000, 100.0, 1.5)
    compared = Beside("", 32, 60.0, 30.0, [1.9, 2.1])
    fleet_report.write([setting(1000, 1), setting(5000, 4)], compared, "a day", tmp_path)
    text = (tmp_path / "fleet.md").read_text()
    assert "60 engines today and 30 at 8206ef5: 2.000 times as many" in text
    assert text.count("| 1,000 | 1 |") == text.count("| 5,000 | 4 |") == 3
    assert "Not measured: no commit." in fleet_report.markdown([setting(1, 1)], Beside("no commit"), "a day")


async def test_a_small_fleet_loses_nothing_although_a_replica_is_killed(
    tmp_path: Path, postgres: Postgres, tape: list[Report]
) -> None:
    rig = Rig(6, 2, [], Windows(slower=2.0, seconds=0.5, idle_s=0.1), [tape])
    found = await measure(rig, tmp_path, postgres)
    assert found.lost == 0
    assert found.moved == 3
    assert found.reports_s > 0
    assert found.cut > 0
