"""The parts that all sections of a policy share: the base class, the lease field, the globs over requests, the
kinds of numbers, and the function that makes a field.

The module knows no field of its own. Its values are immutable, so any thread may use them.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError, PydanticUndefined

INT32_MAX = 2**31 - 1
MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000


def field(default: Any = PydanticUndefined, *, advice: str, range: str = "", new: bool = False, **more: Any) -> Any:
    """Return a field of a section, with the texts that the policy reference prints about the field.

    advice: when to change the field. range: the field's values in words, if its limits do not name
    them. new: one of the two previous versions does not know the field. more: description and limits, which pydantic's
    Field takes.
    """
    extra: dict[str, JsonValue] = {"advice": advice, "new": new, **({"range": range} if range else {})}
    return Field(default, json_schema_extra=extra, **more)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _lease(value: int) -> int:
    if 0 < value < MIN_LEASE_MS or not 0 <= value <= MAX_LEASE_MS:
        raise PydanticCustomError(
            "lease", "must be 0 or in [{low}, {high}]", {"low": MIN_LEASE_MS, "high": MAX_LEASE_MS}
        )
    return value


SectionLease = Annotated[
    int,
    AfterValidator(_lease),
    field(
        description="Milliseconds for which this section's decisions, its caps included, stay in force without an "
        "answer from the control plane, so that an experiment ends with the control plane; 0 means that only "
        "fallback.lease_ms counts.",
        advice="Set it for an experiment that must end with the control plane.",
        range="0, or 100 to 86,400,000",
    ),
]
# Numbers by their limits.
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Amount = Annotated[float, Field(ge=0)]
Glob = Annotated[str, Field(max_length=256)]
# The globs by which a part of a policy selects requests.
ModelGlob = Annotated[Glob, Field(description="Glob over the model or LoRA adapter name; empty matches all.")]
TenantGlob = Annotated[Glob, Field(description="Glob over the request's tenant; empty matches all.")]
SloClassGlob = Annotated[Glob, Field(description="Glob over the request's SLO class; empty matches all.")]
EffortGlob = Annotated[Glob, Field(description="Glob over the request's effort; empty matches all.")]
