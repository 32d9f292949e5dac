"""Changes the limits of vLLM's scheduler that a policy may set, within bounds that follow from the engine's start.

vLLM reads each limit anew in every step, so a value holds from the next step on. No value preempts a request: vLLM
compares max_num_active_seqs only with requests that wait, and a step always has room for one token, with its drafts, of
each request that can run. The workers' buffers and CUDA graphs are made for the start-up values, so no value may need
larger ones.

The start-up values are read before the first agent begins, and vLLM itself does not change them later, so they can be
restored at any time. Methods that change limits run on the engine-core thread; `bounded` and `message` run on any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.vllm_adapter import scheduler_api

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meridian_agent.vllm_types import Scheduler

# The limits that decide into which pieces prompts are cut.
CUTTING = ("max_num_scheduled_tokens", "long_prefill_token_threshold")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one limit. owner: the object that has the limit as the attribute `attribute`. refusal: why the
    limit cannot change; empty if it can."""

    owner: Any
    attribute: str
    startup: int
    lowest: int
    highest: int
    refusal: str = ""

    def of(self, wanted: int) -> int:
        """Return the value in force if `wanted` is set, 0 for the start-up value."""
        return self.startup if self.refusal or not wanted else max(self.lowest, min(wanted, self.highest))


class SchedulerLimits:
    """The limits of one engine, by name."""

    def __init__(self, bounds: Mapping[str, Bounds]) -> None:
        self._bounds = bounds
        self._wanted: Mapping[str, int] = {}
        self._frozen = False
        # Names of the limits that have ever had another value than at the start; the others are never written.
        self._touched: set[str] = set()
        # Limits that now cut prompts into other pieces than the start-up values would.
        self._cutting: list[Bounds] = []

    def message(self) -> agent_pb2.EngineLimits:
        """Return the limits for the Hello."""
        limits: dict[str, Any] = {
            name: agent_pb2.EngineLimit(
                startup=limit.startup, lowest=limit.lowest, highest=limit.highest, refusal=limit.refusal
            )
            for name, limit in self._bounds.items()
        }
        return agent_pb2.EngineLimits(**limits)

    def bounded(self, settings: agent_pb2.Settings) -> agent_pb2.EngineLimitValues:
        """Return the values that settings give the limits of this engine."""
        wanted = settings.engine_limits
        values: dict[str, Any] = {name: limit.of(getattr(wanted, name)) for name, limit in self._bounds.items()}
        return agent_pb2.EngineLimitValues(**values)

    def obey(self, settings: agent_pb2.Settings) -> None:
        """Put the values of settings in force, or keep them for the end of a freeze."""
        bounded = self.bounded(settings)
        self._wanted = {name: getattr(bounded, name) for name in self._bounds}
        self._apply()

    def freeze(self, frozen: bool) -> None:
        """Put the start-up values in force for the duration of a freeze."""
        self._frozen = frozen
        self._apply()

    def restore(self) -> None:
        """Put the start-up values in force, and forget all others."""
        self._wanted, self._frozen = {}, False
        self._apply()

    def _apply(self) -> None:
        changed = [] if self._frozen else [n for n, limit in self._bounds.items() if self._value(n) != limit.startup]
        self._cutting = [self._bounds[name] for name in changed if name in CUTTING]
        # A name is noted before its limit is written, so that a fault in between leaves nothing behind.
        self._touched.update(changed)
        for name, limit in self._bounds.items():
            if name in self._touched:
                setattr(limit.owner, limit.attribute, self._value(name) if name in changed else limit.startup)

    def _value(self, name: str) -> int:
        return self._wanted.get(name, self._bounds[name].startup)

    def uncut(self, scheduler: Scheduler) -> list[tuple[Any, str, int]]:
        """Return the limits that must have their start-up values in the coming step, as (object, attribute, value),
        because prompts may not be cut into other pieces than vLLM's own."""
        if not self._cutting or scheduler_api.may_cut_prompts(scheduler):
            return []
        return [(limit.owner, limit.attribute, limit.startup) for limit in self._cutting]


def limits_of(scheduler: Scheduler, lacks: Callable[[str], str]) -> SchedulerLimits:
    """Return the limits of an engine that has just started. lacks: returns what this vLLM lacks for changing a limit,
    by its name; empty if nothing is missing."""
    config, slots, row = scheduler.scheduler_config, scheduler.max_num_running_reqs, 1 + scheduler.num_spec_tokens
    tokens, threshold = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
    running = scheduler_api.admission_limit_name(scheduler)
    piece = max(scheduler.block_size, row)
    bounds = {
        "max_num_active_seqs": Bounds(scheduler, running, getattr(scheduler, running), 1, slots),
        # vLLM itself starts only with room for one token of each running request.
        "max_num_scheduled_tokens": Bounds(
            scheduler, "max_num_scheduled_tokens", tokens, min(slots * row, tokens), tokens
        ),
        "long_prefill_token_threshold": Bounds(
            config, "long_prefill_token_threshold", threshold, piece, max(piece, scheduler.max_model_len)
        ),
    }
    refusals = {name: lacks(name) or _refusal(scheduler, name) for name in bounds}
    return SchedulerLimits({name: replace(limit, refusal=refusals[name]) for name, limit in bounds.items()})


def _refusal(scheduler: Scheduler, name: str) -> str:
    """Return why a limit cannot change on an engine with this configuration; empty if it can."""
    if name not in CUTTING:
        return ""
    if reason := scheduler_api.uncuttable(scheduler):
        return reason
    if name == "max_num_scheduled_tokens" and getattr(scheduler, "need_mamba_block_aligned_split", False):
        return "vLLM cuts the prompts of this model at KV blocks only, so they might find no room in a step"
    return ""
