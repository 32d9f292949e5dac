"""A pytest plugin for vLLM's own tests, which puts the agent in front of every scheduler they make.

The plugin also writes down the result of each test. The plugin is loaded with `-p agent_in_front` from this folder and
imports nothing of this repository's `tests`, because in that process the package of that name is vLLM's.

SUITE_RESULTS names the file for the results, one JSON object a line; SUITE_ARM is `stock`, `absent` or `live`.
SUITE_BREAK names a fault that is put into the agent on purpose, to prove that the comparison notices it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ARM = os.environ["SUITE_ARM"]
# Seconds for the control plane to answer; a longer wait fails the run.
PATIENCE_S = 30.0
# Largest number of schedulers that are named with their problems.
MOST_NAMED = 50


class Results:
    """Writes a line for each test as soon as it is over, so that a process that dies leaves its results so far."""

    def __init__(self) -> None:
        self._path = Path(os.environ["SUITE_RESULTS"])
        self._reports: list[pytest.TestReport] = []

    def say(self, **line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # The objects of the imports stay frozen for the whole run: vLLM's fixtures would unfreeze them after each test
        # and then collect garbage, which takes a second each time.
        gc.collect()
        gc.freeze()
        gc.unfreeze = lambda: None
        self.say(collected=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(id=report.nodeid, outcome="not collected", reason=_reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if report.when == "teardown":
            self.say(id=report.nodeid, outcome=_outcome(self._reports), reason=_first_reason(self._reports))
            self._reports = []

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # False if the run was interrupted or ended by an error of pytest's own.
        self.say(finished=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))


def _outcome(reports: list[pytest.TestReport]) -> str:
    for report in reports:
        if report.failed:
            return "failed" if report.when == "call" else f"error in {report.when}"
    if any(hasattr(report, "wasxfail") for report in reports):
        return "xfailed" if any(report.skipped for report in reports) else "xpassed"
    return "skipped" if any(report.skipped for report in reports) else "passed"


def _first_reason(reports: list[pytest.TestReport]) -> str:
    return next((_reason(report) for report in reports if not report.passed), "")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the kind of the exception and its last line, or why a test was skipped."""
    found: Any = report.longrepr
    if isinstance(found, tuple):
        return str(found[2])
    crash = getattr(found, "reprcrash", None)
    lines = [line for line in str(crash.message if crash else found).splitlines() if line.strip()] or [""]
    first, last = lines[0].strip(), lines[-1].strip().removeprefix("E ").strip()
    return last if first == last or not crash else f"{first.partition(':')[0]}: {last}"


class InFront:
    """Puts the agent in front of each scheduler, and counts what it does there.

    Each scheduler is an engine of its own, whose stream ends with its test. With a live control plane a new scheduler
    waits for its settings, and after each step for the answer to that step's report, which this control plane gives to
    every report. So every decision is in the engine before its next step.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._made: list[Any] = []
        self._number = itertools.count()
        # The test under way, and vLLM's own output for the clients in the newest step.
        self._test = ""
        self._stock_told: list[Any] = []
        # The schedulers of engines that the agent stays out of on purpose are counted apart.
        self.counts = {"schedulers": 0, "steps": 0, "worked": 0, "left_out": 0}
        if ARM == "live":
            self.counts |= {"connected": 0, "answered": 0}
        self.problems: list[str] = []

    def install(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from meridian_agent.engine.agent import Agent
        from meridian_agent.engine.scheduler_mixin import GovernedScheduler, governed

        setattr(Agent, "after_schedule", self._after_schedule(Agent.after_schedule))  # noqa: B010
        # Schedulers are replaced wherever a test imports the class from, and whatever it derives from it.
        Scheduler.__new__ = lambda chosen, *_, **__: object.__new__(governed(chosen))
        Scheduler.update_from_output = self._stock_update(Scheduler.update_from_output)
        for name in ("__init__", "schedule", "update_from_output"):
            setattr(GovernedScheduler, name, getattr(self, f"_{name.strip('_')}")(getattr(GovernedScheduler, name)))

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            os.environ["MERIDIAN_ENGINE_ID"] = f"suite-{next(self._number)}"
            original(scheduler, *args, **kwargs)
            self.counts["left_out" if ungovernable(scheduler) else "schedulers"] += 1
            self._made.append(scheduler)
            if ARM == "live" and scheduler._agent is not None:
                link = scheduler._lifecycle.link
                if self._wait(lambda: link.lease.connected and link.lease.held is not None, "no settings"):
                    self.counts["connected"] += 1

        return init

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(scheduler, *args, **kwargs)
            self.counts["steps"] += not ungovernable(scheduler)
            return output

        return schedule

    def _after_schedule(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def after_schedule(agent: Any, scheduler: Any, output: Any) -> None:
            original(agent, scheduler, output)
            self.counts["worked"] += 1

        return after_schedule

    def _stock_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap vLLM's own method beneath the agent, because vLLM's tests hardly check the output for clients."""

        def update(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = original(scheduler, *args, **kwargs)
            self._stock_told = _told(outputs)
            return outputs

        return update

    def _update_from_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(scheduler: Any, planned: Any, computed: Any, *args: Any, **kwargs: Any) -> Any:
            agent = scheduler._agent
            before = agent.tracker.newest if agent is not None else 0
            outputs = original(scheduler, planned, computed, *args, **kwargs)
            if _told(outputs) != self._stock_told:
                raise AssertionError("the agent has changed what clients are told")
            if ARM == "live" and agent is not None and agent is scheduler._agent:
                self._hold(agent, before, computed)
            return outputs

        return update_from_output

    def _hold(self, agent: Any, before: int, computed: Any) -> None:
        """Wait for the answer to a step's report. before: number of the newest record before the step.

        The agent does not report a step that computed nothing and changed nothing; such a step's record is continued by
        the next one. The agent also reports no step before the first one that began on the present stream.
        """
        link = agent.link
        link.outbox.ring.wake()
        if not link.lease.connected:
            self._problem("the stream has ended before its test")
        elif (step := agent.tracker.newest) != before and link.outbox.follows:
            self.counts["answered"] += self._wait(
                lambda: _answered(link, step), f"no answer to the report of step {step}"
            )
        elif computed.req_ids and not link.inbox.new_stream_waits():
            self._problem("no report of a step that computed something")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                self._problem(otherwise)
                return False
            time.sleep(0.0005)
        return True

    def _problem(self, text: str) -> None:
        if len(self.problems) < MOST_NAMED:
            self.problems.append(f"{self._test}: {text}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """End the test's engines; an agent that has failed, or was missing, is a problem."""
        for scheduler in self._made:
            if fault := scheduler._guard.last_fault or scheduler._guard.fault:
                self._problem(fault)
            elif (scheduler._agent is None) != bool(ungovernable(scheduler)):
                self._problem(
                    "no agent" if scheduler._agent is None else f"an agent although {ungovernable(scheduler)}"
                )
            if scheduler._lifecycle is not None:
                link = scheduler._lifecycle.link
                if ARM == "live" and not (link.lease.connected or link._stop.is_set()):
                    self._problem("the stream has ended before its test")
                link.stop()
        self._made.clear()

    def pytest_sessionfinish(self) -> None:
        self._results.say(counts=self.counts, problems=self.problems)


def ungovernable(scheduler: Any) -> str:
    """Return why the agent must stay out of this engine, as the agent itself judges; empty if it need not."""
    # Only the arms with the agent import it.
    from meridian_agent.vllm_adapter import scheduler_api

    return scheduler_api.ungovernable(scheduler)


def _told(outputs: Any) -> list[Any]:
    """Return a step's output for the clients."""
    told = [(client, output) for client, said in outputs.items() for output in said.outputs]
    return [(client, o.request_id, list(o.new_token_ids), o.finish_reason) for client, o in told]


def _answered(link: Any, step: int) -> bool:
    """Return whether the report of this step is answered."""
    waiting = (message.step for message in list(link.inbox.messages) if message is not None)
    return step <= link.inbox.answered_step or any(step <= answered for answered in waiting)


def _break(how: str) -> None:
    """Put a named fault into the agent, which the comparison must notice."""
    from meridian_agent.engine.agent import Agent
    from meridian_agent.engine.scheduler_mixin import GovernedScheduler

    schedule, update = GovernedScheduler.schedule, GovernedScheduler.update_from_output

    def reorder(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.running.reverse()
        return schedule(scheduler, *args, **kwargs)

    def drop(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(scheduler, *args, **kwargs)
        for client in outputs.values():
            for output in client.outputs:
                output.new_token_ids = output.new_token_ids[:-1]
        return outputs

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    broken = {
        "reorder": (GovernedScheduler, "schedule", reorder),
        "drop": (GovernedScheduler, "update_from_output", drop),
        "fault": (Agent, "before_schedule", fail),
    }
    setattr(*broken[how])


def pytest_configure(config: pytest.Config) -> None:
    results = Results()
    config.pluginmanager.register(results, "meridian-results")
    how = os.environ.get("SUITE_BREAK", "")
    if ARM == "stock":
        return
    if how and how != "not in front":
        _break(how)
    in_front = InFront(results)
    if how != "not in front":
        in_front.install()
    config.pluginmanager.register(in_front, "meridian-in-front")
