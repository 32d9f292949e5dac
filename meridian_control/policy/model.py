"""A policy: its sections, and other values of theirs for some requests.

Knows nothing of engines, requests, storage or gRPC. Pure values and functions, usable on any thread.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Optional, Self, get_origin

from pydantic import (
    Field,
    create_model,
)

from meridian_control.policy.schema import (
    EntropyPolicy,
    FallbackPolicy,
    KvMemoryPolicy,
    ModelPolicy,
    SchedulerPolicy,
    Section,
    TelemetryPolicy,
)


def _override(section: type[Section], *names: str) -> type[Section]:
    """A section of an override: these fields of `section`, each of which may be absent."""
    fields: dict[str, Any] = {}
    for name in names:
        info = section.model_fields[name]
        kind = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        # An empty list and an absent one are the same on the wire: only the absent one is allowed.
        if get_origin(info.annotation) is tuple:
            kind = Annotated[kind, Field(min_length=1)]
        fields[name] = (Optional[kind], Field(None, description=info.description))  # noqa: UP045
    return create_model(f"{section.__name__.removesuffix('Policy')}Override", __base__=Section, **fields)


PER_REQUEST = {
    "scheduler": (
        "min_think_tokens",
        "max_think_tokens",
        "soft_think_tokens",
        "soft_close_rank",
        "empty_answer_extension_tokens",
    ),
    "entropy": (
        "enabled",
        "shadow",
        "ema_alpha",
        "eat_warmup_samples",
        "eat_ema_variance_threshold",
        "eat_level_threshold_nats",
        "eat_probe_interval_tokens",
        "eat_probe_placement",
        "eat_probe_max_rank",
        "eat_hold_ms",
        "rank_conditions",
        "rpdi_threshold",
    ),
}
SchedulerOverride = _override(SchedulerPolicy, *PER_REQUEST["scheduler"])
EntropyOverride = _override(EntropyPolicy, *PER_REQUEST["entropy"])

Glob = Annotated[str, Field(max_length=256)]


class Who(NamedTuple):
    """The facts that an override may match on."""

    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    effort: str = ""
    engine_labels: Mapping[str, str] = {}


class Override(Section):
    """Other values for some requests."""

    model: Glob = Field("", description="Glob over the model or LoRA adapter name; empty matches all.")
    tenant: Glob = Field("", description="Glob over the request's meridian_tenant; empty matches all.")
    slo_class: Glob = Field("", description="Glob over the request's meridian_slo_class; empty matches all.")
    effort: Glob = Field("", description="Glob over the request's meridian_effort; empty matches all.")
    engine_labels: Mapping[str, str] = Field({}, max_length=32, description="Labels the engine must have.")
    scheduler: SchedulerOverride = Field(SchedulerOverride(), description="Set to other values.")  # type: ignore[valid-type]
    entropy: EntropyOverride = Field(EntropyOverride(), description="Set to other values.")  # type: ignore[valid-type]

    def matches(self, who: Who) -> bool:
        pairs = ((self.model, who.model), (self.tenant, who.tenant), (self.slo_class, who.slo_class))
        if not all(not glob or fnmatchcase(name, glob) for glob, name in (*pairs, (self.effort, who.effort))):
            return False
        return all(who.engine_labels.get(name) == value for name, value in self.engine_labels.items())


class Policy(Section):
    """One complete policy; every absent field has its default."""

    scheduler: SchedulerPolicy = SchedulerPolicy()
    entropy: EntropyPolicy = EntropyPolicy()
    kv_memory: KvMemoryPolicy = KvMemoryPolicy()
    telemetry: TelemetryPolicy = TelemetryPolicy()
    fallback: FallbackPolicy = FallbackPolicy()
    model: Mapping[str, ModelPolicy] = Field(
        {}, max_length=256, description="Overrides by model name as the engine serves it."
    )
    override: tuple[Override, ...] = Field(
        (),
        strict=False,
        max_length=256,
        description="Other values for some requests; later entries win, field by field.",
    )

    def of(self, who: Who) -> Self:
        """The policy for one request: every matching override applied in order. Where floor and cap cross, the cap
        wins."""
        changes: dict[str, dict[str, Any]] = {"scheduler": {}, "entropy": {}}
        for override in self.override:
            if override.matches(who):
                for name, changed in changes.items():
                    section = getattr(override, name)
                    changed |= {field: value for field, value in section if value is not None}
        if not any(changes.values()):
            return self
        scheduler = self.scheduler.model_copy(update=changes["scheduler"])
        floor = min(scheduler.min_think_tokens, scheduler.max_think_tokens)
        scheduler = scheduler.model_copy(update={"min_think_tokens": floor})
        entropy = self.entropy.model_copy(update=changes["entropy"])
        return self.model_copy(update={"scheduler": scheduler, "entropy": entropy})
