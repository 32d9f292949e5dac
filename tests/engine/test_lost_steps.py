"""Steps whose output never comes: a program that has the engine in its own process catches an error in a step, ends all
requests and goes on, as vLLM's fault tolerance does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import Run, cases, confirmed, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE
from tests.engine.recording import records
from tests.engine.test_decisions import endless, opened
from tests.processes import Control

MADE = "made by the test"


@pytest.fixture(params=["engine", "worker"])
def failing(llm: Any, agent: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the next step with a probe's row fail, before or after its forward pass."""
    if request.param == "worker":
        llm.collective_rpc(_fail_once)
        yield
        return
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    sample = executor.sample_tokens

    def fails(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if agent.probing.computed:
            meanwhile.undo()
            raise RuntimeError(MADE)
        return output

    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(executor, "sample_tokens", fails)
        yield


def _fail_once(worker: Any) -> None:
    runner = worker.model_runner
    forward = runner._model_forward
    # The function that the agent has put around `_prepare_inputs` has its ProbeRows in a closure.
    cells = runner._prepare_inputs.__closure__
    probe_rows = next(c.cell_contents for c in cells if type(c.cell_contents).__name__ == "ProbeRows")

    def fails(*args: Any, **kwargs: Any) -> Any:
        if probe_rows.count:
            runner._model_forward = forward
            raise RuntimeError(MADE)
        return forward(*args, **kwargs)

    runner._model_forward = fails


@pytest.mark.usefixtures("failing")
def test_a_lost_step_leaves_nothing_behind(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, settled: Settled, stock: list[list[int]]
) -> None:
    control.apply(DENSE)
    run = Run(llm)
    run.add("lost", opened(), endless(agent, max_tokens=200))
    with pytest.raises(RuntimeError, match=MADE):
        run.until(settled=settled)
    llm.llm_engine.abort_request([*scheduler.requests], internal=True)
    with records(agent) as seen:
        prompt = prompt_ids(llm, cases()[0])
        run.put("after", prompt, SamplingParams(temperature=0.0, max_tokens=40), salt=str(scheduler.current_step))
        run.until(settled=settled)
    assert run.tokens["after"] == stock[0][:40]
    assert not scheduler._guard.fault
    prefills = [record.prefill_tokens for record, *_ in seen if record.step_time_ms]
    assert prefills == [len(prompt) - 1] + [0] * (len(prefills) - 1)
    # A program that does not call its engine learns of a freeze all the same.
    run.add("rests", opened(), endless(agent, max_tokens=20))
    run.step()
    control.freeze()
    confirmed(control, True)
    control.thaw()
    confirmed(control, False)
    run.until()
    assert control.settled().open_decisions == 0
