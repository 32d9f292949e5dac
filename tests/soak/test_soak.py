"""Run a short soak, and check that its audit of the recording can fail."""

from __future__ import annotations

import asyncio

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from pathlib import Path
from typing import Any

from meridian.v1 import fleet_pb2

from meridian_control.offline.trace_file import TraceWriter, read
from tests.soak import trace
from tests.soak.run import Soak

SECONDS, SEED = 4.0, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    return asyncio.run(Soak(folder, SEED, SECONDS, clients=4, together=True).run())


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_short_soak(summary: dict[str, Any]) -> None:
    assert (summary["failed"], summary["violations"]) == (0, 0)
    assert summary["decisions"] == summary["outcomes"] > 0
    assert min(summary[name] for name in ("requests", "faults", "reports")) > 2
    assert summary["equal_to_stock"]["compared"] > 0


def settled_in(folder: Path) -> tuple[list[fleet_pb2.TraceRecord], fleet_pb2.TraceRecord, fleet_pb2.TraceRecord]:
    """Return the records of a trace, one with decisions, and a later one with an outcome of these.

    The session is one that the recording has from its beginning; of others it need not show every decision.
    """
    for path in folder.glob("*.trace"):
        records = list(read(path))
        late = {r.session_id for r in records if r.joined_late}
        whole = [r for r in records if r.session_id not in late]
        made = {(r.session_id, number): r for r in whole for number in trace._ids(r.down.directives)}
        for record in records:
            for outcome in record.up.step.outcomes:
                if decided := made.get((record.session_id, outcome.decision_id)):
                    return records, decided, record
    raise AssertionError("no trace has a decision and its outcome")


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", ["a decision", "an outcome twice"])
def test_what_is_wrong_in_a_trace_is_found(summary: dict[str, Any], folder: Path, tmp_path: Path, harm: str) -> None:
    """The trace is that of the short soak, with one record repeated or left out."""
    assert not summary["violations"]
    records, made, settled = settled_in(folder)
    if harm == "a decision":
        records.remove(made)
    else:
        settled.up.step.outcomes.append(settled.up.step.outcomes[0])
    with TraceWriter(tmp_path / "harmed.trace") as out:
        for record in records:
            out.write(record)
    assert trace.audit([tmp_path / "harmed.trace"]).violations
