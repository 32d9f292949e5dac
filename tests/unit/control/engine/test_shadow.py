"""Rules in shadow against what really happened: each request counts once, with the place where each rule would have
ended it."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_END, FLAG_MARKER, TAKE_BACK_SHIFT
from meridian_control.engine.effective_policies import EffectivePolicies
from meridian_control.engine.request_table import THINK, RequestTable
from meridian_control.engine.shadow_comparison import Comparison
from meridian_control.engine.shortening import LOWER_CAP
from tests.fakes.agent import FakeAgent, hello
from tests.fakes.parts import engine_view
from tests.fakes.tables import policy
from tests.fakes.tables import tokens as columns
from tests.unit.sessions import CALIBRATED, EARLY, Stream, each_token_ends_a_sentence, freezes, stream

SHADOWED = policy(scheduler={"shadow": True}, entropy={"shadow": True})
NO_CAP = -1


def told(made: Comparison) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return (requests, thinking tokens, requests that would end, their tokens there, saved tokens) by section and
    reason."""
    return {
        (m.section, m.reason): (m.requests, m.think_tokens, m.would_end, m.would_end_think_tokens, m.saved_tokens)
        for m in made.messages()
    }


def test_a_request_for_which_several_rules_fire_is_counted_once_where_the_first_would_have_ended_it() -> None:
    made = Comparison()
    made.applied(1, SHADOWED)
    for slot, places in enumerate(({"eat": 100, "rpdi": 40, "soft_close": 70}, {"rpdi": 10, "loop": 150}, {})):
        for reason, tokens in places.items():
            made.fired(slot, reason, tokens)
        made.ended(slot, 200, SHADOWED, NO_CAP)
    assert told(made) == {
        ("entropy", ""): (3, 600, 2, 50, 350),
        ("entropy", "eat"): (3, 600, 1, 100, 100),
        ("entropy", "rpdi"): (3, 600, 2, 50, 350),
        ("loop", ""): (3, 600, 1, 150, 50),
        ("loop", "loop"): (3, 600, 1, 150, 50),
        ("scheduler", ""): (3, 600, 1, 70, 130),
        ("scheduler", "soft_close"): (3, 600, 1, 70, 130),
    }


@pytest.mark.parametrize(
    ("cap", "expected"), [(150, (1, 200, 1, 150, 50)), (200, (1, 200, 0, 0, 0)), (300, (1, 200, 0, 0, 0))]
)
def test_a_cap_in_shadow_would_have_ended_what_went_further(cap: int, expected: tuple[int, ...]) -> None:
    made = Comparison()
    made.applied(1, SHADOWED)
    made.ended(0, 200, SHADOWED, cap)
    assert told(made)["scheduler", ""] == expected
    assert (("scheduler", "hard_cap") in told(made)) == bool(expected[2])


def test_only_sections_in_shadow_are_compared_and_only_the_first_end() -> None:
    half = policy(scheduler={"shadow": False}, entropy={"shadow": True}, loop={"enabled": False})
    made = Comparison()
    made.applied(1, half)
    made.fired(0, "eat", 10)
    made.ended(0, 20, half, NO_CAP)
    made.fired(0, "rpdi", 30)
    made.ended(0, 90, half, NO_CAP)
    assert told(made) == {("entropy", ""): (1, 20, 1, 10, 10), ("entropy", "eat"): (1, 20, 1, 10, 10)}
    made.opened(0)
    made.ended(0, 5, half, NO_CAP)
    assert told(made)["entropy", ""] == (2, 25, 1, 10, 10)
    off = policy(entropy={"enabled": False})
    made.opened(1)
    made.ended(1, 5, off, NO_CAP)
    assert told(made)["entropy", ""] == (2, 25, 1, 10, 10)


def test_a_rule_that_reads_signals_is_compared_over_measured_requests_only() -> None:
    made = Comparison()
    made.applied(1, SHADOWED)
    for slot in range(5):
        made.fired(slot, "loop", 50)
        made.ended(slot, 200, SHADOWED, 150, measured=slot < 2)
    requests = {section: counts[0] for (section, reason), counts in told(made).items() if not reason}
    assert requests == {"entropy": 2, "loop": 5, "scheduler": 5}


def test_other_rules_begin_anew_and_other_fields_do_not() -> None:
    made = Comparison()
    rules_of = EffectivePolicies(RequestTable(1), hello(), made).compared_rules
    made.applied(1, rules_of(SHADOWED))
    made.fired(0, "eat", 10)
    made.ended(0, 20, SHADOWED, NO_CAP)
    made.applied(2, rules_of(SHADOWED.model_copy(update={"fallback": policy(fallback={"lease_ms": 500}).fallback})))
    assert told(made)["entropy", ""][0] == 1
    assert {m.since_revision for m in made.messages()} == {1}
    made.fired(1, "eat", 10)
    changed = policy(scheduler={"shadow": True}, entropy={"shadow": True, "rpdi_threshold": 3.0})
    made.applied(3, rules_of(changed))
    made.ended(1, 20, changed, NO_CAP)
    assert told(made)["entropy", ""] == (1, 20, 0, 0, 0)
    assert {m.since_revision for m in made.messages()} == {3}


# ------------------------------------------------------------------------------------------- the session's comparison


def run(entropy: dict[str, Any], scheduler: dict[str, Any], think: int = 30) -> Stream:
    made = stream(policy(scheduler=EARLY | scheduler, entropy=CALIBRATED | entropy), agent=FakeAgent())
    each_token_ends_a_sentence(made)
    made.open("a", think=think, answer=2)
    made.step(think + 10)
    assert made.balanced()
    return made


def test_a_session_compares_what_it_decides_in_shadow_with_what_comes() -> None:
    made = run({"shadow": True, "rank_conditions": [{"max_ranks": [1]}]}, {})
    rows = told(made.session.shadow)
    reasons = {r for section, r in rows if section == "entropy"}
    assert reasons == {"", "eat", "rank"}
    fired = {d.reason: d for d in made.log.decisions("force")}
    assert set(fired) == {"eat", "rank"}
    for reason, decision in fired.items():
        assert decision.shadow
        where = decision.outcome_think_tokens
        assert rows["entropy", reason] == (1, 30, 1, where, 30 - where)
    assert rows["entropy", ""] == rows["entropy", min(fired, key=lambda r: fired[r].outcome_think_tokens)]
    assert [m.saved_tokens for m in engine_view(made.session).shadow] == [r[4] for r in rows.values()]


def test_an_active_rule_still_ends_what_a_rule_in_shadow_would_have_ended_before() -> None:
    made = run({"shadow": True}, {"soft_think_tokens": 20})
    assert made.session.totals.ends["soft_close"] == 1
    rows = told(made.session.shadow)
    requests, tokens, would_end, there, saved = rows["entropy", "eat"]
    assert (requests, would_end) == (1, 1)
    assert there < 20 <= tokens < 30
    assert saved == tokens - there


def test_a_cap_in_shadow_is_compared() -> None:
    made = run({"enabled": False}, {"shadow": True, "max_think_tokens": 12})
    assert told(made.session.shadow)["scheduler", "hard_cap"] == (1, 30, 1, 12, 18)


@pytest.mark.parametrize(
    ("stages", "would_end_at"), [({50: LOWER_CAP}, 52), ({0: LOWER_CAP, 50: 0}, 20), ({0: LOWER_CAP, 10: 0}, None)]
)
def test_a_cap_in_shadow_that_a_budget_in_force_changes(stages: dict[int, int], would_end_at: int | None) -> None:
    budget = {"name": "b", "tokens_per_day": 1000, "soft_think_tokens": 10_000, "max_think_tokens": 20, "shadow": False}
    shadowed = EARLY | {"max_think_tokens": 1000, "shadow": True}
    made = stream(policy(scheduler=shadowed, entropy={"enabled": False}, budget=[budget]))
    made.thinks_under(stages, think=200, answer=5)
    expected = (1, 200, 0, 0, 0) if would_end_at is None else (1, 200, 1, would_end_at, 200 - would_end_at)
    assert told(made.session.shadow)["scheduler", ""] == expected


def test_a_requests_own_cap_is_no_rule_in_shadow() -> None:
    """It ends thinking although the policy's cap is in shadow, unless a freeze suspends it."""
    made = stream(policy(scheduler={"shadow": True, "max_think_tokens": 20}))
    for name, own in (("own", 7), ("same", 20), ("policy's", None), ("larger", 30)):
        made.open(name, think=40, own_cap=own)
    made.step(45)
    assert made.session.totals.ends == {"hard_cap": 3, "natural": 1, "hard_cap_shadowed": 2}
    assert told(made.session.shadow)["scheduler", "hard_cap"] == (4, 97, 2, 40, 30)
    ends = {d.life.opened.request_id: (d.shadow, d.outcome) for d in made.log.decisions("cap")}
    applied, shadowed = (False, agent_pb2.OUTCOME_APPLIED), (True, agent_pb2.OUTCOME_SHADOWED)
    assert ends == {"own": applied, "same": applied, "policy's": shadowed, "larger": shadowed}
    slot = made.open("frozen", own_cap=7)
    made.step(3)
    freezes(made)
    made.say(tokens=columns([(slot, THINK, 0, 1.0)] * 37 + [(slot, THINK, FLAG_MARKER | FLAG_END, 1.0)]))
    assert told(made.session.shadow)["scheduler", "hard_cap"] == (5, 137, 2, 40, 30)


def test_what_is_aborted_is_not_compared_and_what_ends_while_thinking_is() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True}))
    for name in ("aborted", "cut"):
        made.open(name)
    made.step(30)
    made.agent.abort("aborted")
    made.agent.engine.finish("cut", 2)
    made.step()
    assert told(made.session.shadow)["entropy", ""][:3] == (1, 30, 1)


def test_an_agent_that_takes_back_more_thinking_than_it_counted_leaves_no_negative_count() -> None:
    """The rows after the end of thinking make up for the negative count, so that the table alone does not show it."""
    made = stream(SHADOWED)
    takes_back = FLAG_MARKER | FLAG_END | 2 << TAKE_BACK_SHIFT
    rows = [(0, THINK, 0, 1.0), (0, THINK, takes_back, 1.0), (0, THINK, FLAG_MARKER, 1.0), (0, THINK, 0, 1.0)]
    made.say(opened=[agent_pb2.RequestOpened(slot=0, request_id="a", phase=THINK)], tokens=columns(rows))
    assert told(made.session.shadow)["scheduler", ""] == (1, 0, 0, 0, 0)
    assert [e.think_tokens for e in made.life("a").events if e.kind == "think_end"] == [0]
