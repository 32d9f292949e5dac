"""Policies field by field: their differences, and the rule that set a value."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_control.policy.diff import Subject, diff, explain, spelled
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import PER_REQUEST, Who

LEAVES = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


@given(VALUES)
def test_values_are_spelled_as_toml_reads_them(value: Any) -> None:
    assert "\n" not in spelled(value)
    assert tomllib.loads(f"x = {spelled(value)}") == {"x": value}


DIFFS: list[tuple[str, str, list[tuple[str, str, str]]]] = [
    ("", "", []),
    ("scheduler.max_think_tokens = 32768", "", []),
    (
        "scheduler.max_think_tokens = 9",
        "",
        [("scheduler.min_think_tokens", "9", "512"), ("scheduler.max_think_tokens", "9", "32768")],
    ),
    ("entropy.shadow = false", "", [("entropy.shadow", "false", "true")]),
    ("", "entropy.ema_alpha = 1", [("entropy.ema_alpha", "0.2", "1.0")]),
    # A list is compared as one value.
    (
        "",
        "entropy.rank_conditions = [{max_ranks = [5, 7]}]",
        [("entropy.rank_conditions", "[]", "[{max_ranks = [5, 7]}]")],
    ),
    ("", "model.m = {}", []),
    ("", 'model."a.b".closing_text = "So\\n"', [('model."a.b".closing_text', "", '"So\\n"')]),
    (
        "model.m.think_end_token_ids = [1]",
        "model.m.think_end_token_ids = [2]",
        [("model.m.think_end_token_ids", "[1]", "[2]")],
    ),
    (
        "",
        '[[override]]\ntenant = "a"\nengine_labels = {zone = "b"}\nscheduler.max_think_tokens = 7',
        [
            ("override[0].tenant", "", '"a"'),
            ("override[0].engine_labels.zone", "", '"b"'),
            ("override[0].scheduler.max_think_tokens", "", "7"),
        ],
    ),
    ("[[override]]\nscheduler.soft_close_rank = 1", "", [("override[0].scheduler.soft_close_rank", "1", "")]),
    (
        '[[budget]]\nname = "a"\ntokens_per_day = 1',
        '[[budget]]\nname = "a"\ntokens_per_day = 2\ntenant = "b"',
        [("budget[0].tokens_per_day", "1", "2"), ("budget[0].tenant", "", '"b"')],
    ),
]


@pytest.mark.parametrize(("before", "after", "expected"), DIFFS)
def test_diff(before: str, after: str, expected: list[tuple[str, str, str]]) -> None:
    changes = diff(parse_toml(before), parse_toml(after))
    assert sorted((c.path, c.before, c.after) for c in changes) == sorted(expected)


def test_a_diff_the_other_way_is_its_mirror() -> None:
    for before, after, _ in DIFFS:
        one, two = parse_toml(before), parse_toml(after)
        mirrored = sorted((c.path, c.after, c.before) for c in diff(one, two))
        assert sorted((c.path, c.before, c.after) for c in diff(two, one)) == mirrored


POLICY = parse_toml("""
scheduler = {max_think_tokens = 1000, min_think_tokens = 600}
entropy.shadow = true
model.m.closing_text = "So"

[[override]]
tenant = "a*"
scheduler.max_think_tokens = 500
entropy.ema_alpha = 0.5

[[override]]
tenant = "ab"
entropy.ema_alpha = 0.2

[[budget]]
name = "b"
tokens_per_day = 1

[[budget]]
name = "c"
tenant = "ab"
tokens_per_day = 7
""")


def explained(subject: Subject) -> dict[str, tuple[str, str]]:
    return {row.path: (row.value, row.origin) for row in explain(POLICY, subject)}


LOWERED, RAISED = ({"own_floor_tokens": floor, "own_cap_tokens": cap} for floor, cap in ((500, 1001), (700, 800)))


@pytest.mark.parametrize(
    ("who", "own", "expected"),
    [
        (
            Who("m", "abc"),
            {"model": "m"},
            {
                "scheduler.max_think_tokens": ("500", "override[0]"),
                "entropy.ema_alpha": ("0.5", "override[0]"),
                "entropy.shadow": ("true", "default"),
                "model.m.closing_text": ('"So"', "policy"),
                "model.m.reasoning_parser": ('""', "default"),
                "fallback.lease_ms": ("30000", "default"),
            },
        ),
        # The later override, and the budgets that match.
        (
            Who(tenant="ab"),
            {},
            {
                "entropy.ema_alpha": ("0.2", "override[1]"),
                "budget[1].tokens_per_day": ("7", "policy"),
                "budget[0].shadow": ("true", "policy"),
            },
        ),
        # The floor was lowered.
        (Who(), {}, {"scheduler.min_think_tokens": ("600", "policy")}),
        (
            Who(tenant="a"),
            {},
            {"scheduler.min_think_tokens": ("500", "override[0]"), "budget[1].tokens_per_day": ("", "")},
        ),
        # The request's own limits.
        (Who(), RAISED, {f"scheduler.{m}_think_tokens": (n, "request") for m, n in (("min", "700"), ("max", "800"))}),
        (Who(), LOWERED, {f"scheduler.{m}_think_tokens": (n, "policy") for m, n in (("min", "600"), ("max", "1000"))}),
    ],
)
def test_explain_names_what_set_a_value(who: Who, own: dict[str, Any], expected: dict[str, tuple[str, str]]) -> None:
    rows = explained(Subject(who, own.get("model", ""), **{name: own[name] for name in own if name != "model"}))
    assert {path: rows.get(path, ("", "")) for path in expected} == expected


def test_pressure_entries_are_compared_and_explained_like_budgets() -> None:
    before = parse_toml('[[pressure]]\nname = "a"\nttot_p99_ms = 250')
    after = parse_toml('[[pressure]]\nname = "a"\nttot_p99_ms = 200\ntenant = "b"')
    changed = [(change.path, change.before, change.after) for change in diff(before, after)]
    assert sorted(changed) == [("pressure[0].tenant", "", '"b"'), ("pressure[0].ttot_p99_ms", "250.0", "200.0")]
    assert {row.path for row in explain(after, Subject(Who(tenant="b"), ""))} >= {"pressure[0].shadow"}
    assert not [row for row in explain(after, Subject(Who(), "")) if row.path.startswith("pressure")]


def test_limits_are_those_of_the_engines_labels() -> None:
    policy = parse_toml(
        "engine.max_num_active_seqs = 64\nengine.long_prefill_token_threshold = 512\n"
        "[[override]]\nengine_labels = {gpu = 'l4'}\nengine.max_num_active_seqs = 0"
    )
    assert policy.engine_limits({}) == {"max_num_active_seqs": 64, "long_prefill_token_threshold": 512}
    assert policy.engine_limits({"gpu": "l4", "zone": "a"}) == {"long_prefill_token_threshold": 512}
    rows = {row.path: row for row in explain(policy, Subject(Who(tenant="t", engine_labels={"gpu": "l4"}), ""))}
    found = rows["engine.max_num_active_seqs"], rows["engine.long_prefill_token_threshold"]
    assert [row.origin for row in found] == ["override[0]", "policy"]
    assert [row.value for row in found] == ["0", "512"]


@pytest.mark.parametrize("who", [Who(), Who(tenant="a"), Who("m", "ab")])
def test_explain_gives_what_holds(who: Who) -> None:
    holds = POLICY.of(who)
    rows = explain(POLICY, Subject(who, ""))
    for section, names in PER_REQUEST.items():
        for name in names:
            value = getattr(getattr(holds, section), name)
            expected = spelled(list(value) if isinstance(value, tuple) else value)
            assert (f"{section}.{name}", expected) in [(row.path, row.value) for row in rows]
