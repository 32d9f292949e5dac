"""The tables that `meridianctl` prints."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.cli.console import NAME_WIDTH, PIPED_WIDTH, PlainConsole, add, new_table
from meridian_control.cli.tables import (
    engine_table,
    handover_table,
    limit_lines,
    pool_lines,
    pressure_table,
    request_table,
    thinking_lines,
)

if TYPE_CHECKING:
    from rich.table import Table


def cells_of(table: Table) -> dict[str, list[Any]]:
    """Return the cells of each column by its heading."""
    return {str(column.header): list(column.cells) for column in table.columns}


@pytest.mark.parametrize("connector", ["", "NixlConnector"])
def test_connectors_have_a_column_if_an_engine_has_one(connector: str) -> None:
    prefill = fleet_pb2.Engine(engine_id="prefill", kv_connector=connector, kv_role="kv_producer" if connector else "")
    cells = cells_of(engine_table([prefill, fleet_pb2.Engine(engine_id="plain")]))
    assert cells["engine"] == ["prefill", "plain"]
    assert cells.get("KV connector") == (["NixlConnector kv_producer", ""] if connector else None)


def test_pools_and_urls_have_columns_if_an_engine_is_in_a_pool() -> None:
    a = fleet_pb2.Engine(
        engine_id="a", pool="thinking", answering_engine=fleet_pb2.AnsweringEngine(url="http://a:8000")
    )
    plain = fleet_pb2.Engine(engine_id="plain")
    cells = cells_of(engine_table([a, plain]))
    assert (cells["pool"], cells["URL"]) == (["thinking", "none"], ["http://a:8000", ""])
    assert "pool" not in cells_of(engine_table([plain]))


def test_the_engines_say_why_they_have_no_part_in_handovers_and_what_became_of_them() -> None:
    a = fleet_pb2.Engine(engine_id="a", pool="thinking", no_hand_over="no KV connector", handovers={"handed_over": 2})
    b = fleet_pb2.Engine(
        engine_id="b", pool="answering", answering_engine=fleet_pb2.AnsweringEngine(unfit="it is frozen")
    )
    other = fleet_pb2.Engine(
        engine_id="other", answering_engine=fleet_pb2.AnsweringEngine(unfit="it has no URL"), no_hand_over="why"
    )
    assert list(pool_lines([a, b, other])) == [
        "a hands no request over: no KV connector",
        "a was to hand requests over: 2 handed_over",
        "no request is handed over to b: it is frozen",
    ]


def test_handovers_in_shadow_are_shown_as_means() -> None:
    sums = fleet_pb2.ShadowHandovers(requests=4, transfer_ms=160.0, recompute_ms=2000.0, gain_ms=8000.0)
    rows = handover_table([fleet_pb2.Engine(engine_id="a", shadow_handovers=sums), fleet_pb2.Engine(engine_id="b")])
    assert [list(column.cells) for column in rows.columns] == [["a"], ["4"], ["40"], ["500"], ["2000"]]


@pytest.mark.parametrize("columns", [60, 80, 100, 120, PIPED_WIDTH])
@pytest.mark.parametrize("letters", [5, 24, 40, 57, 100])
def test_no_terminal_cuts_a_column_off(letters: int, columns: int) -> None:
    name = "v" * letters
    engine = fleet_pb2.Engine(engine_id=name, model="Qwen/Qwen3-8B", step_time_ms=21.3, kv_used=0.93, running=64)
    live = fleet_pb2.LiveRequest(engine_id=name, request_id="chatcmpl-" + "0" * 36, think_tokens=1234, rank=3)
    decided = new_table("time", "engine", "request", "revision", "thinking", "decision", "why", "outcome")
    add(decided, "2026-01-31T12:00:00.250Z", name, "r", 12, 1234, "end thinking", "the variance is low", "applied")
    for table in (engine_table([engine]), engine_table([engine], wide=True), request_table([live]), decided):
        terminal = PlainConsole(width=columns, file=StringIO())
        with terminal.capture() as shown:
            terminal.print(table)
        texts = [text for column in table.columns for text in (str(column.header), *map(str, column.cells))]
        assert Counter("".join(shown.get().split())) == Counter("".join("".join(texts).split()))
        row = str(next(iter(table.columns[0].cells)))
        assert row in shown.get() or len(row) > min(columns // 3, NAME_WIDTH)


def limited(name: str, wanted: int, in_force: int, more: int, **fields: Any) -> fleet_pb2.Engine:
    """Return an engine with a limit that its agent may change between bounds, and one that has no highest value."""
    running, piece = agent_pb2.EngineLimit(startup=128, lowest=1, highest=128), agent_pb2.EngineLimit(lowest=16)
    rows = [
        fleet_pb2.EngineLimitState(name="running", limit=running, wanted=wanted, in_force=in_force),
        fleet_pb2.EngineLimitState(name="piece", limit=piece, wanted=more, in_force=more),
    ]
    return fleet_pb2.Engine(engine_id=name, engine_limits=rows, **fields)


def test_engines_name_the_limits_that_the_policy_changes() -> None:
    frozen = limited("f", 32, 128, 0, state=fleet_pb2.CONNECTION_STATE_CONNECTED, freeze={"confirmed": True})
    engines = limited("a", 32, 32, 512), limited("b", 500, 128, 0), limited("stock", 0, 128, 0), frozen
    assert list(limit_lines([*engines, fleet_pb2.Engine(engine_id="older")])) == [
        "a runs with running 32 (started with 128), piece 512 (started with 0)",
        "b runs with running 128 (started with 128; the policy sets 500, the engine takes 1 to 128)",
        "f runs with running 128 (started with 128; the policy sets 32, not in force: the engine is frozen)",
    ]


def test_a_value_that_may_miss_its_target_is_shown_before_one_with_too_few_samples() -> None:
    few = {"target": "ttot_p99_ms", "measured": 900.0, "limit": 100.0, "samples": 9}
    enough = {"target": "output_itl_p99_ms", "measured": 42.0, "limit": 40.0, "samples": 10}
    row = fleet_pb2.Pressure(name="chat", level=1, readings=[fleet_pb2.PressureReading(**r) for r in (few, enough)])  # type: ignore[arg-type]
    cells = cells_of(pressure_table([fleet_pb2.Engine(engine_id="e", pressures=[row])]))
    assert (cells["target"], cells["measured"], cells["samples"]) == (["output_itl_p99_ms"], ["42"], ["10"])


def test_what_engines_do_not_know_of_thinking_is_said() -> None:
    silent, a = fleet_pb2.Engine(engine_id="s"), fleet_pb2.Engine(engine_id="a", reclaim_note="later prompts do")
    b = fleet_pb2.Engine(engine_id="b", unread_prompts=3)
    lines = list(thinking_lines([silent, a, b]))
    assert lines[0] == "a: later prompts do"
    assert lines[1].startswith("b: the prompt of 3 requests came as embeddings")
    assert len(lines) == 2
