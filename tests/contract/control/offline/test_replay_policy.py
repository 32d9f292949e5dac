"""Replay of a recorded stream under a policy: its own policy changes nothing, another one changes only what it asks
for."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_control.cli.console import console
from meridian_control.cli.replay_tables import tables
from meridian_control.decisions.dispatch import WARM_STEPS
from meridian_control.fleet.recording import (
    down_record,
    end_record,
    freeze_records,
    hello_record,
    policy_record,
    stages_record,
    up_record,
)
from meridian_control.offline.comparison_report import figures
from meridian_control.offline.policy_comparison import Difference
from meridian_control.offline.policy_replay import ThinkEnd, _EqualAnswers
from meridian_control.offline.trace_file import FileError
from meridian_control.policy import formats as forms
from meridian_control.session.freeze_state import Freeze, Match
from tests.fakes import traces
from tests.fakes.engine import TEXT
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, EARLY, Stream

if TYPE_CHECKING:
    from pathlib import Path

    from meridian_control.policy.model import Policy
    from meridian_control.session.operator_ends import OperatorEnd

# A policy to record with: every rule on, nothing applied, and EAT measured densely.
DENSE = policy(
    scheduler=EARLY,
    entropy={**CALIBRATED, "shadow": True, "eat_level_threshold_nats": 0.0, "eat_probe_interval_tokens": 1},
)
ACTIVE = policy(scheduler=EARLY, entropy=CALIBRATED | {"holdout_share": 0.0})


class Recorded(Stream):
    """A stream that the test records as the server records streams."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.records = [hello_record(self.session, self.now)]

    def deliver(self, responses: list[agent_pb2.ConnectResponse]) -> None:
        self.records += [down_record(self.session, self.now, response) for response in responses]
        super().deliver(responses)

    def pump(self) -> list[agent_pb2.ConnectResponse]:
        before = len(self.responses)
        while said := self.agent.heard():
            for message in said:
                self.records.append(up_record(self.session, self.now, message))
                self.deliver(self.session.on_message(message, self.now))
        return self.responses[before:]

    def freeze(self, *freezes: Freeze) -> None:
        self.deliver(self.session.on_freezes(freezes, self.now))
        self.pump()

    def stages(self, **stages: int) -> None:
        super().stages(**stages)
        self.records.append(stages_record(self.session, self.now))

    def end(self, name: str, reason: str = "") -> OperatorEnd:
        self.records.append(end_record(self.session, self.now, name))
        return super().end(name, reason)

    def apply(self, new: Policy) -> list[agent_pb2.ConnectResponse]:
        self.records.append(policy_record(self.session, self.now, self.revision + 1, new))
        return super().apply(new)


def recorded(first: Policy, requests: int = 12, seed: int = 0, sentences: bool = True, **hello: Any) -> Recorded:
    """Record requests of several lengths, some of them preempted or aborted, on an engine that is slow enough for
    shares."""
    made = Recorded(hello_fields=hello)
    rng = made.agent.rng
    rng.seed(seed)
    made.agent.step_cost_ms = 5.0, 4.0
    if sentences:
        made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))
    made.apply(first)
    for number in range(requests):
        made.open(f"r{number}", think=rng.randrange(1, 40), answer=rng.randrange(1, 20), entropy_nats=rng.random())
        made.agent.end_rank = rng.randrange(1, 40)
        made.agent.eat_nats = rng.choice([0.01, 0.01, 0.5])
        made.step(rng.randrange(1, 9))
        live = sorted(made.agent.engine.live)
        if live and rng.random() < 0.3:
            made.agent.preempt(rng.choice(live))
            made.step(2)
            for name, request in list(made.agent.engine.live.items()):
                if request.preempted:
                    made.agent.preempt(name, waits=False)
        if number % 5 == 4 and live:
            made.agent.abort(rng.choice(sorted(made.agent.engine.live)))
    made.step(80)
    return made


def difference(tmp_path: Path, records: list[fleet_pb2.TraceRecord], new: Policy) -> Difference:
    path = tmp_path / "a.trace"
    path.unlink(missing_ok=True)
    found = Difference(new)
    found.add([traces.write(path, records)])
    return found


def told(tmp_path: Path, records: list[fleet_pb2.TraceRecord], new: Policy) -> dict[str, Any]:
    return figures(difference(tmp_path, records, new), new)


NOTHING: dict[str, Any] = {"added": {}, "gone": {}, "moved": {}}


def changes_nothing(found: dict[str, Any]) -> None:
    assert found["forces"] == NOTHING
    assert found["changed_requests"] == []
    assert found["ends"]["recorded"] == found["ends"]["new"]
    assert (found["caps_changed"], found["order"]["pairs_changed"], found["share"]["reports_changed"]) == (0, 0, 0)
    tokens = found["think_tokens"]
    assert tokens["recorded"] == tokens["new"]
    assert len(set(tokens["saved_against_natural_ends"].values())) == 1
    assert found["shadowed"]["recorded"] == found["shadowed"]["new"]
    assert found["eat_probes"]["recorded"] == found["eat_probes"]["new"]
    assert found["policy_changes"] == []


# ----------------------------------------------------------------------------------------------- the recorded policy


POLICIES = {
    "dense": DENSE,
    "active": ACTIVE,
    "rules": policy(
        scheduler=EARLY | {"soft_think_tokens": 12, "max_think_tokens": 25},
        entropy={"shadow": False, "rank_conditions": [{"max_ranks": [3]}], "eat_probe_max_rank": 9},
    ),
    "give up": policy(
        scheduler=EARLY,
        entropy=DENSE.entropy.model_dump()
        | {"shadow": False, "eat_level_threshold_nats": 0.0, "give_up_tokens": 9, "give_up_eat_nats": 0.2}
        | {"give_up_shadow": False, "eat_warmup_samples": 2},
    ),
    "margin": policy(
        scheduler=EARLY,
        entropy={"shadow": False, "margin_threshold_nats": 0.5, "confirm_sentence_ends": 3}
        | {"eat_probe_max_margin_nats": 1.0, "eat_probe_interval_tokens": 2},
    ),
    "deadline": policy(scheduler=EARLY | {"strategy": "deadline", "output_tpot_budget_ms": 6.0}),
    "stock": policy(scheduler=EARLY | {"strategy": "stock"}, kv_memory={"shadow": True}),
    "shadow": policy(scheduler=EARLY | {"shadow": True, "max_think_tokens": 9}),
    "extension": policy(scheduler=EARLY | {"max_think_tokens": 70, "empty_answer_extension_tokens": 9}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_under_its_own_policy_a_trace_replays_exactly_and_nothing_changes(tmp_path: Path, name: str) -> None:
    """The replay plays a part of the agent, which must not be noticed: every recorded decision comes out again."""
    made = recorded(POLICIES[name])
    found = told(tmp_path, made.records, forms.parse_toml(forms.to_toml(POLICIES[name])))
    changes_nothing(found)
    count = found["decisions_reproduced"]
    assert count["count"] == count["of"] == made.session._ledger.made > 20
    assert found["requests"] >= 8
    assert not any(sentence.startswith("The past") for sentence in found["not_known"])


def test_a_recording_under_fields_that_were_removed(tmp_path: Path) -> None:
    """A field with a value of its own is named, because its rule may have ended thinking then."""
    made = recorded(DENSE)
    for record in made.records:
        if record.HasField("policy"):
            # near_repeated_tokens = 720, near_shadow = true
            record.policy.policy.loop.MergeFromString(b"\x30\xd0\x05\x38\x01")
    found = told(tmp_path, made.records, DENSE)
    changes_nothing(found)
    (sentence,) = (text for text in found["not_known"] if text.startswith("Recorded policy: "))
    assert sentence.startswith("Recorded policy: loop.near_repeated_tokens = 720 has no effect: it was removed after ")


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(POLICIES)))
def test_whatever_was_recorded(tmp_path_factory: pytest.TempPathFactory, seed: int, name: str) -> None:
    made = recorded(POLICIES[name], requests=8, seed=seed, sentences=seed % 3 > 0)
    found = told(tmp_path_factory.mktemp("t"), made.records, POLICIES[name])
    changes_nothing(found)
    assert found["decisions_reproduced"]["count"] == found["decisions_reproduced"]["of"]


@settings(max_examples=200)
@given(answers=st.lists(st.integers(0, 1), min_size=1, max_size=12), data=st.data())
def test_equal_answers_are_counted_over_the_samples_that_a_run_gets(answers: list[int], data: st.DataObject) -> None:
    """The recorded count tells that answers are equal if all between them are; other equal answers are not known."""
    counted, given, before = _EqualAnswers(), list[int](), 0
    for number, answer in enumerate(answers):
        before = before + 1 if number and answer == answers[number - 1] else 1
        if not data.draw(st.booleans()):
            counted.left_out += 1
            continue
        since = given[-1] if given else 0
        alike = bool(given) and len(set(answers[since : number + 1])) == 1
        expected = before if number == 0 else counted.count + 1 if alike else 1
        given.append(number)
        assert counted.take(before) == expected


def test_several_revisions_and_a_refusal_replay_exactly(tmp_path: Path) -> None:
    made = recorded(DENSE, requests=4)
    made.open("a", answer=2)
    made.step(5)
    made.agent.refuse_settings = "unknown marker"
    made.apply(ACTIVE)
    made.agent.refuse_settings = ""
    made.apply(policy(scheduler=EARLY | {"max_think_tokens": 20}))
    made.step(40)
    found = told(tmp_path, made.records, DENSE)
    assert found["recorded_revisions"] == [1, 2, 3]
    assert found["decisions_reproduced"]["count"] == found["decisions_reproduced"]["of"]
    assert found["forces"]["gone"] == {"hard_cap": 1}, "one policy for the whole trace gives other ends"


def test_a_recording_that_joined_late_has_the_same_answers_under_its_own_policy(tmp_path: Path) -> None:
    """The recorded session had decision ids and step costs from before the recording, and the replay takes them
    over."""
    made = recorded(ACTIVE, requests=3)
    made.records = [hello_record(made.session, made.now, joined_late=True)]
    made.records.append(policy_record(made.session, made.now, 1, ACTIVE))
    for number in range(6):
        made.open(f"late-{number}", think=30, answer=3)
        made.step(7)
    made.step(40)
    found = told(tmp_path, made.records, ACTIVE)
    changes_nothing(found)
    assert found["requests"] == 6
    assert found["ends"]["new"] == {"eat": 6}


@pytest.mark.parametrize("new", ["active", "deadline"])
def test_an_engine_that_was_frozen_is_frozen_in_the_replay_too(tmp_path: Path, new: str) -> None:
    """During a freeze nothing is decided under any policy; decisions after the thaw come out again."""
    made = recorded(POLICIES[new], requests=4)
    for number in range(3):
        made.open(f"before-{number}", think=40, answer=3)
        made.step(3)
        made.freeze(Freeze(number, Match(), "", "an incident", made.now, made.now + timedelta(minutes=9)))
        made.open(f"frozen-{number}", think=9, answer=3)
        made.step(20)
        made.freeze()
        made.step(20)
    found = told(tmp_path, made.records, POLICIES[new])
    count = found["decisions_reproduced"]
    assert count["count"] == count["of"] == made.session._ledger.made
    assert found["ends"]["recorded"] == found["ends"]["new"]
    other = difference(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 5}))
    frozen = [o for o in other.outcomes if o.request_id.startswith("frozen-")]
    assert [o.after for o in frozen] == [ThinkEnd("natural", 9)] * 3, "a frozen engine gets no cap"


def test_a_recording_that_joined_a_frozen_engine_knows_of_it(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(ACTIVE)
    made.freeze(Freeze(7, Match(), "", "an incident", made.now, made.now + timedelta(minutes=9)))
    made.records = [hello_record(made.session, made.now, joined_late=True), *freeze_records(made.session, made.now)]
    made.records.append(policy_record(made.session, made.now, 1, ACTIVE))
    made.open("a", think=30, answer=3)
    made.step(20)
    assert difference(tmp_path, made.records, ACTIVE).of_decisions == 0
    made.freeze()
    made.open("b", think=30, answer=3)
    made.step(40)
    found = told(tmp_path, made.records, ACTIVE)
    changes_nothing(found)
    assert found["ends"]["new"]["eat"] >= 1, "the replay ends the freeze as well"


def test_the_ends_of_operators_are_replayed_under_every_policy(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY))
    for name, think in (("a", 30), ("b", 30), ("c", 3)):
        made.open(name, think=think, answer=5)
    made.step(6)
    # "a" is ended, and the second call changes nothing; "c" answers already.
    for name in "aac":
        made.end(name)
    made.step(3)
    made.end("b")
    made.step(40)
    found = told(tmp_path, made.records, policy(scheduler=EARLY))
    changes_nothing(found)
    assert found["decisions_reproduced"]["count"] == found["decisions_reproduced"]["of"] == made.session._ledger.made
    assert found["ends"]["new"] == {"operator": 2, "natural": 1}
    early = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 8}))
    assert {r["request_id"]: (r["change"], r["new"]["reason"]) for r in early["changed_requests"]} == {
        "b": ("moved", "hard_cap")
    }, "the operator ended a at fewer tokens than the new cap"
    assert early["ends"]["new"] == {"operator": 1, "hard_cap": 1, "natural": 1}


# ------------------------------------------------------------------------------------------------------ other policies


def test_an_active_rule_over_a_dense_recording(tmp_path: Path) -> None:
    """The recording's policy applied nothing, so all ends of the new rule are added, where the live rule makes them."""
    made = Recorded()
    made.apply(DENSE)
    for number in range(4):
        made.open(f"r{number}", think=30 + number, answer=3)
    made.step(60)
    found = told(tmp_path, made.records, ACTIVE)
    assert found["forces"] == {"added": {"eat": 4}, "gone": {}, "moved": {}}
    assert found["ends"] == {"recorded": {"natural": 4}, "new": {"eat": 4}}
    live = Recorded()
    live.apply(ACTIVE)
    for number in range(4):
        live.open(f"r{number}", think=30 + number, answer=3)
    live.step(60)
    decided = {d.life.opened.request_id: d for d in live.log.decisions(lambda d: d.kind == "force", None)}
    for request in found["changed_requests"]:
        place = request["new"]["think_tokens"]
        # The recording has a sample at every token, not at every other token, so an end may come one token earlier.
        assert 0 <= decided[request["request_id"]].signals.think_tokens - place <= 1
        assert (
            request["ended"]
            == request["recorded"]
            == {"reason": "natural", "think_tokens": 30 + int(request["request_id"][1:])}
        )
    saved = sum(r["recorded"]["think_tokens"] - r["new"]["think_tokens"] for r in found["changed_requests"])
    tokens = found["think_tokens"]
    assert tokens["saved_against_natural_ends"] == {"recorded": 0, "new": saved}
    assert tokens["recorded"] - tokens["new"] == saved > 50
    assert {c["path"] for c in found["policy_changes"]} >= {"entropy.shadow"}


def test_ends_that_are_gone_moved_or_added_by_a_cap(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY | {"max_think_tokens": 20}))
    for name, think in (("short", 5), ("middle", 15), ("long", 100)):
        made.open(name, think=think, answer=2)
    made.open("own", think=100, answer=2, own_cap=8)
    made.step(40)

    def under(cap: int) -> tuple[dict[str, Any], dict[str, Any]]:
        found = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": cap}))
        return found, {r["request_id"]: (r["change"], r["new"]) for r in found["changed_requests"]}

    lower, requests = under(10)
    ten = {"reason": "hard_cap", "think_tokens": 10}
    assert requests == {"middle": ("added", ten), "long": ("moved", ten)}
    assert lower["forces"] == {"added": {"hard_cap": 1}, "gone": {}, "moved": {"hard_cap": 1}}
    assert lower["caps_changed"] == 3
    assert lower["think_tokens"]["saved_against_natural_ends"] == {"recorded": 0, "new": 5}
    higher, requests = under(50)
    assert requests == {"long": ("gone", {"reason": "unknown", "think_tokens": 20})}
    assert any("1 requests that the new policy no longer ends" in sentence for sentence in higher["not_known"])
    assert higher["think_tokens"]["requests_known"] == 3


def test_ends_that_an_answer_reserve_adds_moves_or_no_longer_makes(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY | {"answer_reserve_tokens": 10}))
    for name, think, most in (("short", 5, 50), ("middle", 30, 50), ("long", 100, 50), ("cut", 5, 8)):
        made.open(name, think=think, answer=2, max_tokens=most)
    made.step(60)

    def under(reserve: int) -> tuple[dict[str, Any], dict[str, Any]]:
        found = told(tmp_path, made.records, policy(scheduler=EARLY | {"answer_reserve_tokens": reserve}))
        return found, {r["request_id"]: (r["change"], r["new"]) for r in found["changed_requests"]}

    same, requests = under(10)
    assert (requests, same["ends"]["recorded"]) == ({}, {"answer_reserve": 2, "natural": 2})
    # The recording shows where a reserve of 10 tokens ended the long one; for the others max_tokens is the limit.
    # A larger reserve takes half of max_tokens, together with the end.
    larger, requests = under(30)
    assert requests == {
        "middle": ("added", {"reason": "answer_reserve", "think_tokens": 25}),
        "long": ("moved", {"reason": "answer_reserve", "think_tokens": 25}),
    }
    assert any("one token as the end" in sentence for sentence in larger["not_known"])
    smaller, requests = under(5)
    assert requests["long"] == ("gone", {"reason": "unknown", "think_tokens": 39})
    assert not any("one token as the end" in sentence for sentence in smaller["not_known"])


def test_rules_in_shadow_are_told_apart_from_ends(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(DENSE)
    made.open("a", think=30, answer=2)
    made.step(40)
    shadow = policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True})
    found = told(tmp_path, made.records, shadow)
    assert found["forces"] == NOTHING
    row = found["shadowed"]["new"]["eat"]
    assert row["requests"] == 1
    active = told(tmp_path, made.records, ACTIVE)
    assert row["would_save_tokens"] == active["think_tokens"]["saved_against_natural_ends"]["new"]


def test_samples_exist_only_where_they_were_recorded(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY, entropy={"enabled": False}))
    made.open("a", think=30, answer=2)
    made.step(40)
    found = told(tmp_path, made.records, ACTIVE)
    assert found["forces"] == NOTHING
    assert found["eat_probes"]["new"] == {"asked": 1, "answered": 0}
    assert any("EAT: samples exist only at recorded places" in sentence for sentence in found["not_known"])


def test_reports_that_merge_steps_tell_of_what_the_new_policy_did(tmp_path: Path) -> None:
    """The new policy has other probes and outcomes than the recorded ones, also in reports that list each merged
    step."""
    records = recorded(DENSE).records
    single = told(tmp_path, records, ACTIVE)
    for record in records:
        report = record.up.step
        if record.up.WhichOneof("message") != "step" or not report.steps:
            continue
        # Put a step without tokens before the recorded step.
        merged, report.steps = report.merged, 2
        merged.rows.extend([0, len(report.tokens.slot)])
        merged.step_time_ms.extend([1.0, report.step_time_ms])
        merged.prefill_tokens.extend([0, report.prefill_tokens])
        merged.age_ms.extend([report.step_time_ms, 0.0])
        merged.probes.extend([0, len(report.probes.slot)])
        for name in ("preempted", "resumed", "outcomes"):
            getattr(merged, name).extend([0, len(getattr(report, name))])
    twice = told(tmp_path, records, ACTIVE)
    assert single["changed_requests"]
    assert (twice["changed_requests"], twice["forces"]) == (single["changed_requests"], single["forces"])
    assert twice["eat_probes"] == single["eat_probes"]


def test_a_probe_wants_a_sample_of_its_place(tmp_path: Path) -> None:
    """Samples were recorded at sentence ends and are wanted at paragraph ends, so only samples at paragraph ends are
    used."""
    at_sentences = DENSE.entropy.model_copy(update={"eat_probe_placement": "sentence"})
    made = Recorded()
    made.apply(DENSE.model_copy(update={"entropy": at_sentences}))
    made.open("a", think=31, answer=2)
    for step in range(40):
        paragraph = step % 4 == 3
        flags = FLAG_SENTENCE | (FLAG_PARAGRAPH if paragraph else 0)
        made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([flags]))
        made.step()
    paragraphs = ACTIVE.entropy.model_copy(update={"eat_probe_placement": "paragraph", "eat_warmup_samples": 3})
    found = told(tmp_path, made.records, ACTIVE.model_copy(update={"entropy": paragraphs}))
    (request,) = found["changed_requests"]
    dense = told(
        tmp_path,
        made.records,
        ACTIVE.model_copy(update={"entropy": paragraphs.model_copy(update={"eat_probe_placement": "sentence"})}),
    )
    (sooner,) = dense["changed_requests"]
    assert request["new"]["think_tokens"] > sooner["new"]["think_tokens"] + 4


def test_another_strategy_changes_the_order_and_the_share(tmp_path: Path) -> None:
    made = Recorded()
    made.agent.step_cost_ms = 1.0, 4.0
    budgets = EARLY | {"output_tpot_budget_ms": 12.0}
    made.apply(policy(scheduler=budgets))
    for number in range(6):
        made.open(f"r{number}", think=3 if number % 2 else 900, answer=900)
        made.step(6)
    made.step(WARM_STEPS + 20)
    other = told(tmp_path, made.records, policy(scheduler=budgets | {"strategy": "reasoning_first"}))
    assert other["order"]["reports_changed"] > 20
    assert 0 < other["order"]["pairs_changed"] < other["order"]["pairs"]
    assert other["share"]["reports_changed"] > 0
    assert other["share"]["reports_limited"]["think_per_step"]["recorded"] > 0
    assert other["share"]["reports_limited"]["think_per_step"]["new"] == 0
    stock = told(tmp_path, made.records, policy(scheduler=budgets | {"strategy": "stock"}))
    assert stock["order"]["pairs_changed"] > 0
    assert stock["share"]["reports_limited"]["think_per_step"]["new"] == 0


def test_pressure_is_measured_again_and_decided_by_the_targets_of_the_policy(tmp_path: Path) -> None:
    limits = {"scheduler": EARLY | {"max_think_tokens": 900}, "entropy": {"enabled": False}}
    target = {"name": "a", "output_itl_p99_ms": 40, "window_s": 1, "max_think_tokens": 20, "shadow": False}
    pressed = policy(**limits, pressure=[target])
    made = Recorded()
    made.apply(pressed)
    for name in ("r0", "r1", "r2"):
        made.open(name, 1, 900)
    for number in range(20):
        made.open(f"t{number}", 50, 5)
        made.step(8, then_ms=100.0)
    assert made.session.pressure.levels == {"a": 6}
    changes_nothing(told(tmp_path, made.records, pressed))
    looser = told(tmp_path, made.records, policy(**limits, pressure=[target | {"output_itl_p99_ms": 400}]))
    assert looser["caps_changed"] > 5


# ------------------------------------------------------------------------------------------------------- the report


def text(found: Difference, new: Policy) -> str:
    terminal = console()
    with terminal.capture() as captured:
        for part in tables(found, new):
            terminal.print(part)
    return captured.get()


def test_the_same_trace_and_policy_give_the_same_report_byte_for_byte(tmp_path: Path) -> None:
    made = recorded(DENSE)
    reports, shown = set(), set()
    for _ in range(3):
        found = difference(tmp_path, made.records, ACTIVE)
        reports.add(json.dumps(figures(found, ACTIVE)))
        shown.add(text(found, ACTIVE))
    assert len(reports) == len(shown) == 1
    (report,) = reports
    assert json.loads(report)["forces"]["added"]["eat"] > 0
    (page,) = shown
    assert "Not known:" in page


def test_requests_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    requests = [traces.made_up(n) for n in range(4)]
    requests[0].finish = agent_pb2.FINISH_REASON_ABORT
    requests[0].rows = requests[0].rows[:5]
    requests[1].rows = [(3, 0, 0.1, 9)] * 3
    made = traces.records(requests, at_once=2)
    found = told(tmp_path, made[:-10], policy())
    assert found["left_out"] == {
        "aborted while thinking": 1,
        "did not think": 1,
        "still under way at the end of the trace": 1,
    }
    assert found["requests"] == 1


def test_a_snapshot_in_the_middle_leaves_out_what_lived(tmp_path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(20)], at_once=4)
    rows = [agent_pb2.RequestOpened(slot=0, request_id="old", think_tokens=3)]
    made[len(made) // 2].up.CopyFrom(agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=rows)))
    found = told(tmp_path, made, policy())
    assert found["left_out"] == {"began before the trace": 1, "reports were lost": 4}


def test_a_trace_that_breaks_the_contract(tmp_path: Path) -> None:
    made = traces.records([traces.made_up(0)])
    made[5].up.step.tokens.flags.append(1)
    with pytest.raises(FileError, match=r"record 6: step token columns must have one length|record \d+: "):
        difference(tmp_path, made, policy())
    with pytest.raises(FileError, match="record 0: its session has no Hello before it"):
        difference(tmp_path, made[2:], policy())


def test_times_are_the_recorded_ones(tmp_path: Path) -> None:
    """Deadlines depend on time: a trace that is moved as a whole gives the same result, and a stretched trace does
    not."""
    made = recorded(POLICIES["deadline"])
    before = told(tmp_path, made.records, POLICIES["deadline"])
    later = []
    for record in made.records:
        copied = fleet_pb2.TraceRecord()
        copied.CopyFrom(record)
        moved = Timestamp()
        moved.FromNanoseconds(record.time.ToNanoseconds() + 3_600_000_000_000)
        copied.time.CopyFrom(moved)
        later.append(copied)
    assert told(tmp_path, later, POLICIES["deadline"]) == before
    for record in later:
        start = later[0].time.ToNanoseconds()
        record.time.FromNanoseconds(start + 9 * (record.time.ToNanoseconds() - start))
    stretched = told(tmp_path, later, POLICIES["deadline"])["decisions_reproduced"]
    assert stretched["count"] < stretched["of"]
