"""The policy schema: what it accepts, the exact text of every refusal, and the three forms it converts between."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import assume, given
from hypothesis import strategies as st
from meridian.v1 import policy_pb2
from pydantic import AfterValidator, BaseModel, Field
from pydantic.fields import FieldInfo

from meridian_control.common.errors import PolicyError
from meridian_control.policy.disagg_schema import CONNECTORS
from meridian_control.policy.drift_schema import EatBin, SignalBin
from meridian_control.policy.formats import (
    check_extensions,
    extension,
    find,
    from_proto,
    load_config,
    merged,
    parse_toml,
    parse_values,
    to_proto,
    to_stored_toml,
    to_toml,
    with_fields,
)
from meridian_control.policy.model import Override, Policy, Who
from meridian_control.policy.schema import (
    GatewayPolicy,
    RankCondition,
)
from meridian_control.policy.section import INT32_MAX, MAX_LEASE_MS, MIN_LEASE_MS, Section

CORPUS = Path(__file__).parents[3] / "data" / "policies"
ACCEPTED = sorted(CORPUS.glob("accepted/*.toml"))
REJECTED = sorted(CORPUS.glob("rejected/*.toml"))
ERROR = "# error: "

# Policies with texts that are too long for a file which people read.
REJECTED_TEXT = [
    (
        f"model.m.closing_text = '{'x' * 2001}'",
        f'model.m.closing_text must have at most 2000 characters; got "{"x" * 58}…',
    ),
    (
        f"scheduler.max_think_tokens = {16**4500:#x}",
        "scheduler.max_think_tokens must be in [1, 2147483647]; got a very long value",
    ),
    ("x = " + "[" * 5000, "f.toml: nested too deeply"),
    (f"override = [{'{}, ' * 257}]", f"override must have at most 256 entries; got [{'{}, ' * 14}{{}}…"),
    (
        "".join(f"[model.m{n}]\n" for n in range(257)),
        'model must have at most 256 entries; got {"m0": {}, "m1": {}, "m2": {}, "m3": {}, "m4": {}, "m5": {}…',
    ),
    (
        "[[override]]\n" + "".join(f'engine_labels.l{n} = ""\n' for n in range(33)),
        "override[0].engine_labels must have at most 32 entries; got "
        '{"l0": "", "l1": "", "l2": "", "l3": "", "l4": "", "l5": ""…',
    ),
    (
        f"entropy.rank_conditions = [{'{max_ranks = [5]}, ' * 17}]",
        "entropy.rank_conditions must have at most 16 entries; got "
        '[{"max_ranks": [5]}, {"max_ranks": [5]}, {"max_ranks": [5]}…',
    ),
    (
        f"model.m.think_end_token_ids = [{'7, ' * 65}]",
        f"model.m.think_end_token_ids must have at most 64 entries; got [{'7, ' * 19}7…",
    ),
]

TOO_LONG = ["text", "number", "nesting", "overrides", "models", "labels", "conditions", "markers"]


def complaints(text: str, source: str = "f.toml") -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse_toml(text, source)
    assert str(caught.value) == "\n".join(map(str, caught.value.violations()))
    return str(caught.value).split("\n")


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_accepts(path: Path) -> None:
    policy = load_config(path)
    assert parse_toml(to_toml(policy)) == parse_toml(to_stored_toml(policy)) == policy == from_proto(to_proto(policy))


@pytest.mark.parametrize("path", REJECTED, ids=lambda path: path.stem)
def test_rejects(path: Path) -> None:
    text = path.read_text()
    expected = [line.removeprefix(ERROR) for line in text.splitlines() if line.startswith(ERROR)]
    assert complaints(text, path.name) == expected


@pytest.mark.parametrize(("text", "expected"), REJECTED_TEXT, ids=TOO_LONG)
def test_rejects_what_is_too_long(text: str, expected: str) -> None:
    assert complaints(text) == [expected]


def test_the_corpus_is_there() -> None:
    assert len(ACCEPTED) >= 30
    assert len(REJECTED) >= 60


def test_defaults() -> None:
    policy = parse_toml("")
    assert policy == Policy() == from_proto(policy_pb2.Policy())
    assert (policy.entropy.shadow, policy.scheduler.shadow, policy.kv_memory.shadow) == (True, False, False)
    assert (policy.scheduler.max_think_tokens, policy.entropy.rpdi_window_tokens) == (32768, 512)


# ------------------------------------------------------------------------------------------------------------- proto


def test_proto_reports_what_json_would_hide() -> None:
    message = policy_pb2.Policy()
    message.entropy.ema_alpha = math.nan
    message.scheduler.think_tpot_budget_ms = math.inf
    message.model["NaN"].reasoning_parser = "NaN"
    message.model["a.b"].think_end_token_ids.append(-5)
    message.telemetry.MergeFromString(b"\xf8\x7f\x01")  # field 2047, from a newer client
    with pytest.raises(PolicyError) as caught:
        from_proto(message)
    assert str(caught.value).split("\n") == [
        "scheduler.think_tpot_budget_ms must be a finite number; got inf",
        "entropy.ema_alpha must be a finite number; got nan",
        'telemetry."field 2047" is not a known key',
        'model."a.b".think_end_token_ids[0] must be in [0, 2147483647]; got -5',
    ]


def schema_of_model(model: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        nested = models_in(field.annotation)
        found[name] = schema_of_model(nested[0]) if nested else None
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in models_in(arg)]


def schema_of_proto(message: Descriptor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.fields:
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            nested = nested.fields_by_name["value"].message_type
        # A capability from elsewhere brings the schema of its section itself.
        if nested is not None and nested.full_name == "google.protobuf.Struct":
            nested = None
        found[field.name] = None if nested is None else schema_of_proto(nested)
    return found


def test_proto_and_schema_have_the_same_fields() -> None:
    assert schema_of_proto(policy_pb2.Policy.DESCRIPTOR) == schema_of_model(Policy)


# ------------------------------------------------------------------------------------------------------- round trips


def values(field: FieldInfo) -> st.SearchStrategy[Any]:  # noqa: PLR0911
    if type(None) in get_args(field.annotation):
        # An override's field is absent, or has a value that the section itself allows.
        inner = FieldInfo.from_annotation(get_args(field.annotation)[0])
        return values(inner).filter(lambda value: value != [])
    nested = list(models_in(field.annotation))
    if bins := [kind for kind in (EatBin, SignalBin) if kind in nested]:
        edge_name = "max_nats" if EatBin in bins else "max_value"
        edges = st.lists(st.floats(0, 1e9), min_size=1, max_size=4, unique=True).map(sorted)
        counts = st.integers(1, INT32_MAX)
        return edges.flatmap(lambda found: st.tuples(*(st.tuples(st.just(edge), counts) for edge in found))).map(
            lambda found: [{edge_name: edge, "requests": count} for edge, count in found]
        )
    if any(isinstance(c, AfterValidator) for c in field.metadata):
        # Texts with a check of their own are fabrics, and numbers are leases.
        leases = st.just(0) | st.integers(MIN_LEASE_MS, MAX_LEASE_MS)
        return st.sampled_from(sorted(CONNECTORS)) if field.annotation is str else leases
    limits = {name: getattr(c, name) for c in field.metadata for name in ("gt", "ge", "le") if hasattr(c, name)}
    if field.annotation is int:
        return st.integers(limits["ge"], limits["le"])
    if field.annotation is float:
        low = limits.get("gt", limits.get("ge"))
        upper = limits.get("le")
        return st.floats(low, upper, exclude_min="gt" in limits, allow_nan=False, allow_infinity=False)
    if field.annotation is bool:
        return st.booleans()
    if field.annotation is str:
        return st.text(max_size=50)
    if get_origin(field.annotation) is Literal:
        return st.sampled_from(get_args(field.annotation))
    if field.annotation == Mapping[str, str]:
        return st.dictionaries(st.text(), st.text(), max_size=2)
    if models := models_in(field.annotation):
        is_list = get_origin(field.annotation) is tuple
        return st.lists(tables(models[0]), max_size=3) if is_list else tables(models[0])
    if field.annotation == GatewayPolicy.model_fields["client_slo_classes"].annotation:
        return st.lists(st.text(max_size=50), max_size=3)
    if field.annotation == RankCondition.model_fields["max_ranks"].annotation:
        return st.lists(st.integers(1, INT32_MAX), min_size=1, max_size=8)
    return st.lists(st.integers(0, INT32_MAX), max_size=3)


def tables(model: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for any subset of a section's keys."""
    return st.fixed_dictionaries({}, optional={name: values(field) for name, field in model.model_fields.items()})


def of_whole_engines(override: dict[str, Any]) -> bool:
    of_requests = ("model", "tenant", "slo_class", "effort", "traffic")
    return not (override.get("engine") and any(map(override.get, of_requests)))


SECTIONS = {name: field.annotation for name, field in Policy.model_fields.items() if not get_args(field.annotation)}
MODEL = get_args(Policy.model_fields["model"].annotation)[1]
TREES = st.fixed_dictionaries(
    {},
    optional={
        **{name: tables(section) for name, section in SECTIONS.items()},
        "model": st.dictionaries(st.text(), tables(MODEL), max_size=2),
        "override": st.lists(tables(Override).filter(of_whole_engines), max_size=2),
    },
)


def test_a_low_cap_alone_lowers_the_floor() -> None:
    scheduler = parse_toml("scheduler.max_think_tokens = 64").scheduler
    assert (scheduler.min_think_tokens, scheduler.max_think_tokens) == (64, 64)


@given(TREES)
def test_round_trips(tree: Mapping[str, Any]) -> None:
    scheduler = tree.get("scheduler", {})
    assume(scheduler.get("min_think_tokens", 0) <= scheduler.get("max_think_tokens", 32768))
    policy = Policy.model_validate(tree)
    assert parse_toml(to_toml(policy)) == policy
    wire = to_proto(policy).SerializeToString()
    assert from_proto(policy_pb2.Policy.FromString(wire)) == policy


# --------------------------------------------------------------------------------------------------------- overrides

LOW = {"effort": "low", "scheduler": {"max_think_tokens": 100}}


@pytest.mark.parametrize(
    ("patterns", "who", "expected"),
    [
        ({}, Who(), True),
        ({"model": "Qwen/*"}, Who(model="Qwen/Qwen3-8B"), True),
        ({"model": "qwen/*"}, Who(model="Qwen/Qwen3-8B"), False),
        ({"tenant": "acme"}, Who(), False),
        ({"tenant": "acme", "slo_class": "batch"}, Who(tenant="acme", slo_class="batch"), True),
        ({"tenant": "acme", "slo_class": "batch"}, Who(tenant="acme", slo_class="chat"), False),
        ({"effort": "[lm]*"}, Who(effort="medium"), True),
        ({"engine_labels": {"zone": "a"}}, Who(engine_labels={"zone": "a", "gpu": "h"}), True),
        ({"engine_labels": {"zone": "a"}}, Who(engine_labels={"zone": "b"}), False),
    ],
)
def test_an_override_matches_when_all_its_patterns_do(patterns: dict[str, Any], who: Who, expected: bool) -> None:
    changed = Policy.model_validate({"override": [patterns | {"scheduler": {"soft_close_rank": 3}}]}).of(who)
    assert (changed.scheduler.soft_close_rank == 3) is expected


NAME = st.text(st.sampled_from("a#%235f\n")) | st.text()


@given(NAME, NAME, st.text("0123456789abcdef"))
def test_the_name_of_a_traffic_says_whose_it_is(model: str, slo_class: str, fingerprint: str) -> None:
    """Clients choose SLO classes, so that no class may make a name that another model's traffic has."""
    who = Who(model, slo_class=slo_class, fingerprint=fingerprint)
    assert Who.of_traffic(who.traffic) == who


@pytest.mark.parametrize(
    ("who", "known"),
    [
        (Who(), True),
        *((Who(effort=level), True) for level in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
        (Who(effort="turbo"), False),
        (Who(effort="Low"), False),
        # An override without an effort names none, and one for other tenants does not count.
        (Who(effort="turbo", tenant="any"), False),
        (Who(effort="ultra-3"), False),
        (Who(effort="ultra-3", tenant="acme"), True),
    ],
)
def test_an_effort_is_known_to_the_apis_or_to_an_override(who: Who, known: bool) -> None:
    ultra = {"effort": "ultra*", "tenant": "acme", "scheduler": {"max_think_tokens": 9}}
    anyone = {"tenant": "any", "scheduler": {"max_think_tokens": 8}}
    assert Policy.model_validate({"override": [ultra, anyone]}).knows_effort(who) is known


def test_later_overrides_win_field_by_field() -> None:
    second = {"tenant": "a", "scheduler": {"soft_think_tokens": 7}, "entropy": {"shadow": False}}
    third = {"tenant": "a", "scheduler": {"soft_think_tokens": 8}}
    policy = Policy.model_validate({"override": [LOW, second, third]})
    changed = policy.of(Who(tenant="a", effort="low"))
    assert (changed.scheduler.max_think_tokens, changed.scheduler.soft_think_tokens) == (100, 8)
    assert not changed.entropy.shadow
    assert policy.of(Who(tenant="b")) is policy


def test_where_floor_and_cap_cross_the_cap_wins() -> None:
    policy = Policy.model_validate({"override": [LOW, {"scheduler": {"min_think_tokens": 300}}]})
    assert policy.of(Who(effort="low")).scheduler.min_think_tokens == 100
    assert policy.of(Who()).scheduler.min_think_tokens == 300


# ------------------------------------------------------------------------------------------------------------- files


def test_find_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, user = tmp_path / "here" / "meridian.toml", tmp_path / "config" / "meridian" / "meridian.toml"
    here.parent.mkdir()
    user.parent.mkdir(parents=True)
    monkeypatch.chdir(here.parent)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find(None) is None
    user.touch()
    assert find(None) == user
    here.touch()
    found = find(None)
    assert found is not None
    assert found.resolve() == here
    explicit = tmp_path / "mine.toml"
    explicit.touch()
    assert find(explicit) == explicit
    with pytest.raises(PolicyError, match=r"^nowhere\.toml: is not a file$"):
        find(Path("nowhere.toml"))
    here.unlink()
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    user.parent.parent.rename(tmp_path / ".config")
    assert find(None) == tmp_path / ".config" / "meridian" / "meridian.toml"


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "meridian.toml"
    path.write_text("telemetry.report_interval_steps = 4")
    assert load_config(path).telemetry.report_interval_steps == 4
    path.write_text("=")
    with pytest.raises(PolicyError, match=r"meridian\.toml: line 1, column 1: Invalid statement"):
        load_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match=r"meridian\.toml: cannot be read: not UTF-8"):
        load_config(path)
    with pytest.raises(PolicyError, match=r"cannot be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize("value", [None, [1, None], {"b": None}, 10**400, [-(10**400)], [2**53 + 1]], ids=range(6))
def test_an_extension_that_cannot_be_stored_is_refused(value: Any) -> None:
    with pytest.raises(
        PolicyError, match=r"^extension must have finite numbers only, integers that a float can hold, and no"
    ):
        parse_values({"extension": {"e": {"a": value}}})


@pytest.mark.parametrize("value", [True, "x", [1, 2.5, {"b": 2**600}], {"b": []}])
def test_an_extension_that_can_be_stored_keeps_its_value(value: Any) -> None:
    asked = parse_values({"extension": {"e": {"a": value}}})
    assert from_proto(to_proto(asked)) == parse_toml(to_stored_toml(asked)) == asked


class OwnPolicy(Section):
    """A section of a capability of one's own, with types and limits that no other section has."""

    shadow: bool
    most: int = Field(1, le=10)
    either: Annotated[int, Field(gt=0)] | str = 1
    names: tuple[str, ...] = ()
    kinds: frozenset[Literal["a", "b"]] = frozenset()


def test_an_extension_may_have_any_types_and_limits() -> None:
    section = {"shadow": True, "names": ["x"], "kinds": ["a", "b"], "either": "x"}
    asked = parse_values({"extension": {"own": section}})
    for stored in (asked, from_proto(to_proto(asked)), parse_toml(to_stored_toml(asked))):
        check_extensions(stored, {"own": OwnPolicy}, {})
        found = extension(stored, "own", OwnPolicy)
        assert found == OwnPolicy(shadow=True, names=("x",), kinds=frozenset({"a", "b"}), either="x")


@pytest.mark.parametrize(
    ("section", "violation"),
    [
        ({}, "extension.own.shadow must be set"),
        ({"most": 11}, "extension.own.most Input should be less than or equal to 10; got 11"),
        ({"either": -1}, "extension.own.either.constrained-int Input should be greater than 0; got -1"),
        ({"names": "x"}, 'extension.own.names must be a list; got "x"'),
    ],
)
def test_a_bad_extension_is_named(section: dict[str, Any], violation: str) -> None:
    with pytest.raises(PolicyError) as refused:
        check_extensions(parse_values({"extension": {"own": section}}), {"own": OwnPolicy}, {})
    assert violation in [str(one) for one in refused.value.violations()]


@pytest.mark.parametrize(
    ("field", "section", "values"),
    [
        ("disagg.thinking_pool={pool='b'}", "disagg", {"thinking_pool": {"pool": "b"}, "enabled": True}),
        ("disagg.thinking_pool={}", "disagg", {"thinking_pool": {}, "enabled": True}),
        ("disagg.thinking_pool.pool=b", "disagg", {"thinking_pool": {"zone": "a", "pool": "b"}, "enabled": True}),
        ("extension.e={x={a=2}}", "extension", {"e": {"x": {"a": 2}, "y": 3}, "f": {}}),
        ("extension.e.x={a=2}", "extension", {"e": {"x": {"a": 2}, "y": 3}, "f": {}}),
        (
            "extension.f.text=Stop \U0001f600 \x7f",
            "extension",
            {"e": {"x": {"b": 1}, "y": 3}, "f": {"text": "Stop \U0001f600 \x7f"}},
        ),
        ("extension.e.x.a=2", "extension", {"e": {"x": {"b": 1, "a": 2}, "y": 3}, "f": {}}),
    ],
)
def test_a_field_that_is_a_table_is_replaced(field: str, section: str, values: dict[str, Any]) -> None:
    """A name that goes on into the table changes one entry of it; a file's tables have no such names."""
    before = {
        "disagg": {"thinking_pool": {"zone": "a"}, "enabled": True},
        "extension": {"e": {"x": {"b": 1}, "y": 3}, "f": {}},
    }
    assert with_fields(before, [field]) == before | {section: values}
    if field.endswith("}"):
        assert merged(before, tomllib.loads(field)) == before | {section: values}
