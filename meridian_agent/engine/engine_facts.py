"""Holds the facts that the agent finds out about its engine once, when the engine starts. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of one engine.

    boundaries: sentence and paragraph flags by token id. shares_blocks: probes may begin on a block that is partly
    filled. tool_call: the token that begins a tool call, where the chat template keeps thinking until the tool has
    answered. on_fault: takes the cause and the text of a fault outside of the hooks. expected_backend: what should
    measure entropy on the workers, and why the CUDA kernel does not. no_probes: why the agent refuses probes; empty
    where it accepts them.
    """

    model: str
    boundaries: bytes
    shares_blocks: bool
    tool_call: int | None
    on_fault: Callable[[str, str], None]
    expected_backend: tuple[str, str]
    no_probes: str = ""
