"""Prometheus metrics, collected from the fleet's own counters at each scrape.

Names, labels and texts come from the catalogue. A scrape runs on a thread of prometheus-client; the counters are read
on the event loop that owns the fleet.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from meridian_control import __version__
from meridian_control.common import enum_names
from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK
from meridian_control.fleet.part import answer_of, each
from meridian_control.fleet.turns import in_turns
from meridian_control.fleet.views import engine_limits
from meridian_control.rollout.state import State
from meridian_control.telemetry.catalogue import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from meridian.v1 import agent_pb2
    from prometheus_client.core import Metric

    from meridian_control.common.histogram import Histogram
    from meridian_control.common.metric_entry import Entry
    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.rollout.state import GuardrailReading, Rollout

    Labels: TypeAlias = tuple[str, ...]
    Rows: TypeAlias = Iterable[tuple[Labels, float]]

SCRAPE_TIMEOUT_S = 5.0
# Largest number of engines with series of their own. Metrics over the whole fleet count the other engines too.
MAX_ENGINE_SERIES = 500
STATES = {number: name for number, name in enum_names.STATES.items() if number}
PHASES = {"prompt": PROMPT, "think": THINK, "output": OUTPUT}
# These label values are exposed from 0 on, because Prometheus does not see the first increment of a new series.
ENDS = (
    *("natural", "hard_cap", "answer_reserve", "premature_stop", "eat", "rank", "rpdi", "soft_close"),
    *("give_up", "loop", "operator", "extension"),
)
ANSWERS = tuple(
    f"{kind}_after_{why}" for kind in ("answered", "empty", "long", "reentry") for why in ("natural", "forced")
)
CLIENT_FAULTS = (
    *("invalid_request", "policy_invalid", "unauthenticated", "permission_denied"),
    *("host_only", "too_many", "memory_exceeded", "recording_too_slow"),
)
STREAM_ENDS = (
    *("agent_closed", "disconnected", "going_away", "replaced", "overflow"),
    *("invalid_request", "memory_exceeded", "internal", "permission_denied", "too_many"),
)

# Names of the hooks in which an agent may fail.
FAULT_CAUSES = frozenset(enum_names.FAULT_CAUSE_NAMES.values()) - {"unspecified"}

# Metrics of every connected engine.
ENGINE: dict[str, Callable[[Session], float]] = {
    "meridian_engine_revision": lambda s: s.acked_revision,
    "meridian_engine_wanted_revision": lambda s: s.revision,
    "meridian_engine_refused": lambda s: bool(s.nack_error),
    "meridian_engine_frozen": lambda s: s.frozen,
    "meridian_engine_open_decisions": lambda s: len(s.open_decisions),
}
# Metrics of every engine that has reported. Agents send their counters with their reports, so no exporter runs in the
# engines' pods.
REPORTED: dict[str, Callable[[agent_pb2.StepReport], float]] = {
    "meridian_engine_running_requests": lambda r: r.running,
    "meridian_engine_waiting_requests": lambda r: r.waiting,
    "meridian_engine_kv_used_ratio": lambda r: r.kv_used,
    "meridian_engine_step_seconds": lambda r: r.step_time_ms / 1e3,
    "meridian_agent_preempted_think_total": lambda r: r.counters.preempted_think,
    "meridian_agent_output_critical_total": lambda r: r.counters.output_critical,
    "meridian_agent_think_skips_total": lambda r: r.counters.think_skips,
    "meridian_agent_recomputed_tokens_total": lambda r: r.counters.recomputed_tokens,
    "meridian_agent_reports_dropped_total": lambda r: r.counters.reports_dropped,
    "meridian_agent_probe_tokens_total": lambda r: r.counters.probe_tokens,
    "meridian_agent_scheduler_seconds_total": lambda r: r.counters.scheduler_seconds,
    "meridian_agent_round_trip_seconds": lambda r: r.counters.round_trip_ms / 1e3,
    "meridian_agent_calm_steps_total": lambda r: r.counters.calm_steps,
    "meridian_agent_full_steps_total": lambda r: r.counters.full_steps,
}


class FleetCollector(Collector):
    """Collects the fleet's metrics for Prometheus.

    The number of label sets is bounded by engines, phases, states, kinds, reasons, outcomes, causes, sections,
    guardrails, and what the capabilities bound. `leads` says whether this replica leads; `rollout` is the newest
    rollout as the leading replica knows it; `faults` counts callers' faults by cause; `loop` is the fleet's event loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        leads: Callable[[], bool],
        rollout: Callable[[], Rollout | None],
        faults: Mapping[str, int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._catalogue = catalogue(fleet.capabilities)
        self._fleet, self._leads, self._rollout, self._faults, self._loop = fleet, leads, rollout, faults, loop

    def collect(self) -> Iterable[Metric]:
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            return reading.result(SCRAPE_TIMEOUT_S)
        finally:
            # A read that is late would otherwise go on beside that of the next scrape.
            reading.cancel()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the catalogue already has the names and only `collect` has the values."""
        return ()

    async def _read(self) -> list[Metric]:
        parts = self._fleet.parts.values()
        for part in parts:
            await answer_of(part, part.before_metrics(), None)
        totals = await self._fleet.totals()
        # The newest stream of each engine comes last.
        newest = {session.hello.engine_id: session for session in self._fleet.connections.sessions}
        engines = dict(sorted(newest.items())[:MAX_ENGINE_SERIES])
        states = self._fleet.views.agent_states()
        agents = Counter[int](states.values())
        values: list[tuple[str, Rows]] = [
            ("meridian_build_info", [((__version__,), 1)]),
            ("meridian_replica_leads", [((), self._leads())]),
            ("meridian_policy_revision", [((), self._fleet.revision)]),
            ("meridian_engines", [((), len(newest))]),
            ("meridian_engines_sharing_name", [((), self._fleet.connections.sharing_name())]),
            ("meridian_engine_memory_bytes", [((), self._fleet.memory.bytes)]),
            ("meridian_engines_without_series", [((), len(newest) - len(engines))]),
            *_staged(self._rollout() if self._leads() else None, self._fleet.clock()),
            ("meridian_agents", [((name,), agents[number]) for number, name in STATES.items()]),
            *chain.from_iterable(each(parts, lambda part: self._listed(part.metrics(totals)))),
            *self._counted(totals),
            ("meridian_engine_state", _states(engines, states)),
            *await _of_all(engines),
        ]
        named = {name for name, _ in values}
        own = (
            entry for capability in self._fleet.capabilities for entry in capability.metrics if entry.name not in named
        )
        histograms = [*_histograms(totals), ("meridian_event_loop_delay_seconds", self._fleet.loop_delay.delays)]
        return [
            *[_family(self._catalogue[name], rows) async for name, rows in in_turns(values)],
            *(_counted(entry, totals) for entry in own),
            *(_histogram(self._catalogue[name], histogram) for name, histogram in histograms),
        ]

    def _listed(self, values: Iterable[tuple[str, Rows]]) -> list[tuple[str, Rows]]:
        """Return the values of a capability's metrics. Raises ValueError for a metric that the catalogue lacks."""
        found: list[tuple[str, Rows]] = [(name, list(rows)) for name, rows in values]
        if unknown := [name for name, _ in found if name not in self._catalogue]:
            raise ValueError(f"Capability.metrics lists no {unknown[0]}")
        return found

    def _counted(self, totals: Totals) -> Iterator[tuple[str, Rows]]:
        own_rules = [capability.name for capability in self._fleet.capabilities if capability.section is not None]
        for name, count in (
            ("meridian_reports_total", totals.reports),
            ("meridian_token_events_total", totals.token_events),
            ("meridian_requests_total", totals.requests),
            ("meridian_unknown_efforts_total", totals.unknown_efforts),
            ("meridian_unread_prompts_total", totals.unread_prompts),
            ("meridian_policy_nacks_total", totals.nacks),
            ("meridian_unknown_outcomes_total", totals.unknown_outcomes),
        ):
            yield name, [((), count)]
        for name, expected, counts in (
            ("meridian_think_ends_total", (*ENDS, *own_rules), totals.ends),
            ("meridian_answers_total", ANSWERS, totals.answers),
            ("meridian_stream_ends_total", STREAM_ENDS, self._fleet.stream_ends),
            ("meridian_client_faults_total", CLIENT_FAULTS, self._faults),
            ("meridian_preemptions_total", PHASES, totals.preempted),
            ("meridian_tokens_saved_against_cap_total", (), totals.below_cap),
            ("meridian_shadow_think_tokens_total", (), totals.shadow_think_tokens),
        ):
            yield name, [((key,), count) for key, count in {**dict.fromkeys(expected, 0), **counts}.items()]
        yield "meridian_tokens_saved_shadow_estimate_total", totals.shadow_saved.items()
        yield "meridian_decisions_total", [(_kind(key), count) for key, count in totals.decisions.items()]
        settled = [((*_kind(key), outcome), count) for (key, outcome), count in totals.settled.items()]
        yield "meridian_outcomes_total", settled


def _histograms(totals: Totals) -> list[tuple[str, Histogram]]:
    return [
        ("meridian_ttot_seconds", totals.ttot),
        ("meridian_output_itl_seconds", totals.output_itl),
        ("meridian_queueing_seconds", totals.queueing),
        ("meridian_request_think_tokens", totals.think_tokens),
        ("meridian_decision_staleness_steps", totals.staleness_steps),
    ]


def _states(engines: dict[str, Session], known: dict[str, agent_pb2.AgentState.ValueType]) -> Rows:
    """Return each engine's state, also for engines that went away if the limit of series allows it."""
    gone = [engine for engine in known if engine not in engines][: MAX_ENGINE_SERIES - len(engines)]
    named = [(engine, known[engine]) for engine in (*engines, *gone)]
    return [((engine, name), float(number == state)) for engine, state in named for number, name in STATES.items()]


def _staged(rollout: Rollout | None, now: datetime) -> Iterator[tuple[str, Rows]]:
    """Yield the rollout's metric families, which are empty if there is no rollout. now: by the clock that gives the
    rollout's events their times."""
    rollouts = [] if rollout is None else [rollout]
    yield "meridian_rollout_state", [((state.word,), r.state is state) for r in rollouts for state in State]
    yield "meridian_rollout_age_seconds", [((), (now - r.events[-1].time).total_seconds()) for r in rollouts]
    yield "meridian_rollout_step", [((), r.step) for r in rollouts]
    yield "meridian_rollout_steps", [((), len(r.plan.step)) for r in rollouts]
    engines = (
        [(("candidate",), r.candidate_engines) for r in rollouts],
        [(("other",), r.other_engines) for r in rollouts],
    )
    yield "meridian_rollout_engines", [row for rows in engines for row in rows]
    readings = [reading for r in rollouts for reading in r.guardrails if reading.value is not None]
    yield "meridian_rollout_guardrail_ratio", [((read.guardrail,), of_limit(read)) for read in readings]


def of_limit(reading: GuardrailReading) -> float:
    """Return a guardrail's reading divided by its limit: above 1 if the guardrail is violated."""
    value = reading.value or 0.0
    return value / reading.limit if reading.limit else math.inf if value > 0 else 0.0


async def _of_all(engines: dict[str, Session]) -> Iterable[tuple[str, Rows]]:
    """Return what `_of` yields, and let the event loop do other work in between."""
    values = {name: list(rows) for name, rows in _of({})}
    async for engine, session in in_turns(list(engines.items())):
        for name, rows in _of({engine: session}):
            values[name] += rows
    return values.items()


def _of(engines: dict[str, Session]) -> Iterator[tuple[str, Rows]]:
    hellos = [session.hello for session in engines.values()]
    known = [((h.engine_id, h.model, h.vllm_version, h.agent_version), 1.0) for h in hellos]
    yield "meridian_engine_info", known
    yield "meridian_engine_requests", [row for engine, session in engines.items() for row in _phases(engine, session)]
    for name, value in ENGINE.items():
        yield name, [((engine,), float(value(session))) for engine, session in engines.items()]
    limits = [((e, row.name), row.in_force) for e, s in engines.items() for row in engine_limits(s)]
    yield "meridian_engine_limit", limits
    faults = [((e, cause), n) for e, s in engines.items() for cause, n in _faults(s.hello).items()]
    yield "meridian_agent_faults_total", faults
    reports = {e: s.gauges for e, s in engines.items() if s.gauges is not None}
    for name, of_report in REPORTED.items():
        yield name, [((engine,), of_report(report)) for engine, report in reports.items()]
    tiers = ("unreachable", "blocks_reclaimed"), ("kept_too_long", "blocks_expired")
    reclaimed = [
        ((engine, tier), getattr(report.counters, name)) for engine, report in reports.items() for tier, name in tiers
    ]
    yield "meridian_agent_blocks_reclaimed_total", reclaimed
    spent = [((engine, part), s) for engine, report in reports.items() for part, s in _spent(report.counters).items()]
    yield "meridian_agent_seconds_total", spent


def _spent(counters: agent_pb2.AgentCounters) -> dict[str, float]:
    """Return the agent's seconds, by part. The hooks' are what is left of all; an older agent counts them only."""
    parts = {"worker": counters.worker_seconds, "threads": counters.thread_seconds}
    # Without the rounding errors of the sum, for each of which a counter that stands still would fall.
    return {"hooks": max(0.0, round(counters.agent_seconds - sum(parts.values()), 6)), **parts}


def _phases(engine: str, session: Session) -> Rows:
    table = session.table
    new = (table.think_tokens + table.output_tokens == 0) & ~table.preempted
    states = {"new": new, "generating": ~new & ~table.preempted, "preempted": table.preempted}
    for phase, number in PHASES.items():
        for state, chosen in states.items():
            yield (engine, phase, state), int(np.sum(table.live & (table.phase == number) & chosen))


def _kind(key: str) -> Labels:
    """Return the labels of a decision that is counted under `kind` or `kind/reason`."""
    kind, _, reason = key.partition("/")
    return kind, reason


def _counted(entry: Entry, totals: Totals) -> Metric:
    """Return a counter with which a capability counts in the streams. One without labels is exposed from 0 on."""
    rows = {labels: count for (name, labels), count in totals.counted.items() if name == entry.name}
    return _family(entry, (rows or ({} if entry.labels else {(): 0})).items())


def _family(entry: Entry, rows: Rows) -> Metric:
    kind = CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily
    family = kind(entry.name.removesuffix("_total"), entry.text, labels=entry.labels)
    for labels, value in sorted(rows):
        family.add_metric(labels, value)
    return family


def _faults(hello: agent_pb2.Hello) -> Counter[str]:
    """Count the agent's faults by cause. An unknown cause counts as `other`, so that agents cannot add label values."""
    known: Counter[str] = Counter()
    for cause, count in hello.faults.items():
        known[cause if cause in FAULT_CAUSES else "other"] += count
    return known


def _histogram(entry: Entry, histogram: Histogram) -> Metric:
    bounds = [*map(str, histogram.bounds.tolist()), "+Inf"]
    buckets = list(zip(bounds, np.cumsum(histogram.counts, dtype=float).tolist(), strict=True))
    return HistogramMetricFamily(entry.name, entry.text, buckets=buckets, sum_value=histogram.sum)
