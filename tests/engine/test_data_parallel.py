"""vLLM's server with two data-parallel ranks, each of which the control plane governs as an engine of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.engine.test_served import PROMPTS, Served, all_of, phase_metrics, stream
from tests.processes import Control, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from meridian.v1 import fleet_pb2

CAP = 10
RANKS = ("--data-parallel-size", "2", "--distributed-executor-backend", "uni", "--num-gpu-blocks-override", "64")


async def test_each_rank_is_an_engine_of_its_own(tmp_path: Path) -> None:
    """Each rank is named after its pod, with its own steps, decisions and caps; requests go to both."""
    control = Control(tmp_path)
    served = Served(tmp_path, control.target, options=RANKS, more={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})

    def obey(revision: int) -> dict[str, fleet_pb2.Engine] | None:
        found = {engine.engine_id: engine for engine in control.engines()}
        return found if len(found) == 2 and {e.acked_revision for e in found.values()} == {revision} else None

    try:
        wait_for(served.ready, 180, "vLLM to serve")
        revision = control.set_policy({"scheduler": {"max_think_tokens": CAP}})
        wait_for(lambda: obey(revision), 30, "both ranks to obey the policy")
        answers = await all_of(served)
        assert {len(reasoning.split()) for reasoning, *_ in answers} == {CAP}

        wait_for(lambda: sum(_ended(obey(revision))) == len(answers), 30, "every cap to be reported")
        engines = obey(revision)
        counted = [phase_metrics(served.port, rank)["meridian_vllm_think_tokens_total"] for rank in ("0", "1")]
        names = [f"effort-{i}" for i in range(len(PROMPTS))]
        said = [
            stream(served, prompt, reasoning_effort="low", request_id=name)
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        await asyncio.gather(*said)
        efforts = {control.explain(name).effort for name in names}
    finally:
        served.process.stop()
        control.process.stop()
    assert efforts == {"low"}
    assert engines is not None
    assert engines.keys() == {"served", "served-dp1"}
    assert not any(engine.fault for engine in engines.values())
    assert all(_ended(engines)), "a rank got no request"
    assert counted == [CAP * ended for ended in _ended(dict(sorted(engines.items())))], "vLLM's own metrics"


def _ended(engines: dict[str, fleet_pb2.Engine] | None) -> list[int]:
    """Return the number of ends of thinking that each rank has reported."""
    return [sum(engine.ends.values()) for engine in (engines or {}).values()]
