"""A capability of one's own in a control plane, `tests/primes`: what people see of it, and a control plane without
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.control.app.test_server import Process
from tests.contract.control.telemetry.test_metrics import scraped, value
from tests.contract.ctl import OK, ctl
from tests.fakes.linked import LinkedEngine, until
from tests.primes.capability import ENDS
from tests.replicated import Replicated

SET = ("extension.primes.shadow=false", "extension.primes.at_least=20", "entropy.holdout_share=0.0")
# The first prime at which the capability ends thinking under these policies.
PRIME = 23


@pytest.fixture
def with_primes(tmp_path: Path) -> Iterator[Process]:
    """Yield a control plane with the capability that has not started."""
    process = Process(tmp_path)
    process.module = "tests.primes"
    yield process
    process.kill()
    assert "Traceback" not in process.log()


async def shown(process: Process, *arguments: str) -> str:
    """Return what meridianctl prints."""
    result = await ctl(process, *arguments)
    assert result.exit_code == OK, result.output
    return result.output


async def as_json(process: Process, *arguments: str) -> Any:
    return json.loads(await shown(process, *arguments, "-o", "json"))


async def ends_at_a_prime(process: Process, engine: LinkedEngine, name: str) -> int:
    """Let the capability end the thinking of a request; return its thinking tokens there."""
    engine.open(name)
    live = engine.engine.live[name]
    for _ in range(PRIME):
        engine.step()
    # Without further steps: a busy machine would make enough of them to reach a cap before the decision comes.
    await engine.hears(lambda: live.ending is not None)
    engine.step()
    assert live.state.ends
    tokens = live.state.think_tokens
    engine.engine.finish(name)
    await engine.steps_until(lambda: value(process, "meridian_think_ends_total", reason="primes"))
    return tokens


async def test_people_see_its_policy_and_its_ends(with_primes: Process) -> None:
    process = with_primes
    await process.started()
    # Prometheus does not see the first increment of a new series.
    ends = {s.labels["reason"]: s.value for s in scraped(process)["meridian_think_ends_total"].samples}
    assert ends["primes"] == 0
    assert [s.value for s in scraped(process)[ENDS].samples if s.name == ENDS] == [0]
    assert await as_json(process, "decisions", "--reason", "primes") == []
    told = await shown(process, "policy", "set", *SET, "--diff")
    assert "extension.primes.at_least" in told
    assert "harm is not measured" in told
    told = await shown(process, "policy", "set", "extension.primes.at_least=21", "--diff")
    assert "extension.primes.at_least" in told
    assert "extension.primes.shadow" not in told
    rows = {row["path"]: row["value"] for row in await as_json(process, "policy", "explain")}
    assert (rows["extension.primes.at_least"], rows["extension.primes.shadow"]) == ("21", "false")
    with LinkedEngine([process.target]) as engine:
        await engine.hears(lambda: 3 in engine.kept)
        place = await ends_at_a_prime(process, engine, "a")
    assert place == PRIME
    (decision,) = await as_json(process, "decisions", "--reason", "primes")
    assert (decision["kind"], decision["outcome"]) == ("force", "OUTCOME_APPLIED")
    told = await shown(process, "explain", "a")
    assert "thinking ended: primes" in told
    assert "extension.primes.at_least" in told
    assert value(process, ENDS) == 1
    assert value(process, "meridian_decisions_total", kind="force", reason="primes") == 1


async def test_a_control_plane_without_it_goes_on_without_it(with_primes: Process) -> None:
    process = with_primes
    await process.started()
    await shown(process, "policy", "set", *SET)
    await process.terminate()
    process.module = "meridian_control"
    await process.started()
    assert "extension.primes has no effect here: no capability reads it" in process.log()
    await shown(process, "policy", "set", "scheduler.max_think_tokens=40", "scheduler.min_think_tokens=0")
    with LinkedEngine([process.target]) as engine:
        await engine.hears(lambda: 3 in engine.kept)
        engine.open("a")
        live = engine.engine.live["a"]
        await engine.steps_until(lambda: live.state.ends)
        assert live.state.think_tokens == 40
    refused = await ctl(process, "policy", "set", "extension.primes.at_least=30")
    assert "extension.primes is the section of no known capability" in refused.output
    await process.terminate()
    process.module = "tests.primes"
    await process.started()
    with LinkedEngine([process.target], "later") as engine:
        await engine.hears(lambda: 3 in engine.kept)
        await ends_at_a_prime(process, engine, "b")
    await until(lambda: value(process, ENDS) == 1)


async def test_a_replica_without_it_serves_beside_one_that_has_it(replicated: Replicated, tmp_path: Path) -> None:
    without, beside = await replicated.started(), Process(tmp_path, "--store", replicated.database)
    beside.module = "tests.primes"
    replicated.processes.append(beside)
    await beside.started()
    await shown(beside, "policy", "set", *SET)
    await until(lambda: "extension.primes has no effect here" in without.log())
    await shown(without, "policy", "set", "scheduler.max_think_tokens=40", "scheduler.min_think_tokens=0")
    with LinkedEngine([without.target], "one") as one, LinkedEngine([beside.target], "other") as other:
        for engine in (one, other):
            await engine.hears(lambda: 3 in engine.kept)  # noqa: B023 - called at once
        await ends_at_a_prime(beside, other, "a")
        one.open("b")
        live = one.engine.live["b"]
        await one.steps_until(lambda: live.state.ends)
        assert live.state.think_tokens == 40
        (decision,) = await as_json(without, "decisions", "--reason", "primes")
    assert decision["engine_id"] == "other"
