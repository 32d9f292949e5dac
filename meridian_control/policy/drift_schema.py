"""The policy's descriptions of the distributions of its signals on the requests of the calibration.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from meridian_control.policy.section import Amount, Count, Section, field

MAX_BINS = 16
# Signals whose distribution a policy may describe, each in the field `<signal>_reference`; all but EAT are read at
# sentence ends.
SIGNALS = ("eat", "rank", "rpdi")


class EatBin(Section):
    """Requests of a calibration whose first EAT sample that a rule could read lies in one bin."""

    max_nats: Amount = field(
        0.0,
        description="Largest sample of the bin, above the previous bin's; to the last bin belong all larger ones, too.",
        advice="Leave it as `meridianctl calibrate` writes it.",
    )
    requests: Count = field(
        0,
        description="Requests of the calibration whose value lies in the bin.",
        advice="Leave it as `meridianctl calibrate` writes it.",
    )

    @property
    def max_value(self) -> float:
        return self.max_nats


class SignalBin(Section):
    """Requests of a calibration whose value at the first sentence end at which a rule may end thinking lies in one
    bin."""

    max_value: Amount = field(
        0.0,
        description="Largest value of the bin, above the previous bin's; to the last bin belong all larger ones, too.",
        advice="Leave it as `meridianctl calibrate` writes it.",
    )
    requests: Count = field(
        0,
        description="Requests of the calibration whose value lies in the bin.",
        advice="Leave it as `meridianctl calibrate` writes it.",
    )


Bins: TypeAlias = tuple[EatBin, ...] | tuple[SignalBin, ...]


def _ascending(bins: Bins) -> Bins:
    edges = [reference_bin.max_value for reference_bin in bins]
    if sorted(set(edges)) != edges:
        name = "max_nats" if isinstance(bins[0], EatBin) else "max_value"
        raise PydanticCustomError("ascending", "must have {name} in ascending order", {"name": name})
    if bins and not any(reference_bin.requests for reference_bin in bins):
        raise PydanticCustomError("no_requests", "must have requests in some bin")
    return bins


EatReference = Annotated[
    tuple[EatBin, ...],
    field(
        strict=False,
        max_length=MAX_BINS,
        description="Distribution of EAT on the requests of the calibration: of each request, the first sample that a "
        "rule could read. If live requests leave it, the control plane puts the section into shadow; empty switches "
        "this off.",
        advice="Remove it if you change the floor or the placement of probes by hand.",
        new=True,
    ),
    AfterValidator(_ascending),
]
SignalReference = Annotated[tuple[SignalBin, ...], AfterValidator(_ascending)]


def signal_reference(signal: str) -> Any:
    """Return the field of a signal that rules read at sentence ends. signal: its name in a sentence."""
    return field(
        (),
        strict=False,
        max_length=MAX_BINS,
        description=f"As eat_reference, of {signal} at the first sentence end from the floor on.",
        advice="Remove it if you change the floor by hand.",
        new=True,
    )


def bin_of(bins: Sequence[EatBin | SignalBin], value: float) -> int:
    """Return the index of the bin in which a value lies. bins: at least one."""
    return next((index for index, reference_bin in enumerate(bins) if value <= reference_bin.max_value), len(bins) - 1)
