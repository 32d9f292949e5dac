"""What a server confirms while vLLM is paused and makes no step."""

from __future__ import annotations

import itertools

import httpx

from tests.engine import confirmed
from tests.engine.served import Served, paused
from tests.processes import RPC_S, Control, wait_for


def test_a_paused_server_confirms_a_freeze_and_keeps_its_stream(apart: tuple[Served, Control]) -> None:
    """The engine core is a process of its own, which waits for messages while it is paused."""
    served, control = apart
    url, said = f"http://127.0.0.1:{served.port}", len(served.process.output())
    body = {"model": "maze", "prompt": "1", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=RPC_S, verify=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        with paused(served):
            before = control.engine()
            # The lease is short only while the engine is paused: a busy control plane may be silent for longer.
            revision = control.apply({"fallback": {"lease_ms": 1000}})
            control.freeze()
            confirmed(control, True)
            assert control.engine().freeze.paused
            assert control.apply({"fallback": {"lease_ms": 60_000}}) == revision + 1
            control.thaw()
            confirmed(control, False)
        assert sum(1 for _ in itertools.islice(lines, 100)) == 100
    # The client has left before the last token.
    wait_for(lambda: control.requests() == [], 20, "the end of the request")
    assert control.engine().connect_time == before.connect_time
    assert "stream to" not in served.process.output()[said:]
