"""A session counts thinking for budgets, and shortens requests as the budgets' stages say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.budgets.charges import OTHERS, Carried, Charges
from meridian_control.capabilities.budgets.charges import ROOM as SETS_ROOM
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.common.errors import InvalidRequest
from meridian_control.engine.session import Session
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED
from meridian_control.policy.model import Policy
from tests.fakes.parts import parts
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import (
    Act,
    Stream,
    aborts,
    each_token_ends_a_sentence,
    govern,
    opens,
    play,
    step_report,
    stream,
)

# Both budgets may cut down to the rules' floor.
STAGES = {"soft_think_tokens": 10, "min_think_tokens": 1}
BUDGETS: list[dict[str, Any]] = [
    {"name": "acme", "tenant": "acme", "tokens_per_minute": 1000, "max_think_tokens": 20, **STAGES},
    {"name": "high", "effort": "high", "tokens_per_day": 1000, "max_think_tokens": 30, **STAGES},
]
OFF: dict[str, Any] = {"enabled": False}
THINK = agent_pb2.PHASE_THINK


def following(made: Stream, session_id: str, carried: Carried) -> Session:
    """Return the engine's next session, which goes on with what an earlier one has counted."""
    makers = parts(budgets=lambda stream: EngineBudgets(stream, carried))
    return Session(session_id, made.hello, made.now, parts=makers)


def budgeted(shadow: bool = False, **scheduler: Any) -> Policy:
    limits = {"min_think_tokens": 4, "max_think_tokens": 100, **scheduler}
    return policy(scheduler=limits, entropy=OFF, budget=[{**budget, "shadow": shadow} for budget in BUDGETS])


def closable(first: Policy) -> Stream:
    """Return an engine on which every token ends a sentence with a likely end marker."""
    made = stream(first)
    each_token_ends_a_sentence(made)
    made.agent.end_rank = 1
    return made


def charges(made: Stream | Session) -> Charges:
    return (made.session if isinstance(made, Stream) else made).part(EngineBudgets).charges


def decided(made: Stream, name: str, *reasons: str) -> list[Any]:
    return [event.decision for event in made.life(name).events if event.decision.reason in reasons]


# -------------------------------------------------------------------------------------------------------------- stages


def test_caps_fall_and_rise_with_the_stages() -> None:
    made = stream(budgeted())
    made.open("ours", tenant="acme")
    made.open("floored", tenant="acme", min_think_tokens=12)
    made.open("small", tenant="acme", own_cap=9)
    made.open("other", tenant="else")
    made.step(3)
    whole = {"ours": 100, "floored": 100, "small": 9, "other": 100}
    assert made.caps() == whole
    for stage, cap, floored in ((SOFT_CLOSE, 100, 100), (LOWER_CAP, 20, 20), (FLOOR, 4, 12), (UNSHORTENED, 100, 100)):
        made.stages(acme=stage)
        if stage == FLOOR:
            made.agent.abort("ours")
            made.open("ours2", tenant="acme")
        said = made.step()
        wanted = {"ours": cap, "floored": floored, "small": 9 if cap >= 9 else 4, "other": 100}
        told = {name.removesuffix("2"): limit for name, limit in made.caps().items()}
        assert told == wanted
        assert all(cap.slot != made.agent.engine.live["other"].slot for cap in said.caps)
    assert made.step(5).caps == [], "nothing is sent until a stage changes"
    assert made.balanced()


@pytest.mark.parametrize(
    ("scheduler", "stage", "begins", "budget", "limit"),
    [
        ({}, SOFT_CLOSE, 10, "acme", "budget acme in stage soft_close"),
        ({"soft_think_tokens": 8}, LOWER_CAP, 8, "", "scheduler.soft_think_tokens"),
    ],
    ids=["a budget's", "the policy's own"],
)
def test_a_soft_close_names_what_lets_it_begin(
    scheduler: dict[str, Any], stage: int, begins: int, budget: str, limit: str
) -> None:
    requests = opens("ours", tenant="acme"), opens("other", tenant="else")
    made = play(closable(budgeted(**scheduler)), {"acme": stage}, *requests, 100)
    (force,) = decided(made, "ours", "soft_close")
    assert (force.kind, force.budget, force.comparisons[0].limit_name) == ("force", budget, limit)
    assert not budget or force.budget_stage == stage
    assert force.signals.think_tokens >= begins
    assert bool(decided(made, "other", "soft_close")) == bool(scheduler)


def test_soft_close_names_the_budget_that_lets_it_begin() -> None:
    """The other budget is in a higher stage, and sets the cap."""
    early = {"name": "early", "tokens_per_day": 1, "soft_think_tokens": 10, "max_think_tokens": 60_000, "shadow": False}
    strict = {**early, "name": "strict", "soft_think_tokens": 60_000, "max_think_tokens": 50_000}
    made = closable(policy(scheduler={"max_think_tokens": 100_000}, entropy=OFF, budget=[early, strict]))
    play(made, {"early": SOFT_CLOSE, "strict": LOWER_CAP}, opens("ours"), 600)
    cap, force = decided(made, "ours", "budget", "soft_close")
    assert (cap.budget, cap.budget_stage) == ("strict", LOWER_CAP)
    assert (force.budget, force.budget_stage) == ("early", SOFT_CLOSE)


def test_an_extended_cap_names_the_budget() -> None:
    made = stream(budgeted(empty_answer_extension_tokens=30))
    made.agent.empty_answer = True
    play(made, {"acme": LOWER_CAP}, opens("a", tenant="acme", min_think_tokens=25), 20)
    (cap,) = [decision for decision in decided(made, "a", "empty_answer") if decision.kind == "cap"]
    assert (cap.budget, cap.comparisons[0].value, cap.comparisons[0].limit) == ("acme", 50, 50)


def test_a_cap_that_the_requests_floor_lifts_to_the_policys_names_the_policy() -> None:
    made = stream(budgeted(empty_answer_extension_tokens=30))
    made.agent.empty_answer = True
    play(made, {"acme": LOWER_CAP}, opens("a", tenant="acme", min_think_tokens=150), 50)
    caps = [decision for decision in decided(made, "a", "hard_cap", "empty_answer") if decision.kind == "cap"]
    name, rows = "scheduler.max_think_tokens", [cap.comparisons[0] for cap in caps]
    assert [(row.value, row.limit_name, row.limit) for row in rows] == [
        (100, name, 100),
        (130, f"{name} + scheduler.empty_answer_extension_tokens", 130),
    ]
    assert not any(cap.budget for cap in caps)


@pytest.mark.parametrize("first", [budgeted(shadow=True), budgeted(enabled=False)], ids=["shadow", "off"])
def test_a_budget_in_shadow_and_a_scheduler_that_is_off_shorten_nothing(first: Policy) -> None:
    made = play(stream(first), {"acme": FLOOR}, opens("a", tenant="acme"), 50)
    assert made.session.totals.ends == {}
    assert charges(made).take_tokens() == {"acme": 50}


def test_a_scheduler_in_shadow_shadows_its_budgets() -> None:
    limits = {"shadow": True, "min_think_tokens": 4}
    made = stream(policy(scheduler=limits, entropy=OFF, budget=[{**BUDGETS[0], "shadow": False}]))
    play(made, {"acme": FLOOR}, opens("a", tenant="acme"), 50)
    assert made.session.totals.ends == {"hard_cap_shadowed": 1}, "as the end would be counted in force"
    assert [cap.shadow for cap in decided(made, "a", "budget")] == [True]
    assert made.agent.engine.live["a"].state.think_tokens == 50


def test_stages_that_come_before_the_policy_hold() -> None:
    assert play(Stream(), {"acme": LOWER_CAP}, budgeted(), opens("a", tenant="acme"), 1).caps() == {"a": 20}


def test_a_budget_in_force_needs_ranks_and_earlier_reports() -> None:
    for shadow, measured, steps in ((False, True, 8), (True, False, 24)):
        made = stream(budgeted(shadow=shadow))
        (told,) = [response.settings for response in made.responses if response.HasField("settings")]
        assert (told.observe_entropy, told.report_interval_steps) == (measured, steps)


# -------------------------------------------------------------------------------------------------------------- shadow


def shadowed(made: Stream) -> tuple[int, ...]:
    """Return the comparison of budgets in shadow: thinking that ended, its tokens, ends, their tokens, and saved."""
    (row,) = [row for row in made.session.shadow.messages() if row.section == "budget" and not row.reason]
    return row.requests, row.think_tokens, row.would_end, row.would_end_think_tokens, row.saved_tokens


def test_a_budget_in_shadow_shows_what_its_caps_would_save() -> None:
    made = stream(budgeted(shadow=True))
    ours = opens("capped", 50, tenant="acme"), opens("short", 15, tenant="acme")
    others = opens("floored", 50, tenant="acme", min_think_tokens=30), opens("other", 50, tenant="else")
    play(made, {"acme": LOWER_CAP}, *ours, *others, 60)
    assert shadowed(made) == (3, 115, 2, 50, 30 + 20)
    assert made.session.totals.shadow_saved["budget", "budget"] == 50
    assert "hard_cap" not in made.session.totals.ends


@pytest.mark.parametrize(
    ("before", "after", "ends_at"),
    [
        (LOWER_CAP, UNSHORTENED, 20),
        (SOFT_CLOSE, LOWER_CAP, 40),
        (UNSHORTENED, UNSHORTENED, 0),
        (LOWER_CAP, FLOOR, 20),
    ],
)
def test_a_budget_in_shadow_would_end_thinking_at_the_cap_of_its_time(before: int, after: int, ends_at: int) -> None:
    made = stream(budgeted(shadow=True))
    play(made, {"acme": before}, opens("a", 90, tenant="acme"), 40, {"acme": after}, 60)
    assert shadowed(made) == (1, 90, int(ends_at > 0), ends_at, 90 - ends_at if ends_at else 0)


def test_the_comparison_of_budgets_begins_anew_with_other_budgets() -> None:
    made = play(stream(budgeted(shadow=True)), {"acme": LOWER_CAP}, opens("a", 30, tenant="acme"), 40)
    assert shadowed(made)[2] == 1
    made.apply(policy(budget=[{"name": "acme", "tokens_per_day": 1}]))
    assert made.session.shadow.messages() == []
    play(made, opens("b", 30), 10, policy(entropy=OFF, loop=OFF), 40)
    assert made.session.shadow.messages() == [], "no budget is in shadow for the request any more"


# --------------------------------------------------------------------------------------------------------------- usage


def counts(**budgets: int) -> Callable[[Stream], None]:
    """Assert the thinking tokens of each budget since the last look."""

    def check(made: Stream) -> None:
        assert charges(made).take_tokens() == budgets

    return check


def tenants(**tokens: int) -> Callable[[Stream], None]:
    """Assert the thinking tokens of each tenant since the last look."""

    def check(made: Stream) -> None:
        assert charges(made).take_by_tenant() == {(tenant, "model"): count for tenant, count in tokens.items()}

    return check


def says(count: int, **opened: Any) -> Act:
    """Report a request of the tenant acme in slot 0 and so many thinking tokens of it."""
    request = agent_pb2.RequestOpened(slot=0, request_id="a", tenant="acme", phase=THINK, **opened)
    rows = tokens([(0, THINK, 0, float("nan"))] * count)
    return lambda made: made.session.on_message(step_report(opened=[request], tokens=rows), made.now)


def snapshot(think_tokens: int) -> agent_pb2.ConnectRequest:
    opened = agent_pb2.RequestOpened(slot=3, request_id="a", prompt_tokens=1, think_tokens=think_tokens)
    opened.MergeFrom(agent_pb2.RequestOpened(tenant="acme", phase=THINK))
    return agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=9, requests=[opened]))


OURS, BOTH = opens("a", tenant="acme"), opens("both", tenant="acme", effort="high")
USAGE: dict[str, tuple[Act, ...]] = {
    "for every budget that matches, and once": (
        *(BOTH, opens("one", tenant="acme"), opens("none", tenant="else"), 7, counts(acme=14, high=7), counts()),
        *(2, aborts("both"), 1, counts(acme=2 + 3, high=2)),
    ),
    "only thinking": (opens("a", 5, 20, tenant="acme"), 40, counts(acme=5)),
    "none from before the stream": (says(3, think_tokens=500), counts(acme=3)),
    "those that only a snapshot brings": (
        *(OURS, 5, lambda made: made.session.on_message(snapshot(40), made.now), counts(acme=40)),
    ),
    "for a new budget from then on": (
        *(policy(entropy=OFF), OURS, 5, budgeted(), 2, counts(acme=2), policy(entropy=OFF), 2, counts()),
        *(budgeted(), 1, counts(acme=1)),
    ),
    "what a budget that goes has counted": (OURS, 5, policy(entropy=OFF), 5, counts(acme=5)),
    "not on a prefill engine, whose token is generated again": (says(1, remote_decode=True), counts(), tenants()),
    "tenants without any budget": (
        *(policy(entropy=OFF), OURS, opens("b", tenant="acme"), opens("c", tenant=""), 7),
        *(tenants(**{"acme": 14, "": 7}), counts(), tenants(), aborts("a"), 2, tenants(**{"acme": 2, "": 2})),
    ),
    # The store reads budgets once a second, and a scrape reads tenants whenever it comes.
    "budgets and tenants apart": (OURS, 3, counts(acme=3), 4, tenants(acme=7), counts(acme=4)),
}


@pytest.mark.parametrize("acts", USAGE.values(), ids=USAGE)
def test_what_counts(acts: tuple[Act, ...]) -> None:
    play(stream(budgeted()), *acts)


def test_tokens_from_before_the_policy_wait_for_their_budgets() -> None:
    """The agent confirms a policy a little after its snapshot, and usage may be stored in between."""
    made = play(Stream(), BOTH, 3, counts(), budgeted(), 2, counts(acme=2, high=2))
    assert dict(charges(made).take_unmatched()) == {("model", "acme", "slo", "high"): 3}


def test_users_without_a_policy_are_bounded() -> None:
    made = Stream()
    for number in range(SETS_ROOM + 3):
        charges(made).add_ended(agent_pb2.EndedThinking(tenant=f"t{number}", think_tokens=2))
    counted = charges(made).take_unmatched()
    assert (len(counted), counted[OTHERS], counted.total()) == (SETS_ROOM + 1, 6, 2 * (SETS_ROOM + 3))


def test_tokens_that_a_marker_takes_back_are_set_off_later() -> None:
    """A counter that falls would look like a restart of the replica."""
    made = stream(budgeted())
    charged, table = charges(made), made.session.table
    table.open(agent_pb2.RequestOpened(slot=0, tenant="acme", model="m", phase=THINK), 0.0)
    charged.assign(0, ("acme",))
    for think_tokens, counted in ((5, 5), (3, None), (4, None), (6, 1)):
        table.think_tokens[0] = think_tokens
        assert charged.take_tokens() == ({} if counted is None else {"acme": counted})
        assert charged.take_by_tenant() == ({} if counted is None else {("acme", "m"): counted})


def test_combinations_of_budgets_are_forgotten_with_their_requests() -> None:
    """Clients choose the fields that budgets match on, so eleven budgets make 2048 combinations."""
    letters = "abcdefghijk"
    budgets = [{"name": letter, "tenant": f"*{letter}*", "tokens_per_day": 1} for letter in letters]
    made = stream(policy(entropy=OFF, budget=budgets))
    made.open("kept", tenant="b")
    charged, table = charges(made), made.session.table
    for number in range(1 << len(letters)):
        tenant = "".join(letter for bit, letter in enumerate(letters) if number >> bit & 1)
        table.close(9)
        request = table.open(agent_pb2.RequestOpened(slot=9, request_id=f"r{number}", tenant=tenant), 0.0)
        charged.open(9)
        made.session._policies.assign(9, request)
        assert charged.names(9) == tuple(tenant)
        assert len(charged._sets) <= SETS_ROOM
    table.close(9)
    made.step(2)
    assert charged.take_tokens()["b"] == 2


# --------------------------------------------------------------------------------------------- over several streams


def from_another_replica(reported_session_id: str = "", **fields: Any) -> agent_pb2.ConnectRequest:
    """Return a snapshot whose request has 30 thinking tokens, of which no stream has brought 4."""
    said = snapshot(30)
    said.snapshot.requests[0].unreported_think_tokens = 4
    said.snapshot.MergeFrom(agent_pb2.Snapshot(reported_session_id=reported_session_id, **fields))
    return said


def test_the_next_stream_counts_on_where_the_last_one_ended() -> None:
    made = play(stream(budgeted()), OURS, 5)
    counted = charges(made).hand_on("s").tokens
    assert (counted, charges(made).take_tokens()) == ({("a", 1): 5}, {"acme": 5})
    again = following(made, "s2", Carried("s", counted))
    again.on_message(snapshot(30), made.now)
    govern(again, 1, budgeted(), made.now)
    assert charges(again).take_tokens() == {"acme": 25}
    again.on_message(snapshot(31), made.now)
    assert charges(again).take_tokens() == {"acme": 1}, "what was carried over holds for the first snapshot only"


def test_a_snapshot_says_what_no_stream_has_brought() -> None:
    made = stream(budgeted())
    ended = agent_pb2.EndedThinking(tenant="acme", model="m", effort="high", think_tokens=100)
    responses = made.session.on_message(from_another_replica(ended=[ended]), made.now)
    assert [response.directives.step for response in responses] == [9], "the agent waits for the answer"
    assert charges(made).take_tokens() == {"acme": 4}
    assert charges(made).take_by_tenant() == {("acme", ""): 4, ("acme", "m"): 100}
    assert dict(charges(made).take_unmatched()) == {("m", "acme", "", "high"): 100}
    assert not charges(made).take_unmatched()
    made.session.on_message(snapshot(31), made.now)
    assert charges(made).take_tokens() == {"acme": 1}
    ended.tenant = "t" * 1025
    with pytest.raises(InvalidRequest, match="at most 1024 characters"):
        made.session.on_message(from_another_replica(ended=[ended]), made.now)


def test_a_snapshot_is_answered_at_once_if_it_says_what_no_stream_has_brought() -> None:
    made, ended = Stream(), agent_pb2.Snapshot(step=10, ended=[agent_pb2.EndedThinking(think_tokens=1)])
    assert made.session.on_message(snapshot(30), made.now) == []
    for said, step in ((from_another_replica(), 9), (agent_pb2.ConnectRequest(snapshot=ended), 10)):
        (response,) = made.session.on_message(said, made.now)
        assert response.directives == agent_pb2.Directives(step=step)


@pytest.mark.parametrize(("reported", "tokens"), [("s", 25), ("", 25), ("elsewhere", 4)])
def test_what_an_older_session_counted_is_not_carried_past_another_replica(reported: str, tokens: int) -> None:
    made = stream(budgeted())
    again = following(made, "s3", Carried("s", {("a", 1): 5}))
    again.on_message(from_another_replica(reported), made.now)
    charges(again).take_tokens()
    assert charges(again).take_by_tenant() == {("acme", ""): tokens}


def test_a_session_without_a_snapshot_hands_on_what_it_was_given() -> None:
    made, carried = stream(budgeted()), Carried("s", {("a", 1): 5})
    again = following(made, "s3", carried)
    assert charges(again).hand_on("s3") == carried
    again.on_message(snapshot(30), made.now)
    assert charges(again).hand_on("s3") == Carried("s3", {("a", 1): 30})
