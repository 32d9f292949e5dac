"""A capability in a folder of its own, and one line of assembly: the agent applies its decisions, and people see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from meridian_control.cli.main import app
from tests.fakes.linked import LinkedEngine
from tests.primes.capability import ENDS, is_prime
from tests.processes import RPC_S, Control, free_port

if TYPE_CHECKING:
    from pathlib import Path

CLOSED = {"entropy": {"enabled": False}, "loop": {"enabled": False}}


class ControlWithPrimes(Control):
    module = "tests.primes"


def ctl(control: Control, *args: str) -> str:
    result = CliRunner().invoke(app, ["--server", control.target, *args])
    assert result.exit_code == 0, result.output
    return result.output


def page(port: int) -> list[list[str]]:
    """Return what the status page shows of capabilities."""
    with httpx.stream("GET", f"http://127.0.0.1:{port}/events", timeout=RPC_S, verify=False) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                found: list[list[str]] = json.loads(line.removeprefix("data: "))["capabilities"]
                return found
    return []


async def test_a_capability_needs_its_folder_and_one_line_of_assembly(tmp_path: Path) -> None:
    metrics, shown = free_port(), free_port()
    listen = ["--metrics-listen", f"127.0.0.1:{metrics}", "--page-listen", f"127.0.0.1:{shown}"]
    control = ControlWithPrimes(tmp_path, options=listen)
    try:
        revision = control.set_policy({**CLOSED, "extension": {"primes": {"enabled": True, "at_least": 11}}})
        with LinkedEngine([control.target]) as engine:
            await engine.steps_until(lambda: revision in engine.kept)
            engine.open("thinks")

            def ended() -> list[dict[str, Any]]:
                decided = json.loads(ctl(control, "decisions", "--kind", "force", "-o", "json"))
                return [one for one in decided if one["reason"] == "prime" and one["outcome"] == "OUTCOME_APPLIED"]

            (decision,) = await engine.steps_until(ended)
            assert is_prime(int(decision["signals"]["think_tokens"]))
            assert f"\n{ENDS} " in httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=RPC_S, verify=False).text
            assert page(shown) == [["primes", "ends at a prime", "1"]]
        assert "extension.primes" in ctl(control, "policy", "explain")
        with pytest.raises(grpc.RpcError, match=r"extension\.primes\.at_least"):
            control.set_policy({"extension": {"primes": {"at_least": 1}}})
        with pytest.raises(grpc.RpcError, match=r"extension\.prims"):
            control.set_policy({"extension": {"prims": {}}})
    finally:
        control.process.stop()
