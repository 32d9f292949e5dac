"""The decision log: the requests whose lives it keeps, the contents of a life, the search for a life, and the log's
bounds."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.cli.explain import _heading
from meridian_control.common.decision_words import outcome_text
from meridian_control.common.errors import InvalidRequest, NotFound
from meridian_control.common.slices import at_once
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.fleet.views import each_request_view
from meridian_control.journal.log import LIFE_EVENTS, DecisionLog
from meridian_control.journal.messages import explain_request, list_decisions, newest_life, page_of
from meridian_control.journal.request_ids import sampled
from tests.fakes.engine import START, TEXT
from tests.fakes.tables import policy
from tests.unit.sessions import (
    CALIBRATED,
    EARLY,
    NOW,
    Stream,
    each_token_ends_a_sentence,
    freezes,
    reconnected,
    stream,
)


def life(made: Stream, request_id: str = "a", engine_id: str = "") -> fleet_pb2.RequestLife:
    request = fleet_pb2.ExplainRequestRequest(request_id=request_id, engine_id=engine_id)
    return explain_request(made.log, list(each_request_view(made.session)), request).life


def kinds(told: fleet_pb2.RequestLife) -> list[str]:
    """Return the kinds of a life's events, without probes and tiers."""
    names = [(e.decision.kind, e.decision.reason) if e.kind == "decision" else (e.kind, e.detail) for e in told.events]
    return [" ".join(filter(None, name)) for name in names if name[0] not in ("probe", "tier")]


def decisions(made: Stream, **asked: Any) -> list[fleet_pb2.LoggedDecision]:
    return list(at_once(list_decisions(made.log, fleet_pb2.ListDecisionsRequest(**asked))).decisions)


def compared(decision: fleet_pb2.LoggedDecision) -> dict[str, tuple[float, str, str, float]]:
    return {c.signal: (c.value, c.operator, c.limit_name, c.limit) for c in decision.comparisons}


# -------------------------------------------------------------------------------------------------------------- lives


def test_a_life_from_opening_to_closing() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a", answer=3, tenant="acme")
    made.step(6)
    made.agent.preempt("a")
    made.step(2)
    made.agent.preempt("a", waits=False)
    made.step(30)
    told = life(made)
    ends = ["force eat", "think_end eat", "closed stop"]
    assert kinds(told) == ["opened", "cap hard_cap", "preempted", "resumed", *ends]
    assert (told.engine_id, told.incarnation, told.tenant, told.joined_late) == ("engine", "1", "acme", False)
    force = next(e for e in told.events if e.decision.kind == "force").decision
    end = next(e for e in told.events if e.kind == "think_end")
    assert (force.outcome, force.revision, force.shadow) == (agent_pb2.OUTCOME_APPLIED, 1, False)
    assert force.signals.think_tokens <= force.outcome_think_tokens == end.think_tokens == told.think_tokens
    assert force.time.ToNanoseconds() < force.outcome_time.ToNanoseconds()
    assert told.output_tokens == 3
    times = [e.time.ToNanoseconds() for e in told.events]
    assert times == sorted(times)
    assert told.close_time.ToNanoseconds() == times[-1]
    assert told.open_time.ToDatetime(UTC) == NOW + timedelta(milliseconds=5), "the time is the message's"


def test_what_a_report_brings_comes_before_what_is_decided_from_it() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("a", think=3, answer=2)
    made.merged([made.agent.step() for _ in range(5)])
    told = life(made)
    assert kinds(told) == ["opened", "think_end natural", "cap hard_cap"]
    assert [event.think_tokens for event in told.events] == sorted(event.think_tokens for event in told.events)


def test_what_the_eat_rule_saw_and_compared() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a", min_think_tokens=6)
    made.step(30)
    (force,) = decisions(made, kind="force")
    assert compared(force) == {
        "think_tokens": (force.signals.think_tokens, ">=", "own min_think_tokens", 6),
        "eat_samples": (4, ">=", "entropy.eat_warmup_samples", 4),
        "eat_ema_variance": (0, "<", "entropy.eat_ema_variance_threshold", 1e-4),
        "eat_ema_nats": (pytest.approx(0.01), "<", "entropy.eat_level_threshold_nats", 0.1),
    }
    probes = decisions(made, kind="probe", reason="eat")
    assert [p.measured_eat_nats for p in probes] == [pytest.approx(0.01)] * 4
    (cap,) = decisions(made, kind="cap")
    assert compared(cap) == {"max_think_tokens": (32768, "=", "scheduler.max_think_tokens", 32768)}


RANKS = {"rank_conditions": [{"max_ranks": [1, 1]}, {"max_ranks": [9]}], "eat_probe_interval_tokens": 10_000}


@pytest.mark.parametrize(
    ("sections", "reason", "expected"),
    [
        (
            {"entropy": CALIBRATED | {"confirm_sentence_ends": 2}},
            "eat",
            {
                "eat_samples": (5, ">=", "entropy.eat_warmup_samples + entropy.confirm_sentence_ends - 1", 5),
                "earlier_eat_ema_nats[0]": (pytest.approx(0.01), "<", "entropy.eat_level_threshold_nats", 0.1),
                "earlier_eat_ema_variance[0]": (0, "<", "entropy.eat_ema_variance_threshold", 1e-4),
            },
        ),
        (
            {"entropy": RANKS},
            "rank",
            {"boundary_ranks[0]": (3, "<=", "entropy.rank_conditions[1].max_ranks[0]", 9)},
        ),
        (
            {"entropy": RANKS | {"confirm_sentence_ends": 2}},
            "rank",
            {
                "boundary_ranks[0]": (3, "<=", "entropy.rank_conditions[1].max_ranks[0]", 9),
                "boundary_ranks[1]": (3, "<=", "entropy.rank_conditions[1].max_ranks[0]", 9),
            },
        ),
        (
            {"entropy": {"rpdi_threshold": 0.5, "rpdi_window_tokens": 2, "confirm_sentence_ends": 2}},
            "rpdi",
            {
                "rpdi": (1, ">", "entropy.rpdi_threshold", 0.5),
                "boundary_rpdi[1]": (1, ">", "entropy.rpdi_threshold", 0.5),
            },
        ),
        (
            {"scheduler": {"soft_think_tokens": 4}},
            "soft_close",
            {
                "think_tokens": (5, ">=", "scheduler.soft_think_tokens", 4),
                "boundary_ranks[0]": (3, "<=", "scheduler.soft_close_rank", 20),
            },
        ),
    ],
)
def test_what_the_other_rules_compared(
    sections: dict[str, dict[str, Any]], reason: str, expected: dict[str, Any]
) -> None:
    scheduler = EARLY | sections.get("scheduler", {})
    made = stream(policy(scheduler=scheduler, entropy={"shadow": False} | sections.get("entropy", {})))
    made.agent.end_rank = 3
    made.open("a")
    made.step(3)
    each_token_ends_a_sentence(made)
    made.step(40)
    (force,) = decisions(made, kind="force")
    assert force.reason == reason
    assert compared(force) == compared(force) | expected


def test_a_requests_own_cap_and_an_extension_are_named() -> None:
    limits = {"max_think_tokens": 100, "min_think_tokens": 0, "empty_answer_extension_tokens": 30}
    made = stream(policy(scheduler=limits, entropy={"enabled": False}))
    made.agent.empty_answer = True
    made.open("a")
    made.open("own", own_cap=90)
    made.step(120)
    names = {(d.request_id, d.reason): compared(d)["max_think_tokens"] for d in decisions(made, kind="cap")}
    both = "scheduler.max_think_tokens + scheduler.empty_answer_extension_tokens"
    assert names == {
        ("a", "hard_cap"): (100, "=", "scheduler.max_think_tokens", 100),
        ("a", "empty_answer"): (130, "=", both, 130),
        ("own", "hard_cap"): (90, "=", "own max_think_tokens", 90),
    }
    probe = decisions(made, kind="probe", request_id="a")[0]
    assert compared(probe)["think_tokens"][1:] == (">=", "max_think_tokens - 64", 36)
    assert "think_end hard_cap" in kinds(life(made, "own"))


def test_an_extension_is_no_reason_once_the_policy_has_none() -> None:
    limits = {"max_think_tokens": 100, "min_think_tokens": 0, "answer_reserve_tokens": 0}
    extending = {**limits, "empty_answer_extension_tokens": 30}
    made = stream(policy(scheduler=extending, entropy={"enabled": False}))
    made.agent.empty_answer = True
    made.open("a")
    made.step(60)
    made.apply(policy(scheduler={**limits, "max_think_tokens": 90}, entropy={"enabled": False}))
    newest, *_ = decisions(made, kind="cap")
    assert (newest.reason, compared(newest)) == (
        "hard_cap",
        {"max_think_tokens": (90, "=", "scheduler.max_think_tokens", 90)},
    )


def test_a_limit_names_the_override_that_sets_it() -> None:
    """Two overrides of different tenants may set the same values, and a later one wins."""
    limits = {"max_think_tokens": 40, "answer_reserve_tokens": 7, "answer_reserve_for": "all"}
    overrides = [
        {"scheduler": limits},
        *({"tenant": tenant, "scheduler": {"max_think_tokens": 30}} for tenant in ("acme", "b*", "acme*")),
        {"engine_labels": {"zone": "x"}, "scheduler": {"max_think_tokens": 20}},
    ]
    made = stream(policy(override=overrides))
    for name in ("acme", "bar", "", "acme-2"):
        made.open(f"r-{name}", tenant=name)
    made.step()
    reserve = "override[0].scheduler.answer_reserve_tokens"
    assert {d.request_id: [row.limit_name for row in d.comparisons] for d in decisions(made, kind="cap")} == {
        "r-acme": ["override[3].scheduler.max_think_tokens", reserve],
        "r-bar": ["override[2].scheduler.max_think_tokens", reserve],
        "r-": ["override[0].scheduler.max_think_tokens", reserve],
        "r-acme-2": ["override[3].scheduler.max_think_tokens", reserve],
    }


def test_a_rule_names_the_override_that_sets_its_thresholds_and_its_floor() -> None:
    """A floor that is lowered to a lower cap is said where the cap is."""
    entropy = {"rank_conditions": [{"max_ranks": [9]}], "eat_probe_interval_tokens": 10_000}
    low = {"effort": "low", "scheduler": {"max_think_tokens": 20}}
    other = {"effort": "other", "scheduler": {"min_think_tokens": 12}, "entropy": entropy}
    made = stream(policy(entropy={"shadow": False}, override=[{"entropy": entropy}, low, other]))
    made.agent.end_rank = 3
    for effort in ("low", "other"):
        made.open(effort, effort=effort)
    each_token_ends_a_sentence(made)
    made.step(25)
    named = {d.request_id: [row.limit_name for row in d.comparisons] for d in decisions(made, reason="rank")}
    rank = "entropy.rank_conditions[0].max_ranks[0]"
    assert named == {
        "low": ["override[1].scheduler.max_think_tokens", f"override[0].{rank}"],
        "other": ["override[2].scheduler.min_think_tokens", f"override[2].{rank}"],
    }


def test_the_default_cap_of_the_control_group_is_named_as_such() -> None:
    """The policy's own cap does not hold for the group, unless it is higher than the default."""
    names: dict[tuple[int, str], Any] = {}
    for cap in (100, 40_000):
        limits = {"max_think_tokens": cap, "answer_reserve_tokens": 0, "min_think_tokens": 0}
        made = stream(policy(scheduler=limits, entropy={"holdout_share": 0.5, "shadow": False}))
        made.open("r1")
        made.open("r3", own_cap=90)
        made.open("r2")
        made.step()
        names |= {(cap, d.request_id): compared(d)["max_think_tokens"] for d in decisions(made, kind="cap")}
    default, field = "default cap, in the control group", "scheduler.max_think_tokens"
    assert names == {
        (100, "r1"): (32768, "=", default, 32768),
        (100, "r2"): (100, "=", field, 100),
        (100, "r3"): (90, "=", "own max_think_tokens", 90),
        (40_000, "r1"): (40_000, "=", field, 40_000),
        (40_000, "r2"): (40_000, "=", field, 40_000),
        (40_000, "r3"): (90, "=", "own max_think_tokens", 90),
    }


def test_an_abort_says_who_may_have_made_it() -> None:
    made = stream(policy(scheduler=EARLY))
    for name in "ab":
        made.open(name)
    made.step(3)
    made.agent.abort("a")
    made.agent.engine.finish("b", agent_pb2.FINISH_REASON_ABORT)
    made.step()
    assert [kinds(life(made, name))[-1] for name in "ab"] == [
        "closed the client has gone",
        "closed aborted by the front end: a stop string, a disconnect or a pause",
    ]


# ------------------------------------------------------------------------------------------------------------- streams


def test_a_life_goes_on_over_a_broken_stream() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("a", answer=2)
    made.open("gone", answer=2)
    made.step(3)
    at_once(made.session.closing(made.now))
    assert [d.outcome for d in decisions(made, kind="cap", request_id="a")] == [agent_pb2.OUTCOME_AGENT_OFF]
    told = life(made)
    assert kinds(told)[-1] == "stream_lost"
    assert not told.HasField("close_time")
    made.agent.abort("gone")
    made.agent.engine.take()
    made.now += timedelta(seconds=3)
    again = reconnected(made, policy(scheduler=EARLY))
    again.step(3)
    assert kinds(life(again))[-3:] == ["stream_lost", "stream_back", "cap hard_cap"]
    assert {d.session_id for d in decisions(again, kind="cap", request_id="a")} == {"s", "t"}
    assert kinds(life(again, "gone"))[-1] == "stream_lost"


def test_a_life_shows_that_its_engine_was_frozen_and_by_whom() -> None:
    """A freeze ends all decisions, so that without it nothing would say why a cap did not act."""
    made = stream(policy(scheduler=EARLY | {"max_think_tokens": 20}))
    made.open("a", think=60)
    made.step(5)
    until = made.now + timedelta(1)
    both = tuple(Freeze(number, Match(), "ann", "incident", made.now, until) for number in (1, 2))
    for listed in (both[:1], both, ()):
        made.deliver(made.session.on_freezes(listed, made.now))
        made.pump()
    made.step(5)
    said = [(event.kind, event.detail) for event in life(made).events if event.kind in ("frozen", "thawed")]
    assert said == [("frozen", "freeze 1 by ann: incident"), ("thawed", "")]
    assert "agent off or frozen" in outcome_text("cap", decisions(made, kind="cap")[-1].outcome)


@pytest.mark.parametrize("stays", [True, False])
def test_a_freeze_ends_in_a_life_although_its_stream_was_lost_meanwhile(stays: bool) -> None:
    """stays: whether the engine is still frozen when the next stream begins."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", think=60)
    made.step(2)
    freezes(made)
    made.open("b", think=60)
    made.step(2)
    at_once(made.session.closing(made.now))
    said = {"freeze": agent_pb2.FreezeStatus(frozen=stays)}
    again = Stream(session_id="t", log=made.log, now=made.now, hello_fields=said)
    (thaw,) = again.session.on_freezes((), again.now)
    for message in (
        {"snapshot": made.agent.snapshot()},
        {"freeze_status": agent_pb2.FreezeStatus(nonce=thaw.freeze.nonce)},
        {"step": agent_pb2.StepReport(step=9, steps=1, opened=[agent_pb2.RequestOpened(slot=9, request_id="c")])},
    ):
        again.session.on_message(agent_pb2.ConnectRequest(**message), again.now)
    wanted = ["frozen", "stream_lost", "stream_back", "thawed"]
    for name in "ab":
        told = [event.kind for event in life(again, name).events]
        assert [kind for kind in told if kind in wanted] == wanted
    assert not {"frozen", "thawed"}.intersection(kinds(life(again, "c")))


def test_each_input_of_a_streaming_session_has_a_life_of_its_own() -> None:
    """All inputs have the session's id, and the prompt of each has those before it."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", answer=2)
    made.step(5)
    at_once(made.session.closing(made.now))
    made.agent.abort("a")
    made.agent.engine.take()
    made.open("a", prompt=[TEXT, START])
    made.now += timedelta(seconds=3)
    again = reconnected(made, policy(scheduler=EARLY))
    again.step(3)
    both = explain_request(made.log, [], fleet_pb2.ExplainRequestRequest(request_id="a"))
    assert kinds(both.life) == ["opened", "cap hard_cap"]
    (earlier,) = both.siblings
    assert kinds(earlier)[-1] == "stream_lost"


def test_a_request_that_was_under_way_is_said_to_be() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("a")
    made.step(3)
    made.log = DecisionLog()
    again = reconnected(made, policy(scheduler=EARLY))
    assert life(again).joined_late
    assert life(again).think_tokens == 3
    at_once(made.session.closing(made.now))
    assert kinds(life(again))[-1] != "stream_lost", "the end of the older stream is no event of the request"


def test_a_request_that_a_snapshot_lacks_ended_unheard() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("a")
    made.step(3)
    made.agent.abort("a")
    made.agent.engine.take()
    made.agent.say(snapshot=made.agent.snapshot())
    made.pump()
    assert kinds(life(made))[-1] == "closed unknown"


# --------------------------------------------------------------------------------------------------- search and bounds


def test_requests_are_found_by_the_clients_part_of_their_id_and_the_newest_first() -> None:
    made = stream(policy(scheduler=EARLY))
    for name in ("chatcmpl-mine-1a2b", "mine-9", "other"):
        made.open(name, think=2, answer=1)
        made.step(6)
    assert life(made, "mine").request_id == "mine-9"
    assert life(made, "chatcmpl-mine").request_id == "chatcmpl-mine-1a2b"
    assert {d.request_id for d in decisions(made, request_id="mine")} == {"chatcmpl-mine-1a2b", "mine-9"}
    for request_id, engine_id in (("min", ""), ("mine", "elsewhere"), ("", "")):
        with pytest.raises(NotFound, match="in the decision log"):
            life(made, request_id, engine_id)


def test_decisions_come_newest_first_in_pages() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    for name in "abc":
        made.open(name, answer=2)
        made.step(20)
    every = decisions(made)
    ids = [d.decision_id for d in every]
    assert ids == sorted(ids, reverse=True)
    assert {d.kind for d in every} == {"cap", "force", "probe", "tier"}
    request = fleet_pb2.ListDecisionsRequest(page_size=7)
    paged: list[fleet_pb2.LoggedDecision] = []
    while True:
        page = at_once(list_decisions(made.log, request))
        paged += page.decisions
        if not page.next_page_token:
            break
        assert len(page.decisions) >= 7, "decisions of the same time stay on one page"
        request.page_token = page.next_page_token
    assert paged == every
    assert {d.request_id for d in decisions(made, request_id="b", engine_id="engine")} == {"b"}
    for token in ("x", "9" * 18):
        with pytest.raises(InvalidRequest, match="page_token"):
            decisions(made, page_token=token)


def test_a_life_that_two_replicas_tell_of_is_one() -> None:
    """The request's engine moved to another replica, which knows the request from that time on."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", answer=2)
    made.step(3)
    at_once(made.session.closing(made.now))
    request = fleet_pb2.ExplainRequestRequest(request_id="a")
    before = explain_request(made.log, (), request)
    made.log = DecisionLog()
    made.now += timedelta(seconds=1)
    again = reconnected(made, policy(scheduler=EARLY))
    again.step(3)
    after = explain_request(made.log, list(each_request_view(again.session)), request)
    told = newest_life([after, before])
    assert kinds(told.life) == ["opened", "cap hard_cap", "stream_lost", "opened", "cap hard_cap"]
    assert not told.life.joined_late
    assert told.life.open_time == before.life.open_time
    assert (told.life.think_tokens, told.live.request_id) == (after.life.think_tokens, "a")
    assert newest_life([before]) == before


@pytest.mark.parametrize("stays", [True, False])
def test_a_thaw_between_two_replicas_is_in_the_life(stays: bool) -> None:
    """stays: whether the engine is still frozen when it comes to the other replica, which thaws it later."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", think=60)
    made.step(2)
    freezes(made)
    at_once(made.session.closing(made.now))
    request = fleet_pb2.ExplainRequestRequest(request_id="a")
    answers = [explain_request(made.log, (), request)]
    later, status = made.now + timedelta(seconds=2), agent_pb2.FreezeStatus(frozen=stays)
    again = Stream(session_id="t", log=DecisionLog(), now=later, hello_fields={"freeze": status})
    again.session.on_message(agent_pb2.ConnectRequest(snapshot=made.agent.snapshot()), again.now)
    if stays:
        again.now += timedelta(seconds=1)
        (thaw,) = again.session.on_freezes((), again.now)
        thawed = agent_pb2.FreezeStatus(nonce=thaw.freeze.nonce)
        again.session.on_message(agent_pb2.ConnectRequest(freeze_status=thawed), again.now)
    answers.append(explain_request(again.log, (), request))
    told = newest_life(answers).life
    wanted = ["frozen", "stream_lost", "opened", "thawed"]
    assert [event.kind for event in told.events if event.kind in wanted][1:] == wanted
    (thaw_event,) = [event for event in told.events if event.kind == "thawed"]
    assert thaw_event.time.ToDatetime(UTC) == again.now


def part(
    tokens: tuple[int, int], *events: tuple[int, str], close_s: int | None = None
) -> fleet_pb2.ExplainRequestResponse:
    """Return what one replica knows of a request: its counts, and the seconds and kinds of events."""
    life = fleet_pb2.RequestLife(think_tokens=tokens[0], output_tokens=tokens[1])
    answer = fleet_pb2.ExplainRequestResponse(life=life)
    answer.life.open_time.FromSeconds(events[0][0])
    for seconds, kind in events:
        event = answer.life.events.add(kind=kind, detail="stop" if kind == "closed" else "")
        event.time.FromSeconds(seconds)
    if close_s is not None:
        answer.life.close_time.FromSeconds(close_s)
    return answer


@pytest.mark.parametrize(
    "parts",
    [
        # The engine came back to the first replica.
        (
            part((900, 40), (100, "opened"), (110, "stream_lost"), (130, "stream_back"), (150, "closed"), close_s=150),
            part((500, 0), (110, "opened"), (130, "stream_lost")),
        ),
        # The first replica noticed late that the stream was lost.
        (
            part((500, 0), (100, "opened"), (160, "stream_lost")),
            part((900, 40), (110, "opened"), (150, "closed"), close_s=150),
        ),
    ],
)
def test_a_life_ends_as_the_replica_says_that_saw_the_end(parts: tuple[fleet_pb2.ExplainRequestResponse, ...]) -> None:
    for answers in (parts, parts[::-1]):
        *_, end = _heading(newest_life(answers))
        assert end == "closed after 50.000 s (stop): 900 thinking and 40 answer tokens"


def test_pages_of_several_replicas_end_between_two_moments() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    for name in "abcd":
        made.open(name)
    made.step(12)
    every = decisions(made, page_size=1000)
    whole = page_of((*every[::2], *every[1::2]), 1000)
    assert [d.time.ToMicroseconds() for d in whole.decisions] == [d.time.ToMicroseconds() for d in every]
    page = page_of(every, 3)
    assert len(page.decisions) == 4, "the session asked for four probes at the same time"
    assert page.next_page_token == str(page.decisions[-1].time.ToMicroseconds())


def test_a_probe_has_only_the_values_that_decided_about_it() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_level_threshold_nats": 0.0}))
    made.open("a")
    made.step(100)
    counted = decisions(made, kind="probe")[0].signals
    assert (counted.phase, counted.output_tokens) == (agent_pb2.PHASE_THINK, 0)
    assert 90 <= counted.think_tokens <= 100
    assert (math.isnan(counted.entropy_nats), counted.eat_samples, list(counted.boundary_ranks)) == (True, 0, [])
    cap = decisions(made, kind="cap")[0].signals
    assert (cap.phase, cap.max_think_tokens) == (agent_pb2.PHASE_THINK, 32768)
    gate = {"eat_level_threshold_nats": 0.0, "eat_probe_max_rank": 50}
    made.apply(policy(scheduler=EARLY, entropy=CALIBRATED | gate))
    each_token_ends_a_sentence(made)
    made.agent.end_rank = 3
    made.step(100)
    gated = decisions(made, kind="probe")[0]
    assert gated.signals.think_tokens > counted.think_tokens
    assert gated.signals.eat_samples > 0
    assert compared(gated)["boundary_ranks[0]"] == (3, "<=", "entropy.eat_probe_max_rank", 50)
    assert gated.signals.boundary_ranks[0] == 3


@pytest.mark.parametrize("room", [60, 1000])
def test_a_life_shows_its_probes_and_probes_displace_probes_only(room: int) -> None:
    made = Stream(log=DecisionLog(max_probes=room))
    made.apply(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_level_threshold_nats": 0.0}))
    made.open("a")
    made.open("b")
    made.step(400)
    told = life(made)
    probes = [e.decision for e in told.events if e.decision.kind == "probe"]
    listed = decisions(made, page_size=1000)
    kept = Counter(d.kind for d in listed)
    asked = made.session.totals.decisions["probe"]
    assert kept == {"probe": min(room, asked), "cap": 2, "tier": 2}
    assert {probe.request_id for probe in probes} == {"a"}
    assert probes[-1].signals.think_tokens > 390
    assert kinds(told)[:2] == ["opened", "cap hard_cap"]
    assert told.events_left_out == (asked - kept["probe"]) // 2
    times = [event.time.ToNanoseconds() for event in told.events]
    assert times == sorted(times)
    assert [d.decision_id for d in listed] == sorted((d.decision_id for d in listed), reverse=True)


def test_one_life_keeps_its_newest_events() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("a")
    made.step()
    for number in range(LIFE_EVENTS):
        made.apply(policy(scheduler=EARLY | {"max_think_tokens": 100_000 + number}))
        made.step()
    told = life(made)
    opened, *events = (event for event in told.events if event.decision.kind != "probe")
    assert opened.kind == "opened"
    assert len(events) == LIFE_EVENTS
    newest = next(made.log.decisions("cap"))
    assert newest.decision_id in {event.decision.decision_id for event in events}
    counted = made.session.totals.decisions
    assert told.events_left_out == counted["cap"] + counted["tier"] - LIFE_EVENTS


def test_the_log_forgets_what_ended_first_and_keeps_its_bounds() -> None:
    made = Stream(log=DecisionLog(max_events=60, max_decisions=20))
    made.apply(policy(scheduler=EARLY))
    made.open("lives")
    for number in range(50):
        made.open(f"r{number}", think=2, answer=1)
        made.step(6)
        assert made.log.events <= 60
    assert life(made, "lives").open_time.ToDatetime() < life(made, "r49").open_time.ToDatetime()
    with pytest.raises(NotFound, match="dropped for newer requests"):
        life(made, "r0")
    assert len([d for d in decisions(made, page_size=1000) if d.kind != "probe"]) == 20
    kept = [*made.log._live.values(), *made.log._over.values()]
    assert sum(1 + len(kept_life.events) for kept_life in kept) == made.log.events


def test_a_life_with_long_texts_counts_more() -> None:
    """The bound of the log is a bound of its memory, whatever clients and agents write into a request's texts."""
    made = Stream(log=DecisionLog(max_events=100))
    made.apply(policy(scheduler=EARLY))
    for number in range(20):
        made.open(f"r{number}", answer=1, tenant="é" * 1000, effort="é" * 1000)
        made.step(3)
    kept = [*made.log._live.values(), *made.log._over.values()]
    assert {life.weight for life in kept} == {5}
    assert made.log.events <= 100
    assert 10 < len(kept) < 20


def test_live_requests_go_too_where_there_is_no_other_room() -> None:
    made = Stream(log=DecisionLog(max_events=20))
    made.apply(policy(scheduler=EARLY))
    for number in range(20):
        made.open(f"r{number}")
        made.step()
    assert made.log.events <= 20
    with pytest.raises(NotFound, match="is unknown, is not in the sample, or was dropped"):
        life(made, "elsewhere")
    with pytest.raises(NotFound, match="the request lives, but is not in the sample"):
        life(made, "r0")


# -------------------------------------------------------------------------------------------------------------- sample


def test_a_sample_holds_lives_whole_or_not_at_all() -> None:
    half = {"decision_log_sample_ratio": 0.5}
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"holdout_share": 0.0}, telemetry=half))
    names = [f"r{number}" for number in range(40)]
    for name in names:
        made.open(name, answer=1)
    made.step(40)
    wanted = {name for name in names if sampled(name, 0.5)}
    assert 8 < len(wanted) < 32
    assert {d.request_id for d in decisions(made, page_size=1000)} == wanted
    for name in wanted:
        assert kinds(life(made, name))[-2:] == ["think_end eat", "closed stop"]
    made.apply(policy(scheduler=EARLY, telemetry={"decision_log_sample_ratio": 0}))
    made.open("r1", answer=1)
    before = made.log.events
    made.step(5)
    assert made.log.events == before


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_sample_holds_every_smaller_one(request_id: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert sampled(request_id, large) or not sampled(request_id, small)
    assert sampled(request_id, 1.0)
    assert not sampled(request_id, 0.0)


def test_the_log_is_bounded_in_bytes() -> None:
    """A decision keeps its request's texts in memory, also when the request's life is forgotten."""
    made = Stream(log=DecisionLog(max_events=40, max_decision_bytes=60_000))
    made.apply(policy(scheduler=EARLY))
    for number in range(40):
        made.open(f"r{number}", answer=1, tenant=f"{number}".ljust(1000, "t"), effort=f"{number}".ljust(1000, "e"))
        made.step(3)
        kept = [*made.log._probes, *made.log._decisions]
        lives = {id(decision.life): decision.life.held_bytes for decision in kept}
        assert made.log.decision_bytes == sum(decision.size_under(decision.under) for decision in kept) + sum(
            lives.values()
        )
        assert made.log.decision_bytes <= 60_000
    assert 0 < len(kept) < 40
