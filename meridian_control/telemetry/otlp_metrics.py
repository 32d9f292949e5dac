"""Sends the metrics of `/metrics` to an OpenTelemetry collector too, under the same names.

A thread collects from the same registry that a scrape reads, so both have the same values. Counters and histograms are
cumulative since the replica's start. A collector that does not answer loses points in time, but no counts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from meridian_control import __version__
from meridian_control.common.channels import NO_PROXY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

logger = logging.getLogger(__name__)

# Timeout in seconds of an export, so an unreachable collector delays the control plane's exit by at most this long.
EXPORT_TIMEOUT_S = 2
CUMULATIVE = otlp.AggregationTemporality.CUMULATIVE


class MetricsExport:
    """Sends a registry's metrics to an OTLP endpoint over gRPC every `interval_s` seconds, and once more at the end.

    `endpoint` is host:port or a URL; http:// and an address without a scheme mean no TLS. The host's name tells
    replicas apart, unless OTEL_RESOURCE_ATTRIBUTES has another service.instance.id.
    """

    def __init__(self, endpoint: str, interval_s: float, registry: CollectorRegistry) -> None:
        secure = endpoint.startswith("https://")
        self._exporter = OTLPMetricExporter(
            endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_S, channel_options=(NO_PROXY,)
        )
        named = Resource.create({"service.name": "meridian-control", "service.version": __version__})
        self._resource = Resource({"service.instance.id": socket.gethostname()}).merge(named)
        self._registry, self._interval_s = registry, interval_s
        # The time of day may be set back, and counts must not end before they began.
        self._began_ns, self._monotonic_ns = time.time_ns(), time.monotonic_ns()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            points = metrics(
                self._registry.collect(), self._began_ns, self._began_ns + time.monotonic_ns() - self._monotonic_ns
            )
            scope = otlp.ScopeMetrics(InstrumentationScope("meridian_control", __version__), points, "")
            self._exporter.export(otlp.MetricsData([otlp.ResourceMetrics(self._resource, [scope], "")]))
        except Exception:
            logger.exception("the metrics could not be sent to the OpenTelemetry collector")

    async def stop(self) -> None:
        """Send the metrics once more and end the thread. The event loop goes on meanwhile, because it is asked for the
        fleet's values."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        self._exporter.shutdown()


def metrics(families: Iterable[Metric], began_ns: int, now_ns: int) -> list[otlp.Metric]:
    """Return Prometheus metric families as OTLP metrics; a family without samples is left out.

    began_ns, now_ns: beginning and end of the counts, in nanoseconds since 1970.
    """
    found = []
    for family in families:
        data: otlp.Gauge | otlp.Sum | otlp.Histogram
        if family.type == "histogram":
            data = otlp.Histogram(_histograms(family.samples, began_ns, now_ns), CUMULATIVE)
        elif family.type == "counter":
            samples = [sample for sample in family.samples if sample.name.endswith("_total")]
            data = otlp.Sum(_numbers(samples, began_ns, now_ns), CUMULATIVE, True)
        else:
            data = otlp.Gauge(_numbers(family.samples, began_ns, now_ns))
        if data.data_points:
            found.append(otlp.Metric(family.name, family.documentation, "", data))
    return found


def _numbers(samples: Iterable[Sample], began_ns: int, now_ns: int) -> list[otlp.NumberDataPoint]:
    return [otlp.NumberDataPoint(dict(sample.labels), began_ns, now_ns, float(sample.value)) for sample in samples]


def _histograms(samples: Iterable[Sample], began_ns: int, now_ns: int) -> list[otlp.HistogramDataPoint]:
    """Return a point for each set of labels. Prometheus adds up the buckets; OTLP does not."""
    by_labels: dict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    for sample in samples:
        if sample.name.endswith("_created"):
            continue
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        kind = sample.labels.get("le") or sample.name.rpartition("_")[2]
        by_labels[tuple(sorted(labels.items()))][kind] = sample.value
    points = []
    for key, values in by_labels.items():
        total = values.pop("sum", 0.0)
        count = int(values.pop("count", values["+Inf"]))
        bounds = sorted(float(le) for le in values if le != "+Inf")
        reached = [int(values[le]) for le in sorted(values, key=float)]
        counts = [upper - lower for lower, upper in zip([0, *reached], reached, strict=False)]
        # None, because Prometheus does not keep the smallest and the largest value.
        ends: Any = (None, None)
        points.append(otlp.HistogramDataPoint(dict(key), began_ns, now_ns, count, total, counts, bounds, *ends))
    return points
