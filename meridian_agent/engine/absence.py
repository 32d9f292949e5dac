"""Tells the control plane that an engine runs without the agent, and why.

The stream carries only this fact: the engine obeys no settings and reports no steps. Runs in the engine core only;
never raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Never

from meridian.v1 import agent_pb2

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.guard import Guard
from meridian_agent.link.control_stream import ControlStream
from meridian_agent.link.credentials import AgentCredentials
from meridian_agent.link.engine_name import EngineName
from meridian_agent.link.identity import identity_of_engine, rank_of, targets
from meridian_agent.link.settings_file import state_folder
from meridian_agent.vllm_adapter.version import vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")


def say_absent(reason: str, scheduler: Any, connect: Callable[..., ControlStream] = ControlStream) -> None:
    """Keep a stream open until the engine is shut down, with a Hello that carries `reason` as the fault.

    scheduler: the engine's scheduler, of any version of vLLM.
    """
    logger.error("meridian: no agent in this engine, vLLM runs as stock; %s", reason)
    try:
        config = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
        name = getattr(scheduler, "engine_name", None) or EngineName(state_folder(), rank_of(config))
        # The claim on the name lasts as long as the engine.
        scheduler.engine_name = name
        identity = identity_of_engine(vllm_version(), name.name)

        def hello() -> agent_pb2.Hello:
            return agent_pb2.Hello(**identity, fault=reason, state=agent_pb2.AGENT_STATE_OFF)

        def refuse(settings: agent_pb2.Settings) -> Never:
            raise BadSettings(f"the agent is off: {reason}")

        stream = connect(targets(), hello, refuse, lambda _: None, credentials=AgentCredentials.from_environment())
        stream.start()
        shutdown = scheduler.shutdown

        def end(*args: Any, **kwargs: Any) -> Any:
            Guard("the stream ends with the process").run(stream.stop)
            name.release()
            return shutdown(*args, **kwargs)

        scheduler.shutdown = end
    except Exception:
        logger.exception("meridian: could not report that there is no agent")
