"""Puts the agent in front of the scheduler class that vLLM chose. Each hook calls vLLM's own method and makes one
guarded call to the agent; while the agent is off, each hook calls vLLM's own method only.

Code outside of the guard only makes calls. If the agent fails while one of vLLM's own methods runs, the mixin settles
the fault after that method has returned.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.guard import Guard, hook
from meridian_agent.engine import stock_restore
from meridian_agent.engine.absence import say_absent
from meridian_agent.engine.lifecycle import Lifecycle
from meridian_agent.engine.queue_order import Limit
from meridian_agent.vllm_adapter import premature_stops, probe_rows, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meridian_agent.engine.agent import Agent
    from meridian_agent.link.engine_name import EngineName
    from meridian_agent.vllm_types import (
        ModelRunnerOutput,
        Request,
        Scheduler,
        SchedulerOutput,
    )
else:
    Scheduler = object


@functools.cache
def governed(chosen: type) -> type:
    """Return a subclass of the scheduler class that vLLM chose, with the agent in front; a class that has the agent
    already is returned as it is."""
    if issubclass(chosen, GovernedScheduler):
        return chosen
    return type(f"Governed{chosen.__name__}", (GovernedScheduler, chosen), {"__module__": __name__})


class GovernedScheduler(Scheduler):
    """Mixin over a vLLM scheduler class (see `governed`), which makes it a whole scheduler."""

    # The agent; None while it is off.
    _agent: Agent | None = None
    _lifecycle: Lifecycle | None = None
    # The engine's name; None until it is known.
    engine_name: EngineName | None = None
    _guard: Guard
    # Whether the engine's thread is inside of `schedule` or `update_from_output`.
    _inside = False
    # Number of steps that have begun, and this number when the link's thread looked last.
    _begun = _seen = 0
    # Whether a fault has left changes of the agent in the engine, and whether the queues were ordered by a plan at that
    # time.
    _to_restore = _ordered = False
    # The requests that had stopped at that time and were to go on, as `premature_stops.let_go` takes them.
    _stopped: Mapping[str, bool] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The original values of the scheduler's limits that are lowered in this step.
        self._stock_limits: list[Limit] = []
        self._guard = Guard()
        # The scheduled steps whose output is still to come, oldest first.
        self._under_way = deque[Any]()
        # Held by the engine's thread while a step begins and while a hook between two steps runs, and by the link's
        # thread while it publishes what no step has published.
        self._between_steps = threading.RLock()
        if reason := self._guard.run(scheduler_api.ungovernable, self):
            say_absent(reason, self)
            return
        self._agent = self._guard.run(self._begin)
        # The time to start is not part of the time that steps take.
        self._guard.seconds = 0.0
        if self._agent is None:
            say_absent(self._guard.fault, self)

    def _begin(self) -> Agent:
        # A fault at the start would happen again, and building the agent later would stall a step while it reads a
        # tokenizer.
        self._guard.starting = True
        self._lifecycle = Lifecycle(self, self._guard)
        self._lifecycle.link.outbox.at_rest = self._at_rest
        agent = self._lifecycle.start()
        self._guard.starting = False
        return agent

    def add_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._agent is not None:
            self._guard.run(self._agent.admit, request)
        super().add_request(request, *args, **kwargs)  # type: ignore[safe-super]
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.opened, self, request)

    def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None and not isinstance(request_ids, (str, NoneType)):
            # A generator could be read once only.
            request_ids = list(request_ids)
        if self._agent is not None:
            self._guard.run(self._agent.finishing, self, request_ids)
        done = super().finish_requests(request_ids, finished_status, *args, **kwargs)  # type: ignore[safe-super]
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.finished, done, request_ids, finished_status)
                if not self._inside:
                    self._guard.run(self._agent.ended_between_steps, self)
        return done

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self._between_steps:
            self._inside = True
        self._begun += 1
        try:
            return self._schedule(*args, **kwargs)
        finally:
            self._inside = False

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._guard.fault:
            self._settle_fault()
        if (agent := self._agent) is not None:
            if self._stock_limits:
                self._guard.run(self._restore_limits)
            if limits := self._guard.run(agent.before_schedule, self):
                self._guard.run(self._lower_limits, limits)
        if self._guard.fault:
            self._settle_fault()
        began = time.perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._under_way.append(output)
        if agent is not None:
            agent.scheduler_seconds += time.perf_counter() - began
            if self._stock_limits:
                self._guard.run(self._restore_limits)
            self._guard.run(agent.after_schedule, self, output)
            if self._guard.fault:
                self._settle_fault(scheduled=output)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        base = super().get_grammar_bitmask(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        agent = self._agent
        if agent is None or self._guard.fault or (agent.accounts.postponed and not agent.lease.attention):
            # With a postponed step the coming one is calm, and nothing waits to be sent.
            return base
        merged = self._guard.run(agent.bitmask, self, scheduler_output, base)
        return base if self._guard.fault else merged

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        self._inside = True
        try:
            return self._update(scheduler_output, model_runner_output, *args, **kwargs)
        finally:
            self._inside = False

    def _update(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        began = time.perf_counter()
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        lost = 0 if self._under_way and self._under_way.popleft() is scheduler_output else self._lost(scheduler_output)
        if (agent := self._agent) is not None:
            if lost:
                self._guard.run(agent.accounts.lose, lost)
            agent.scheduler_seconds += time.perf_counter() - began
            agent.hook_seconds = self._guard.seconds
            self._guard.run(agent.after_update, self, model_runner_output, outputs)
            if self._guard.fault:
                self._settle_fault(outputs.values())
        return outputs

    def _lost(self, scheduler_output: SchedulerOutput) -> int:
        """Return how many steps were scheduled before this one and have brought no output: after an error in a step
        vLLM's fault tolerance, or a program that has the engine in its own process, ends all requests and goes on. The
        oldest step has been taken out already."""
        lost = 1
        while self._under_way and self._under_way.popleft() is not scheduler_output:
            lost += 1
        return lost

    def _handle_stopped_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None and self._guard.run(self._agent.stopped, self, request):
            # vLLM takes the request out of its queues and keeps all else of it.
            return False
        ended = super()._handle_stopped_request(request, *args, **kwargs)  # type: ignore[misc]
        if not ended and self._agent is not None:
            self._guard.run(self._agent.accounts.answered_input, request)
        return ended

    def get_num_unfinished_requests(self) -> int:
        number: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        # Under data parallelism all ranks stop computing together once no rank has such a request.
        if self._agent is not None and self._agent.stops.waiting:
            number += self._guard.run(self._agent.unfinished, self) or 0
        return number

    def stop_sleeps(self, request_id: str) -> bool:
        """Return whether the newest token of a request, one of its stop tokens, does not end the request. vLLM asks
        through the request's list of stop tokens."""
        return self._agent is not None and bool(self._guard.run(self._agent.stop_sleeps, request_id))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None:
            self._guard.run(self._agent.preempting, request)
        result = super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.preempted, self, request, self._inside)
        return result

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> Any:
        failed = super()._handle_invalid_blocks(*args, **kwargs)  # type: ignore[misc]
        if failed and self._agent is not None:
            self._guard.run(self._agent.computes_again)
        return failed

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.resetting, self)
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def _free_request_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.freeing, self, request)
        return super()._free_request_blocks(request, *args, **kwargs)  # type: ignore[misc]

    def end_stream(self) -> None:
        """End the stream, because the engine core shuts down and makes no more steps. Never raises."""
        self._end(lambda lifecycle: lifecycle.end_stream())

    def _end(self, end: Callable[[Lifecycle], None]) -> None:
        if self._agent is not None:
            with self._between_steps:
                self._guard.run(self._agent.accounts.take_postponed)
        if self._lifecycle is not None:
            # The stream is ended while the agent is off, too.
            Guard("the stream ends with the process").run(end, self._lifecycle)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._end(lambda lifecycle: lifecycle.stop())
        super().shutdown(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------- on the link's threads

    @property
    def _is_stepping(self) -> bool:
        """Whether a step has begun whose hooks have not all run."""
        return self._inside or bool(self._under_way)

    def _at_rest(self) -> None:
        """Publish what no step has published, if the engine has made none since the last call, for example because vLLM
        is paused. Never waits for the engine's thread."""
        seen, self._seen = self._seen, self._begun
        if self._is_stepping or seen != self._begun or not self._between_steps.acquire(blocking=False):
            return
        try:
            if seen == self._begun and not self._is_stepping and self._agent is not None:
                self._guard.run(self._agent.rest, self)
        finally:
            self._between_steps.release()

    def _let_stopped_go(self) -> None:
        stopped, self._stopped = self._stopped, {}
        premature_stops.let_go(self, stopped)

    # ----------------------------------------------------------------------------------------------- under the guard

    @hook(agent_pb2.FAULT_CAUSE_BEFORE_SCHEDULE)
    def _lower_limits(self, limits: list[Limit]) -> None:
        self._stock_limits = [Limit(owner, name, getattr(owner, name)) for owner, name, _ in limits]
        for owner, name, limit in limits:
            setattr(owner, name, limit)

    @hook(agent_pb2.FAULT_CAUSE_AFTER_SCHEDULE)
    def _restore_limits(self) -> None:
        for owner, name, limit in self._stock_limits:
            setattr(owner, name, limit)
        self._stock_limits = []

    # ------------------------------------------------------------------------------------------ after a hook has failed

    def _settle_fault(self, outputs: Any = (), scheduled: Any = None) -> None:
        """Restore stock vLLM after a fault; begin with another agent once the rest is over. Never raises.

        outputs: the outputs that vLLM is about to send to the clients. scheduled: the step that vLLM has just
        scheduled.
        """
        if self._agent is not None:
            self._stopped = self._agent.stops.waiting
            self._ordered, self._agent, self._to_restore = self._agent.queues.ordered, None, True
        if self._to_restore:
            changes: list[Callable[[], object]] = [self._restore_limits, self._let_stopped_go]
            if self._lifecycle is not None:
                changes += [self._lifecycle.disarm, self._lifecycle.limits.restore]
            if scheduled is not None:
                changes.append(functools.partial(probe_rows.take_back, self, scheduled))
            self._to_restore = not stock_restore.as_stock(self, self._ordered, changes, outputs)
        if self._lifecycle is not None and self._guard.come_back():
            self._agent = self._guard.run(self._lifecycle.again, len(self._under_way))
            if self._agent is None:
                # An agent that could not come back may have put limits of its settings in force.
                self._to_restore = not stock_restore.as_stock(self, False, [self._lifecycle.limits.restore])
