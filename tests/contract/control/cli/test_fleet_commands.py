"""`meridianctl engines`, `requests`, `top` and `wait` against a server whose fleet the test sets."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

import pytest
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2

from tests.contract.ctl import (
    CONNECTED,
    FAILED,
    OK,
    Control,
    engine,
)
from tests.processes import MERIDIANCTL


async def test_engines(control: Control) -> None:
    control.fleet.engines = [engine("a[b]", 1, kv_used=0.25), engine("b", 0, nack_error="no", fault="tripped")]
    listed = json.loads((await control("engines", "-o", "json")).stdout)
    assert [(e["engine_id"], e["acked_revision"], e["kv_used"]) for e in listed] == [("a[b]", "1", 0.25), ("b", "0", 0)]
    first, second, reason = (await control("engines")).stdout.splitlines()[1:]
    assert reason.startswith("b refused revision ")
    assert reason.endswith(": no")
    assert first.split()[:2] == ["a[b]", "connected"]
    assert "25%" in first
    assert "fault: tripped" in second
    assert "0/1 refused" in second
    control.fleet.engines = [engine("c", 1, unknown_markers="started without --reasoning-parser")]
    *_, missing = (await control("engines")).stdout.splitlines()
    assert missing == "c does not know its thinking markers: started without --reasoning-parser"


async def test_a_long_name_hides_no_other_column(control: Control) -> None:
    control.fleet.engines = [engine("a", 1), engine("b" * 256, 1, fault="tripped")]
    shown = (await control("engines")).stdout
    first = shown.splitlines()[1]
    assert first.split()[:2] == ["a", "connected"]
    assert shown.count("b") >= 256
    assert "fault: tripped" in " ".join(shown.split())


async def test_engines_say_what_measures_entropy(control: Control) -> None:
    torch, none = agent_pb2.ENTROPY_BACKEND_TORCH, agent_pb2.ENTROPY_BACKEND_NONE
    control.fleet.engines = [
        engine("a", 1, entropy_backend=torch, entropy_note="CuPy is not installed"),
        engine("b", 1, entropy_backend=none, entropy_note="there are no entropy kernels for xpu"),
        engine("c", 1, entropy_backend=agent_pb2.ENTROPY_BACKEND_CUDA),
        engine("d", 1),
    ]
    said = (await control("engines")).stdout
    assert "torch, slower" in " ".join(said.split())
    assert "a measures entropy with torch: CuPy is not installed" in said.splitlines()
    assert "b measures entropy with none: there are no entropy kernels for xpu" in said.splitlines()
    assert sum("measures entropy" in line for line in said.splitlines()) == 2
    listed = json.loads((await control("engines", "-o", "json")).stdout)
    assert [e["entropy_backend"].rpartition("_")[2] for e in listed] == ["TORCH", "NONE", "CUDA", "UNSPECIFIED"]


async def test_requests(control: Control) -> None:
    last = fleet_pb2.LastDecision(decision_id=1, kind="force", reason="eat", outcome=agent_pb2.OUTCOME_APPLIED)
    control.fleet.requests = [
        fleet_pb2.LiveRequest(engine_id="a", request_id="r1", phase=agent_pb2.PHASE_THINK, entropy_nats=float("nan")),
        fleet_pb2.LiveRequest(engine_id="b", request_id="r2", phase=agent_pb2.PHASE_OUTPUT, last_decision=last),
    ]
    listed = json.loads((await control("requests", "-o", "json")).stdout)
    assert [(r["request_id"], r["entropy_nats"]) for r in listed] == [("r1", "NaN"), ("r2", 0.0)]
    only = json.loads((await control("requests", "--engine", "b", "-o", "json")).stdout)
    assert [r["request_id"] for r in only] == ["r2"]
    first, second = (await control("requests")).stdout.splitlines()[1:]
    assert first.split()[:3] == ["a", "r1", "think"]
    assert second.strip().endswith("force eat applied")


async def test_top_into_a_pipe_until_interrupted(control: Control) -> None:
    control.fleet.engines = [engine("engine-7", 1)]
    command = [*MERIDIANCTL, "top", "--interval-ms", "50"]
    environment = {**os.environ, "MERIDIAN_SERVER": control.address, "FORCE_COLOR": "1", "COLUMNS": "80"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            for _ in range(3):
                await process.stdout.readuntil(b"engine-7")
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert (process.returncode, errors) == (OK, b"")


async def test_wait_for_engines_that_lag(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 1), engine("b", 0), engine("gone", 0, state=0)]
    waiting = asyncio.create_task(control("wait"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    control.fleet.engines[1].acked_revision = 1
    result = await waiting
    assert (result.exit_code, result.stdout) == (OK, "revision 1 is applied on all 2 connected engines\n")


async def test_wait_times_out(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await control("policy", "set", "fallback.lease_ms=600")
    control.fleet.engines = [engine("a", 2), engine("b", 1)]
    result = await control("wait", "--revision", 2, "--timeout", 0)
    assert (result.exit_code, result.stderr) == (FAILED, "b is at revision 1\n")


async def test_wait_knows_the_revisions_that_are_stored(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    result = await control("wait", "--revision", 2)
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert result.stderr.startswith("NOT_FOUND: ")
    assert "2" in result.stderr


async def test_what_replicas_do_not_say_is_missing(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [fleet_pb2.Engine(engine_id="e", state=CONNECTED, acked_revision=1)]
    control.fleet.requests = [fleet_pb2.LiveRequest(engine_id="e", request_id="r")]
    control.fleet.unreachable = ["b-1", "a-2"]
    missing = "replicas that did not answer, so that their data is missing: a-2, b-1\n"
    for command in ("engines", "requests"):
        result = await control(command)
        assert (result.exit_code, result.stderr) == (OK, missing)
    result = await control("wait", "--timeout", 0)
    assert (result.exit_code, result.stderr) == (FAILED, missing), "engines of unreachable replicas may lag behind"


async def test_wait_stops_at_a_refusal(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 1), engine("b", 0, nack_error="unknown parser")]
    result = await control("wait", "--revision", 1, "--timeout", 60)
    assert (result.exit_code, result.stderr) == (FAILED, "b refused: unknown parser\n")


async def test_wait_names_those_that_lag_beside_those_that_refused(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 0), engine("b", 0, nack_error="no")]
    result = await control("wait", "--revision", 1)
    assert (result.exit_code, result.stderr) == (FAILED, "b refused: no\na is at revision 0\n")


async def test_wait_ignores_the_refusal_of_an_older_revision(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    await control("policy", "set", "fallback.lease_ms=600")
    control.fleet.engines = [engine("b", 0, nack_error="old")]
    result = await control("wait", "--revision", 2, "--timeout", 0)
    assert result.stderr == "b is at revision 0\n"


NONE = "no engine is connected; --allow-none accepts that\n"
LOST = "b is lost: its stream broke off, and it has not come back\n"


@pytest.mark.parametrize(
    ("engines", "options", "code", "said"),
    [
        ((), (), FAILED, NONE),
        ((), ("--allow-none",), OK, "no engine is connected\n"),
        ((), ("--engines", "1"), FAILED, "no engine is connected, of at least 1\n"),
        (("a",), (), OK, "revision 1 is applied on all 1 connected engines\n"),
        (("a",), ("--engines", "2"), FAILED, "1 engines are connected, of at least 2\n"),
        (("a", "b!"), (), FAILED, LOST),
        (("b!",), (), FAILED, NONE + LOST),
        (("b-",), (), FAILED, NONE + "b has left\n"),
        (("b!",), ("--allow-none",), OK, "no engine is connected\n"),
        (("a", "b!"), ("--engines", "1"), OK, "revision 1 is applied on all 1 connected engines\n"),
        (("a", "b!"), ("--engines", "2"), FAILED, "1 engines are connected, of at least 2\nb has left\n"),
        # An engine that has shut down is not expected back.
        (("a", "b-"), (), OK, "revision 1 is applied on all 1 connected engines\n"),
    ],
)
async def test_wait_for_engines_that_are_not_there(
    control: Control, file: Path, *, engines: tuple[str, ...], options: tuple[str, ...], code: int, said: str
) -> None:
    """b! is an engine whose stream broke off, and b- one that has shut down."""
    await control("policy", "apply", "-f", file)
    gone = {"": CONNECTED, "!": 0, "-": 0}
    control.fleet.engines = [engine(e[0], 1, state=gone[e[1:]], lost=e[1:] == "!") for e in engines]
    result = await control("wait", "--timeout", 0, *options)
    assert (result.exit_code, result.stdout + result.stderr) == (code, said)


async def test_wait_for_an_engine_that_comes_back(control: Control, file: Path) -> None:
    await control("policy", "apply", "-f", file)
    control.fleet.engines = [engine("a", 1), engine("b", 0, state=0, lost=True)]
    waiting = asyncio.create_task(control("wait"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    control.fleet.engines[1] = engine("b", 1)
    assert (await waiting).stdout == "revision 1 is applied on all 2 connected engines\n"


async def test_budgets(control: Control) -> None:
    acme = policy_pb2.BudgetPolicy(name="acme", tenant="a*", effort="high", tokens_per_minute=600, burst_tokens=900)
    every = policy_pb2.BudgetPolicy(name="all", tokens_per_day=10**9, shadow=True)
    floor, whole = fleet_pb2.BUDGET_STAGE_FLOOR, fleet_pb2.BUDGET_STAGE_UNSHORTENED
    control.fleet.budgets = fleet_pb2.ListBudgetsResponse(
        budgets=[
            fleet_pb2.Budget(policy=acme, stage=floor, used_tokens=5000, minute_left_tokens=-90.4, left_ratio=-0.1),
            fleet_pb2.Budget(policy=every, stage=whole, used_tokens=12, day_left_tokens=10**9 - 12, left_ratio=1.0),
        ]
    )
    result = await control("budgets")
    assert result.exit_code == OK
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert rows[1:] == [
        "acme tenant=a* effort=high floor -10% -90/900 5000",
        "all all unshortened (shadow) 100% 999999988/1000000000 12",
        "usage of all replicas as of never",
    ]
    (first, _) = json.loads((await control("budgets", "-o", "json")).stdout)
    assert (first["policy"]["name"], first["stage"]) == ("acme", "BUDGET_STAGE_FLOOR")
