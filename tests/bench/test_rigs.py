"""The benchmark of the fleet still runs, and loses nothing."""

from __future__ import annotations

from pathlib import Path

from tests.bench.fleet_rig import Rig, Windows, measure
from tests.bench.fleet_tape import made
from tests.postgres import Postgres


async def test_a_small_fleet_loses_nothing_although_a_replica_is_killed(tmp_path: Path, postgres: Postgres) -> None:
    tape = made(1, 4, 20.0, 600, 1000)
    rig = Rig(6, 2, [], Windows(slower=2.0, seconds=0.5, idle_s=0.1), [tape])
    found = await measure(rig, tmp_path, postgres)
    assert found["lost"] == 0
    assert found["moved"] == 3
    assert found["reports_s"] > 0
    assert found["cut"] > 0
