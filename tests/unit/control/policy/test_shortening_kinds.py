"""What in a policy shortens thinking, the warnings about it, and the reasons why its harm is not measured."""

from __future__ import annotations

from typing import Any

import pytest

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.policy.effects import in_shadow
from meridian_control.policy.shortening_kinds import kinds_of, not_measured, warnings
from tests.fakes.tables import policy

ACME = {"name": "acme", "tokens_per_day": 1, "shadow": False}
BUSY = {"name": "busy", "ttft_p99_ms": 1.0, "shadow": False}


@pytest.mark.parametrize(
    ("sections", "kinds"),
    [
        ({}, []),
        ({"scheduler": {"max_think_tokens": 32767}}, ["cap"]),
        ({"scheduler": {"max_think_tokens": 9, "shadow": True}}, []),
        ({"scheduler": {"max_think_tokens": 9, "enabled": False}}, []),
        ({"scheduler": {"soft_think_tokens": 1}}, ["soft_close"]),
        ({"entropy": {"shadow": False}}, ["entropy"]),
        ({"entropy": {"shadow": False, "enabled": False}}, []),
        ({"loop": {"shadow": False}}, ["loop"]),
        ({"budget": [ACME]}, ["budget acme"]),
        ({"budget": [{**ACME, "shadow": True}]}, []),
        ({"budget": [ACME], "scheduler": {"shadow": True}}, []),
        ({"pressure": [BUSY]}, ["pressure busy"]),
        ({"pressure": [{**BUSY, "entropy_in_force": True}]}, ["entropy", "pressure busy"]),
        ({"override": [{"tenant": "a", "scheduler": {"max_think_tokens": 9}}]}, ["cap"]),
        ({"override": [{"tenant": "a", "entropy": {"shadow": False}}]}, ["entropy"]),
        (
            {
                "entropy": {"enabled": False},
                "override": [
                    {"tenant": "a", "entropy": {"enabled": True}},
                    {"model": "m", "entropy": {"shadow": False}},
                ],
            },
            ["entropy"],
        ),
    ],
)
def test_kinds_of_a_policy(sections: dict[str, Any], kinds: list[str]) -> None:
    assert [" ".join(filter(None, kind)) for kind in kinds_of(policy(**sections))] == kinds


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"entropy": {"holdout_share": 0.0}}, ""),
        ({"budget": [ACME]}, ""),
        ({"budget": [ACME], "entropy": {"holdout_share": 0.0}}, "entropy.holdout_share is 0"),
        ({"budget": [ACME], "entropy": {"enabled": False}}, "entropy.enabled is false"),
    ],
)
def test_why_harm_is_not_measured(sections: dict[str, Any], why: str) -> None:
    assert not_measured(policy(**sections)).startswith(why)
    assert bool(not_measured(policy(**sections))) is bool(why)
    assert bool(warnings(policy(**sections))) is bool(why)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, []),
        ({"budget": [ACME]}, []),
        ({"budget": [{**ACME, "min_think_tokens": 21}]}, ["budget acme may cut thinking to 21 tokens"]),
        ({"budget": [{**ACME, "min_think_tokens": 21, "shadow": True}]}, []),
        ({"pressure": [{**BUSY, "max_think_tokens": 99}]}, ["pressure busy may cut thinking to 99 tokens"]),
        ({"scheduler": {"max_think_tokens": 99}}, ["scheduler.max_think_tokens is 99"]),
        ({"scheduler": {"max_think_tokens": 99, "shadow": True}}, []),
        # Calibration itself may recommend a soft close before the calibrated cap.
        ({"scheduler": {"soft_think_tokens": 99}}, []),
        (
            {"override": [{}, {"tenant": "a", "scheduler": {"max_think_tokens": 99}}]},
            ["override[1].scheduler.max_think_tokens is 99"],
        ),
    ],
)
def test_warnings_of_caps_and_floors_below_the_calibrated_cap(sections: dict[str, Any], expected: list[str]) -> None:
    scheduler = {"min_think_tokens": 0, "calibrated_cap_tokens": 100, **sections.get("scheduler", {})}
    found = warnings(policy(**{**sections, "scheduler": scheduler}))
    assert found == [f"{text}, below the 100 that the policy's calibration found to be enough" for text in expected]
    unknown = policy(**{**sections, "scheduler": {**scheduler, "calibrated_cap_tokens": 0}})
    assert warnings(unknown) == []


@pytest.mark.parametrize(
    ("section", "field", "reasons"),
    [
        ("entropy", "shadow", ENTROPY_REASONS),
        ("entropy", "give_up_shadow", ("give_up",)),
        ("scheduler", "shadow", ("soft_close",)),
        ("loop", "shadow", ("loop",)),
    ],
)
def test_each_rule_is_in_shadow_by_its_own_fields(section: str, field: str, reasons: tuple[str, ...]) -> None:
    force: dict[str, Any] = {"scheduler": {"shadow": False}, "loop": {"shadow": False}}
    force["entropy"] = {"shadow": False, "give_up_shadow": False}
    force[section] = {**force[section], field: True}
    shadowed = [reason for reason in (*ENTROPY_REASONS, "soft_close", "loop") if in_shadow(policy(**force), reason)]
    assert shadowed == list(reasons)
