"""A complete policy: its sections, overrides with other values for some requests, budgets, and targets under pressure.

The module knows nothing of engines, storage or gRPC. The module's values are immutable, and the functions may run on
any thread.
"""

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Optional, Self, TypeVar, get_origin

from pydantic import Field, JsonValue, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.disagg_schema import DisaggPolicy
from meridian_control.policy.schema import (
    EnginePolicy,
    EntropyPolicy,
    FallbackPolicy,
    GatewayPolicy,
    KvMemoryPolicy,
    LoopPolicy,
    ModelPolicy,
    PreemptionPolicy,
    SchedulerPolicy,
    TelemetryPolicy,
)
from meridian_control.policy.section import EffortGlob, ModelGlob, Section, SloClassGlob, TenantGlob
from meridian_control.policy.shortening_schema import (
    MAX_BUDGETS,
    MAX_PRESSURES,
    BudgetPolicy,
    PressurePolicy,
    StagedEntry,
)


def _override(section: type[Section], *names: str) -> type[Section]:
    """Make a section of an override: a model with the named fields of `section`, each of which may be absent."""
    fields: dict[str, Any] = {}
    for name in names:
        info = section.model_fields[name]
        kind = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        # An empty list looks like an absent list on the wire, so an override may not set an empty list.
        if get_origin(info.annotation) is tuple:
            kind = Annotated[kind, Field(min_length=1)]
        fields[name] = (Optional[kind], Field(None, description=info.description))  # noqa: UP045
    return create_model(f"{section.__name__.removesuffix('Policy')}Override", __base__=Section, **fields)


def _new_fields(section: type[Section]) -> tuple[str, ...]:
    """Return the fields of a section, or of an entry, that are marked as new."""
    extras = {name: info.json_schema_extra for name, info in section.model_fields.items()}
    return tuple(name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("new"))


PER_REQUEST = {
    "scheduler": (
        *("min_think_tokens", "max_think_tokens", "soft_think_tokens", "soft_close_rank"),
        *("empty_answer_extension_tokens", "answer_reserve_tokens", "answer_reserve_for"),
    ),
    "entropy": (
        *("enabled", "shadow", "ema_alpha", "eat_warmup_samples", "eat_ema_variance_threshold"),
        *("eat_level_threshold_nats", "eat_probe_interval_tokens", "eat_probe_placement", "eat_probe_max_rank"),
        *("eat_hold_ms", "rank_conditions", "rpdi_threshold", "confirm_sentence_ends"),
        *("give_up_tokens", "give_up_eat_nats", "give_up_shadow", "self_calibration"),
    ),
    "loop": tuple(LoopPolicy.model_fields),
    "preemption": ("may_preempt", "max_prompt_tokens", "preemptible_from_tokens"),
}
# The fields that an override may set: those decided per request, and those of whole engines.
IN_OVERRIDES = {**PER_REQUEST, "engine": tuple(EnginePolicy.model_fields)}
# Sections that one of the two previous versions, 0.1.0 and 0.2.0, does not know; and by name, the new fields of the
# others and of entries.
NEW_SECTIONS = ("loop", "disagg", "budget", "pressure", "engine", "extension", "gateway", "preemption")
NEW_FIELDS = {
    "scheduler": _new_fields(SchedulerPolicy),
    "entropy": _new_fields(EntropyPolicy),
    "kv_memory": _new_fields(KvMemoryPolicy),
    "telemetry": _new_fields(TelemetryPolicy),
    "budget": _new_fields(BudgetPolicy),
    "pressure": _new_fields(PressurePolicy),
}
SchedulerOverride = _override(SchedulerPolicy, *PER_REQUEST["scheduler"])
EntropyOverride = _override(EntropyPolicy, *PER_REQUEST["entropy"])
LoopOverride = _override(LoopPolicy, *PER_REQUEST["loop"])
PreemptionOverride = _override(PreemptionPolicy, *PER_REQUEST["preemption"])
EngineOverride = _override(EnginePolicy, *IN_OVERRIDES["engine"])

MAX_OVERRIDES = 256

# The levels of effort in OpenAI's and Anthropic's APIs, as vLLM accepts them.
API_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

AnyStagedEntry = TypeVar("AnyStagedEntry", bound=StagedEntry)


class Who(NamedTuple):
    """The facts about a request and its engine that an override may match on."""

    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    effort: str = ""
    engine_labels: Mapping[str, str] = {}
    fingerprint: str = ""

    def of(self, request: Any) -> Self:
        """Return the facts about a request, with these labels and this fingerprint of its engine. request: an object
        with the attributes `model`, `tenant`, `slo_class` and `effort`."""
        return self._replace(
            model=request.model, tenant=request.tenant, slo_class=request.slo_class, effort=request.effort
        )

    @property
    def traffic(self) -> str:
        """The exact name of the request's traffic, for which self-calibration finds a rule. A # of the model's name is
        escaped, so that the first two in the name of the traffic are between its parts."""
        model = self.model.replace("%", "%25").replace("#", "%23")
        return f"{model}#{self.fingerprint}#{self.slo_class}"

    @classmethod
    def of_traffic(cls, traffic: str) -> Self:
        """Return the facts that the name of a traffic has."""
        model, _, rest = traffic.partition("#")
        fingerprint, _, slo_class = rest.partition("#")
        model = model.replace("%23", "#").replace("%25", "%")
        return cls(model, slo_class=slo_class, fingerprint=fingerprint)


def matches_globs(entry: Any, who: Who) -> bool:
    """Whether a request fits the globs over model, tenant, SLO class and effort; an empty glob fits every request."""
    pairs = (
        (entry.model, who.model),
        (entry.tenant, who.tenant),
        (entry.slo_class, who.slo_class),
        (entry.effort, who.effort),
    )
    return all(not glob or fnmatchcase(name, glob) for glob, name in pairs)


def _is_storable(value: Any) -> bool:
    """Whether both TOML and a Struct can hold a value of an extension: a Struct's numbers are floats."""
    if isinstance(value, Mapping):
        return all(map(_is_storable, value.values()))
    if isinstance(value, list):
        return all(map(_is_storable, value))
    if isinstance(value, int | float):
        return abs(value) <= sys.float_info.max and float(value) == value
    return value is not None


class Override(Section):
    """Other values of policy fields for the requests that the override matches."""

    model: ModelGlob = ""
    tenant: TenantGlob = ""
    slo_class: SloClassGlob = ""
    effort: EffortGlob = ""
    engine_labels: Mapping[str, str] = Field({}, max_length=32, description="Labels that the engine must have.")
    traffic: str = Field(
        "",
        max_length=1024,
        description="Exact name of the traffic that self-calibration found the values for: model, fingerprint of the "
        "model and SLO class; empty matches all.",
    )
    scheduler: SchedulerOverride = Field(SchedulerOverride(), description="Other scheduler values.")  # type: ignore[valid-type]
    entropy: EntropyOverride = Field(EntropyOverride(), description="Other entropy values.")  # type: ignore[valid-type]
    loop: LoopOverride = Field(LoopOverride(), description="Other loop values.")  # type: ignore[valid-type]
    engine: EngineOverride = Field(EngineOverride(), description="Other engine values.")  # type: ignore[valid-type]
    preemption: PreemptionOverride = Field(  # type: ignore[valid-type]
        PreemptionOverride(), description="Other preemption values."
    )

    @model_validator(mode="after")
    def _whole_engines(self) -> Self:
        requests = self.model or self.tenant or self.slo_class or self.effort or self.traffic
        if self.engine != EngineOverride() and requests:
            raise PydanticCustomError(
                "not_whole_engines",
                "must not set engine beside model, tenant, slo_class, effort or traffic, only engine_labels",
            )
        return self

    def changes(self, section: str) -> dict[str, Any]:
        """Return the values of a section that the override sets, by field."""
        return {name: value for name, value in getattr(self, section) if value is not None}

    def matches(self, who: Who) -> bool:
        return (
            (not self.traffic or self.traffic == who.traffic)
            and matches_globs(self, who)
            and self._fits(who.engine_labels)
        )

    def may_match_on(self, engine_labels: Mapping[str, str], fingerprint: str) -> bool:
        """Whether some request may match on an engine with these labels and this fingerprint of its model. The names of
        adapters are only known from their requests, so no names of models are compared."""
        is_of_model = not self.traffic or Who.of_traffic(self.traffic).fingerprint == fingerprint
        return is_of_model and self._fits(engine_labels)

    def _fits(self, engine_labels: Mapping[str, str]) -> bool:
        return all(engine_labels.get(name) == value for name, value in self.engine_labels.items())


class Policy(Section):
    """One complete policy; every absent field gets its default."""

    scheduler: SchedulerPolicy = SchedulerPolicy()
    entropy: EntropyPolicy = EntropyPolicy()
    kv_memory: KvMemoryPolicy = KvMemoryPolicy()
    telemetry: TelemetryPolicy = TelemetryPolicy()
    fallback: FallbackPolicy = FallbackPolicy()
    loop: LoopPolicy = LoopPolicy()
    disagg: DisaggPolicy = DisaggPolicy()
    engine: EnginePolicy = EnginePolicy()
    gateway: GatewayPolicy = GatewayPolicy()
    preemption: PreemptionPolicy = PreemptionPolicy()
    model: Mapping[str, ModelPolicy] = Field(
        {}, max_length=256, description="Facts about models, by the name under which the engine serves the model."
    )
    override: tuple[Override, ...] = Field(
        (),
        strict=False,
        max_length=MAX_OVERRIDES,
        description="Other values for some requests; later entries win, field by field.",
    )
    budget: tuple[BudgetPolicy, ...] = Field(
        (),
        strict=False,
        max_length=MAX_BUDGETS,
        description="Budgets of thinking tokens over the whole fleet.",
    )
    pressure: tuple[PressurePolicy, ...] = Field(
        (),
        strict=False,
        max_length=MAX_PRESSURES,
        description="Targets of requests on each engine, for which thinking is shortened while they are missed.",
    )

    extension: Mapping[str, Mapping[str, JsonValue]] = Field(
        {},
        max_length=64,
        description="Sections of capabilities that a control plane has beside the usual ones, by name.",
    )

    @field_validator("extension")
    @classmethod
    def _finite(cls, value: Mapping[str, Mapping[str, JsonValue]]) -> Mapping[str, Mapping[str, JsonValue]]:
        if not _is_storable(value):
            raise PydanticCustomError(
                "not_storable", "must have finite numbers only, integers that a float can hold, and no null"
            )
        return value

    @field_validator("budget", "pressure")
    @classmethod
    def _named_once(cls, value: tuple[AnyStagedEntry, ...]) -> tuple[AnyStagedEntry, ...]:
        names = [entry.name for entry in value]
        for name in names:
            if names.count(name) > 1:
                kind = "budgets" if isinstance(value[0], BudgetPolicy) else "pressure entries"
                raise PydanticCustomError(
                    "same_name", 'must not have two {kind} "{name}"', {"kind": kind, "name": name}
                )
        return value

    def of(self, who: Who) -> Self:
        """Return the policy for one request, with every matching override applied in order.

        If the thinking floor exceeds the cap, the cap wins.
        """
        changes: dict[str, dict[str, Any]] = {name: {} for name in IN_OVERRIDES}
        for override in self.override:
            if override.matches(who):
                for name in changes:
                    changes[name] |= override.changes(name)
        if not any(changes.values()):
            return self
        scheduler = self.scheduler.model_copy(update=changes["scheduler"])
        floor = min(scheduler.min_think_tokens, scheduler.max_think_tokens)
        scheduler = scheduler.model_copy(update={"min_think_tokens": floor})
        entropy = self.entropy.model_copy(update=changes["entropy"])
        names = ("loop", "engine", "preemption")
        others = {name: getattr(self, name).model_copy(update=changes[name]) for name in names}
        return self.model_copy(update={"scheduler": scheduler, "entropy": entropy, **others})

    def path_of(self, who: Who, section: str, name: str) -> str:
        """Return the dotted path of a field's value that holds for a request under the policy with the matching
        overrides: of the last override that sets the field, else of the section."""
        for index, override in reversed([*enumerate(self.override)]):
            if name in override.changes(section) and override.matches(who):
                return f"override[{index}].{section}.{name}"
        return f"{section}.{name}"

    def on_engine(self, labels: Mapping[str, str], fingerprint: str) -> Self:
        """Return the policy with those overrides alone that may match requests on an engine with these labels and this
        fingerprint of its model."""
        kept = tuple(override for override in self.override if override.may_match_on(labels, fingerprint))
        return self if len(kept) == len(self.override) else self.model_copy(update={"override": kept})

    def extensions_on(self, *, shadow: bool) -> list[str]:
        """Return the names of the extensions that are on, in shadow or in force, as their sections say: one is off that
        says `enabled = false`, and in shadow that says `shadow = true`."""
        on = {name: values for name, values in self.extension.items() if values.get("enabled") is not False}
        return [name for name, values in on.items() if (values.get("shadow") is True) is shadow]

    def engine_limits(self, labels: Mapping[str, str]) -> dict[str, int]:
        """Return the limits that are set for an engine with these labels, by name."""
        set_here = self.of(Who(engine_labels=labels)).engine
        return {name: value for name, value in set_here if value}

    def knows_effort(self, who: Who) -> bool:
        """Whether a request has no effort, one of the API's levels, or an effort that a matching override names."""
        named = (override for override in self.override if override.effort)
        return not who.effort or who.effort in API_EFFORTS or any(override.matches(who) for override in named)

    def __repr_name__(self) -> str:
        """Return the name under which other programs import the class."""
        return "MeridianConfig"
