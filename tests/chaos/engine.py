"""A real vLLM engine under steady load in a process of its own: `python -m tests.chaos.engine SOCKET SETTINGS`.

The process connects to SOCKET, on which `driver.Engine` listens, and steps until it receives the command to pause; it
answers commands between two steps. SETTINGS is JSON: the engine's arguments and the load. Everything runs on
the main thread, which is the engine core's. With MERIDIAN_CONTROL unset in the environment the engine is stock vLLM.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

from tests.bench.machine import rss_mb
from tests.chaos.reports import Done, Report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Shortest time between two looks at the agent's state, which happen between steps.
LOOK_S = 0.005
# Times at which the handlers before a fork had ended. Python runs the handler that was registered first as the last
# one.
_handled_s: list[float] = []
os.register_at_fork(before=lambda: _handled_s.append(time.monotonic()))


class Load:
    """Keeps a constant number of requests in flight, one case after the other.

    A case is a chat or a prompt in token ids, and may have sampling parameters of its own. `salted`: no prompt finds
    another prompt's blocks in the prefix cache.
    """

    def __init__(self, llm: Any, settings: dict[str, Any]) -> None:
        from vllm import SamplingParams

        from tests.engine import prompt_ids

        def params(case: dict[str, Any]) -> Any:
            sampling = settings["sampling"] | case.get("sampling", {})
            return SamplingParams(temperature=0.0, detokenize=False, **sampling)

        self._llm, self._in_flight, self._is_salted = llm, settings["in_flight"], settings.get("salted", False)
        self._prompts = [case.get("prompt_ids") or prompt_ids(llm, case) for case in settings["cases"]]
        self._params = [params(case) for case in settings["cases"]]
        self._added = 0
        # Case, number of tokens and begin time of each request in flight.
        self._live: dict[str, tuple[int, int, float]] = {}

    def step(self, report: Report, now_s: float) -> None:
        engine = self._llm.llm_engine
        while len(self._live) < self._in_flight:
            case = self._added % len(self._prompts)
            params = self._params[case].clone()
            salt = {"cache_salt": str(self._added)} if self._is_salted else {}
            engine.add_request(str(self._added), {"prompt_token_ids": self._prompts[case], **salt}, params)
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
        # The scheduler of stock vLLM has no agent.
        self._agent: Any = getattr(scheduler, "_agent", None)
        self._guard: Any = getattr(scheduler, "_guard", None)
        self._report = Report()
        self._work = Work(llm) if settings.get("metered") else None
        # Seconds between two steps.
        self._pause_s = settings.get("pause_s", 0.0)
        self._running = False
        self._stepped_s = self._looked_s = 0.0

    def serve(self, connection: Connection[Any, Any]) -> None:
        while True:
            while not self._running or connection.poll(self._pause_s):
                command = connection.recv()
                if command == "stop":
                    return
                if isinstance(command, int):
                    self._steps(command)
                elif command == "fork":
                    # The time of the fork also counts in the step's duration.
                    self._report.fork_held_s = fork()
                else:
                    self._running = command != "pause"
                    self._stepped_s = time.monotonic()
                connection.send(self._take())
            self._step()

    def _steps(self, count: int) -> None:
        self._running, self._stepped_s = False, time.monotonic()
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        before = self._report.tokens
        self._load.step(self._report, self._stepped_s)
        now_s = time.monotonic()
        took_s = now_s - self._stepped_s
        self._report.busy_s += took_s
        if self._report.tokens > before:
            self._report.longest_s = max(self._report.longest_s, took_s)
        if self._agent is not None and now_s - self._looked_s > LOOK_S:
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
        if self._agent is not None:
            # The next report begins with the agent's present state.
            self._report.states = report.states[-1:]
            report.dropped, report.fault = self._agent.link.outbox.reports_dropped, self._guard.fault
        if self._work is not None:
            report.cpu_s = self._work.seconds()
        report.rss_mb = rss_mb(os.getpid())
        return report


class Work:
    """The processor time of the engine's processes, without the time that they spend waiting for each other.

    vLLM's processes wait by spinning. The worker is a `tests.bench.metered.MeteredWorker`, which counts its own time.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._llm, self._waited_s, read = llm, 0.0, MessageQueue.dequeue

        @functools.wraps(read)
        def dequeue(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return read(*args, **kwargs)
            finally:
                self._waited_s += time.thread_time() - began_s

        MessageQueue.dequeue = dequeue

    def seconds(self) -> float:
        worker_s: list[float] = self._llm.collective_rpc("busy_seconds")
        return time.process_time() - self._waited_s + sum(worker_s)


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

    torch.set_num_threads(1)
    llm = vllm.LLM(**settings["engine"])
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send("ready")
        Engine(llm, settings).serve(connection)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
