"""The tables that `meridianctl` prints."""

from __future__ import annotations

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.cli.tables import engine_table


@pytest.mark.parametrize("connector", ["", "NixlConnector"])
def test_connectors_have_a_column_if_an_engine_has_one(connector: str) -> None:
    prefill = fleet_pb2.Engine(engine_id="prefill", kv_connector=connector, kv_role="kv_producer" if connector else "")
    table = engine_table([prefill, fleet_pb2.Engine(engine_id="plain")])
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["engine"] == ["prefill", "plain"]
    assert cells.get("KV connector") == (["NixlConnector kv_producer", ""] if connector else None)
