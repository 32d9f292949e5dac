"""An exception at any line that the agent runs at an engine's start: vLLM starts and serves as it does without the
agent."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from collections.abc import Callable, Iterator

import vllm.config.scheduler as vllm_scheduler
import vllm.v1.metrics.loggers as vllm_loggers
import vllm.v1.metrics.stats as vllm_stats
import vllm.v1.worker.worker_base as vllm_worker

from meridian_agent import install, plugin
from meridian_agent.engine import scheduler_mixin as scheduler_module
from meridian_agent.engine.scheduler_mixin import GovernedScheduler
from meridian_agent.vllm_adapter import phase_numbers
from tests.sim.engine import Engine, Script, Shape, words
from tests.sim.inject import ENGINE, Fault, Injected, Line
from tests.sim.world import RESTS_S, Options, World, _silent

pytestmark = pytest.mark.filterwarnings("ignore")
# One line in this many is tested.
SAMPLED = 12
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with _silent():
        yield


def served(patch: pytest.MonkeyPatch, injected: Injected | None) -> tuple[Any, list[str]]:
    """Return an engine's output for three requests, and the reasons why it runs without an agent.

    `injected` is the agent's fault; None for an engine without an agent.
    """
    absent: list[str] = []
    World(1, Options(ticks=0), patch, is_stock=True)
    # An earlier engine holds its name until Python drops it.
    patch.setenv("MERIDIAN_ENGINE_ID", f"start-{os.getpid()}-{next(NUMBERS)}")
    patch.setattr(scheduler_module, "say_absent", lambda reason, _: absent.append(reason))
    if injected is not None:
        injected.install(patch, RESTS_S)
    engine = Engine(Shape(places=8, blocks=200), lambda *_: None, is_governed=injected is not None)
    start, *_ = words()
    for seed in range(3):
        engine.open(f"r{seed}", [start], Script(seed, 10, 10, restless=False), {})
    while engine.busy():
        engine.step(lambda: None, lambda: None)
    return (engine.model.tokens, engine.finished, engine.schedule), absent


def with_fault(line: Line | None) -> tuple[Injected, Any, list[str]]:
    injected = Injected(Fault(line, at_start=True))
    with pytest.MonkeyPatch.context() as patch:
        return injected, *served(patch, injected)


def test_an_agent_that_cannot_be_built() -> None:
    """The agent is off until the engine is started again, and the control plane is told the reason."""
    with pytest.MonkeyPatch.context() as patch:
        stock, _ = served(patch, None)
    with_fault(None)  # What happens once in a process has happened.
    reached, whole, absent = with_fault(None)
    assert (whole, absent) == (stock, [])
    lines = sorted(reached.reached)
    assert len(lines) > 150, "lines are not reached any more"
    for line in lines[::SAMPLED]:
        injected, said, why = with_fault(line)
        assert said == stock, line
        assert injected.raised, line
        # The agent expects some faults, for example in a tokenizer, so that they cost less than the whole agent.
        assert [text.partition(" ")[2][:12] for text in why] in ([], ["RuntimeError"]), line


def installed(line: Line | None) -> Injected:
    """Load the plugin with a fault in it, and let vLLM choose its scheduler."""
    injected = Injected(Fault(line))
    config, wrapper = vllm_scheduler.SchedulerConfig, vllm_worker.WorkerWrapperBase
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERIDIAN_CONTROL", "nowhere:1")
        patch.setattr(config, "get_scheduler_cls", stock := config.get_scheduler_cls)
        patch.setattr(wrapper, "init_device", wrapper.init_device)
        for name in ("__init__", "record"):
            patch.setattr(vllm_loggers.PrometheusStatLogger, name, getattr(vllm_loggers.PrometheusStatLogger, name))
        patch.setattr(config, "_meridian_installed", False, raising=False)
        # The field is added anew, also if an earlier test has loaded the plugin.
        patch.delitem(vllm_stats.SchedulerStats.__dataclass_fields__, phase_numbers.FIELD, raising=False)
        injected.traced(ENGINE, plugin.register)
        chosen = _chosen(config, stock)
    assert injected.raised is (line is not None), line
    assert issubclass(chosen, GovernedScheduler) or not injected.reached.keys() - {line} or injected.raised, line
    return injected


def _chosen(config: Any, stock: Callable[[Any], type]) -> type:
    one = config.default_factory()
    chosen: type = one.get_scheduler_cls()
    assert issubclass(chosen, stock(one))
    return chosen


def test_a_plugin_that_cannot_be_loaded() -> None:
    """vLLM still gets a scheduler of its own, governed or not."""
    # The first time also imports modules, which no later time does.
    installed(None)
    whole = installed(None)
    lines = sorted(whole.reached)
    assert len(lines) > 15, "lines are not reached any more"
    for line in lines:
        installed(line)


def test_stock_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.meridian")
    logger.setLevel(logging.ERROR)
    logger.addHandler(caplog.handler)
    try:
        # The first time also imports modules. A fault before `install` costs a part that the engine does not need.
        installed(None)
        begins = install.install.__code__.co_firstlineno
        installed(next(line for line in sorted(installed(None).reached) if line[1:] > ("install.py", begins)))
    finally:
        logger.removeHandler(caplog.handler)
    assert "runs stock vLLM" in caplog.text
