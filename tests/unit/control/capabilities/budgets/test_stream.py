"""A session counts thinking for budgets, and shortens requests as the budgets' stages say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_control.capabilities.budgets.charges import OTHERS, Carried
from meridian_control.capabilities.budgets.charges import ROOM as SETS_ROOM
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.common.errors import InvalidRequest
from meridian_control.engine.session import Session
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED
from tests.fakes.engine import TEXT
from tests.fakes.parts import parts
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.unit.sessions import Stream, step_report, stream

if TYPE_CHECKING:
    from meridian_control.policy.model import Policy

# Both budgets may cut down to the rules' floor.
STAGES = {"soft_think_tokens": 10, "min_think_tokens": 1}
BUDGETS: list[dict[str, Any]] = [
    {"name": "acme", "tenant": "acme", "tokens_per_minute": 1000, "max_think_tokens": 20, **STAGES},
    {"name": "high", "effort": "high", "tokens_per_day": 1000, "max_think_tokens": 30, **STAGES},
]


def following(made: Stream, session_id: str, carried: Carried) -> Session:
    """Return the engine's next session, which goes on with what an earlier one has counted."""
    makers = parts(budgets=lambda stream: EngineBudgets(stream, carried))
    return Session(session_id, made.hello, made.now, parts=makers)


def budgeted(shadow: bool = False, entropy: bool = False, **scheduler: Any) -> Policy:
    limits = {"min_think_tokens": 4, "max_think_tokens": 100, **scheduler}
    budgets = [{**budget, "shadow": shadow} for budget in BUDGETS]
    return policy(scheduler=limits, entropy={"enabled": entropy}, budget=budgets)


def closable(first: Policy) -> Stream:
    """Return an engine on which every token ends a sentence with a likely end marker."""
    made = stream(first)
    made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))
    made.agent.end_rank = 1
    return made


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


def test_soft_close_begins_earlier_and_names_the_budget() -> None:
    made = closable(budgeted())
    made.stages(acme=SOFT_CLOSE)
    made.open("ours", tenant="acme")
    made.open("other", tenant="else")
    made.step(100)
    closed = made.life("ours")
    (force,) = [event.decision for event in closed.events if event.decision.kind == "force"]
    assert (force.reason, force.budget, force.budget_stage) == ("soft_close", "acme", SOFT_CLOSE)
    assert force.comparisons[0].limit_name == "budget acme in stage soft_close"
    assert force.signals.think_tokens >= 10
    assert not [event for event in made.life("other").events if event.decision.kind == "force"]


def test_soft_close_names_the_budget_that_lets_it_begin() -> None:
    """The other budget is in a higher stage, and sets the cap."""
    early = {"name": "early", "tokens_per_day": 1, "soft_think_tokens": 10, "max_think_tokens": 60_000, "shadow": False}
    strict = {**early, "name": "strict", "soft_think_tokens": 60_000, "max_think_tokens": 50_000}
    made = closable(policy(scheduler={"max_think_tokens": 100_000}, entropy={"enabled": False}, budget=[early, strict]))
    made.stages(early=SOFT_CLOSE, strict=LOWER_CAP)
    made.open("ours")
    made.step(600)
    cap, force = [e.decision for e in made.life("ours").events if e.decision.reason in ("budget", "soft_close")]
    assert (cap.budget, cap.budget_stage) == ("strict", LOWER_CAP)
    assert (force.budget, force.budget_stage) == ("early", SOFT_CLOSE)


def test_a_soft_close_of_the_policy_names_no_budget() -> None:
    made = closable(budgeted(soft_think_tokens=8))
    made.stages(acme=LOWER_CAP)
    made.open("ours", tenant="acme")
    made.step(60)
    (force,) = [event.decision for event in made.life("ours").events if event.decision.kind == "force"]
    assert (force.reason, force.budget) == ("soft_close", "")
    assert force.comparisons[0].limit_name == "scheduler.soft_think_tokens"


def test_an_extended_cap_names_the_budget() -> None:
    made = stream(budgeted(empty_answer_extension_tokens=30))
    made.agent.empty_answer = True
    made.stages(acme=LOWER_CAP)
    made.open("a", tenant="acme", min_think_tokens=25)
    made.step(20)
    extended = [event.decision for event in made.life("a").events if event.decision.reason == "empty_answer"]
    (cap,) = [d for d in extended if d.kind == "cap"]
    assert (cap.budget, cap.comparisons[0].value, cap.comparisons[0].limit) == ("acme", 50, 50)


@pytest.mark.parametrize("acts", [{"shadow": True}, {"enabled": False}])
def test_a_budget_in_shadow_and_a_scheduler_that_is_off_shorten_nothing(acts: dict[str, bool]) -> None:
    made = stream(budgeted(shadow=True) if "shadow" in acts else budgeted(**acts))
    made.stages(acme=FLOOR)
    made.open("a", tenant="acme")
    made.step(50)
    assert made.session.totals.ends == {}
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 50}


def shadowed(made: Stream) -> tuple[int, ...]:
    """Return the comparison of budgets in shadow: thinking that ended, its tokens, ends, their tokens, and saved."""
    (row,) = [row for row in made.session.shadow.messages() if row.section == "budget" and not row.reason]
    return row.requests, row.think_tokens, row.would_end, row.would_end_think_tokens, row.saved_tokens


def test_a_budget_in_shadow_shows_what_its_caps_would_save() -> None:
    made = stream(budgeted(shadow=True))
    made.stages(acme=LOWER_CAP)
    made.open("capped", 50, tenant="acme")
    made.open("short", 15, tenant="acme")
    made.open("floored", 50, tenant="acme", min_think_tokens=30)
    made.open("other", 50, tenant="else")
    made.step(60)
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
    made.stages(acme=before)
    made.open("a", 90, tenant="acme")
    made.step(40)
    made.stages(acme=after)
    made.step(60)
    assert shadowed(made) == (1, 90, int(ends_at > 0), ends_at, 90 - ends_at if ends_at else 0)


def test_the_comparison_of_budgets_begins_anew_with_other_budgets() -> None:
    made = stream(budgeted(shadow=True))
    made.stages(acme=LOWER_CAP)
    made.open("a", 30, tenant="acme")
    made.step(40)
    assert shadowed(made)[2] == 1
    made.apply(policy(budget=[{"name": "acme", "tokens_per_day": 1}]))
    assert made.session.shadow.messages() == []
    made.open("b", 30)
    made.step(10)
    made.apply(policy(entropy={"enabled": False}, loop={"enabled": False}))
    made.step(40)
    assert made.session.shadow.messages() == [], "no budget is in shadow for the request any more"


def test_a_scheduler_in_shadow_shadows_its_budgets() -> None:
    limits = {"shadow": True, "min_think_tokens": 4}
    made = stream(policy(scheduler=limits, entropy={"enabled": False}, budget=[{**BUDGETS[0], "shadow": False}]))
    made.stages(acme=FLOOR)
    made.open("a", tenant="acme")
    made.step(50)
    assert made.session.totals.ends["hard_cap_shadowed"] == 0
    assert [event.decision.shadow for event in made.life("a").events if event.decision.reason == "budget"] == [True]
    assert made.agent.engine.live["a"].state.think_tokens == 50


def test_stages_that_come_before_the_policy_hold() -> None:
    made = Stream()
    made.stages(acme=LOWER_CAP)
    made.apply(budgeted())
    made.open("a", tenant="acme")
    made.step()
    assert made.caps() == {"a": 20}


# --------------------------------------------------------------------------------------------------------------- usage


def test_tokens_count_for_every_budget_that_matches_and_once() -> None:
    made = stream(budgeted())
    made.open("both", tenant="acme", effort="high")
    made.open("one", tenant="acme")
    made.open("none", tenant="else")
    made.step(7)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 14, "high": 7}
    assert made.session.part(EngineBudgets).charges.take_tokens() == {}
    made.step(2)
    made.agent.abort("both")
    made.step()
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 2 + 3, "high": 2}


def test_only_thinking_counts() -> None:
    made = stream(budgeted())
    made.open("a", 5, 20, tenant="acme")
    made.step(40)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 5}


def test_tokens_from_before_the_stream_do_not_count() -> None:
    made = stream(budgeted())
    opened = agent_pb2.RequestOpened(
        slot=0, request_id="a", tenant="acme", phase=agent_pb2.PHASE_THINK, think_tokens=500
    )
    made.session.on_message(step_report(opened=[opened], tokens=tokens(3)), made.now)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 3}


def tokens(count: int) -> agent_pb2.TokenColumns:
    """Return thinking tokens of slot 0."""
    nothing = [float("nan")] * count
    think = [agent_pb2.PHASE_THINK] * count
    return agent_pb2.TokenColumns(
        slot=[0] * count,
        phase=think,
        flags=[0] * count,
        entropy_nats=nothing,
        end_rank=[0] * count,
        end_logprob_nats=nothing,
    )


def snapshot(think_tokens: int) -> agent_pb2.ConnectRequest:
    opened = agent_pb2.RequestOpened(
        slot=3, request_id="a", tenant="acme", phase=agent_pb2.PHASE_THINK, think_tokens=think_tokens
    )
    return agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=9, requests=[opened]))


def test_a_snapshot_brings_tokens_that_no_report_brought() -> None:
    made = stream(budgeted())
    made.open("a", tenant="acme")
    made.step(5)
    made.session.on_message(snapshot(40), made.now)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 40}


def test_the_next_stream_counts_on_where_the_last_one_ended() -> None:
    made = stream(budgeted())
    made.open("a", tenant="acme")
    made.step(5)
    counted = made.session.part(EngineBudgets).charges.hand_on("s").tokens
    assert (counted, made.session.part(EngineBudgets).charges.take_tokens()) == ({"a": 5}, {"acme": 5})
    again = following(made, "s2", Carried("s", counted))
    again.on_message(snapshot(30), made.now)
    settings = again.on_policy(1, budgeted())[0].settings
    status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=1)
    again.on_message(agent_pb2.ConnectRequest(settings_status=status), made.now)
    assert again.part(EngineBudgets).charges.take_tokens() == {"acme": 25}
    again.on_message(snapshot(31), made.now)
    assert again.part(EngineBudgets).charges.take_tokens() == {"acme": 1}, (
        "what was carried over holds for the first snapshot only"
    )


def from_another_replica(reported_session_id: str = "", **fields: Any) -> agent_pb2.ConnectRequest:
    """Return a snapshot whose request has 30 thinking tokens, of which no stream has brought 4."""
    said = snapshot(30)
    said.snapshot.requests[0].unreported_think_tokens = 4
    said.snapshot.MergeFrom(agent_pb2.Snapshot(reported_session_id=reported_session_id, **fields))
    return said


def test_a_snapshot_says_what_no_stream_has_brought() -> None:
    made = stream(budgeted())
    ended = agent_pb2.EndedThinking(tenant="acme", model="m", effort="high", think_tokens=100)
    responses = made.session.on_message(from_another_replica(ended=[ended]), made.now)
    assert [response.directives.step for response in responses] == [9], "the agent waits for the answer"
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 4}
    assert made.session.part(EngineBudgets).charges.take_by_tenant() == {("acme", ""): 4, ("acme", "m"): 100}
    assert dict(made.session.part(EngineBudgets).charges.take_unmatched()) == {("m", "acme", "", "high"): 100}
    assert not made.session.part(EngineBudgets).charges.take_unmatched()
    made.session.on_message(snapshot(31), made.now)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 1}
    ended.tenant = "t" * 1025
    with pytest.raises(InvalidRequest, match="at most 1024 characters"):
        made.session.on_message(from_another_replica(ended=[ended]), made.now)


def test_a_snapshot_is_answered_at_once_if_it_says_what_no_stream_has_brought() -> None:
    made = Stream()
    assert made.session.on_message(snapshot(30), made.now) == []
    (response,) = made.session.on_message(from_another_replica(), made.now)
    assert response.directives == agent_pb2.Directives(step=9)
    ended = agent_pb2.Snapshot(step=10, ended=[agent_pb2.EndedThinking(think_tokens=1)])
    (response,) = made.session.on_message(agent_pb2.ConnectRequest(snapshot=ended), made.now)
    assert response.directives == agent_pb2.Directives(step=10)


@pytest.mark.parametrize(("reported", "tokens"), [("s", 25), ("", 25), ("elsewhere", 4)])
def test_what_an_older_session_counted_is_not_carried_past_another_replica(reported: str, tokens: int) -> None:
    made = stream(budgeted())
    again = following(made, "s3", Carried("s", {"a": 5}))
    again.on_message(from_another_replica(reported), made.now)
    again.part(EngineBudgets).charges.take_tokens()
    assert again.part(EngineBudgets).charges.take_by_tenant() == {("acme", ""): tokens}


def test_a_session_without_a_snapshot_hands_on_what_it_was_given() -> None:
    made, carried = stream(budgeted()), Carried("s", {"a": 5})
    again = following(made, "s3", carried)
    assert again.part(EngineBudgets).charges.hand_on("s3") == carried
    again.on_message(snapshot(30), made.now)
    assert again.part(EngineBudgets).charges.hand_on("s3") == Carried("s3", {"a": 30})


def test_tokens_from_before_the_policy_wait_for_their_budgets() -> None:
    """The agent confirms a policy a little after its snapshot, and usage may be stored in between."""
    made = Stream()
    made.open("a", tenant="acme", effort="high")
    made.step(3)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {}
    made.apply(budgeted())
    made.step(2)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 2, "high": 2}
    assert dict(made.session.part(EngineBudgets).charges.take_unmatched()) == {("model", "acme", "slo", "high"): 3}


def test_users_without_a_policy_are_bounded() -> None:
    made = Stream()
    for number in range(SETS_ROOM + 3):
        ended = agent_pb2.EndedThinking(tenant=f"t{number}", think_tokens=2)
        made.session.part(EngineBudgets).charges.add_ended(ended)
    counted = made.session.part(EngineBudgets).charges.take_unmatched()
    assert (len(counted), counted[OTHERS], counted.total()) == (SETS_ROOM + 1, 6, 2 * (SETS_ROOM + 3))


def test_a_new_budget_begins_with_the_tokens_from_now_on() -> None:
    made = stream(policy(entropy={"enabled": False}))
    made.open("a", tenant="acme")
    made.step(5)
    made.apply(budgeted())
    made.step(2)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 2}
    made.apply(policy(entropy={"enabled": False}))
    made.step(2)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {}
    made.apply(budgeted())
    made.step()
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 1}


def test_a_budget_that_goes_keeps_what_it_counted() -> None:
    made = stream(budgeted())
    made.open("a", tenant="acme")
    made.step(5)
    made.apply(policy(entropy={"enabled": False}))
    made.step(5)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 5}


def test_combinations_of_budgets_are_forgotten_with_their_requests() -> None:
    """Clients choose the fields that budgets match on, so eleven budgets make 2048 combinations."""
    letters = "abcdefghijk"
    budgets = [{"name": letter, "tenant": f"*{letter}*", "tokens_per_day": 1} for letter in letters]
    made = stream(policy(entropy={"enabled": False}, budget=budgets))
    made.open("kept", tenant="b")
    charges, table = made.session.part(EngineBudgets).charges, made.session.table
    for number in range(1 << len(letters)):
        tenant = "".join(letter for bit, letter in enumerate(letters) if number >> bit & 1)
        opened = agent_pb2.RequestOpened(slot=9, request_id=f"r{number}", tenant=tenant)
        table.close(9)
        request = table.open(opened, 0.0)
        charges.open(9)
        made.session._policies.assign(9, request)
        assert charges.names(9) == tuple(tenant)
        assert len(charges._sets) <= SETS_ROOM
    table.close(9)
    made.step(2)
    assert charges.take_tokens()["b"] == 2


# ------------------------------------------------------------------------------------------------------------- settings


def test_a_budget_in_force_needs_ranks_and_earlier_reports() -> None:
    for shadow, measured, steps in ((False, True, 8), (True, False, 24)):
        made = stream(budgeted(shadow=shadow))
        (told,) = [response.settings for response in made.responses if response.HasField("settings")]
        assert (told.observe_entropy, told.report_interval_steps) == (measured, steps)


# ------------------------------------------------------------------------------------------------------------- tenants


def test_thinking_counts_for_its_tenant_without_any_budget() -> None:
    made = stream(policy(entropy={"enabled": False}))
    for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "")):
        made.open(name, tenant=tenant)
    made.step(7)
    charges = made.session.part(EngineBudgets).charges
    assert charges.take_by_tenant() == {("acme", "model"): 14, ("", "model"): 7}
    assert charges.take_tokens() == charges.take_by_tenant() == {}
    made.agent.abort("a")
    made.step(2)
    assert charges.take_by_tenant() == {("acme", "model"): 2, ("", "model"): 2}


def test_budgets_and_tenants_count_apart() -> None:
    """The store reads budgets once a second, and a scrape reads tenants whenever it comes."""
    made = stream(budgeted())
    made.open("a", tenant="acme")
    made.step(3)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 3}
    made.step(4)
    assert made.session.part(EngineBudgets).charges.take_by_tenant() == {("acme", "model"): 7}
    assert made.session.part(EngineBudgets).charges.take_tokens() == {"acme": 4}


def test_the_first_token_of_a_prefill_engine_counts_where_it_is_generated_again() -> None:
    made = stream(budgeted())
    opened = agent_pb2.RequestOpened(
        slot=0, request_id="a", tenant="acme", phase=agent_pb2.PHASE_THINK, remote_decode=True
    )
    made.session.on_message(step_report(opened=[opened], tokens=tokens(1)), made.now)
    assert made.session.part(EngineBudgets).charges.take_tokens() == {}
    assert made.session.part(EngineBudgets).charges.take_by_tenant() == {}


def test_tokens_that_a_marker_takes_back_are_set_off_later() -> None:
    """A counter that falls would look like a restart of the replica."""
    made = stream(budgeted())
    charges, table = made.session.part(EngineBudgets).charges, made.session.table
    table.open(agent_pb2.RequestOpened(slot=0, tenant="acme", model="m", phase=agent_pb2.PHASE_THINK), 0.0)
    charges.assign(0, ("acme",))
    for think_tokens, counted in ((5, 5), (3, None), (4, None), (6, 1)):
        table.think_tokens[0] = think_tokens
        assert charges.take_tokens() == ({} if counted is None else {"acme": counted})
        assert charges.take_by_tenant() == ({} if counted is None else {("acme", "m"): counted})
