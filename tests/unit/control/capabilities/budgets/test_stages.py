"""The stages of a budget, and the values that a stage gives a request."""

from __future__ import annotations

from typing import Any

import pytest

from meridian_control.capabilities.budgets.fleet_budgets import stage_of
from meridian_control.engine.shortening import (
    FLOOR,
    LOWER_CAP,
    SOFT_CLOSE,
    UNSHORTENED,
    Staged,
    matching,
    shortened,
)
from meridian_control.policy.model import Who
from tests.fakes.tables import in_stages, policy

ACME = {"name": "acme", "tenant": "acme*", "tokens_per_day": 1000, "shadow": False}
# A floor that lets the rules' floor be the last stage.
DEEP = {"min_think_tokens": 1}
WHO = Who(tenant="acme-1", model="m")


@pytest.mark.parametrize(
    ("left", "stage"),
    [(1, UNSHORTENED), (0.51, UNSHORTENED), (0.5, SOFT_CLOSE), (0.25, LOWER_CAP), (0.11, LOWER_CAP), (0.1, FLOOR)],
)
def test_a_stage_begins_at_its_share(left: float, stage: int) -> None:
    assert stage_of(left) == stage
    assert stage_of(-1) == FLOOR


def test_a_stage_ends_only_above_the_share_at_which_it_began() -> None:
    stage: int = UNSHORTENED
    course = []
    for percent in (52, 50, 52, 54, 56, 25, 29, 31, 10, 14, 16, 54, 99):
        stage = stage_of(percent / 100, stage)
        course.append(stage)
    rising = [UNSHORTENED, SOFT_CLOSE, SOFT_CLOSE, SOFT_CLOSE, UNSHORTENED, LOWER_CAP, LOWER_CAP, SOFT_CLOSE]
    assert course == [*rising, FLOOR, FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED]


@pytest.mark.parametrize(
    ("scheduler", "own_floor", "stage", "soft", "cap"),
    [
        ({}, 1, SOFT_CLOSE, 4096, 32768),
        ({}, 1, LOWER_CAP, 1024, 2048),
        ({}, 1, FLOOR, 512, 512),
        ({}, 700, FLOOR, 700, 700),
        ({"soft_think_tokens": 9000}, 1, SOFT_CLOSE, 4096, 32768),
        ({"soft_think_tokens": 1000}, 1, LOWER_CAP, 1000, 2048),
        ({"min_think_tokens": 3000}, 1, LOWER_CAP, 3000, 3000),
        ({"min_think_tokens": 5000}, 1, SOFT_CLOSE, 5000, 32768),
        ({"min_think_tokens": 0}, 1, FLOOR, 1, 1),
        ({"max_think_tokens": 1500}, 1, LOWER_CAP, 750, 1500),
        # Without a floor of its own a budget cuts no deeper than its cap, whatever the rules' floor is.
        ({}, 0, LOWER_CAP, 2048, 2048),
        ({}, 0, FLOOR, 2048, 2048),
        ({"min_think_tokens": 21}, 0, FLOOR, 2048, 2048),
        ({"min_think_tokens": 3000}, 0, FLOOR, 3000, 3000),
    ],
)
def test_each_stage_shortens_and_none_goes_below_the_floors(
    scheduler: dict[str, Any], own_floor: int, stage: int, soft: int, cap: int
) -> None:
    own = policy(scheduler=scheduler, budget=[{**ACME, "min_think_tokens": own_floor}])
    held, by = shortened(own, in_stages(matching(own.budget, WHO), {"acme": stage}))
    assert (held.scheduler.soft_think_tokens, held.scheduler.max_think_tokens) == (soft, cap)
    assert held.scheduler.min_think_tokens == own.scheduler.min_think_tokens
    assert by is not None
    assert (by.cap.section, by.cap.name, by.cap.stage, by.cap.without) == ("budget", "acme", stage, own)


@pytest.mark.parametrize(
    ("budget", "scheduler", "stages"),
    [
        (ACME, {}, {}),
        (ACME, {}, {"acme": UNSHORTENED, "other": FLOOR}),
        ({**ACME, "shadow": True}, {}, {"acme": FLOOR}),
        ({**ACME, "model": "other"}, {}, {"acme": FLOOR}),
        ({**ACME, "slo_class": "batch"}, {}, {"acme": FLOOR}),
        ({**ACME, "effort": "high"}, {}, {"acme": FLOOR}),
        (ACME, {"soft_think_tokens": 100}, {"acme": SOFT_CLOSE}),
    ],
)
def test_other_requests_keep_their_policy(
    budget: dict[str, Any], scheduler: dict[str, Any], stages: dict[str, int]
) -> None:
    own = policy(scheduler=scheduler, budget=[budget])
    assert shortened(own, in_stages(matching(own.budget, WHO), stages)) == (own, None)


ALL = {**ACME, **DEEP, "name": "all", "soft_think_tokens": 9000}
STRICT = [{**ACME, **DEEP}, {**ALL, "max_think_tokens": 1000}]
LATE = [{**ACME, **DEEP, "soft_think_tokens": 500}, {**ALL, "max_think_tokens": 6000}]
FLOORS = [
    {**ACME, "max_think_tokens": 4096, "min_think_tokens": 512},
    {**ACME, "name": "all", "max_think_tokens": 1024, "min_think_tokens": 1024},
]


@pytest.mark.parametrize(
    ("budgets", "stages", "soft", "cap", "name"),
    [
        # The strictest budget counts.
        (STRICT, {"acme": LOWER_CAP, "all": SOFT_CLOSE}, 1024, 2048, "acme"),
        (STRICT, {"acme": LOWER_CAP, "all": FLOOR}, 10, 10, "all"),
        (STRICT, {"acme": LOWER_CAP, "all": LOWER_CAP}, 500, 1000, "all"),
        (STRICT, {"acme": SOFT_CLOSE, "all": SOFT_CLOSE}, 4096, 32768, "acme"),
        # No stage begins soft close later than the stage before, or undoes what another budget shortened.
        (LATE, {"acme": SOFT_CLOSE}, 500, 32768, "acme"),
        (LATE, {"acme": LOWER_CAP}, 500, 2048, "acme"),
        (LATE, {"acme": FLOOR}, 10, 10, "acme"),
        (LATE, {"acme": SOFT_CLOSE, "all": SOFT_CLOSE}, 500, 32768, "acme"),
        (LATE, {"acme": SOFT_CLOSE, "all": LOWER_CAP}, 500, 6000, "all"),
        (LATE, {"acme": SOFT_CLOSE, "all": FLOOR}, 10, 10, "all"),
        # The cap's budget is the one that sets it, whatever the stages are, and soft close begins where one alone lets
        # it begin.
        ([ACME, {**ALL, "max_think_tokens": 1000}], {"acme": FLOOR, "all": LOWER_CAP}, 500, 1000, "all"),
        (FLOORS, {"acme": FLOOR, "all": FLOOR}, 512, 512, "acme"),
        (FLOORS[::-1], {"acme": LOWER_CAP, "all": LOWER_CAP}, 1024, 1024, "all"),
    ],
)
def test_several_budgets(budgets: list[dict[str, Any]], stages: dict[str, int], soft: int, cap: int, name: str) -> None:
    own = policy(scheduler={"min_think_tokens": 10}, budget=budgets)
    held, by = shortened(own, in_stages(matching(own.budget, WHO), stages))
    assert (held.scheduler.soft_think_tokens, held.scheduler.max_think_tokens) == (soft, cap)
    assert by is not None
    assert by.cap.name == name


@pytest.mark.parametrize(
    ("pressure", "stage", "in_force"),
    [
        ({}, SOFT_CLOSE, True),
        ({}, UNSHORTENED, False),
        ({"shadow": True}, FLOOR, False),
        ({"entropy_in_force": False}, FLOOR, False),
    ],
)
def test_pressure_puts_entropy_rules_in_force(pressure: dict[str, Any], stage: int, in_force: bool) -> None:
    """Beside it a budget is stricter."""
    entry = {"name": "chat", "ttot_p99_ms": 1, "shadow": False, "entropy_in_force": True, **pressure}
    own = policy(entropy={"shadow": True}, budget=[ACME], pressure=[entry])
    pressed = [Staged("pressure", own.pressure[0], stage)] if stage > UNSHORTENED else []
    held, by = shortened(own, [Staged("budget", own.budget[0], FLOOR), *pressed])
    assert held.entropy == own.entropy.model_copy(update={"shadow": not in_force})
    assert by is not None
    assert by.cap.name == "acme"


def test_pressure_may_change_the_entropy_rules_alone() -> None:
    entry = {"name": "chat", "ttot_p99_ms": 1, "soft_think_tokens": 4096, "shadow": False, "entropy_in_force": True}
    own = policy(scheduler={"soft_think_tokens": 2048}, entropy={"shadow": True}, pressure=[entry])
    held, by = shortened(own, [Staged("pressure", own.pressure[0], SOFT_CLOSE)])
    assert (held.scheduler, held.entropy.shadow) == (own.scheduler, False)
    assert by is not None
    assert (by.cap.section, by.cap.name) == ("pressure", "chat")
