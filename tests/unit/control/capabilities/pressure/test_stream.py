"""A session measures the targets of its requests, and shortens their thinking while a target is missed."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core import tracker
from meridian_control.capabilities.control_group.rule import held_out
from meridian_control.capabilities.pressure.rule import MAX_LEVEL, Reading
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.decision_words import why
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED
from meridian_control.engine.token_rows import FLAG_END, FLAG_FROM_OUTPUT, FLAG_MARKER, TAKE_BACK_SHIFT
from meridian_control.policy.model import Policy
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import CALIBRATED, Act, Stream, aborts, opens, play, stream

CHAT: dict[str, Any] = {
    "name": "chat",
    "tenant": "chat",
    "output_itl_p99_ms": 40.0,
    "window_s": 1,
    "soft_think_tokens": 10,
    "max_think_tokens": 20,
    # The rules' floor may be the last stage.
    "min_think_tokens": 1,
    "shadow": False,
}
ANSWERS = ("answer", "another")
# Steps of this many milliseconds miss the target of CHAT by far, and these leave room.
SLOW_MS, FAST_MS = 100.0, 25.0


def pressed(*entries: dict[str, Any], budget: Any = (), **scheduler: Any) -> Policy:
    limits = {"min_think_tokens": 4, "max_think_tokens": 100, **scheduler}
    return policy(scheduler=limits, entropy={"enabled": False}, pressure=list(entries or [CHAT]), budget=budget)


def converging(**sections: Any) -> Policy:
    """Return a policy whose entropy rules are in force under pressure only, which shortens nothing else."""
    limits = {"soft_think_tokens": 50_000, "max_think_tokens": 50_000}
    own = {
        "scheduler": {"min_think_tokens": 4, "max_think_tokens": 100_000},
        "entropy": CALIBRATED | {"shadow": True},
        "pressure": [{**CHAT, **limits, "entropy_in_force": True}],
    }
    return policy(**own | sections)


def answering(first: Policy, **fields: Any) -> Stream:
    """Return an engine with two requests that answer all the time, so that their tokens measure the steps."""
    made = stream(first)
    for name in ANSWERS:
        made.open(name, 1, 100_000, tenant="chat", **fields)
    made.step(2)
    return made


def seconds(made: Stream, count: float, step_ms: float) -> agent_pb2.Directives:
    return made.step(round(1e3 * count / step_ms), then_ms=step_ms)


def slow(count: float) -> Act:
    """Let so many seconds pass with steps that miss the target."""
    return lambda made: seconds(made, count, SLOW_MS)


def passes(**time: float) -> Act:
    """Let time pass without a step."""

    def act(made: Stream) -> None:
        made.now += timedelta(**time)

    return act


def unshortened(made: Stream) -> None:
    made.stages()


def idle(made: Stream) -> None:
    play(made, *map(aborts, ANSWERS), 1)


def at(wanted: int) -> Act:
    """Assert the level of the entry `chat`."""

    def check(made: Stream) -> None:
        assert level(made) == wanted

    return check


def capped(**caps: int) -> Act:
    """Assert the caps in force on the agent."""

    def check(made: Stream) -> None:
        assert {name: made.caps()[name] for name in caps} == caps

    return check


def level(made: Stream, name: str = "chat") -> int:
    return made.session.part(EnginePressure).levels.get(name, 0)


def counted(made: Stream, metric: str) -> dict[tuple[str, ...], int]:
    """Return the values of a counter by its labels."""
    return {labels: count for (name, labels), count in made.session.totals.counted.items() if name == metric}


def readings(made: Stream, name: str = "chat") -> dict[str, Reading]:
    return {reading.target: reading for reading in made.session.part(EnginePressure).readings[name]}


# ------------------------------------------------------------------------------------------------------------ shortened


def test_converged_thinking_ends_only_under_pressure() -> None:
    """The entropy rules are in shadow; a request whose EAT has converged before goes on until the level rises."""
    made = answering(converging())
    made.open("ours", 10_000, tenant="chat")
    made.open("other", 10_000, tenant="batch")
    made.step(60)
    assert made.session.totals.ends == {"natural": 2, "eat_shadowed": 2}, "without pressure the rule is in shadow"
    seconds(made, 2.5, SLOW_MS)
    assert level(made) == 2
    assert made.session.totals.ends["eat"] == 1
    live = made.agent.engine.live
    assert live["ours"].state.think_tokens < live["other"].state.think_tokens, "only requests under pressure end"
    (end,) = [e.decision for e in made.life("ours").events if e.decision.kind == "force" and not e.decision.shadow]
    assert (end.reason, end.pressure.name, end.pressure.level) == ("eat", "chat", 2)
    assert any(row.limit_name == "pressure chat output_itl_p99_ms" for row in end.comparisons)
    while level(made):
        seconds(made, 1, FAST_MS)
    made.open("later", 10_000, tenant="chat")
    made.step(60)
    assert made.session.totals.ends == {"natural": 2, "eat": 1, "eat_shadowed": 3}, "in shadow again"
    assert made.balanced()


def test_an_end_that_pressure_allows_names_it_beside_a_stricter_budget() -> None:
    budget = {"name": "acme", "tokens_per_day": 1, "max_think_tokens": 60_000, "shadow": False}
    made = answering(converging(budget=[{**budget, "soft_think_tokens": 60_000}]))
    play(made, opens("ours", 10_000, tenant="chat"), 60, {"acme": LOWER_CAP}, 2, slow(1.2), at(2))
    (end,) = [e.decision for e in made.life("ours").events if e.decision.kind == "force" and not e.decision.shadow]
    assert (end.reason, end.budget, end.pressure.name, end.budget_stage) == ("eat", "", "chat", SOFT_CLOSE)


def test_an_end_names_the_pressure_that_allows_it_although_its_level_is_of_an_earlier_stream() -> None:
    made = answering(converging())
    made.session.part(EnginePressure).set_levels({"chat": 2})
    made.open("ours", 10_000, tenant="chat")
    made.step(60)
    (end,) = [e.decision for e in made.life("ours").events if e.decision.kind == "force"]
    assert (end.reason, end.shadow, end.pressure) == ("eat", False, fleet_pb2.PressureChange(name="chat"))
    assert "in force by pressure chat in stage soft_close" in why(end, True)


@pytest.mark.parametrize("shadow", [False, True])
def test_pressure_leaves_the_control_group_in_shadow(shadow: bool) -> None:
    """The control group is counted too, so that the harm of rules that only pressure puts in force is known."""
    made = answering(converging(entropy=CALIBRATED | {"shadow": shadow, "holdout_share": 0.5}))
    names = [f"request-{number}" for number in range(6)]
    control = {name for name in names if held_out(name, 0.5)}
    assert 0 < len(control) < len(names)
    seconds(made, 2.5, SLOW_MS)
    assert level(made) > 0
    for name in names:
        made.open(name, 10_000, tenant="chat")
    made.step(60)
    # A request whose thinking a rule ends has answered by now.
    assert control <= made.agent.engine.live.keys()
    assert made.session.totals.ends["eat"] == len(names) - len(control)
    assert made.session.totals.ends["eat_shadowed"] == len(control)
    # Pressure is a reason only where the rule would be in shadow without it, and is not.
    for name in names:
        (end,) = [e.decision for e in made.life(name).events if e.decision.kind == "force"]
        assert (end.pressure.name == "chat") == (shadow and name not in control), name
    counted = made.session.table.control & made.session.table.counted
    assert {name for name, live in made.agent.engine.live.items() if counted[live.slot]} == control


def test_those_that_gain_least_are_shortened_a_level_earlier() -> None:
    made = answering(pressed({**CHAT, "output_itl_p99_ms": 90.0, "max_think_tokens": 30}, max_think_tokens=10_000))
    for name in ("long", "middle", "short"):
        made.open(name, 100_000, tenant="chat", own_cap=None)
        made.step(3)
    seconds(made, 1.2, SLOW_MS)
    assert (level(made), made.caps()["long"]) == (1, 10_000)
    made.session.part(EnginePressure).set_levels({"chat": 3})
    made.apply(pressed({**CHAT, "output_itl_p99_ms": 120.0, "max_think_tokens": 30}, max_think_tokens=10_000))
    seconds(made, 1.2, SLOW_MS)
    assert level(made) == 3
    live = made.agent.engine.live
    told = [int(made.session.table.max_think_tokens[live[name].slot]) for name in ("long", "middle", "short")]
    assert told == [30, 30, 10_000], "two of three are the half that gains least"


def test_a_request_that_is_chosen_stays_so_over_a_change_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "RESTING_SLOTS", 0)
    entry = {**CHAT, "output_itl_p99_ms": 90.0, "max_think_tokens": 30}
    made = answering(pressed(entry, max_think_tokens=10_000))
    for name in ("long", "middle", "short"):
        made.open(name, 100_000, tenant="chat", own_cap=None)
        made.step(3)
    seconds(made, 1.2, SLOW_MS)
    live, pressure = made.agent.engine.live, made.session.part(EnginePressure)

    def stages() -> list[int]:
        """The stages of the entry `chat`."""
        of_slots = [dict(pressure.stages_of(live[name].slot)) for name in ("long", "middle", "short")]
        chat = [entry.name for entry in pressure.entries].index("chat")
        return [found.get(chat, UNSHORTENED) for found in of_slots]

    assert (level(made), stages()) == (1, [SOFT_CLOSE, SOFT_CLOSE, UNSHORTENED])
    other = {**entry, "name": "other", "tenant": "other"}
    made.apply(pressed(other, {**entry, "max_think_tokens": 40}, max_think_tokens=10_000))
    assert stages() == [SOFT_CLOSE, SOFT_CLOSE, UNSHORTENED]

    slot = live["long"].slot
    made.agent.engine.finish("long")
    made.step(1)
    assert made.open("later", 100_000, tenant="chat") == slot
    made.step(1)
    assert pressure.stages_of(slot) == (), "another request in the same slot"


def test_pressure_in_shadow_that_the_policy_has_no_more_is_not_compared() -> None:
    made = answering(pressed({**CHAT, "shadow": True}))
    made.open("a", 40, tenant="chat")
    seconds(made, 3.2, SLOW_MS)
    made.apply(policy(scheduler={"max_think_tokens": 100}, entropy={"enabled": False}))
    made.step(40)
    assert made.agent.engine.live["a"].state.output_tokens
    assert not [row for row in made.session.shadow.messages() if row.section == "pressure" and row.requests]


@pytest.mark.parametrize("before", [pressed({**CHAT, "shadow": True}), pressed(shadow=True)])
def test_a_level_that_had_no_effect_does_not_come_into_force(before: Policy) -> None:
    """In shadow nothing relieves the engine, so the level rises further than would be enough."""
    other = pressed({**CHAT, "output_itl_p99_ms": 41.0})
    play(answering(before), slow(5.2), at(MAX_LEVEL), pressed(), at(0), slow(2.2), at(2), before, at(2), before, at(2))
    play(answering(pressed()), slow(2.2), at(2), other, at(2), before, at(2))


def test_pressure_in_shadow_only_measures_and_compares() -> None:
    made = answering(pressed({**CHAT, "shadow": True}))
    made.open("a", 40, tenant="chat")
    made.open("other", 40, tenant="batch")
    seconds(made, 5.2, SLOW_MS)
    assert level(made) == 6
    assert made.caps()["a"] == 100
    (row,) = [row for row in made.session.shadow.messages() if row.section == "pressure" and not row.reason]
    assert (row.requests, row.think_tokens, row.would_end) == (3, 42, 1)
    assert not [event for event in made.life("a").events if event.decision.reason == "pressure"]


# ------------------------------------------------------------------------------------------------------------- measured

EVERY = {
    "name": "chat",
    "output_itl_p99_ms": 1000.0,
    "ttot_p99_ms": 1000.0,
    "ttft_p99_ms": 1000.0,
    "ttfvt_p99_ms": 1000.0,
    "queueing_p99_ms": 1000.0,
    "preempted_answer_ratio": 0.5,
    "window_s": 1,
}


def test_each_target_is_measured() -> None:
    made = stream(pressed(EVERY))
    made.agent.places = 4
    for number in range(4):
        made.open(f"r{number}", 5, 100)
    # The report that brings a request brings its first token too, so that its TTFT is known to within a step.
    made.step(10, then_ms=40.0)
    made.agent.preempt("r0")
    made.step(4, then_ms=200.0)
    told = readings(made)
    assert (told["ttft_p99_ms"].samples, told["ttfvt_p99_ms"].samples, told["ttot_p99_ms"].samples) == (4, 4, 4)
    assert 40 <= told["ttot_p99_ms"].measured <= 1.1 * 40
    assert 200 <= told["ttfvt_p99_ms"].measured <= 1.1 * 240, "five thinking tokens, then the first of the answer"
    assert told["queueing_p99_ms"].samples == 4
    assert told["queueing_p99_ms"].measured < 20, "each joins the step that follows"
    assert told["output_itl_p99_ms"].samples >= 12
    assert told["preempted_answer_ratio"] == ("preempted_answer_ratio", 0.25, 0.5, 4)


PREEMPTION = {"name": "chat", "preempted_answer_ratio": 0.1, "window_s": 1}


@pytest.mark.parametrize("first", [(), (PREEMPTION,)], ids=["first entry", "another policy"])
def test_answers_that_have_begun_before_a_policy_count_in_its_first_window(first: tuple[dict[str, Any], ...]) -> None:
    """Half of the new answers are preempted, but few of all; and a request that thinks is no answer."""
    made = stream(pressed(*first))
    for number in range(40):
        made.open(f"old{number}", 1 if number else 10**6, 100_000)
    made.step(40, then_ms=50.0)
    made.apply(pressed(PREEMPTION, max_think_tokens=10**6))
    for number in range(2):
        made.open(f"new{number}", 1, 100_000)
    made.step(3, then_ms=20.0)
    made.agent.preempt("old1")
    made.step(20, then_ms=50.0)
    told = readings(made)["preempted_answer_ratio"]
    assert (told.samples, told.measured) == (41, 1 / 41)


PREEMPTED, QUEUED = "preempted_answer_ratio", "queueing_p99_ms"


def rows(count: int, **fields: Any) -> list[agent_pb2.RequestOpened]:
    return [agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", **fields) for slot in range(count)]


def snapshot(*requests: agent_pb2.RequestOpened) -> Act:
    said = agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=1, requests=requests))
    return lambda made: made.session.on_message(said, made.now)


def says(**fields: Any) -> Act:
    return lambda made: made.say(**fields)


ANSWERED = {"phase": OUTPUT, "think_tokens": 5, "output_tokens": 50}
WAITING = rows(24)
for waits in WAITING[:12]:
    waits.queued = True
# A snapshot of answers and of one request that has none yet, which then is preempted in the first of several steps.
BEFORE_ANSWER = [*rows(20, **ANSWERED), agent_pb2.RequestOpened(slot=20, request_id="r20", think_tokens=5)]
THREE_STEPS: dict[str, Any] = {"step_time_ms": [1] * 3, "prefill_tokens": [0] * 3, "age_ms": [200, 100, 0]}
ANSWERS_THEN: dict[str, Any] = {
    "tokens": tokens([(20, THINK, FLAG_MARKER | FLAG_END, math.nan), (20, OUTPUT, 0, math.nan)]),
    "merged": agent_pb2.StepColumns(rows=[0, 1, 1], preempted=[1, 0, 0], **THREE_STEPS),
    "closed": [agent_pb2.RequestClosed(slot=20)],
}


def before_answer(phase: agent_pb2.Phase.ValueType) -> Act:
    BEFORE_ANSWER[-1].phase = phase
    return snapshot(*BEFORE_ANSWER)


FIRST_WINDOW: dict[str, tuple[tuple[Act, ...], dict[str, tuple[int, float]]]] = {
    "answers of a snapshot": ((snapshot(*rows(20, **ANSWERED)), says(preempted=[3])), {PREEMPTED: (20, 1 / 20)}),
    "none that thought when it was preempted, and answers by the end of the report": (
        (before_answer(THINK), says(steps=3, preempted=[20], **ANSWERS_THEN)),
        {PREEMPTED: (21, 0), "ttot_p99_ms": (1, 100)},
    ),
    "none of an answer that has not begun": ((before_answer(OUTPUT), says(preempted=[20])), {PREEMPTED: (20, 0)}),
    "none of requests from before the stream": ((snapshot(*rows(1, phase=THINK, think_tokens=5)),), {}),
    # A request that waits counts with the time so far. An older agent does not say that requests wait in the queue.
    "requests that wait": ((says(opened=rows(12)),), dict.fromkeys(("ttft_p99_ms", "ttfvt_p99_ms"), (12, 1100))),
    "those of a snapshot that wait in the queue": (
        (snapshot(*WAITING),),
        {QUEUED: (12, 1100), "ttft_p99_ms": (24, 1100), "ttfvt_p99_ms": (24, 1100)},
    ),
    # As after a freeze.
    "those that wait through a snapshot": (
        (snapshot(*WAITING), passes(seconds=0.5), snapshot(*WAITING)),
        {QUEUED: (12, 1600), "ttft_p99_ms": (24, 1600), "ttfvt_p99_ms": (24, 1600)},
    ),
}


@pytest.mark.parametrize(("acts", "told"), FIRST_WINDOW.values(), ids=FIRST_WINDOW)
def test_what_is_measured_in_the_first_window(acts: tuple[Act, ...], told: dict[str, tuple[int, float]]) -> None:
    """The number of samples of each target, and the value, to within the width of a bucket."""
    made = play(stream(pressed({**EVERY, "ttft_p99_ms": 500.0, "ttfvt_p99_ms": 500.0})), *acts, passes(seconds=1.1))
    made.say()
    found = readings(made)
    assert {name: reading.samples for name, reading in found.items() if reading.samples} == {
        name: samples for name, (samples, _) in told.items()
    }
    for name, (_, value) in told.items():
        assert value <= found[name].measured <= (1.1 * value if name != PREEMPTED else value)
        assert found[name].missed == (value > found[name].limit)


@pytest.mark.parametrize(("limit_ms", "missed"), [(100.0, False), (99.999, True)])
def test_a_target_that_is_met_exactly_is_not_missed(limit_ms: float, missed: bool) -> None:
    made = answering(pressed({**CHAT, "output_itl_p99_ms": limit_ms}))
    seconds(made, 9, 100.0)
    assert (level(made) > 0) == missed


def test_the_beginning_of_a_start_marker_is_no_answer() -> None:
    """A model that writes its start marker in several tokens has not answered with the first of them."""
    made = stream(pressed({**EVERY, "ttfvt_p99_ms": 500.0}))
    completed = FLAG_MARKER | FLAG_FROM_OUTPUT | 1 << TAKE_BACK_SHIFT
    made.say(opened=[agent_pb2.RequestOpened(slot=number, request_id=f"r{number}") for number in range(12)])
    for phase, flags in ((OUTPUT, 0), (THINK, completed)):
        made.say(tokens=tokens([(slot, phase, flags, 0.0, 0, 0.0, 0.0) for slot in range(12)]))
    made.now += timedelta(seconds=1.1)
    made.say()
    told = readings(made)
    assert told["preempted_answer_ratio"].samples == 0
    assert told["ttfvt_p99_ms"].measured >= 1100, "all twelve still wait for their answers"


def test_a_request_in_the_queue_counts_until_it_joins_a_step() -> None:
    made = stream(pressed({**EVERY, "queueing_p99_ms": 500.0}))
    opened = [agent_pb2.RequestOpened(slot=number, request_id=f"r{number}", queued=True) for number in range(24)]
    made.say(opened=opened)
    made.now += timedelta(seconds=0.4)
    first = range(12)
    made.say(joined=agent_pb2.JoinedColumns(slot=first, queueing_ms=[400.0] * 12))
    made.now += timedelta(seconds=0.7)
    made.say(closed=[agent_pb2.RequestClosed(slot=23)])
    told = readings(made)["queueing_p99_ms"]
    assert (told.samples, told.missed) == (24, True), (
        "twelve have waited for 400 ms, and twelve wait for 1100 ms so far"
    )
    assert 1100 <= told.measured <= 1.1 * 1100
    made.now += timedelta(seconds=1.1)
    made.say(joined=agent_pb2.JoinedColumns(slot=[*first, 23], queueing_ms=[700.0] * 13))
    made.now += timedelta(seconds=1.1)
    made.say()
    told = readings(made)["queueing_p99_ms"]
    assert told.samples == 12 + 11, "the request that has ended has no queueing time any more"
    histogram = made.session.totals.queueing
    assert histogram.counts.sum() == 24
    assert histogram.sum == pytest.approx(12 * 0.4 + 12 * 0.7)


# -------------------------------------------------------------------------------------------------------------- levels

WIDER, THINKS = {**CHAT, "max_think_tokens": 30}, {"think": 10_000, "tenant": "chat"}
ACME = {"name": "acme", "tokens_per_day": 1, "max_think_tokens": 15, "min_think_tokens": 1, "shadow": False}
LEVELS: dict[str, tuple[Policy, tuple[Act, ...]]] = {
    "a level is kept over a change of the policy": (
        pressed(),
        (slow(1.2), pressed(WIDER), at(2), pressed({**CHAT, "name": "other"}), at(0)),
    ),
    "a budget and pressure together take the stricter": (
        pressed(budget=[ACME]),
        (
            *(slow(3.2), {"acme": LOWER_CAP}, opens("a", **THINKS), 2, capped(a=15), {"acme": FLOOR}, 1, capped(a=4)),
            *(unshortened, opens("b", **THINKS), 2, capped(b=20)),
        ),
    ),
    "an idle engine is restored by the time that passes": (
        pressed(),
        (
            *(slow(3.2), at(4), idle, passes(seconds=9), opens("a", **THINKS), 2, at(2)),
            *(aborts("a"), 1, passes(days=9), opens("b", **THINKS), 2, at(0), capped(b=100)),
        ),
    ),
    "a changed policy finds an idle engine restored": (
        pressed(),
        (slow(5.2), at(6), idle, passes(hours=5), pressed(WIDER), opens("a", **THINKS), 2, at(0), capped(a=100)),
    ),
    "a clock that is set back keeps no idle engine under pressure": (
        pressed(),
        (
            slow(5.2),
            idle,
            passes(hours=-1),
            *[passes(seconds=1), lambda made: made.session.rest(made.now)] * 600,
            at(0),
        ),
    ),
    "an engine that makes no step leaves no room": (pressed(), (slow(3.2), passes(seconds=30), 1, at(4))),
    "windows begin anew if the clock goes back": (pressed(), (slow(0.5), passes(hours=-1), slow(1.2), at(2))),
}


@pytest.mark.parametrize(("first", "acts"), LEVELS.values(), ids=LEVELS)
def test_levels(first: Policy, acts: tuple[Act, ...]) -> None:
    play(answering(first), *acts)


@pytest.mark.parametrize("every_ms", [700, 61_000])
def test_the_levels_of_an_idle_engine_do_not_depend_on_who_looks(every_ms: int) -> None:
    looked_at, alone = (answering(pressed({**CHAT, "window_s": 3})) for _ in range(2))
    for made in (looked_at, alone):
        seconds(made, 21, SLOW_MS)
        idle(made)
    for _ in range(61_000 // every_ms):
        looked_at.now += timedelta(milliseconds=every_ms)
        looked_at.session.rest(looked_at.now)
    alone.now = looked_at.now
    for made in (looked_at, alone):
        made.open("a", 10_000, tenant="chat")
        made.step(2)
    found = [made.session.part(EnginePressure) for made in (looked_at, alone)]
    assert found[0].controllers == found[1].controllers
    assert found[0]._windows[0].start_ms == found[1]._windows[0].start_ms
    assert 0 < level(alone) < 6
