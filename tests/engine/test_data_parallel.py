"""vLLM's server with two data-parallel ranks, each of which the control plane governs as an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from meridian.v1 import fleet_pb2

from tests.engine.served import PROMPTS, Served, all_of, governed, phase_metrics, stream
from tests.engine.test_client_ids import explained, left, stopped, written
from tests.processes import Control, wait_for

CAP = 10
RANKS = ("--data-parallel-size", "2", "--distributed-executor-backend", "uni", "--num-gpu-blocks-override", "64")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[tuple[Served, Control]]:
    """Yield a server with two ranks, and its control plane."""
    with governed(folder / "ranks", RANKS, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as both:
        wait_for(lambda: len(both[1].engines()) == 2, 60, "both ranks to connect")
        yield both


def test_the_causes_of_aborts_reach_each_rank(ranks: tuple[Served, Control]) -> None:
    served, control = ranks
    stop = written(served)
    for number in range(4):
        stopped(served, stop, f"stopped-{number}")
    gone = left(served, control)
    lives = [explained(control, f"stopped-{number}").life for number in range(4)]
    assert {life.events[-1].detail for life in lives} == {"stop"}
    assert {life.events[-1].detail for life in gone} == {"the client has gone"}
    assert {life.engine_id for life in (*lives, *gone)} == {"served", "served-dp1"}


async def test_each_rank_is_an_engine_of_its_own(ranks: tuple[Served, Control]) -> None:
    """Each rank is named after its pod, with its own steps, decisions and caps; requests go to both."""
    served, control = ranks

    def obey(revision: int) -> dict[str, fleet_pb2.Engine] | None:
        found = {engine.engine_id: engine for engine in control.engines()}
        return found if len(found) == 2 and {e.acked_revision for e in found.values()} == {revision} else None

    def counted() -> list[float]:
        return [phase_metrics(served.port, rank)["meridian_vllm_think_tokens_total"] for rank in ("0", "1")]

    revision = control.set_policy({"scheduler": {"max_think_tokens": CAP}})
    wait_for(lambda: obey(revision), 30, "both ranks to obey the policy")
    before = counted()
    answers = await all_of(served)
    assert {len(reasoning.split()) for reasoning, *_ in answers} == {CAP}
    engines = wait_for(
        lambda: (each := obey(revision)) and sum(_ended(each)) == len(answers) and each, 30, "every cap to be reported"
    )
    assert engines.keys() == {"served", "served-dp1"}
    assert not any(engine.fault for engine in engines.values())
    assert all(_ended(engines)), "a rank got no request"
    ended = _ended(dict(sorted(engines.items())))
    assert counted() == [begun + CAP * ends for begun, ends in zip(before, ended, strict=True)], "vLLM's own metrics"
    names = [f"effort-{i}" for i in range(len(PROMPTS))]
    said = [
        stream(served, prompt, reasoning_effort="low", request_id=name)
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    await asyncio.gather(*said)
    assert {control.explain(name).effort for name in names} == {"low"}


def _ended(engines: dict[str, fleet_pb2.Engine]) -> list[int]:
    """Return the number of ends at the cap that each rank has reported. A thought of the other test may have ended by
    itself before its client's leaving arrived."""
    return [engine.ends["hard_cap"] for engine in engines.values()]
