"""Exposes the numbers of an engine's phases in vLLM's own Prometheus registry, so that the pod's `/metrics` has them.

vLLM's front end reads the statistics of each step in its PrometheusStatLogger; the module adds to that class. It wraps
the class in every process that has imported it, and only front ends build one. The series have the labels of vLLM's
own, `model_name` and `engine`. Runs on the front end's event loop, between vLLM's own statistics of two steps.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import phase_numbers, required_api
from meridian_agent.vllm_adapter.phase_numbers import FIELD, PHASES, PhaseNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("vllm.meridian")

LABELS = ["model_name", "engine"]
REQUESTS = "meridian_vllm_requests"
KV_TOKENS = "meridian_vllm_kv_tokens"
THINK_TOKENS = "meridian_vllm_think_tokens"
SAVED_TOKENS = "meridian_vllm_tokens_saved_against_cap"
TTFVT = "meridian_vllm_ttfvt_seconds"
# Upper bounds of the histogram's buckets, in seconds.
BUCKETS = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0]
NAMES = [phase.name.lower() for phase in PHASES]

_METRICS = "_meridian_metrics"


def install() -> None:
    """Add the field to vLLM's statistics, and the metrics to vLLM's own."""
    if lacks := required_api.missing(required_api.Imported(), required_api.METRICS):
        logger.warning("meridian: vLLM lacks %s: its /metrics has no phases", ", ".join(lacks))
        return
    phase_numbers.add_field(importlib.import_module("vllm.v1.metrics.stats").SchedulerStats)
    _wrap(importlib.import_module("vllm.v1.metrics.loggers").PrometheusStatLogger)


def _wrap(stat_logger: Any) -> None:
    begin, record = stat_logger.__init__, stat_logger.record

    @functools.wraps(begin)
    def wrapped_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _guarded(self, lambda: setattr(self, _METRICS, _PhaseMetrics(self)))

    @functools.wraps(record)
    def wrapped_record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        record(self, scheduler_stats, *args, **kwargs)
        metrics = getattr(self, _METRICS, None)
        if metrics is not None and scheduler_stats is not None:
            _guarded(self, lambda: metrics.record(scheduler_stats, kwargs.get("engine_idx", 0)))

    stat_logger.__init__, stat_logger.record = wrapped_begin, wrapped_record


def _guarded(owner: Any, call: Callable[[], None]) -> None:
    """Call a function of this module; after an exception the owner's numbers stay as they are."""
    try:
        call()
    except Exception:
        setattr(owner, _METRICS, None)
        logger.exception("meridian: vLLM's /metrics has no further numbers of phases")


class _PhaseMetrics:
    """The metrics of the engines of one front end. owner: vLLM's own PrometheusStatLogger."""

    def __init__(self, owner: Any) -> None:
        families = _families(owner._gauge_cls, owner._counter_cls, owner._histogram_cls)
        model = owner.vllm_config.model_config.served_model_name
        self._engines = {index: _Engine(families, (model, str(index))) for index in owner.engine_indexes}

    def record(self, stats: Any, index: int) -> None:
        """Take in the statistics of a step of one engine."""
        if (engine := self._engines.get(index)) is None:
            return
        field = getattr(stats, FIELD)
        if field:
            engine.show(PhaseNumbers.decode(field))
        elif field is None:
            # The agent is off, so nobody knows the phases.
            engine.show_unknown(stats.num_running_reqs + stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)


class _Engine:
    """The series of one engine, which begin at 0."""

    def __init__(self, families: Sequence[Any], labels: tuple[str, str]) -> None:
        requests, kv_tokens, think_tokens, saved_tokens, ttfvt = families
        self._requests = [requests.labels(*labels, name) for name in NAMES]
        self._kv_tokens = [kv_tokens.labels(*labels, name) for name in NAMES]
        self._think_tokens, self._saved_tokens = think_tokens.labels(*labels), saved_tokens.labels(*labels)
        self._ttfvt = ttfvt.labels(*labels)

    def show(self, numbers: PhaseNumbers) -> None:
        for series, value in zip(self._requests, numbers.requests, strict=True):
            series.set(value)
        for series, value in zip(self._kv_tokens, numbers.kv_tokens, strict=True):
            series.set(value)
        self._think_tokens.inc(numbers.think_tokens)
        self._saved_tokens.inc(numbers.saved_tokens)
        for seconds in numbers.ttfvt_s:
            self._ttfvt.observe(seconds)

    def show_unknown(self, requests: float) -> None:
        """Count all requests as ones of an unknown phase."""
        nothing = [0.0] * len(PHASES)
        self.show(PhaseNumbers([*nothing[:-1], requests], nothing, 0, 0, []))


@functools.cache
def _families(gauge: Any, counter: Any, histogram: Any) -> tuple[Any, ...]:
    """Return the metrics, once in each process: vLLM may build another logger, but a registry takes each name once."""
    by_phase = {"labelnames": [*LABELS, "phase"], "multiprocess_mode": "mostrecent"}
    return (
        gauge(name=REQUESTS, documentation="Live requests by phase, waiting ones included.", **by_phase),
        gauge(
            name=KV_TOKENS,
            documentation="Tokens in the KV cache by the phase of their request; shared tokens count for each request.",
            **by_phase,
        ),
        counter(name=THINK_TOKENS, documentation="Thinking tokens that were generated.", labelnames=LABELS),
        counter(
            name=SAVED_TOKENS,
            documentation="Thinking tokens between a rule's end and the request's cap: an upper bound of the saving.",
            labelnames=LABELS,
        ),
        histogram(
            name=TTFVT,
            documentation="Seconds from a request's arrival to its first answer token.",
            labelnames=LABELS,
            buckets=BUCKETS,
        ),
    )
