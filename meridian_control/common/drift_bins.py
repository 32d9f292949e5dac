"""The bins in which FleetService compares the signals of live requests with the calibration, the same for each signal.

The module owns the signals' names for people. The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian.v1 import fleet_pb2


class Signal(NamedTuple):
    """A signal's name at the beginning of a sentence, the name of one value, and the unit, empty for none."""

    name: str
    value: str
    unit: str


SIGNALS = {
    "eat": Signal("EAT", "first EAT sample", "nats"),
    "rank": Signal("The end marker's rank", "first rank at a sentence end", ""),
    "rpdi": Signal("RPDI", "first RPDI at a sentence end", ""),
}


class Bin(NamedTuple):
    """A bin's largest value, and the number of requests of the calibration and of live requests in it."""

    max_value: float
    calibrated: int
    seen: int


def where(edges: Sequence[float], index: int) -> str:
    """Return in words where the values of a bin lie. edges: the largest value of each bin, ascending; larger values
    belong to the last bin."""
    if len(edges) == 1:
        return "anywhere"
    if index == len(edges) - 1:
        return f"above {edges[index - 1]:g}"
    return f"from {edges[index - 1]:g} to {edges[index]:g}" if index else f"up to {edges[index]:g}"


def drift_bins(savings: fleet_pb2.Savings) -> dict[str, list[Bin]]:
    """Return the bins of each signal that the policy describes, by signal, in ascending order."""
    by_signal = {
        "eat": [Bin(sample_bin.max_nats, sample_bin.calibrated, sample_bin.seen) for sample_bin in savings.eat_samples]
    }
    others = {"rank": savings.rank_samples, "rpdi": savings.rpdi_samples}
    for signal, bins in others.items():
        by_signal[signal] = [Bin(sample_bin.max_value, sample_bin.calibrated, sample_bin.seen) for sample_bin in bins]
    return {signal: bins for signal, bins in by_signal.items() if bins}
