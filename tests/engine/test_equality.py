"""Output equals stock vLLM's, token for token, wherever no decision applies."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from tests.engine import FIRST_TOKENS, MAX_TOKENS, Run, cases, chat
from tests.engine.pacing import Settled
from tests.engine.policies import NEUTRAL

GREEDY = SamplingParams(temperature=0.0, max_tokens=FIRST_TOKENS)
WHOLE = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def test_neutral_policy(llm: Any, agent: Any, control: Any, whole_stock: list[list[int]], settled: Settled) -> None:
    before, run = control.settled(), Run(llm)
    for number, case in enumerate(cases()):
        run.add(f"r{number}", case, WHOLE)
    # The control plane keeps pace, so it decides about each request before the request has ended.
    run.until(settled=settled)
    assert [run.tokens[f"r{number}"] for number in range(len(whole_stock))] == whole_stock
    after = control.settled()
    assert after.decisions["cap"] - before.decisions["cap"] == len(whole_stock)
    # The first report of a stream may be a snapshot, which replaces the rows of its step.
    assert after.token_events - before.token_events >= sum(map(len, whole_stock)) - len(whole_stock)


def test_shadow(llm: Any, agent: Any, control: Any, whole_stock: list[list[int]]) -> None:
    """Caps and rules that would end all thinking at once are decided and counted, but not applied."""
    before = control.engine().outcomes["shadowed"]
    shadow = {"scheduler": {"shadow": True, "max_think_tokens": 5}, "kv_memory": {"shadow": True}}
    control.apply({**NEUTRAL, **shadow})
    assert chat(llm, cases(), WHOLE) == whole_stock
    assert control.settled().outcomes["shadowed"] > before
    assert control.settled().ends["hard_cap_shadowed"] > 0


def test_everything_disabled(llm: Any, agent: Any, control: Any, whole_stock: list[list[int]]) -> None:
    off = {"enabled": False}
    control.apply({"scheduler": off, "entropy": off, "kv_memory": off})
    assert chat(llm, cases(), WHOLE) == whole_stock
