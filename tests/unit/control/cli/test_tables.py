"""The tables that `meridianctl` prints."""

from __future__ import annotations

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.cli.tables import engine_table, handover_table, pool_lines


@pytest.mark.parametrize("connector", ["", "NixlConnector"])
def test_connectors_have_a_column_if_an_engine_has_one(connector: str) -> None:
    prefill = fleet_pb2.Engine(engine_id="prefill", kv_connector=connector, kv_role="kv_producer" if connector else "")
    table = engine_table([prefill, fleet_pb2.Engine(engine_id="plain")])
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["engine"] == ["prefill", "plain"]
    assert cells.get("KV connector") == (["NixlConnector kv_producer", ""] if connector else None)


def test_pools_and_urls_have_columns_if_an_engine_is_in_a_pool() -> None:
    a = fleet_pb2.Engine(
        engine_id="a", pool="thinking", answering_engine=fleet_pb2.AnsweringEngine(url="http://a:8000")
    )
    plain = fleet_pb2.Engine(engine_id="plain")
    cells = {str(column.header): list(column.cells) for column in engine_table([a, plain]).columns}
    assert (cells["pool"], cells["URL"]) == (["thinking", "none"], ["http://a:8000", ""])
    assert "pool" not in {str(column.header) for column in engine_table([plain]).columns}


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
