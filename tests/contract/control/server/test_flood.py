"""Callers that send nonsense or hang up: what they cost a real control plane in log lines, bytes and memory, while
other callers are served.

`python -m tests.fuzz.flood` floods a control plane by hand, for any time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from meridian_control.server import server as control_server
from meridian_control.server.roles import Access
from tests.contract.control.app.test_server import Process
from tests.contract.control.server.test_open_access import HERE, UPDATE, opened
from tests.contract.control.telemetry.test_metrics import value
from tests.contract.streams import Clock
from tests.fakes.linked import LinkedEngine
from tests.fuzz.flood import CONNECT, HEADERS, INVALID, PREFACE, SETTINGS, Flood, call_headers, frame

# Numbers of calls of each kind, and of connections: before memory is measured for the first time, and after that.
WARM, CALLS = 40, 160
# Limits of what one flooding host may cost. Its log lines are those that FAULTS allows for a few causes, and two for
# each engine that may be named.
MAX_LINES, MAX_BYTES, MAX_GROWTH_MB = 500, 60_000, 20
ANSWERS = {
    "stream of garbage": INVALID,
    "garbage after hello": INVALID,
    "no hello": INVALID,
    "absurd snapshot": INVALID,
    "garbage in a call": INVALID,
    "garbage in a watch": INVALID,
    "garbage in a health check": INVALID,
    "garbage in a health watch": INVALID,
    "no method": grpc.StatusCode.UNIMPLEMENTED,
    "garbage, gone at once": None,
    "hello, gone at once": None,
}


def resident_mb(process: Process) -> float:
    assert process.popen is not None
    with open(f"/proc/{process.popen.pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


async def test_a_flood_costs_a_few_lines_and_little_memory(own: Process) -> None:
    await own.started()
    flood = Flood(own.target)
    # The engine makes no step during the flood, and nothing that it has reported before is answered.
    with LinkedEngine([own.target], "beside", clock=Clock()) as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        await flood.run(WARM)
        await flood.half_open(WARM)
        before_mb = resident_mb(own)
        await flood.run(CALLS)
        await flood.half_open(CALLS)
        grown_mb = resident_mb(own) - before_mb
        engine.open("b")
        await engine.steps_until(lambda: len(engine.caps()) == 2)
        assert engine.streams == 1
    assert {kind: (code, count) for (kind, code), count in flood.answers.items() if kind != "half-open"} == {
        kind: (code, WARM + CALLS) for kind, code in ANSWERS.items()
    }
    counted = await asyncio.to_thread(value, own, "meridian_client_faults_total", cause="invalid_request")
    assert counted >= (WARM + CALLS) * sum(code is INVALID for code in ANSWERS.values())
    for code in ("UNKNOWN", "INTERNAL"):
        # UNKNOWN and INTERNAL are for bugs of the server; a caller that hangs up while it is refused is no bug.
        assert await asyncio.to_thread(value, own, "grpc_server_handled_total", grpc_code=code) == 0, code
    assert await own.terminate() == 0
    log = own.log()
    assert "Traceback" not in log
    # A line that does not begin with a year is not from the logging module but from gRPC's C library.
    assert [line for line in log.splitlines() if not line.startswith("20")] == []
    assert " ERROR " not in log
    assert len(log.splitlines()) < MAX_LINES
    assert len(log) < MAX_BYTES
    assert "lines about callers were left out" in log
    assert grown_mb < MAX_GROWTH_MB


@pytest.mark.parametrize("path", [b"/\xff\xfe/\xff", b"", b"/", b"/no.Such/Method", CONNECT.encode() + b"\xff"])
async def test_no_path_ends_the_server(tmp_path: Path, path: bytes) -> None:
    async with opened(tmp_path, Access()) as running:
        reader, writer = await asyncio.open_connection(HERE, running.port)
        writer.write(PREFACE + frame(SETTINGS, b"") + call_headers(path))
        while (await frame_of(reader))[0] != HEADERS:
            pass
        writer.close()
        async with running.calling(HERE) as here:
            await here.policy.UpdatePolicy(UPDATE)


async def frame_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the next frame's kind and payload. Raises IncompleteReadError at the end of the connection."""
    head = await reader.readexactly(9)
    return head[3], await reader.readexactly(int.from_bytes(head[:3]))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("grpc.server_handshake_timeout_ms", b""),
        ("grpc.max_connection_idle_ms", PREFACE + frame(SETTINGS, b"")),
    ],
)
async def test_who_says_nothing_does_not_keep_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, said: bytes
) -> None:
    """Each of these options ends a silent connection; gRPC's own values are several minutes and never."""
    assert dict(control_server.SERVER_OPTIONS)[option] <= 5 * 60_000
    short: Any = [(name, 100 if name == option else value) for name, value in control_server.SERVER_OPTIONS]
    monkeypatch.setattr(control_server, "SERVER_OPTIONS", short)
    async with opened(tmp_path, Access()) as running:
        reader, writer = await asyncio.open_connection(HERE, running.port)
        writer.write(said)
        async with asyncio.timeout(30):
            while await reader.read(1024):
                pass
        writer.close()
