"""`meridianctl status` against a real control plane, and the words for a fleet in trouble."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import fleet_pb2

from meridian_control.cli import console, status
from meridian_control.storage import postgres
from tests.contract.ctl import CONNECTED, REFUSED, UNREACHABLE, engine, scripted
from tests.contract.ctl import run as run_here
from tests.processes import MERIDIANCTL, Control, run


def test_a_control_plane_in_ten_lines(tmp_path: Path) -> None:
    control = Control(tmp_path)

    def called(*words: str) -> dict[str, str]:
        command = [*MERIDIANCTL, "--server", control.target, *words]
        lines = run(command).stdout.splitlines()
        return {line[:15].strip(): line[15:].strip() for line in lines}

    try:
        before = called("status")
        assert list(before) == [
            *("control plane", "policy", "engines", "requests", "rollout", "freezes", "saved", "harm", "budgets"),
            "pressure",
        ]
        assert (before["control plane"], before["engines"]) == (control.target, "0 connected")
        budget = {"name": "day", "tokens_per_day": 1000}
        control.set_policy({"budget": [budget], "pressure": [{"name": "calm", "ttfvt_p99_ms": 300}]})
        called("freeze", "--for", "1h", "--reason", "look closer", "--allow-none", "--wait", "0")
        after = called("status")
        assert after["policy"].startswith("revision 2, ")
        assert re.fullmatch(r"1 until \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z: look closer", after["freezes"])
        assert after["budgets"].startswith("day 100 % left, ")
        told = json.loads(run([*MERIDIANCTL, "--server", control.target, "status", "-o", "json"]).stdout)
        assert (told["policy"]["revision"], "policy" in told["policy"]) == (2, False)
        assert (told["engines"]["connected"], told["engines"]["lost"], told["rollout"]) == (0, [], None)
        assert [freeze["reason"] for freeze in told["freezes"]] == ["look closer"]
        assert [budget["left_ratio"] for budget in told["budgets"]] == [1.0]
    finally:
        control.process.stop()


async def test_a_policy_store_that_does_not_answer_hides_only_what_it_has() -> None:
    engines = fleet_pb2.ListEnginesResponse(engines=[of("a", thinking=3)])
    savings, budgets = fleet_pb2.GetSavingsResponse(), fleet_pb2.ListBudgetsResponse()
    async with scripted(ListEngines=[engines], GetSavings=[savings], ListBudgets=[budgets]) as target:
        shown, told = await run_here("status", server=target), await run_here("status", "-o", "json", server=target)
    assert (shown.exit_code, told.exit_code) == (UNREACHABLE, UNREACHABLE)
    lines = {line[:15].strip(): line[15:].strip() for line in shown.stdout.splitlines()}
    assert lines["engines"] == "1 connected"
    why = "UNAVAILABLE: no answer"
    assert {name for name, text in lines.items() if text == f"not known: {why}"} == {"policy", "rollout", "freezes"}
    document = json.loads(told.stdout)
    assert document["not_known"] == {"policy": why, "rollout": why, "freezes": why}
    assert (document["policy"], document["requests"]["thinking"]) == (None, 3)


async def test_watching_begins_while_the_policy_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "WATCH_S", 0.0)
    engines, denied = fleet_pb2.ListEnginesResponse(engines=[of("a")]), grpc.StatusCode.PERMISSION_DENIED
    savings, budgets = fleet_pb2.GetSavingsResponse(), fleet_pb2.ListBudgetsResponse()
    listed: list[Any] = [engines, engines, denied]
    async with scripted(ListEngines=listed, GetSavings=[savings], ListBudgets=[budgets]) as target:
        shown = await run_here("status", "--watch", server=target)
    assert (shown.exit_code, shown.stdout.count("1 connected")) == (REFUSED, 2)


def test_a_call_waits_for_the_answer_that_names_a_database_which_hangs() -> None:
    assert console.CALL_TIMEOUT_S >= postgres.CALL_TIMEOUT_S + 5


def of(name: str, **fields: Any) -> fleet_pb2.Engine:
    return engine(name, 1, **fields)


def test_what_is_wrong_with_engines() -> None:
    engines = [
        of("a"),
        of("b", fault="tripped"),
        *(of(f"old-{n}", revision=2) for n in range(4)),
        of("gone", state=CONNECTED + 1, lost=True),
    ]
    assert status._engines(engines) == (
        "6 connected; 1 engine with the agent off: b; 1 engine gone: gone; "
        "4 engines with an older policy: old-0, old-1, old-2, and 1 more"
    )
    sharing = [of("same", missing_facts=["no tokenizer"]), of("same", missing_facts=["no tokenizer"])]
    assert status._engines(sharing) == (
        "2 connected; 2 engines without some facts: same; 2 engines without a name of its own: same"
    )


def test_the_highest_level_of_pressure() -> None:
    def under(level: int) -> Any:
        return [fleet_pb2.Pressure(name="p", level=level), fleet_pb2.Pressure(name="q")]

    engines = [of("a", pressures=under(2)), of("b", pressures=under(3))]
    assert status._pressure(engines) == "p level 3 of 6 (b); q level 0 of 6"
