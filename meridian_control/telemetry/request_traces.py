"""Requests as OpenTelemetry traces: a span per request, child spans for its phases, events for the ends of thinking.

The module turns a request's life in the decision log into spans. The SDK samples, queues and exports the spans on its
own thread, and drops spans if the collector is too slow. `telemetry.decision_log_sample_ratio` sets the share of
requests whose lives are logged. Names follow OpenTelemetry's conventions for generative AI if the conventions have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meridian_control import __version__
from meridian_control.common.channels import NO_PROXY
from meridian_control.common.enum_names import outcome_name
from meridian_control.engine.decision_ledger import CARRIED_OUT, ENDING
from meridian_control.journal.records import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from opentelemetry.sdk.trace.export import SpanExporter

    from meridian_control.journal.records import Life

# Timeout in seconds of an export, so an unreachable collector delays the control plane's exit by at most this long.
EXPORT_TIMEOUT_S = 2
PHASES = {agent_pb2.PHASE_PROMPT: "prompt", agent_pb2.PHASE_THINK: "think", agent_pb2.PHASE_OUTPUT: "output"}


class Tracing:
    """Exports finished requests to an OTLP endpoint over gRPC, or to `exporter`.

    `endpoint` is host:port or a URL; http:// and an address without a scheme mean no TLS. `sample_ratio` is the share
    that is traced of the requests without a trace of their own; a request with a sampled trace always joins its trace.
    """

    def __init__(self, endpoint: str, sample_ratio: float, exporter: SpanExporter | None = None) -> None:
        secure = endpoint.startswith("https://")
        resource = Resource.create({"service.name": "meridian-control", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(sample_ratio)))
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter
                or OTLPSpanExporter(
                    endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_S, channel_options=(NO_PROXY,)
                )
            )
        )
        self._tracer = self._provider.get_tracer("meridian_control", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def queue_spans(self, life: Life) -> None:
        """Queue the spans of a finished request for export, without waiting."""
        opened, end = life.opened, life.close_time
        if end is None:
            return
        parent = self._propagator.extract({"traceparent": opened.traceparent}) if opened.traceparent else None
        span = self._tracer.start_span("meridian.request", parent, start_time=_ns(life.open_time))
        if not span.is_recording():
            # Most requests are not sampled, and the SDK would discard their child spans.
            return
        span.set_attributes(dict(_attributes(life)))
        within = trace.set_span_in_context(span)
        for name, begin, until, tokens in phases(life):
            child = self._tracer.start_span(f"meridian.{name}", within, start_time=_ns(begin))
            if tokens is not None:
                child.set_attribute("meridian.tokens", tokens)
            child.end(_ns(until))
        for event in life.events:
            if isinstance(event, Decision):
                if event.kind in ENDING and event.outcome in CARRIED_OUT:
                    span.add_event(
                        f"meridian.{event.kind}", dict(_decided(event)), _ns(event.outcome_time or event.time)
                    )
            elif event.kind != "phase":
                detail: dict[str, str] = {"meridian.reason": event.detail} if event.detail else {}
                span.add_event(f"meridian.{event.kind}", detail, _ns(event.time))
        span.end(_ns(end))

    def stop(self) -> None:
        """Export the queued spans, within the SDK's own time limit."""
        self._provider.shutdown()


def phases(life: Life) -> Iterator[tuple[str, datetime, datetime, int | None]]:
    """Yield each stretch of one phase: its name, begin, end, and generated tokens (None for the prompt phase)."""
    marks = [e for e in life.history() if not isinstance(e, Decision) and e.phase in PHASES]
    for i, mark in enumerate(marks):
        if i and marks[i - 1].phase == mark.phase:
            continue
        after = next((m for m in marks[i + 1 :] if m.phase != mark.phase), None)
        until = after.time if after is not None else life.close_time
        assert until is not None
        tokens = None
        if mark.phase != agent_pb2.PHASE_PROMPT:
            name = "think_tokens" if mark.phase == agent_pb2.PHASE_THINK else "output_tokens"
            # A mark has the counts at the end of its report, which may already contain the stretch's first tokens, so
            # the stretch's tokens are counted from the previous mark.
            before = marks[i - 1] if i else mark
            tokens = max(0, getattr(after if after is not None else life, name) - getattr(before, name))
        yield PHASES[agent_pb2.Phase.ValueType(mark.phase)], mark.time, until, tokens


def _attributes(life: Life) -> Iterator[tuple[str, Any]]:
    opened = life.opened
    yield "gen_ai.request.model", opened.model
    yield "gen_ai.response.id", opened.request_id
    yield "gen_ai.usage.input_tokens", opened.prompt_tokens
    yield "gen_ai.usage.output_tokens", life.think_tokens + life.output_tokens
    yield "gen_ai.usage.reasoning.output_tokens", life.think_tokens
    if opened.effort:
        yield "gen_ai.request.reasoning.level", opened.effort
    yield "meridian.engine_id", life.engine_id
    for name in ("tenant", "slo_class"):
        if value := getattr(opened, name):
            yield f"meridian.{name}", value
    if life.joined_late:
        yield "meridian.joined_late", True


def _decided(decision: Decision) -> Iterator[tuple[str, Any]]:
    yield "meridian.reason", decision.reason
    if decision.operator_reason:
        yield "meridian.operator_reason", decision.operator_reason
    yield "meridian.decision_id", decision.decision_id
    yield "meridian.revision", decision.revision
    yield "meridian.shadow", decision.shadow
    yield "meridian.outcome", outcome_name(decision.outcome)
    yield "meridian.think_tokens", decision.outcome_think_tokens or decision.signals.think_tokens


def _ns(time: datetime) -> int:
    seconds = int(time.timestamp())
    return seconds * 1_000_000_000 + time.microsecond * 1000
