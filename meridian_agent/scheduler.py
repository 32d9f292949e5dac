"""The mixin that puts the agent in front of whatever scheduler class vLLM chose. Each hook is stock behaviour plus one
guarded call; when the agent is off they are stock behaviour alone."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent import hooks, observe
from meridian_agent.absence import say_absent
from meridian_agent.agent import Agent
from meridian_agent.credentials import Credentials
from meridian_agent.environment import identity_of_engine, targets
from meridian_agent.guard import Guard
from meridian_agent.link import Link
from meridian_agent.phases import NO_MARKERS, Markers
from meridian_agent.settings import check
from meridian_agent.state import StateFile, state_folder

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")


@functools.cache
def governed(chosen: type) -> type:
    """The scheduler class vLLM chose, with the agent in front of it; already governed classes come back as they are."""
    if issubclass(chosen, GovernedScheduler):
        return chosen
    return type(f"Governed{chosen.__name__}", (GovernedScheduler, chosen), {"__module__": __name__})


class GovernedScheduler:
    """Mixin over a vLLM scheduler class (see `governed`)."""

    _agent: Agent | None = None
    _guard: Guard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = Guard()
        self._agent = self._guard.run(build_agent, self, self._guard)
        if self._agent is None:
            say_absent(self._guard.fault)

    def _tell(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Run a hook of the agent's under the guard, and book its time."""
        began = time.perf_counter()
        result = self._guard.run(hook, *args)
        if self._agent is not None:
            self._agent.agent_seconds += time.perf_counter() - began
        return result

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._agent is not None:
            self._tell(self._agent.opened, self, request)

    def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
        done = super().finish_requests(request_ids, finished_status, *args, **kwargs)  # type: ignore[misc]
        if self._agent is not None:
            self._tell(self._agent.finished, [getattr(r, "request_id", r) for r in done])
        return done

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        agent = self._agent
        if agent is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        limits = self._tell(agent.before_schedule, self)
        began = time.perf_counter()
        output = self._schedule_within(limits or {}, *args, **kwargs)
        agent.scheduler_seconds += time.perf_counter() - began
        self._tell(agent.after_schedule, self, output)
        return output

    def _schedule_within(self, limits: dict[str, int], *args: Any, **kwargs: Any) -> Any:
        """Stock schedule with lower values of some of the scheduler's own limits, by attribute."""
        stock_limits = {name: getattr(self, name) for name in limits}
        for name, limit in limits.items():
            setattr(self, name, limit)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name, limit in stock_limits.items():
                setattr(self, name, limit)

    def get_grammar_bitmask(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        base = super().get_grammar_bitmask(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._agent is None or self._guard.fault:
            return base
        merged = self._tell(self._agent.bitmask, self, scheduler_output, base)
        return base if self._guard.fault else merged

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        if (agent := self._agent) is None:
            return outputs
        agent.scheduler_seconds += time.perf_counter() - began
        self._tell(agent.after_update, self, model_runner_output, outputs)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None:
            self._tell(self._agent.preempting, request)
        result = super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._agent is not None:
            self._tell(self._agent.preempted, self, request)
        return result

    def _free_request_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._agent is not None:
            self._tell(self._agent.freeing, self, request)
        return super()._free_request_blocks(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._agent is not None:
            self._guard.run(self._agent.link.stop)
        super().shutdown(*args, **kwargs)  # type: ignore[misc]


def build_agent(scheduler: Any, guard: Guard) -> Agent:
    """Make and start the agent of one engine core, from the environment and the engine's own configuration."""
    config = scheduler.vllm_config
    model = config.model_config.served_model_name
    model = str(model[0] if isinstance(model, (list, tuple)) else model)
    markers = _markers(config)
    identity = identity_of_engine(getattr(config.parallel_config, "data_parallel_rank", 0))
    template = hooks.template_of(hooks.tokenizer_of(config), markers)
    agent: Agent

    def hello() -> agent_pb2.Hello:
        return agent_pb2.Hello(
            **identity,
            model=model,
            block_size_tokens=scheduler.block_size,
            num_blocks=config.cache_config.num_gpu_blocks,
            max_num_seqs=scheduler.max_num_running_reqs,
            vocab_size=config.model_config.get_vocab_size(),
            capabilities=capabilities(scheduler, template.strips_think, agent.no_entropy),
            revision=link.revision,
            fault=guard.fault,
            state=agent_pb2.AGENT_STATE_OFF if guard.fault else link.state,
            freeze=link.freeze_status(),
            refused=link.refused,
        )

    def prepare(settings: agent_pb2.Settings) -> Markers:
        if guard.fault:
            raise ValueError(f"the agent is off: {guard.fault}")
        return hooks.resolve_markers(config, settings)

    state = StateFile(state_folder(), identity["engine_id"], model)
    link = Link(targets(), hello, prepare, state.keep, credentials=Credentials.from_environment())
    agent = Agent(scheduler, markers, link, model)
    agent.tool_call = template.tool_call
    _start_from(state, agent, prepare)
    if os.environ.get("MERIDIAN_FREEZE", "0") not in ("", "0"):
        logger.warning("meridian: frozen by MERIDIAN_FREEZE: vLLM runs as stock")
        link.freeze_for(math.inf)
    guard.on_trip = link.step_aside
    link.start()
    logger.info("meridian: governing %s, control plane %s", type(scheduler).__name__, ", ".join(targets()))
    return agent


def _start_from(state: StateFile, agent: Agent, prepare: Callable[[agent_pb2.Settings], Markers]) -> None:
    """Begin with the settings of the last start, until a control plane says otherwise."""
    settings = state.load()
    if settings is None:
        return
    try:
        check(settings)
        agent.put_in_force(settings, prepare(settings))
    except ValueError as error:
        logger.warning("meridian: %s is ignored: %s", state.path, error)
        return
    agent.link.hold(settings)
    logger.info("meridian: starting from revision %d of %s", settings.revision, state.path)


def _markers(config: Any) -> Markers:
    try:
        return hooks.resolve_markers(config, agent_pb2.Settings())
    except ValueError as error:
        logger.warning("meridian: nothing counts as thinking until policy names the markers: %s", error)
        return NO_MARKERS


def capabilities(scheduler: Any, strips_think: bool, no_entropy: str) -> agent_pb2.Capabilities:
    """What this engine can honour. no_entropy: why its worker measures nothing, if it said so."""
    caching = bool(scheduler.kv_cache_manager.enable_caching)
    one_group = len(scheduler.kv_cache_config.kv_cache_groups) == 1
    entropy = not no_entropy and observe.possible(str(scheduler.vllm_config.device_config.device_type))
    return agent_pb2.Capabilities(
        token_entropy=entropy,
        force_end=True,
        eat_probe=entropy and caching,
        dispatch=True,
        reclaim=caching and one_group,
        template_strips_think=strips_think,
    )
