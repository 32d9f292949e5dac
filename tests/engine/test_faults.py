"""Faults in the agent stay in the agent: every hook fails once on the real engine, and the output stays stock's."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meridian_agent.core import guard as guard_module
from meridian_agent.core.step_record import COUNTERS
from meridian_agent.core.step_signals import SPENT_STEPS
from meridian_agent.vllm_adapter.server_metrics import REQUESTS
from tests.engine import Run, cases, chat, rebuild
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE, NEUTRAL
from tests.engine.recording import records
from tests.engine.test_decisions import endless, opened
from tests.engine.test_equality import GREEDY
from tests.engine.test_phase_metrics import by_phase
from tests.processes import ENGINE_ENV, Control, Process, wait_for

HOOKS = ["opened", "before_schedule", "after_schedule", "bitmask", "after_update", "freeing"]
# Part of the exceptions' texts, which must not leave the machine, because they may quote a request.
SECRET = "somebody's prompt"


@pytest.fixture
def rebuilt(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the agent that a test has broken by a new one.

    Until then no agent comes back by itself, however long a busy machine takes for the requests of the test.
    """
    monkeypatch.setattr(guard_module, "RESTS_S", (3600.0,))
    yield
    rebuild(scheduler)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.usefixtures("rebuilt")
def test_a_hook_that_raises(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, stock: list[list[int]], hook: str
) -> None:
    """The hook fails during a run: no request fails, no token changes, and the fleet shows the fault."""
    engine_id = control.engine().engine_id
    original, calls = getattr(agent, hook), []

    def fails(*args: Any) -> Any:
        calls.append(hook)
        if len(calls) >= 3:
            raise RuntimeError(f"injected into {hook}: {SECRET}")
        return original(*args)

    setattr(agent, hook, fails)
    assert chat(llm, cases(), GREEDY) == stock
    assert "injected into" in scheduler._guard.text
    assert len(calls) == 3
    shown = control.faulty(engine_id)
    assert f"RuntimeError at {__name__}:" in shown.fault
    assert SECRET not in str(shown)
    assert chat(llm, cases(), GREEDY) == stock


@pytest.mark.usefixtures("rebuilt")
@pytest.mark.parametrize("part", ["before", "after"])
def test_a_fault_around_a_step_with_probe_rows(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    scheduler: Any,
    control: Control,
    settled: Settled,
    stock: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """The agent fails between placing probes as rows and taking them out of vLLM's books: no token changes, and vLLM's
    own metrics say that the phases are unknown."""
    limits = agent.queues.limits

    def fails(*args: Any) -> Any:
        if part == "before" and not agent.probing.rows:
            return limits(*args)
        raise RuntimeError("injected beside probe rows")

    if part == "before":
        monkeypatch.setattr(agent.queues, "limits", fails)
    else:
        monkeypatch.setattr(agent.probing, "take_rows", fails)
    control.apply(DENSE)
    run = Run(llm)
    for number, case in enumerate(cases()):
        run.add(f"r{number}", case, GREEDY.clone())
    run.until(lambda: bool(scheduler._guard.fault), settled=settled)
    assert "injected beside probe rows" in scheduler._guard.text
    assert by_phase(REQUESTS) == {"unknown": len(scheduler.requests)}
    run.until()
    assert [run.tokens[f"r{number}"] for number in range(len(stock))] == stock
    assert not any(request.spec_token_ids for request in scheduler.running)


@pytest.mark.usefixtures("rebuilt")
def test_preemption_hook_that_raises(llm: Any, agent: Any, scheduler: Any, control: Control) -> None:
    from tests.engine.test_pressure import pressure

    def fails(*_: Any) -> None:
        raise RuntimeError("injected into preempted")

    agent.preempted = fails
    control.apply(NEUTRAL)
    pressure(llm, agent, control)
    assert "injected into preempted" in scheduler._guard.text


@pytest.mark.usefixtures("rebuilt")
def test_it_comes_back_by_itself(
    llm: Any, agent: Any, scheduler: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on meanwhile, and their tokens count afterwards; the fault stays visible."""
    # A busy control plane may hear of the fault only after a short rest.
    monkeypatch.setattr(guard_module, "RESTS_S", (3600.0, 3600.0))
    engine_id = control.engine().engine_id
    control.apply({"scheduler": {"max_think_tokens": 200}})
    run = Run(llm)
    for name in ("old", "older"):
        run.add(name, opened(), endless(agent, max_tokens=240))
    run.until(lambda: len(run.tokens["old"]) > 2 * SPENT_STEPS)
    _break(agent, "after_update")
    run.until(lambda: scheduler._agent is None)
    before = counters(agent)
    assert min(before["worker_seconds"], before["full_steps"]) > 0
    run.add("new", opened(), endless(agent, max_tokens=240))
    run.step()
    shown = control.faulty(engine_id)
    assert shown.HasField("recover_time")
    scheduler._guard._back_at = 0.0
    # A stream whose Hello reports a rest lasts as long as the rest.
    scheduler._lifecycle.link.restart()
    run.until(lambda: scheduler._agent is not None)
    again = scheduler._agent
    assert again is not agent
    # The counts are those since the engine's start. One that fell and rose again would count twice.
    assert [name for name, count in counters(again).items() if count < before[name]] == []
    assert len(again.tracker.by_id) == 3
    assert len(run.tokens["old"]) < 200
    run.until()
    end = again.tracker.markers.end[0]
    assert {name: run.tokens[name].index(end) for name in run.tokens} == dict.fromkeys(run.tokens, 200)
    assert {name: run.tokens[name].count(end) for name in run.tokens} == dict.fromkeys(run.tokens, 1)
    wait_for(lambda: not control.engine().fault, 20, "the agent to be back")
    shown = control.settled()
    assert dict(shown.faults) == {"after_update": 1}
    assert shown.last_fault.startswith(f"after_update: RuntimeError at {__name__}:")
    # The agent fails as often as it may come back; after that it stays off.
    _break(again, "before_schedule")
    chat(llm, cases()[:1], GREEDY)
    assert (scheduler._agent, scheduler._guard.rest_s() > 3000) == (None, True)
    shown = control.faulty(engine_id)
    assert dict(shown.faults) == {"after_update": 1, "before_schedule": 1}


@pytest.mark.usefixtures("rebuilt")
def test_reports_are_numbered_on_after_a_fault(
    llm: Any, agent: Any, scheduler: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report between two steps takes a number, too, so reports are ahead of the engine's steps. With a number from
    before, a report would count as answered before it is sent."""
    monkeypatch.setattr(guard_module, "RESTS_S", (0.0, 3600.0))
    run = Run(llm)
    for number in range(8):
        run.add(f"goes-{number}", opened(), endless(agent, max_tokens=240))
        llm.llm_engine.abort_request([f"goes-{number}"])
    control.settled()
    answered = agent.link.outbox.unreported.heard_step
    assert answered > scheduler.current_step + 4
    _break(agent, "before_schedule")
    run.add("after", opened(), endless(agent, max_tokens=40))
    run.until(lambda: scheduler._agent not in {None, agent})
    with records(scheduler._agent) as sent:
        run.until()
    assert sent[0][0].step > answered


def counters(agent: Any) -> dict[str, float]:
    """Return what an agent's reports count, by name."""
    counted = dict(zip(COUNTERS, agent._counters(), strict=True))
    del counted["round_trip_ms"]
    return counted


def _break(agent: Any, hook: str) -> None:
    @functools.wraps(getattr(agent, hook))
    def fails(*_: Any) -> None:
        raise RuntimeError(f"injected into {hook}")

    setattr(agent, hook, fails)


@pytest.mark.parametrize("hook", ["begin", "before_sampling", "put"])
def test_a_worker_hook_that_raises(llm: Any, agent: Any, control: Control, stock: list[list[int]], hook: str) -> None:
    """The worker stops measuring and continues to serve; the engine core continues without signals.

    If the worker can still report the fault, the engine core promises no more signals; otherwise the worker reports the
    fault when the fault is over.
    """
    before = control.settled().faults["observer"]
    observers = llm.collective_rpc(_break_observer, args=(hook,))
    assert all(observers)
    try:
        assert chat(llm, cases(), GREEDY) == stock
        assert all(f"RuntimeError at {__name__}:" in fault for fault in llm.collective_rpc(_observer_fault))
        assert (f"RuntimeError at {__name__}:" in agent.measuring.no_entropy) == (hook != "put")
        # The observer's rest is over, and it measures again.
        llm.collective_rpc(_mend_observer)
        wait_for(lambda: chat(llm, cases(), GREEDY) and not agent.measuring.no_entropy, 30, "entropy again")
        assert not any(llm.collective_rpc(_observer_fault))
    finally:
        llm.collective_rpc(_mend_observer)
        chat(llm, cases()[:1], GREEDY)
    shown = control.settled()
    assert (shown.capabilities.token_entropy, shown.faults["observer"]) == (True, before + 1)
    assert f"RuntimeError at {__name__}:" in shown.last_fault
    assert SECRET not in str(shown)


def _observer(worker: Any) -> Any:
    cells = worker.model_runner.sample_tokens.__closure__
    return next(c.cell_contents for c in cells if type(c.cell_contents).__name__ == "Observer")


def _break_observer(worker: Any, hook: str) -> bool:
    def fails(*_: Any) -> None:
        raise RuntimeError(SECRET)

    setattr(_observer(worker), hook, fails)
    return True


def _observer_fault(worker: Any) -> str:
    observer = _observer(worker)
    return str(observer.guard.fault or observer.delivery.fault)


def _mend_observer(worker: Any) -> None:
    observer = _observer(worker)
    for hook in ("begin", "before_sampling", "put"):
        observer.__dict__.pop(hook, None)
    observer.guard._back_at = observer.delivery._back_at = 0.0


NO_OP = """
import os, sys
from importlib.metadata import entry_points
before = set(sys.modules)
(plugin,) = entry_points(group="vllm.general_plugins", name="meridian")
for value in (None, "", ",", " , ", "\\n\\t,"):
    os.environ.pop("MERIDIAN_CONTROL", None)
    if value is not None:
        os.environ["MERIDIAN_CONTROL"] = value
    plugin.load()()
ours = {m for m in set(sys.modules) - before if m.split(".")[0] in ("meridian_agent", "meridian", "grpc", "google")}
assert ours == {"meridian_agent", "meridian_agent.plugin"}, ours
assert "vllm" not in sys.modules
"""


def test_unset_means_nothing_is_imported() -> None:
    """A variable that names no address at all counts as unset."""
    subprocess.run([sys.executable, "-c", NO_OP], check=True)


@pytest.mark.parametrize(
    ("what", "address", "said"),
    [
        ("version", "127.0.0.1:1", ["0.99.0 is outside the supported"]),
        ("hook", "127.0.0.1:1", ["Scheduler._preempt_request"]),
        (
            "address",
            "http://control:50051",
            [
                "MERIDIAN_CONTROL='http://control:50051': no address host:port; it is left out",
                "MERIDIAN_CONTROL names no usable address: this process runs stock vLLM",
            ],
        ),
    ],
)
def test_a_vllm_that_does_not_fit_stays_stock_and_says_so(
    tmp_path: Path, what: str, address: str, said: list[str]
) -> None:
    environment = {**ENGINE_ENV, "MERIDIAN_CONTROL": address}
    process = Process([sys.executable, "-m", "tests.engine.misfit", what], tmp_path / "log", environment)
    assert process.popen.wait() == 0, process.output()
    assert [text for text in said if text not in process.output()] == []
