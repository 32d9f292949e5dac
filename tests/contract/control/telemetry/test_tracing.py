"""Requests as OpenTelemetry traces, received by a collector's own gRPC service."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from meridian.v1 import agent_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK
from meridian_control.engine.token_rows import FLAG_END, FLAG_MARKER
from meridian_control.journal.log import DecisionLog
from meridian_control.telemetry import request_traces
from meridian_control.telemetry.request_traces import Tracing, phases
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import CALIBRATED, EARLY, Stream, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from meridian_control.journal.records import Life

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flag}" for flag in ("01", "00"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps every span that it receives."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            assert {"service.name", "service.version"} <= {a.key for a in resource.resource.attributes}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.stop(None)


def traced(collector: Collector, ratio: float = 1.0, patience_s: float = 120.0) -> tuple[Stream, Tracing]:
    """Return a stream whose requests are ended by EAT, and the tracing that receives the requests' lives.

    patience_s: the limit of an export, which a busy machine must not exceed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_traces, "EXPORT_TIMEOUT_S", patience_s)
        tracing = Tracing(f"127.0.0.1:{collector.port}", ratio)
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED), log=DecisionLog(ended=tracing.queue_spans))
    return made, tracing


def attributes(of: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in of.attributes}


def test_a_request_is_a_span_with_its_phases_and_its_forced_end(collector: Collector) -> None:
    made, tracing = traced(collector)
    made.open("a", answer=3, tenant="acme", effort="low")
    made.step(6)
    made.agent.preempt("a")
    made.step(2)
    made.agent.preempt("a", waits=False)
    made.step(30)
    tracing.stop()
    by_name = {span.name: span for span in collector.spans}
    assert sorted(span.name for span in collector.spans) == ["meridian.output", "meridian.request", "meridian.think"]
    whole, think, output = (by_name[f"meridian.{name}"] for name in ("request", "think", "output"))
    assert not whole.parent_span_id
    assert think.parent_span_id == output.parent_span_id == whole.span_id
    assert whole.start_time_unix_nano == think.start_time_unix_nano < think.end_time_unix_nano
    assert think.end_time_unix_nano == output.start_time_unix_nano < output.end_time_unix_nano
    assert output.end_time_unix_nano == whole.end_time_unix_nano
    told = attributes(whole)
    assert (told["gen_ai.response.id"], told["meridian.tenant"], told["meridian.engine_id"]) == ("a", "acme", "engine")
    assert told["gen_ai.usage.reasoning.output_tokens"] == attributes(think)["meridian.tokens"] > 0
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.reasoning.output_tokens"] + 3
    assert told["gen_ai.request.reasoning.level"] == "low"
    assert attributes(output)["meridian.tokens"] == 3
    names = [event.name for event in whole.events]
    assert names == ["meridian.preempted", "meridian.resumed", "meridian.force", "meridian.think_end"]
    force = attributes(whole.events[2])
    assert (force["meridian.reason"], force["meridian.outcome"], force["meridian.shadow"]) == ("eat", "applied", False)
    assert whole.start_time_unix_nano < whole.events[2].time_unix_nano <= think.end_time_unix_nano


def test_an_end_that_an_operator_asked_for(collector: Collector) -> None:
    made, tracing = traced(collector)
    made.open("a", answer=3)
    made.step(3)
    made.end("a", "a customer waits")
    made.step(30)
    tracing.stop()
    (whole,) = [span for span in collector.spans if span.name == "meridian.request"]
    force, end = whole.events
    told = attributes(force)
    assert (force.name, end.name) == ("meridian.force", "meridian.think_end")
    assert (told["meridian.reason"], told["meridian.operator_reason"]) == ("operator", "a customer waits")
    assert attributes(end)["meridian.reason"] == "operator"


def test_tokens_that_came_with_a_change_of_phase_belong_to_the_new_phase() -> None:
    """After an end of thinking, a report of merged steps may go on with answer tokens, and so may a single step with
    draft tokens."""
    lives: list[Life] = []
    made = stream(log=DecisionLog(ended=lives.append))
    made.say(opened=[{"slot": 0, "request_id": "a", "phase": PROMPT}])
    made.say(3, tokens=tokens([(0, THINK, FLAG_MARKER, 0.0)] + [(0, THINK, 0, 0.0)] * 2))
    end = (0, THINK, FLAG_MARKER | FLAG_END, 0.0)
    made.say(4, tokens=tokens([(0, THINK, 0, 0.0), end, (0, OUTPUT, 0, 0.0), (0, OUTPUT, 0, 0.0)]))
    made.say(tokens=tokens([(0, OUTPUT, 0, 0.0)]), closed=[{"slot": 0, "reason": agent_pb2.FINISH_REASON_STOP}])
    (life,) = lives
    assert [(name, count) for name, _, _, count in phases(life)] == [("prompt", None), ("think", 3), ("output", 3)]


def test_a_request_that_is_traced_already_joins_that_trace(collector: Collector) -> None:
    """A request joins its own trace if that trace is sampled, whatever the ratio is, and has no spans if its trace is
    not sampled."""
    made, tracing = traced(collector, ratio=0.0)
    made.open("in", answer=1, traceparent=SAMPLED)
    made.open("out", answer=1, traceparent=UNSAMPLED)
    made.open("neither", answer=1)
    made.open("nonsense", answer=1, traceparent="no such thing")
    made.step(60)
    tracing.stop()
    (whole,) = [span for span in collector.spans if span.name == "meridian.request"]
    assert attributes(whole)["gen_ai.response.id"] == "in"
    assert "gen_ai.request.reasoning.level" not in attributes(whole), "the client named no effort"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}


def test_a_collector_that_is_gone_costs_nothing(collector: Collector) -> None:
    made, tracing = traced(collector, patience_s=2.0)
    collector.server.stop(None).wait()
    made.open("a", answer=3)
    made.step(60)
    assert not list(made.session.table.requests())
    assert made.balanced()
    tracing.stop()
