"""Holds what an engine can do: the facts that its agent finds out at the start, and the capabilities that its Hello
reports. Reads the scheduler only; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of one engine.

    boundaries: sentence and paragraph flags by token id. shares_blocks: probes may begin on a block that is partly
    filled. tool_call: the token that begins a tool call, if the chat template keeps thinking until the tool has
    answered; None otherwise. on_fault: takes the cause and the text of a fault outside of the hooks. expected_backend:
    the expected entropy backend of the workers, and why it is not the CUDA kernel. no_probes: why the agent refuses
    probes; empty if it accepts them.
    """

    model: str
    boundaries: bytes
    shares_blocks: bool
    tool_call: int | None
    on_fault: Callable[[str, str], None]
    expected_backend: tuple[str, str]
    no_probes: str = ""


def capabilities(scheduler: Any, strips_think: bool, entropy: bool, no_probes: str) -> agent_pb2.Capabilities:
    """Return the capabilities of this engine.

    entropy: whether the worker measures entropy. no_probes: why probes cannot be hidden from the KV connector; empty if
    they can.
    """
    caching = bool(scheduler.kv_cache_manager.enable_caching)
    one_group = len(scheduler.kv_cache_config.kv_cache_groups) == 1
    return agent_pb2.Capabilities(
        token_entropy=entropy,
        force_end=True,
        eat_probe=entropy and caching and not no_probes,
        dispatch=True,
        reclaim=caching and one_group,
        template_strips_think=strips_think,
    )
