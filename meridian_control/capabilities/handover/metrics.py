"""The metric of handovers: its entry in the catalogue, and its values. The function is pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.handover.results import RESULTS
from meridian_control.common.metric_entry import counter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meridian_control.fleet.part import Metric

ENTRIES = (
    counter(
        "meridian_handovers_total",
        ("result",),
        "Requests that were to be handed over, by result: handed_over, recomputed, finished_on_thinking_engine or "
        "client_gone.",
        "`recomputed`: the KV blocks cannot be read; look at the answering engines' logs. `client_gone` grows: the "
        "relay does not reach the answering engines.",
    ),
)


def values(results: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the metric with its label and values. results: number of handovers by result."""
    yield (
        "meridian_handovers_total",
        [((key,), count) for key, count in {**dict.fromkeys(RESULTS, 0), **results}.items()],
    )
