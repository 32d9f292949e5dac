"""A real vLLM engine under steady load in a process of its own: `python -m tests.chaos.engine SOCKET SETTINGS`.

The process connects to SOCKET, on which `driver.Engine` listens, and steps from the first command on; it answers
commands between two steps. SETTINGS is JSON: the engine's arguments and the load. Everything runs on the main thread,
which is the engine core's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.connection import Client, Connection
from typing import Any

from tests.bench.machine import rss_mb
from tests.chaos.reports import Done, Report

# Shortest time between two looks at the agent's state, which happen between steps.
LOOK_S = 0.005
# Times at which the handlers before a fork had ended. Python runs the handler that was registered first as the last
# one.
_handled_s: list[float] = []
os.register_at_fork(before=lambda: _handled_s.append(time.monotonic()))


class Load:
    """Keeps a constant number of requests in flight, one case after the other."""

    def __init__(self, llm: Any, settings: dict[str, Any]) -> None:
        from vllm import SamplingParams

        from tests.engine import prompt_ids

        self._llm, self._in_flight, self._added = llm, settings["in_flight"], 0
        self._prompts = [prompt_ids(llm, case) for case in settings["cases"]]
        self._params = SamplingParams(temperature=0.0, detokenize=False, max_tokens=settings["max_tokens"])
        # Case, number of tokens and begin time of each request in flight.
        self._live: dict[str, tuple[int, int, float]] = {}

    def step(self, report: Report, now_s: float) -> None:
        engine = self._llm.llm_engine
        while len(self._live) < self._in_flight:
            case = self._added % len(self._prompts)
            engine.add_request(str(self._added), {"prompt_token_ids": self._prompts[case]}, self._params.clone())
            self._live[str(self._added)] = case, 0, now_s
            self._added += 1
        for output in engine.step():
            case, had, began_s = self._live[output.request_id]
            completion = output.outputs[0]
            tokens = len(completion.token_ids)
            report.tokens += tokens - had
            self._live[output.request_id] = case, tokens, began_s
            if output.finished:
                del self._live[output.request_id]
                said, reason = tuple(completion.token_ids), str(completion.finish_reason)
                report.finished.append(Done(case, said, reason, began_s, time.monotonic()))
        report.steps += 1


class Engine:
    """The engine, its load, and the report on both."""

    def __init__(self, llm: Any, settings: dict[str, Any]) -> None:
        self._load = Load(llm, settings)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._agent, self._guard = scheduler._agent, scheduler._guard
        self._report = Report()
        # Seconds between two steps.
        self._pause_s = settings["pause_s"]
        self._running = False
        self._stepped_s = self._looked_s = 0.0

    def serve(self, connection: Connection[Any, Any]) -> None:
        while True:
            while not self._running or connection.poll(self._pause_s):
                command = connection.recv()
                if command == "stop":
                    return
                if command == "fork":
                    # The time of the fork also counts in the step's duration.
                    self._report.fork_held_s = fork()
                else:
                    self._running, self._stepped_s = True, time.monotonic()
                connection.send(self._take())
            self._step()

    def _step(self) -> None:
        before = self._report.tokens
        self._load.step(self._report, self._stepped_s)
        now_s = time.monotonic()
        took_s = now_s - self._stepped_s
        if self._report.tokens > before:
            self._report.longest_s = max(self._report.longest_s, took_s)
        if now_s - self._looked_s > LOOK_S:
            self._look(now_s)
        self._stepped_s = now_s

    def _look(self, now_s: float) -> None:
        link, report = self._agent.link, self._report
        self._looked_s = now_s
        report.ring = max(report.ring, link.outbox.ring.qsize())
        report.inbox = max(report.inbox, len(link.inbox.messages))
        caps = [tr.cap for tr in self._agent.tracker.by_id.values() if tr.cap is not None]
        seen = _name(link.lease.state), link.lease.connected and any(cap.decision_id for cap in caps)
        if not report.states or report.states[-1][1:] != seen:
            report.states.append((now_s, *seen))

    def _take(self) -> Report:
        """Return the report and begin the next one."""
        report, self._report = self._report, Report()
        # The next report begins with the agent's present state.
        self._report.states = report.states[-1:]
        report.dropped, report.fault = self._agent.link.outbox.reports_dropped, self._guard.fault
        report.rss_mb = rss_mb(os.getpid())
        return report


def fork() -> float:
    """Fork this process, with a child that ends at once; return the seconds that the handlers before the fork took."""
    began_s = time.monotonic()
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return _handled_s.pop() - began_s


def _name(state: Any) -> str:
    from meridian.v1 import agent_pb2

    return agent_pb2.AgentState.Name(state).removeprefix("AGENT_STATE_")


def main() -> None:
    settings = json.loads(sys.argv[2])
    import torch
    import vllm

    from meridian_agent.core import plain_log

    torch.set_num_threads(1)
    # The log is to have a line for each fault, however often a busy machine ends the short leases.
    plain_log.BURST = sys.maxsize
    llm = vllm.LLM(**settings["engine"])
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send("ready")
        Engine(llm, settings).serve(connection)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
