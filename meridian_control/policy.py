"""The policy: its sections, defaults and limits, and its three forms (TOML text, `Policy`, protobuf message).

Owns every limit and the text of every complaint about a policy. Knows nothing of engines, requests, storage or gRPC.
Pure values and functions, usable on any thread; only `load` and `find` touch the file system.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Self, TypeVar, get_args, get_origin

import tomli_w
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from meridian.v1 import policy_pb2
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from meridian_control.errors import PolicyError, Violation

FILE_NAME = "meridian.toml"
INT32_MAX = 2**31 - 1
MAX_VALUE_CHARS = 60
MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Schema = TypeVar("Schema", bound=Section)


def _lease(value: int) -> int:
    if 0 < value < MIN_LEASE_MS or not 0 <= value <= MAX_LEASE_MS:
        raise PydanticCustomError(
            "lease", "must be 0 or in [{low}, {high}]", {"low": MIN_LEASE_MS, "high": MAX_LEASE_MS}
        )
    return value


SectionLease = Annotated[
    int,
    AfterValidator(_lease),
    Field(
        description="Milliseconds this section's decisions stay in force without a stream, its caps included, so that "
        "an experiment ends with the control plane; 0 for fallback.lease_ms alone."
    ),
]


class SchedulerPolicy(Section):
    """Which sequences join a step, and how much thinking a request may do."""

    enabled: bool = Field(True, description="Order and share steps by phase; false leaves the engine's own order.")
    shadow: bool = Field(False, description="Decide and count, but do not apply.")
    strategy: Literal["output_first", "deadline", "reasoning_first", "stock"] = Field(
        "output_first",
        description="Who is most urgent: answers, whoever is nearest to missing its budget, or thinking with answers "
        "paced at their budget; stock leaves vLLM's own order.",
    )
    think_tpot_budget_ms: float = Field(
        0.0,
        ge=0,
        description="Milliseconds a thinking sequence may go without a token while it is left out of steps; 0 is four "
        "times the output budget.",
    )
    output_tpot_budget_ms: float = Field(
        0.0,
        ge=0,
        description="Step-time target in milliseconds while answers stream; only when it is exceeded are thinking "
        "sequences left out. 0 follows the engine: 1.75 times what a step of all running sequences takes, so that "
        "prompts alone are held back.",
    )
    think_batch_multiplier: float = Field(
        2.5,
        gt=0,
        description="Thinking sequences per answering one that may join a step while answers stream and the output "
        "budget is exceeded.",
    )
    min_prefill_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Prompt tokens that may join a step while answers stream, whatever the output budget leaves; 0 is "
        "twice what steps had of late.",
    )
    long_think_tokens: int = Field(
        8192,
        ge=1,
        le=INT32_MAX,
        description="reasoning_first: thinking tokens from which on a request is the least urgent.",
    )
    max_think_tokens: int = Field(
        32768, ge=1, le=INT32_MAX, description="Hard cap on a request's thinking, in tokens, kept by the agent itself."
    )
    soft_think_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Soft close: thinking tokens from which on thinking ends at the first sentence end where the end "
        "marker ranks at most soft_close_rank; 0 switches the rule off.",
    )
    soft_close_rank: int = Field(20, ge=1, le=INT32_MAX, description="Soft close: highest rank of the end marker.")
    empty_answer_extension_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Thinking tokens added, once, to the cap of a request whose answer would be empty if it were "
        "ended; no rule ends it meanwhile; 0 switches this off.",
    )
    lease_ms: SectionLease = 0
    # After max_think_tokens, which its check reads.
    min_think_tokens: int = Field(
        512,
        ge=0,
        le=INT32_MAX,
        description="Thinking tokens before which no entropy rule ends thinking; not above the hard cap, which also "
        "lowers it where only the cap is given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _floor_within_cap(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "min_think_tokens" not in values:
            cap, floor = values.get("max_think_tokens"), cls.model_fields["min_think_tokens"].default
            if type(cap) is int and 1 <= cap < floor:
                return {**values, "min_think_tokens": cap}
        return values

    @field_validator("min_think_tokens")
    @classmethod
    def _at_most_max(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("max_think_tokens", value)
        if value > limit:
            raise PydanticCustomError("min_above_max", "must be at most max_think_tokens ({limit})", {"limit": limit})
        return value


class RankCondition(Section):
    """One condition of the rank rule (RCPD, arXiv 2508.17627); it holds when every bound does."""

    max_ranks: Annotated[tuple[Annotated[int, Field(ge=1, le=INT32_MAX)], ...], Field(min_length=1, max_length=8)] = (
        Field(
            (5,),
            strict=False,
            description="Highest rank of the end marker at the newest sentence end, the one before it, and so on.",
        )
    )


class EntropyPolicy(Section):
    """When thinking that no longer helps is ended. Shadowed by default, until calibrated for the model."""

    enabled: bool = Field(True, description="Evaluate the EAT and RPDI rules; false measures no entropy.")
    shadow: bool = Field(True, description="Decide and count, but do not end thinking.")
    ema_alpha: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Weight of the newest EAT sample, a fraction.",
    )
    eat_warmup_samples: int = Field(
        20,
        ge=1,
        le=1000,
        description="EAT rule: samples before it may fire; the variance starts at 0 without bias correction, so about "
        "4/ema_alpha make it mean something.",
    )
    eat_ema_variance_threshold: float = Field(
        1e-4,
        ge=0,
        description="EAT rule: the EMA variance, in nats squared, below which EAT counts as settled; the level "
        "threshold must be met too.",
    )
    eat_level_threshold_nats: float = Field(
        0.1,
        ge=0,
        description="EAT rule: the EMA level, in nats, below which the answer counts as decided; the variance "
        "threshold must be met too.",
    )
    eat_probe_interval_tokens: int = Field(
        64, ge=1, le=INT32_MAX, description="Thinking tokens between two EAT probes of a request."
    )
    eat_probe_placement: Literal["anywhere", "sentence", "paragraph"] = Field(
        "sentence", description="Where a probe that is due is placed: at once, or when a sentence or paragraph ends."
    )
    eat_probe_max_rank: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Gate: a probe is asked for only after a sentence end where the end marker ranks at most this, and "
        "then placed at once; 0 switches the gate off.",
    )
    eat_hold_ms: int = Field(
        50,
        ge=0,
        le=10_000,
        description="A probed request waits this long at most, in milliseconds, for what is decided from its probe, so "
        "that thinking ends where it was measured; 0 lets it think on meanwhile. Not in shadow.",
    )
    rank_conditions: tuple[RankCondition, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Rank rule: thinking ends at a sentence end where any of these holds.",
    )
    rpdi_threshold: float = Field(
        2.0,
        ge=0,
        description="RPDI rule: ratio of local to global mean token entropy above which thinking ends; 0 switches the "
        "rule off.",
    )
    rpdi_window_tokens: int = Field(
        512, ge=1, le=65536, description="RPDI rule: newest thinking tokens that make up the local mean."
    )
    lease_ms: SectionLease = 0


class KvMemoryPolicy(Section):
    """Who holds the KV cache when it runs short."""

    enabled: bool = Field(True, description="Act on KV pressure; false leaves eviction and admission to the engine.")
    shadow: bool = Field(False, description="Decide and count, but do not apply.")
    think_phase_memory_fraction: float = Field(
        0.40,
        gt=0,
        le=1,
        description="Share of the KV cache, a fraction, that thinking may hold while preempted answers wait; above it "
        "nothing new is admitted.",
    )
    lease_ms: SectionLease = 0


class TelemetryPolicy(Section):
    """What engines report, how often, and what of it is kept."""

    report_interval_steps: int = Field(1, ge=1, le=1000, description="Engine steps merged into one report.")
    decision_log_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests, a fraction, whose life the decision log keeps; chosen by a hash of their ids.",
    )


class FallbackPolicy(Section):
    """What an engine does without a stream."""

    lease_ms: int = Field(
        30_000,
        ge=MIN_LEASE_MS,
        le=MAX_LEASE_MS,
        description="Milliseconds decisions stay in force without a stream; caps stay.",
    )


# No marker is nearly as long.
MAX_MARKER_TOKENS = 64
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...], Field(max_length=MAX_MARKER_TOKENS)]


class ModelPolicy(Section):
    """What the engine cannot find out about one model by itself."""

    think_start_token_ids: TokenIds = Field(
        (), strict=False, description="Token ids that open thinking; empty takes the reasoning parser's."
    )
    think_end_token_ids: TokenIds = Field(
        (), strict=False, description="Token ids that end thinking; empty takes the reasoning parser's."
    )
    reasoning_parser: str = Field(
        "", max_length=256, description="Name of the vLLM reasoning parser; empty takes the engine's own."
    )
    supports_think_disable: bool = Field(
        True, description="A closed think block at the end of the prompt means the request does not think."
    )
    closing_text: str = Field(
        "", max_length=2000, description="Text that a forced end writes before the marker; it counts as thinking."
    )
    eat_answer_prefix: str = Field(
        "", max_length=2000, description="Text that an EAT probe appends after the marker, to stand before the answer."
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
    """What an override may match on."""

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


# ------------------------------------------------------------------------------------------------------------- forms


def parse_toml(text: str, source: str = "<string>") -> Policy:
    """Read a policy from TOML text; `source` names it in syntax errors. Raises PolicyError."""
    return parse_toml_as(Policy, text, source)


def parse_toml_as(schema: type[Schema], text: str, source: str = "<string>") -> Schema:
    """Read TOML text of another schema. Raises PolicyError."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError([Violation(f"{source}:", _syntax_message(error, text))]) from error
    return _validate(schema, values)


def load(path: Path) -> Policy:
    """Read a policy file. Raises PolicyError, for an unreadable file too."""
    return load_as(Policy, path)


def load_as(schema: type[Schema], path: Path) -> Schema:
    """Read a TOML file of another schema. Raises PolicyError, for an unreadable file too."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PolicyError([Violation(f"{path}:", f"cannot be read: {reason}")]) from error
    return parse_toml_as(schema, text, str(path))


def find(explicit: Path | None) -> Path | None:
    """The policy file to use: `explicit`, which must exist, or the first that exists of ./meridian.toml and the user's.

    Raises PolicyError when `explicit` is not a file.
    """
    if explicit is not None:
        if not explicit.is_file():
            raise PolicyError([Violation(f"{explicit}:", "is not a file")])
        return explicit
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    candidates = (Path(FILE_NAME), config_home / "meridian" / FILE_NAME)
    return next((path for path in candidates if path.is_file()), None)


def from_proto(message: policy_pb2.Policy) -> Policy:
    """Validate a policy message; absent fields get their defaults. Raises PolicyError, for unknown fields too."""
    return from_proto_as(Policy, message)


def from_proto_as(schema: type[Schema], message: Message) -> Schema:
    """Validate a message whose fields are another schema's. Raises PolicyError, for unknown fields too."""
    return _validate(schema, _plain(message))


def to_proto(policy: Policy) -> policy_pb2.Policy:
    """The message with every field set."""
    return json_format.ParseDict(policy.model_dump(mode="json", exclude_none=True), policy_pb2.Policy())


def to_toml(policy: Policy) -> str:
    """TOML text with every field, which parse_toml reads back to an equal policy."""
    return tomli_w.dumps(policy.model_dump(mode="json", exclude_none=True))


def _plain(message: Message) -> dict[str, Any]:
    """Set fields by name, as plain Python values; unlike JSON it keeps NaN a number."""
    known = {field.name: _plain_value(field, value) for field, value in message.ListFields()}
    unknown = UnknownFieldSet(message)
    return known | {f"field {unknown[index].field_number}": None for index in range(len(unknown))}


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.is_repeated and not field.message_type.GetOptions().map_entry:
        return [_plain(entry) for entry in value]
    if field.message_type.GetOptions().map_entry:
        return {key: _plain(entry) if isinstance(entry, Message) else entry for key, entry in value.items()}
    return _plain(value)


# -------------------------------------------------------------------------------------------------------- complaints


def _validate(schema: type[Schema], values: Mapping[str, Any]) -> Schema:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise PolicyError(_violation(schema, found) for found in error.errors()) from None


def _violation(schema: type[Section], error: ErrorDetails) -> Violation:
    path = dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        return Violation(path, "is not a known key")
    return Violation(path, _requirement(schema, error), _render(error["input"]))


def dotted(loc: tuple[int | str, ...]) -> str:
    """Dotted path in TOML's own spelling: `model."Qwen/Qwen3-8B".think_end_token_ids[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in loc).removeprefix(".")


def _key(part: str) -> str:
    return part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else quoted(part)


def quoted(text: str) -> str:
    """A string as TOML spells it: as JSON does, which leaves one character plain that TOML does not."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_TYPES = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "a table",
    "dict_type": "a table",
}
_LENGTHS = {
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_long": "at most {max_length} characters",
}


def _requirement(schema: type[Section], error: ErrorDetails) -> str:
    kind = error["type"]
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}"
    if kind in _LENGTHS:
        return "must have " + _LENGTHS[kind].format_map(error["ctx"])
    if kind == "literal_error":
        return f"must be {error['ctx']['expected']}"
    if kind.startswith(("greater_than", "less_than")):
        return f"must be {_range(_field(schema, error['loc']).metadata)}"
    return error["msg"]


def _range(metadata: list[Any]) -> str:
    """The interval a field's constraints allow: every number has a lower limit, most have an upper one."""
    limits = {name: getattr(limit, name) for limit in metadata for name in ("gt", "ge", "le") if hasattr(limit, name)}
    exclusive = "gt" in limits
    low = limits["gt" if exclusive else "ge"]
    if "le" not in limits:
        return f"{'>' if exclusive else '>='} {low}"
    return f"in {'(' if exclusive else '['}{low}, {limits['le']}]"


def _field(schema: type[Section], loc: tuple[int | str, ...]) -> FieldInfo:
    """The schema of the value at `loc`; table names and list indexes lead to the type of their values."""
    field = FieldInfo.from_annotation(schema)
    for part in loc:
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields[str(part)]
        else:
            field = FieldInfo.from_annotation([arg for arg in get_args(annotation) if arg is not ...][-1])
        if type(None) in get_args(field.annotation):
            field = FieldInfo.from_annotation(get_args(field.annotation)[0])
    return field


def _render(value: Any) -> str:
    """The value as TOML spells it, cut to a line's length."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # an integer of more digits than Python prints
        return "a very long value"
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def _syntax_message(error: ValueError | RecursionError, text: str) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    message, _, position = str(error).removesuffix(")").rpartition(" (at ")
    if position == "end of document":
        position = f"line {text.count(chr(10)) + 1}, column {len(text) - text.rfind(chr(10))}"
    return f"{position}: {message}" if message else str(error)
