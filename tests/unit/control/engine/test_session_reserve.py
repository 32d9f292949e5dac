"""The answer reserve on the control plane's side: who has it, what the agent is told, and what its ends are called."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.engine.settings_delivery import settings
from meridian_control.journal.messages import compared
from meridian_control.offline.policy_replay import RESERVE
from meridian_control.policy.model import Policy
from tests.fakes.agent import hello
from tests.fakes.parts import engine_view
from tests.fakes.tables import policy
from tests.unit.sessions import Stream, opens, play, stream

PLAIN = {"min_think_tokens": 0, "max_think_tokens": 100}
ALL = {"answer_reserve_for": "all"}


def with_reserve(tokens: int, **scheduler: Any) -> Policy:
    return policy(scheduler={**PLAIN, "answer_reserve_tokens": tokens, **ALL, **scheduler}, entropy={"enabled": False})


def caps(directives: agent_pb2.Directives) -> list[tuple[int, int, bool]]:
    return [(c.max_think_tokens, c.answer_reserve_tokens, c.shadow) for c in directives.caps]


def shadows(made: Stream) -> dict[str, tuple[int, ...]]:
    rows = engine_view(made.session).shadow
    return {r.reason: (r.would_end, r.would_end_think_tokens, r.saved_tokens) for r in rows}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (14, "answer_reserve_tokens: 14 of 60 tokens are left for the answer"),
        (50, "50 tokens do not fit, 14 of 60 are left"),
    ],
)
def test_an_end_by_the_reserve_is_counted_logged_and_explained_as_such(tokens: int, says: str) -> None:
    made = stream(with_reserve(tokens))
    made.open("a", answer=3, max_tokens=60)
    assert caps(made.step()) == [(100, tokens, False)]
    made.step(70)
    assert made.session.totals.ends == {RESERVE: 1}
    assert made.session.totals.settled["cap", "applied"] == 1
    assert made.session.totals.below_cap == {}, "no rule saved these tokens"
    (end,) = (event for event in made.life("a").events if event.kind == "think_end")
    assert (end.detail, end.think_tokens) == (RESERVE, 45)
    (cap,) = made.log.decisions("cap")
    assert (cap.outcome, cap.outcome_think_tokens) == (agent_pb2.OUTCOME_APPLIED, 45)
    assert says in cap.detail
    assert ("answer_reserve_tokens", tokens, "=", "scheduler.answer_reserve_tokens", tokens) in compared(cap)
    assert made.balanced()


def test_an_end_of_an_unknown_request_is_counted_by_its_flags() -> None:
    made = stream()
    by_cap, by_reserve = agent_pb2.TOKEN_FLAG_BY_CAP, agent_pb2.TOKEN_FLAG_BY_RESERVE
    limits = (by_cap, "hard_cap"), (by_cap | by_reserve, RESERVE), (by_reserve, "premature_stop")
    for by, reason in (*limits, (agent_pb2.TOKEN_FLAG_FORCED, "unspecified"), (0, "natural")):
        row: dict[str, Any] = {"slot": [7], "phase": [2], "entropy_nats": [0.0], "end_rank": [0]}
        flags = [agent_pb2.TOKEN_FLAG_END | by]
        made.say(tokens=agent_pb2.TokenColumns(**row, end_logprob_nats=[0.0], flags=flags))
        assert made.session.totals.ends[reason] == 1


def test_another_reserve_is_told_and_an_equal_one_is_not() -> None:
    made = stream(with_reserve(0))
    made.open("a")
    assert caps(made.step()) == [(100, 0, False)]
    for tokens, told in ((7, [(100, 7, False)]), (7, []), (9, [(100, 9, False)]), (0, [(100, 0, False)])):
        made.apply(with_reserve(tokens, long_think_tokens=4000 + made.revision))
        assert caps(made.responses[-1].directives) + caps(made.step()) == told
    made.apply(with_reserve(5))
    made.step()
    made.apply(with_reserve(5, enabled=False))
    table = made.session.table
    assert (made.agent.engine.live["a"].reserve_tokens, int(table.answer_reserve_tokens[0])) == (0, 0)


def test_overrides_choose_the_reserve_of_a_request() -> None:
    overrides = [
        {"effort": "high", "scheduler": {"answer_reserve_tokens": 40}},
        {"tenant": "batch", "scheduler": {"answer_reserve_tokens": 0}},
    ]
    made = stream(policy(scheduler={**PLAIN, "answer_reserve_tokens": 10, **ALL}, override=overrides))
    made.open("plain")
    made.open("high", effort="high")
    made.open("batch", effort="high", tenant="batch")
    assert caps(made.step()) == [(100, 10, False), (100, 40, False), (100, 0, False)]
    made = play(stream(policy(scheduler=PLAIN)), opens("chat", chat=True), opens("completion"))
    assert caps(made.step()) == [(100, 256, False), (100, 0, False)], "by default only chats have one"


@pytest.mark.parametrize(
    ("scheduler", "tokens", "sleeps"),
    [
        ({}, 30, "chat"),
        ({"shadow": True}, 0, ""),
        ({"enabled": False}, 0, ""),
        ({"answer_reserve_tokens": 0, "answer_only_stops": "none"}, 0, "none"),
    ],
)
def test_settings_carry_the_reserve_and_whose_stops_sleep(scheduler: dict[str, Any], tokens: int, sleeps: str) -> None:
    assert settings(1, 1, policy(scheduler=scheduler), hello()).answer_only_stops == sleeps
    told = settings(1, 1, with_reserve(30, **scheduler), hello())
    assert (told.answer_reserve_tokens, told.chat_answer_reserve_tokens) == (tokens, 0)
    told = settings(1, 1, with_reserve(30, answer_reserve_for="chat", **scheduler), hello())
    assert (told.answer_reserve_tokens, told.chat_answer_reserve_tokens) == (0, tokens)
    can_not = hello(capabilities=agent_pb2.Capabilities(dispatch=True))
    assert settings(1, 1, with_reserve(30), can_not).answer_reserve_tokens == 0


def test_without_a_reserve_nothing_on_the_wire_differs() -> None:
    """Neither Settings nor ThinkCap has the field, so an agent of another version reads the same bytes."""
    made = stream(with_reserve(0))
    made.open("a", max_tokens=30)
    cap = made.step().caps[0]
    assert cap == agent_pb2.ThinkCap(decision_id=cap.decision_id, slot=0, max_think_tokens=100)
    names = {f.name for f, _ in settings(1, 1, with_reserve(0), hello()).ListFields()}
    assert "answer_reserve_tokens" not in names
    made.step(60)
    assert made.session.totals.ends == {}


# ----------------------------------------------------------------------------------------------------------- in shadow


def test_a_reserve_in_shadow_is_compared_with_what_came() -> None:
    made = stream(with_reserve(14, shadow=True))
    made.open("a", think=55, answer=3, max_tokens=60)
    made.open("b", think=5, answer=3, max_tokens=60)
    assert caps(made.step()) == [(100, 14, True)] * 2
    made.step(70)
    assert made.session.totals.ends == {"natural": 2, "answer_reserve_shadowed": 1}
    assert shadows(made) == {"": (1, 45, 10), RESERVE: (1, 45, 10)}
    assert made.balanced()


def test_the_first_of_cap_and_reserve_in_shadow_counts() -> None:
    made = stream(with_reserve(20, shadow=True, max_think_tokens=20))
    made.open("a", think=25, answer=3, max_tokens=30)
    made.open("b", think=25, answer=3, max_tokens=24)
    made.step(40)
    assert made.session.totals.ends == {"natural": 2, "hard_cap_shadowed": 1, "answer_reserve_shadowed": 1}
    assert shadows(made) == {"": (2, 38, 12), RESERVE: (1, 18, 7), "hard_cap": (2, 40, 10)}


def test_a_stop_in_shadow_is_counted_as_the_end_that_would_have_followed() -> None:
    made = stream(with_reserve(14, shadow=True))
    made.open("a", max_tokens=60)
    made.step(11)
    made.agent.engine.directives.shadow_stop(made.agent.engine.live["a"], 10)
    made.agent.engine.finish("a")
    made.step()
    assert made.session.totals.ends == {"premature_stop_shadowed": 1}
    assert shadows(made) == {"": (1, 10, 1), "premature_stop": (1, 10, 1)}
    assert made.balanced()


@pytest.mark.parametrize(("think_tokens", "reason"), [(99, RESERVE), (100, "hard_cap")])
def test_from_an_older_agent_less_thinking_than_the_cap_means_the_reserve(think_tokens: int, reason: str) -> None:
    made = stream(with_reserve(14, shadow=True))
    made.open("a", max_tokens=60)
    (cap,) = made.step().caps
    shadowed = agent_pb2.OUTCOME_SHADOWED
    made.say(outcomes=[{"decision_id": cap.decision_id, "outcome": shadowed, "think_tokens": think_tokens}])
    assert made.session.totals.ends == {f"{reason}_shadowed": 1}
