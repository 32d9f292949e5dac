"""What self-calibration records: each request that nothing shortens and whose thinking the model itself ends, as the
engine measured it."""

from __future__ import annotations

import gc
import weakref
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut, Sample, name_of
from meridian_control.capabilities.self_calibration.fleet import SelfCalibration
from meridian_control.capabilities.self_calibration.in_order import InOrder
from meridian_control.capabilities.self_calibration.stream import Recorder, any_lost
from meridian_control.common.slices import at_once
from meridian_control.fleet import left_behind
from meridian_control.policy.model import Policy, Who
from tests.fakes.tables import policy
from tests.unit import sessions
from tests.unit.control.capabilities.control_group.test_going_on import BREAKS, Engine
from tests.unit.control.capabilities.control_group.test_stream import CONTROL, TREATED
from tests.unit.sessions import EARLY, Stream, freezes, reconnected, stream, thaws

# A rule that never fires; and a budget that is never spent.
IN_FORCE: dict[str, Any] = {"shadow": False, "eat_level_threshold_nats": 1e-9}
BUDGET: dict[str, Any] = {"name": "all", "tokens_per_minute": 1_000_000}
PROBED = {"eat_probe_interval_tokens": 4, "eat_probe_placement": "anywhere", "holdout_share": 0.5}


@pytest.fixture
def left_out() -> list[LeftOut]:
    return []


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, left_out: list[LeftOut]) -> list[tuple[str, Episode]]:
    """Return the list to which streams of the test add what they record, and fill in why others are left out."""
    kept = list[tuple[str, Episode]]()

    def take(traffic: str, found: Episode | LeftOut) -> None:
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            kept.append((traffic, found))

    recorder = partial(Recorder, in_order=InOrder(take, lambda: datetime.now(UTC)))
    monkeypatch.setattr(sessions, "STREAM_PARTS", (*STREAM_PARTS, recorder))
    return kept


def asked(**entropy: Any) -> Policy:
    return policy(scheduler=EARLY, entropy={**PROBED, "self_calibration": True, **entropy})


def all_measured(scheduler: dict[str, Any] = EARLY, budget: Any = (), **entropy: Any) -> Policy:
    return policy(
        scheduler=scheduler,
        entropy={**PROBED, "self_calibration": True, **entropy},
        telemetry={"shadow_sample_ratio": 1.0},
        budget=budget,
    )


def run(made: Stream, name: str = CONTROL, think: int = 40, **fields: Any) -> None:
    made.open(name, think=think, answer=3, **fields)
    made.step(think + 12)


def test_a_request_of_the_control_group_is_recorded_as_it_was_measured(found: list[tuple[str, Episode]]) -> None:
    made = stream(asked(), hello_fields={"model_fingerprint": "0123456789abcdef"})
    made.agent.eat_nats = 0.5
    run(made)
    ((traffic, episode),) = found
    assert traffic == Who("model", slo_class="slo", fingerprint="0123456789abcdef").traffic
    assert (episode.name, episode.natural_tokens) == (name_of(CONTROL), 40)
    assert Episode.from_json(episode.to_json()) == episode
    places = [sample.think_tokens for sample in episode.samples]
    assert places == sorted(places)
    assert 6 <= len(places) <= 10, "one probe every four tokens"
    assert all(sample.eat_nats == pytest.approx(0.5) for sample in episode.samples)
    assert all(sample.is_read and sample.arrived_tokens >= sample.think_tokens for sample in episode.samples)
    assert [sample.same_answer for sample in episode.samples] == list(range(1, len(places) + 1))


def test_probes_that_no_rule_reads_are_marked(found: list[tuple[str, Episode]]) -> None:
    """A rule in force has fired in shadow for the request of the control group, which is probed on to judge it."""
    rare = {"eat_probe_interval_tokens": 30, "shadow": False, "ema_alpha": 1.0, "eat_warmup_samples": 1}
    made = stream(asked(**rare))
    made.agent.eat_nats = 0.01
    run(made, think=80)
    ((_, episode),) = found
    read = [sample.think_tokens for sample in episode.samples if sample.is_read]
    unread = [sample.think_tokens for sample in episode.samples if not sample.is_read]
    assert read
    assert unread, "the rule fired at its first sample"
    assert min(unread) > read[0]


def test_in_shadow_each_measured_request_is_recorded(found: list[tuple[str, Episode]]) -> None:
    run(stream(all_measured()), TREATED)
    ((_, episode),) = found
    assert (episode.name, episode.natural_tokens) == (name_of(TREATED), 40)


@pytest.mark.parametrize(
    ("reason", "rule"), [("eat", {}), ("give_up", {"eat_level_threshold_nats": 0.0, "give_up_tokens": 20})]
)
def test_a_request_on_which_a_rule_in_shadow_fires_is_recorded(
    found: list[tuple[str, Episode]], reason: str, rule: dict[str, Any]
) -> None:
    """Without such requests the proof would hold only for the others, but the rule is rolled out to all."""
    made = stream(all_measured(eat_warmup_samples=4, give_up_eat_nats=0.001, **rule))
    run(made, TREATED, think=300)
    assert made.session.totals.decisions[f"force/{reason}"] == 1
    ((_, episode),) = found
    assert episode.samples[-1].think_tokens > 280


def test_a_stream_that_has_ended_does_not_stay_in_memory_because_an_older_request_runs(
    found: list[tuple[str, Episode]],
) -> None:
    older, made = stream(all_measured()), stream(all_measured())
    older.open(CONTROL, think=300, answer=3)
    older.step(5)
    run(made, TREATED)
    made.open("lives", think=300, answer=3)
    made.step(5)
    at_once(made.session.closing(datetime.now(UTC)))
    table = weakref.ref(made.session.table)
    del made
    gc.collect()
    assert table() is None
    assert found == []
    older.step(350)
    assert [episode.name for _, episode in found] == [name_of(CONTROL), name_of(TREATED)]


def test_of_several_choices_the_first_is_recorded(found: list[tuple[str, Episode]]) -> None:
    names = [f"{number}_chatcmpl-mine" for number in range(3)]
    made = stream(all_measured())
    for name in names:
        made.open(name, think=40, answer=3)
    made.step(52)
    assert [episode.name for _, episode in found] == [name_of(names[0])]


def test_a_rule_that_comes_into_force_spoils_requests_that_it_may_shorten(found: list[tuple[str, Episode]]) -> None:
    made = stream(all_measured())
    for name in (CONTROL, TREATED):
        made.open(name, think=60, answer=3)
    made.step(20)
    made.apply(all_measured(**IN_FORCE))
    made.step(20)
    made.apply(all_measured())
    made.step(30)
    assert not {episode.name for _, episode in found} - {name_of(CONTROL)}


LEFT_OUT: dict[str, tuple[Policy, dict[str, Any], list[LeftOut]]] = {
    "a rule": (all_measured(**IN_FORCE), {"name": TREATED}, []),
    "a cap": (all_measured(scheduler={**EARLY, "max_think_tokens": 200}), {"name": TREATED}, []),
    "a budget": (all_measured(budget=[{**BUDGET, "shadow": False}]), {"name": TREATED}, []),
    "an extension": (
        all_measured().model_copy(update={"extension": {"own": {"shadow": False}}}),
        {"name": TREATED},
        [],
    ),
    "not asked": (asked(self_calibration=False), {}, []),
    "no control group": (asked(holdout_share=0.0), {}, []),
    "off": (asked(enabled=False), {}, []),
    "ended by force": (asked(), {"own_cap": 20}, [LeftOut.NOT_NATURAL]),
    "unprobed": (all_measured({**EARLY, "min_think_tokens": 1000}), {}, [LeftOut.UNPROBED]),
    "no probe near the end": (asked(eat_probe_interval_tokens=20), {"think": 38}, [LeftOut.FAR]),
    "did not think": (asked(), {"think": 0}, []),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_others_are_not_recorded_and_some_are_said_to_be_left_out(
    found: list[tuple[str, Episode]], left_out: list[LeftOut], case: str
) -> None:
    rules, fields, why = LEFT_OUT[case]
    run(stream(rules), **fields)
    assert (found, left_out) == ([], why)


def test_a_short_request_waits_for_a_long_one_that_began_before(found: list[tuple[str, Episode]]) -> None:
    made = stream(all_measured())
    made.open(CONTROL, think=80, answer=3)
    made.step()
    made.open(TREATED, think=40, answer=3)
    made.step(60)
    assert not found
    made.step(40)
    assert [episode.name for _, episode in found] == [name_of(CONTROL), name_of(TREATED)]


def test_same_rules_go_on_counting(found: list[tuple[str, Episode]]) -> None:
    made = stream(all_measured())
    for name, think in ((CONTROL, 60), (TREATED, 40)):
        made.open(name, think=think, answer=3)
    made.step(50)
    made.apply(all_measured())
    made.step(30)
    assert [episode.name for _, episode in found] == [name_of(CONTROL), name_of(TREATED)]


@pytest.mark.parametrize("event", ["a rule", "a reconnect", "an end"])
def test_short_requests_go_with_a_long_one_that_no_longer_counts(found: list[tuple[str, Episode]], event: str) -> None:
    made = stream(all_measured())
    made.open(TREATED, think=80, answer=3)
    made.step()
    made.open(CONTROL, think=40, answer=3)
    made.step(60)
    if event == "a rule":
        made.apply(all_measured(**IN_FORCE))
        made.apply(all_measured())
    else:
        at_once(made.session.closing(made.now, followed=event == "a reconnect"))
    if event == "a reconnect":
        made = reconnected(made, all_measured())
    made.step(40)
    assert not found


# ------------------------------------------------------------------------------------------------- over several streams


def long_and_short(steps: int) -> Engine:
    """Begin a long request and then a short one, and make some steps."""
    made = Engine()
    made.apply(all_measured())
    for name, think in ((TREATED, 80), (CONTROL, 40)):
        made.open(name, think=think, answer=10)
        made.step()
    made.step(steps)
    return made


def episodes(made: Engine) -> list[Episode]:
    return [Episode.from_json(text) for _, text in made.fleet.part(SelfCalibration)._new]


def recorded(made: Engine) -> list[tuple[str, int]]:
    """Return the name and the thinking tokens of each request that is recorded."""
    return [(episode.name, episode.natural_tokens) for episode in episodes(made)]


BOTH = [(name_of(TREATED), 80), (name_of(CONTROL), 40)]


@pytest.mark.parametrize("policy_first", [False, True])
# One of them thinks, has ended its thinking, has closed; and the streams of the process after the first one.
@pytest.mark.parametrize(("steps", "streams"), [(1, 1), (20, 3), (42, 1), (60, 1), (84, 1)])
def test_requests_are_recorded_whole_although_their_stream_ends(steps: int, streams: int, policy_first: bool) -> None:
    made, whole = long_and_short(steps), long_and_short(steps)
    for _ in range(streams):
        made.end_stream()
        made.connect(all_measured(), policy_first=policy_first)
        made.step()
        whole.step()
    assert not recorded(made)
    for each in (made, whole):
        each.step(100)
    assert recorded(made) == recorded(whole) == BOTH
    for broken, unbroken in zip(episodes(made), episodes(whole), strict=True):
        # A new stream asks for a probe at once.
        assert len(unbroken.samples) <= len(broken.samples) <= len(unbroken.samples) + streams
        counts = [sample.same_answer for sample in broken.samples]
        assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("happened", [*BREAKS, "other rules", "it is not asked for", "a freeze"])
def test_requests_that_do_not_go_on_take_those_behind_them_along(happened: str) -> None:
    made = long_and_short(20)
    if happened == "a freeze":
        freezes(made)
        thaws(made)
    else:
        made.end_stream()
        if happened in BREAKS:
            BREAKS[happened](made)
        if made.connection not in made.fleet.connections:
            made.connect({"other rules": all_measured(**IN_FORCE), "it is not asked for": policy()}.get(happened))
    made.apply(all_measured())
    made.step(120)
    assert not recorded(made)
    made.end_stream()
    made.now += timedelta(seconds=left_behind.KEPT_S + 1)
    made.connect(all_measured(), incarnation="3")
    made.open("2", think=30, answer=3)
    made.step(50)
    assert recorded(made) == [(name_of("2"), 30)]


async def test_requests_of_an_engine_that_does_not_come_back_keep_none_waiting() -> None:
    made = long_and_short(20)
    made.end_stream()
    made.agent.engine.live.clear()
    made.connect(all_measured(), engine_id="another")
    made.open("2", think=30, answer=3)
    made.step(50)
    assert not recorded(made)
    made.now += timedelta(seconds=left_behind.KEPT_S)
    await made.fleet.part(SelfCalibration).tick()
    assert recorded(made) == [(name_of("2"), 30)]


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_request_in_the_slot_of_one_that_was_recorded_is_another_one(is_listed: bool) -> None:
    """is_listed: whether the snapshot lists it."""
    made = long_and_short(20)
    made.end_stream()
    made.free_slots()
    if is_listed:
        assert made.open("2", think=30, answer=3) == 0
    made.connect(all_measured())
    if not is_listed:
        assert made.open("2", think=30, answer=3) == 0
    made.step(60)
    assert recorded(made) == [(name_of("2"), 30)]
    places = [sample.think_tokens for sample in episodes(made)[0].samples]
    assert places == sorted(places)


def test_a_request_in_the_slot_of_one_that_went_on_is_recorded_under_a_policy_with_the_same_rules() -> None:
    made = long_and_short(20)
    made.end_stream()
    made.connect(all_measured())
    made.step(100)
    made.free_slots()
    assert made.open("2", think=30, answer=3) == 0
    made.step(10)
    made.apply(all_measured())
    made.step(60)
    assert recorded(made) == [*BOTH, (name_of("2"), 30)]


def test_a_request_whose_probes_were_lost_is_left_out() -> None:
    """It is not known which answers the lost ones had. Of the other request none were under way."""
    made = long_and_short(20)
    for _ in range(6):
        made.agent.step()
    made.agent.outbox = []
    made.agent.say(snapshot=made.agent.snapshot())
    made.step(100)
    assert recorded(made) == BOTH[:1]
    (seen,) = made.fleet.part(SelfCalibration)._seen.values()
    assert seen == {None: 1, LeftOut.LOST: 1}


def test_counts_of_equal_answers_tell_whether_probes_were_lost() -> None:
    def lost(*counts: int) -> bool:
        return any_lost([Sample(0, 0, 0.0, 0, count, False, True, False) for count in counts])

    assert not lost()
    assert not lost(1, 2, 3, 1, 1, 2)
    assert not lost(0, 0, 0)
    assert lost(2)
    assert lost(1, 3)
    assert lost(1, 2, 2)
    assert lost(3, 2)
