"""Holds what an engine can do: the facts that its agent finds out at the start, what its workers say that they measure,
and the capabilities that its Hello reports. Reads the scheduler only; changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.guard import cause_name
from meridian_agent.core.hand_overs import NO_CONNECTOR
from meridian_agent.core.step_signals import BACKEND, OF_THE_START, RESULT

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_agent.core.sentences import SentenceTable
    from meridian_agent.core.step_signals import Weights
    from meridian_agent.engine.later_turns import LaterTurns
    from meridian_agent.vllm_adapter.hand_over import HandOverPort
    from meridian_agent.vllm_adapter.scheduler_limits import SchedulerLimits
    from meridian_agent.vllm_types import ModelRunnerOutput, Scheduler

logger = logging.getLogger("vllm.meridian")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of one engine.

    sentences: finds the ends of sentences. shares_blocks: probes may begin on a block that is partly
    filled. later_turns: knows whether later turns repeat a request's thinking. on_fault: takes the cause and the text
    of a fault outside of the hooks. expected_backend: the expected entropy backend of the workers, and why it is not
    the CUDA kernel. limits: the limits of vLLM's scheduler that the policy may change. no_probes: why the agent refuses
    probes; empty if it accepts them. no_probe_rows: why no probe can be a row of its request; empty if that can be.
    hand_over: stops requests at the end of their thinking; None if the engine cannot hand requests over, for the reason
    `no_hand_over`. no_answer_handed_over: why the engine cannot read the KV of requests that other engines hand over;
    empty if it can. no_preempt: why the engine preempts nothing for waiting requests; empty if it can.
    no_premature_stops: why a request that stops while it thinks ends there; empty if it goes on. by_gateway: only a
    gateway may name the tenant and the SLO class of a request.
    """

    model: str
    sentences: SentenceTable
    shares_blocks: bool
    later_turns: LaterTurns
    on_fault: Callable[[str, str], None]
    expected_backend: tuple[str, str]
    limits: SchedulerLimits
    no_probes: str = ""
    no_probe_rows: str = "not looked for"
    hand_over: HandOverPort | None = None
    no_hand_over: str = NO_CONNECTOR
    no_answer_handed_over: str = NO_CONNECTOR
    no_preempt: str = "not looked for"
    no_premature_stops: str = ""
    by_gateway: bool = False


class Measuring:
    """Knows what the workers of one engine measure. expected: the expected backend. restart: begins a stream with a new
    Hello."""

    def __init__(
        self, expected: tuple[str, str], on_fault: Callable[[str, str], None], restart: Callable[[], None]
    ) -> None:
        self._on_fault, self._restart = on_fault, restart
        # The worker's reason for measuring nothing; empty while it measures.
        self.no_entropy = ""
        # The worker's entropy backend, at first the expected one, and why it is not the CUDA kernel.
        self.backend = expected
        # Whether the worker can compute a probe as a row of its request.
        self.probe_rows = False
        self.weights: Weights = OF_THE_START

    def hear(self, runner_output: ModelRunnerOutput) -> Any:
        """Return the signals of a step's rows, None if there are none, and take in what else the worker says.
        runner_output: vLLM's ModelRunnerOutput."""
        signals = getattr(runner_output, RESULT, None)
        if isinstance(signals, str):
            self._hear_reason(signals)
            signals = None
        if (backend := getattr(runner_output, BACKEND, None)) is not None:
            self._hear_backend(backend)
        return signals

    def _hear_reason(self, reason: str) -> None:
        """Note why the worker cannot measure, empty if it can; if that has changed, begin a stream with a new Hello."""
        if bool(reason) == bool(self.no_entropy):
            return
        self.no_entropy = reason
        if reason:
            logger.warning("meridian: this engine measures no entropy: %s", reason)
            self._on_fault(cause_name(agent_pb2.FAULT_CAUSE_OBSERVER), reason)
        else:
            logger.info("meridian: this engine measures entropy again")
        self._restart()

    def _hear_backend(self, named: tuple[str, str, bool, Weights]) -> None:
        """Note the worker's entropy backend and weights; if the last Hello named others, begin a stream with a new
        Hello."""
        backend, why, self.probe_rows, weights = named
        (known, _), known_weights = self.backend, self.weights
        self.backend, self.weights = (backend, why), weights
        if backend != known:
            logger.warning("meridian: entropy is measured with %s, not with %s: %s", backend, known, why)
        if weights != known_weights:
            logger.info("meridian: the model's weights were replaced by those of %s", weights[1] or "another source")
        if (backend, weights) != (known, known_weights):
            self._restart()


def capabilities(scheduler: Scheduler, entropy: bool, facts: EngineFacts) -> agent_pb2.Capabilities:
    """Return the capabilities of this engine. entropy: whether the worker measures entropy."""
    caching = bool(scheduler.kv_cache_manager.enable_caching)
    one_group = len(scheduler.kv_cache_config.kv_cache_groups) == 1
    return agent_pb2.Capabilities(
        token_entropy=entropy,
        force_end=True,
        eat_probe=entropy and caching and not facts.no_probes,
        dispatch=True,
        reclaim=caching and one_group,
        template_strips_think=facts.later_turns.has_template,
        hand_over=not facts.no_hand_over,
        answer_handed_over=not facts.no_answer_handed_over,
        queueing_time=True,
        preempt=not facts.no_preempt,
    )
