"""Prometheus metrics, collected from the fleet's own counters when they are scraped.

The scrape runs on a thread of prometheus-client's; the counters are read on the event loop that owns them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from meridian_control.fleet import Fleet

SCRAPE_TIMEOUT_S = 5.0


class FleetCollector(Collector):
    """Label sets are bounded by engines, kinds, reasons and outcomes. `loop` is the fleet's."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet, self._loop = fleet, loop

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known only once read."""
        return ()

    async def _read(self) -> list[Metric]:
        return [*self._counters(), *self._gauges()]

    def _counters(self) -> Iterable[Metric]:
        totals = self._fleet.totals()
        simple = (
            ("meridian_reports", "Step reports received.", totals.reports),
            ("meridian_token_events", "Token rows received.", totals.token_events),
            ("meridian_requests", "Requests opened on engines.", totals.requests),
            ("meridian_policy_nacks", "Policies refused by engines.", totals.nacks),
            ("meridian_unknown_outcomes", "Outcomes of decisions that were never made.", totals.unknown_outcomes),
        )
        for name, text, value in simple:
            yield CounterMetricFamily(name, text, value=value)
        labelled = (
            ("meridian_decisions", "Decisions made, by kind; forces as force/<reason>.", "kind", totals.decisions),
            ("meridian_outcomes", "Outcomes of decisions.", "outcome", totals.outcomes),
            ("meridian_think_ends", "Ends of thinking, by reason.", "reason", totals.ends),
            ("meridian_answers", "What came after an end of thinking, by how it ended.", "kind", totals.answers),
            ("meridian_stream_ends", "Agent streams ended, by reason.", "reason", self._fleet.stream_ends),
        )
        for name, text, label, values in labelled:
            family = CounterMetricFamily(name, text, labels=[label])
            for key, value in sorted(values.items()):
                family.add_metric([key], value)
            yield family

    def _gauges(self) -> Iterable[Metric]:
        engines = [c.session.engine(connected=True) for c in self._fleet.connections]
        yield GaugeMetricFamily("meridian_engines", "Engines connected.", value=len(engines))
        yield self._states()
        per_engine = (
            ("meridian_engine_revision", "Policy revision applied.", lambda e: e.acked_revision),
            ("meridian_engine_thinking_requests", "Running requests in the thinking phase.", lambda e: e.thinking),
            ("meridian_engine_answering_requests", "Running requests in the answer phase.", lambda e: e.answering),
            ("meridian_engine_waiting_requests", "Requests waiting.", lambda e: e.waiting),
            ("meridian_engine_kv_used_ratio", "KV cache in use.", lambda e: e.kv_used),
            ("meridian_engine_open_decisions", "Decisions whose outcome is to come.", lambda e: e.open_decisions),
            ("meridian_engine_frozen", "1 when a freeze has put it back to stock vLLM.", lambda e: e.freeze.confirmed),
            ("meridian_engine_faulted", "1 when an agent fault switched the agent off.", lambda e: bool(e.fault)),
        )
        for name, text, value in per_engine:
            family = GaugeMetricFamily(name, text, labels=["engine", "incarnation"])
            for engine in engines:
                family.add_metric([engine.engine_id, engine.incarnation], float(value(engine)))
            yield family
        yield from self._agents()

    def _states(self) -> Metric:
        """Of engines that went away, too: as they are if they live."""
        states = [engine.agent_state for engine in self._fleet.engines()]
        family = GaugeMetricFamily("meridian_agents", "Agents by state, of lost engines too.", labels=["state"])
        for name, value in agent_pb2.AgentState.items():
            if value:
                family.add_metric([name.removeprefix("AGENT_STATE_").lower()], states.count(value))
        return family

    def _agents(self) -> Iterable[Metric]:
        """The agents' own counters; nothing extra runs in their pods."""
        texts = {
            "preempted_think": "Thinking requests preempted.",
            "output_critical": "Answering requests preempted; the target is zero.",
            "blocks_reclaimed": "KV blocks reclaimed first.",
            "think_skips": "Steps a thinking sequence was left out of.",
            "reports_dropped": "Step reports dropped because the link was slow.",
            "probe_tokens": "Tokens computed for EAT probes.",
            "agent_seconds": "Seconds the agent spent in the engine-core thread.",
            "scheduler_seconds": "Seconds stock schedule and update_from_output took.",
        }
        for name, text in texts.items():
            family = CounterMetricFamily(f"meridian_agent_{name}", text, labels=["engine", "incarnation"])
            for connection in self._fleet.connections:
                hello, report = connection.session.hello, connection.session.last_report
                value = getattr(report.counters, name) if report is not None else 0
                family.add_metric([hello.engine_id, hello.incarnation], value)
            yield family
