"""Metrics as OpenTelemetry metrics, received by a collector's own gRPC service, beside a scrape of the same values."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.sdk.metrics.export import AggregationTemporality
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from meridian_control.telemetry.catalogue import CATALOGUE
from meridian_control.telemetry.otlp_metrics import metrics
from tests.contract.control.app.test_server import Process
from tests.contract.control.telemetry.test_metrics import scraped, value
from tests.fakes.linked import LinkedEngine, until
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """A collector that keeps the newest metrics by name, and the attributes of their resource."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.resource: dict[str, str] = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        (told,) = request.resource_metrics
        self.resource = {a.key: a.value.string_value for a in told.resource.attributes}
        self.metrics = {metric.name: metric for scope in told.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def value(self, name: str, **attributes: str) -> float:
        """Return the sum of the metric's points with these attributes."""
        if (metric := self.metrics.get(name)) is None:
            return 0.0
        points = getattr(metric, metric.WhichOneof("data")).data_points
        said = [({a.key: a.value.string_value for a in point.attributes}, point.as_double) for point in points]
        return float(sum(value for labels, value in said if attributes.items() <= labels.items()))


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.stop(None)


async def test_the_collector_gets_what_a_scrape_gets(collector: Collector, tmp_path: Path) -> None:
    """While the replica runs, and once more when it ends, so that no count is lost."""
    own = Process(tmp_path, "--otlp-metrics-endpoint", f"127.0.0.1:{collector.port}", "--otlp-metrics-interval", "0.05")
    own.module = "tests.patient"
    name = "meridian_tenant_think_tokens"
    try:
        await own.started()
        with LinkedEngine([own.target], "measured") as engine:
            engine.open("a", tenant="acme")
            await engine.steps_until(lambda: collector.value(name, tenant="acme", model="model") > 5)
            of = {name.removesuffix("_total") for name, family in scraped(own).items() if family.samples}
            await until(lambda: of <= collector.metrics.keys())
            assert collector.value("meridian_engines") == 1
            assert collector.metrics["meridian_engines"].description == CATALOGUE["meridian_engines"].text
        await until(lambda: value(own, "meridian_engines") == 0)
        last = value(own, f"{name}_total")
        assert await own.terminate() == 0
    finally:
        own.kill()
    assert collector.value(name) == last > 5
    assert collector.resource["service.name"] == "meridian-control"
    assert collector.resource["service.instance.id"]
    assert "Traceback" not in own.log()


async def test_a_collector_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    own = Process(tmp_path, "--otlp-metrics-endpoint", gone, "--otlp-metrics-interval", "0.05")
    try:
        await own.started()
        with LinkedEngine([own.target]) as engine:
            engine.open("a")
            await engine.steps_until(lambda: value(own, "meridian_tenant_think_tokens_total") > 5)
        assert await own.terminate() == 0
    finally:
        own.kill()
    assert "Traceback" not in own.log()


@pytest.mark.parametrize("interval", ["0", "nan", "inf"])
def test_an_interval_of_nothing_is_refused(tmp_path: Path, interval: str) -> None:
    own = Process(tmp_path, "--otlp-metrics-endpoint", "127.0.0.1:1", "--otlp-metrics-interval", interval)
    own.start()
    assert own.popen is not None
    assert own.popen.wait(60) == 2
    assert f"--otlp-metrics-interval must be a number of seconds above 0; got {float(interval)}" in own.log()


def test_points() -> None:
    registry = CollectorRegistry()
    Counter("c", "Counts.", ["a"], registry=registry).labels("x").inc(3)
    Gauge("g", "Shows.", registry=registry).set(-1.5)
    Gauge("empty", "Has no sample.", ["a"], registry=registry)
    histogram = Histogram("h", "Spreads.", ["a"], buckets=[0.5, 2.0, 10.0], registry=registry)
    for amount in (0.1, 1.0, 1.5, 99.0):
        histogram.labels("x").observe(amount)
    histogram.labels("y")
    found: dict[str, Any] = {metric.name: metric for metric in metrics(registry.collect(), 5, 9)}
    assert sorted(found) == ["c", "g", "h"]
    (count,) = found["c"].data.data_points
    assert (count.attributes, count.value, count.start_time_unix_nano, count.time_unix_nano) == ({"a": "x"}, 3, 5, 9)
    assert found["c"].data.is_monotonic
    assert found["c"].data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    assert [(point.attributes, point.value) for point in found["g"].data.data_points] == [({}, -1.5)]
    one, none = found["h"].data.data_points
    assert (one.attributes, one.count, one.sum) == ({"a": "x"}, 4, 101.6)
    assert (one.explicit_bounds, one.bucket_counts) == ([0.5, 2.0, 10.0], [1, 2, 0, 1])
    assert (none.attributes, none.count, none.bucket_counts) == ({"a": "y"}, 0, [0, 0, 0, 0])
