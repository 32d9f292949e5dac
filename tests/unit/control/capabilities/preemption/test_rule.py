"""Which thinking requests may be preempted for waiting ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meridian_control.capabilities.preemption.rule import NO_KV_BLOCKS, NO_PLACE, victims, waits_for
from meridian_control.policy.model import Policy
from tests.fakes.tables import answering, policy, table, thinking

LONG = thinking(think_tokens=300)
TABLE: list[tuple[str, list[dict[str, Any]], dict[str, Any], list[int]]] = [
    ("those with the fewest tokens first", [thinking(think_tokens=400), LONG], {}, [1, 0]),
    ("prompts count, too", [LONG, thinking(think_tokens=290, prompt_tokens=20)], {}, [0, 1]),
    ("none that has thought little", [thinking(think_tokens=255), thinking(think_tokens=256)], {}, [1]),
    ("none that answers", [LONG, answering(think_tokens=300, output_tokens=1)], {}, [0]),
    ("none that was preempted", [LONG, thinking(think_tokens=300, preempted=True)], {}, [0]),
    ("as the policy says", [thinking(think_tokens=8), thinking(think_tokens=9)], {"preemptible_from_tokens": 9}, [1]),
]


@pytest.mark.parametrize(("rows", "own", "slots"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_victims(rows: list[dict[str, Any]], own: dict[str, Any], slots: list[int]) -> None:
    assert victims([(policy(preemption=own), None)], table(*rows)).tolist() == slots


def test_none_whose_end_is_under_way() -> None:
    assert victims([(policy(), None)], table(LONG, LONG, LONG), ending=[1]).tolist() == [0, 2]


def test_those_that_may_preempt_are_preempted_last() -> None:
    """The requests of the lower class alone may be preempted, as long as there is one."""
    made = table(LONG, LONG, thinking(think_tokens=10))
    urgent, others = policy(preemption={"may_preempt": True}), Policy()

    def mask(*slots: int) -> Any:
        return np.isin(np.arange(len(made.live)), slots)

    assert victims([(urgent, mask(0)), (others, mask(1, 2))], made).tolist() == [1]
    assert victims([(urgent, mask(0, 1)), (others, mask(2))], made).tolist() == [0, 1]


def test_why_a_request_waits() -> None:
    assert (waits_for(8, 8), waits_for(7, 8), waits_for(8, 0)) == (NO_PLACE, NO_KV_BLOCKS, NO_KV_BLOCKS)
