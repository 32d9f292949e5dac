"""Lets the engine core end the agent's stream before it waits for its workers to exit.

vLLM kills an engine core that has not ended five seconds after it was told to, and by default the core gives its
workers these five seconds before it shuts the scheduler down. An engine that is killed with its stream open counts as
lost.
"""

from __future__ import annotations

import functools
from typing import Any

from meridian_agent.vllm_adapter import after_import, required_api

WITHOUT = "an engine whose workers exit slowly counts as lost when it shuts down"


def install() -> None:
    """Wrap the method in which vLLM's engine core shuts down, now or when this process imports its module. Never
    raises."""
    after_import.wrap(required_api.CORE_SHUTDOWN, _wrap, WITHOUT)


def _wrap(core_class: Any) -> None:
    shutdown = core_class.shutdown

    @functools.wraps(shutdown)
    def end_stream_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A scheduler without the agent has no such method.
        end_stream = getattr(getattr(self, "scheduler", None), "end_stream", None)
        if end_stream is not None:
            end_stream()
        return shutdown(self, *args, **kwargs)

    core_class.shutdown = end_stream_first
