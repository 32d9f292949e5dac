"""A capability in a folder of its own, and one line of assembly: it decides on a real engine, and people see it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from transformers import AutoTokenizer

from tests.engine import ENGINE_ARGS
from tests.engine.ctl import ctl
from tests.engine.served import PROMPTS, Served, stream
from tests.primes.capability import ENDS, NAME, is_prime
from tests.processes import RPC_S, Control, wait_for

CLOSED = {"entropy": {"enabled": False}, "loop": {"enabled": False}}


def page(port: str) -> list[list[str]]:
    """Return what the status page shows of capabilities."""
    with httpx.stream("GET", f"http://127.0.0.1:{port}/events", timeout=RPC_S, verify=False) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                found: list[list[str]] = json.loads(line.removeprefix("data: "))["capabilities"]
                return found
    return []


def test_a_capability_needs_its_folder_and_one_line_of_assembly(apart: tuple[Served, Control]) -> None:
    served, control = apart
    metrics, shown = (option.rpartition(":")[2] for option in (control.options[-1], control.options[-3]))
    # The engine measures entropy for this rule alone.
    control.apply({**CLOSED, "extension": {"primes": {"shadow": False, "at_least": 11, "most_nats": 1e9}}})
    # The model ends no thinking by itself, and a prime number of tokens comes soon.
    end = AutoTokenizer.from_pretrained(ENGINE_ARGS["model"]).convert_tokens_to_ids("</think>")

    def ended() -> list[dict[str, Any]]:
        asyncio.run(stream(served, PROMPTS[0], logit_bias={str(end): -30}, ignore_eos=True, max_tokens=60))
        decided = json.loads(ctl(control, "decisions", "--kind", "force", "-o", "json"))
        return [one for one in decided if one["reason"] == NAME and one["outcome"] == "OUTCOME_APPLIED"]

    decisions = wait_for(ended, 60, "an end at a prime number of tokens")
    assert all(is_prime(int(decision["signals"]["think_tokens"])) for decision in decisions)
    assert f"\n{ENDS} " in httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=RPC_S, verify=False).text
    ((name, row, text),) = page(shown)
    assert (name, row, int(text) > 0) == ("primes", "ends at a prime", True)
    assert "extension.primes" in ctl(control, "policy", "explain")
    with pytest.raises(grpc.RpcError, match=r"extension\.primes\.at_least"):
        control.set_policy({"extension": {"primes": {"at_least": 1}}})
    with pytest.raises(grpc.RpcError, match=r"extension\.prims"):
        control.set_policy({"extension": {"prims": {}}})
