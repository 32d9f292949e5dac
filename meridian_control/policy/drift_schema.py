"""The policy's description of the EAT distribution that its rule was calibrated on.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from meridian_control.policy.section import INT32_MAX, Section, advice

MAX_BINS = 16


class EatBin(Section):
    """Requests of a calibration whose first EAT sample that a rule could read lies in one bin."""

    max_nats: float = Field(
        0.0,
        ge=0,
        description="Largest sample of the bin; above the previous bin's. Larger samples than the last bin's belong to "
        "the last bin.",
        json_schema_extra=advice("Leave it as `meridianctl calibrate` writes it."),
    )
    requests: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Requests of the calibration whose sample lies in the bin.",
        json_schema_extra=advice("Leave it as `meridianctl calibrate` writes it."),
    )


def _ascending(bins: tuple[EatBin, ...]) -> tuple[EatBin, ...]:
    edges = [each.max_nats for each in bins]
    if sorted(set(edges)) != edges:
        raise PydanticCustomError("ascending", "must have max_nats in ascending order")
    if bins and not any(each.requests for each in bins):
        raise PydanticCustomError("no_requests", "must have requests in some bin")
    return bins


EatReference = Annotated[
    tuple[EatBin, ...],
    Field(
        strict=False,
        max_length=MAX_BINS,
        description="Distribution of EAT on the requests of the calibration: of each request, the first sample that a "
        "rule could read. If live requests leave it, the control plane puts the section into shadow; empty switches "
        "this off.",
        json_schema_extra=advice("Remove it if you change the floor or the placement of probes by hand."),
    ),
    AfterValidator(_ascending),
]


def bin_of(bins: tuple[EatBin, ...], eat_nats: float) -> int:
    """Return the index of the bin in which a sample lies. bins: at least one."""
    return next((index for index, each in enumerate(bins) if eat_nats <= each.max_nats), len(bins) - 1)
