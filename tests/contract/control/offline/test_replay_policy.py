"""What another policy would have changed in a recorded stream: its own policy changes nothing, another one only what it
asks for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.errors import PolicyError
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.engine.operator_ends import OperatorEnd
from meridian_control.engine.shortening import LOWER_CAP
from meridian_control.fleet.trace_records import (
    down_record,
    end_record,
    freeze_records,
    hello_record,
    part_record,
    policy_record,
    up_record,
)
from meridian_control.offline.policy_replay import changes
from meridian_control.offline.trace_file import FileError
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy
from tests.fakes import traces
from tests.fakes.agent import ALL, hello
from tests.fakes.engine import TEXT
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, EARLY, Stream

# A policy to record with: every rule on, nothing applied, and EAT measured densely.
DENSE = policy(
    scheduler=EARLY,
    entropy={**CALIBRATED, "shadow": True, "eat_level_threshold_nats": 0.0, "eat_probe_interval_tokens": 1},
)
ACTIVE_ENTROPY = CALIBRATED | {"holdout_share": 0.0}
ACTIVE = policy(scheduler=EARLY, entropy=ACTIVE_ENTROPY)


AT_SENTENCES = {"eat_probe_placement": "sentence"}
# Recording policies that end thinking of these requests.
ENDING = ("active", "rules", "give up")


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
        self.records.append(part_record(self.session, self.now, self.session.part(EngineBudgets).record()))

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


def told(tmp_path: Path, records: list[fleet_pb2.TraceRecord], new: Policy) -> dict[str, Any]:
    path = tmp_path / "a.trace"
    path.unlink(missing_ok=True)
    return changes([traces.write(path, records)], new)


def ends(found: dict[str, Any], side: str = "new") -> dict[str, tuple[str, int]]:
    """Return reason and thinking tokens of the end of each request's thinking under one of the two policies."""
    return {row["request_id"]: tuple(row[side].values()) for row in found["by_request"]}


def changes_nothing(found: dict[str, Any]) -> None:
    assert ends(found) == ends(found, "recorded")
    assert (found["changed"], found["refused"]) == (0, {})
    for figure in ("ends", "think_tokens"):
        assert found[figure]["recorded"] == found[figure]["new"]


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
    "confirmed": policy(
        scheduler=EARLY,
        entropy={"shadow": False, "rank_conditions": [{"max_ranks": [20]}], "confirm_sentence_ends": 3}
        | {"eat_probe_max_rank": 25, "eat_probe_interval_tokens": 2},
    ),
    "deadline": policy(scheduler=EARLY | {"strategy": "deadline", "output_tpot_budget_ms": 6.0}),
    "stock": policy(scheduler=EARLY | {"strategy": "stock"}, kv_memory={"shadow": True}),
    "shadow": policy(scheduler=EARLY | {"shadow": True, "max_think_tokens": 9}),
    "extension": policy(scheduler=EARLY | {"max_think_tokens": 70, "empty_answer_extension_tokens": 9}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_under_its_own_policy_nothing_changes(tmp_path: Path, name: str) -> None:
    made = recorded(POLICIES[name])
    found = told(tmp_path, made.records, forms.parse_toml(forms.to_toml(POLICIES[name])))
    changes_nothing(found)
    assert found["requests"] >= 8
    assert found["think_tokens"]["new"] > 40
    assert name not in ENDING or found["ends"]["new"].keys() > {"natural"}


@settings(max_examples=4)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(POLICIES)))
def test_whatever_was_recorded(tmp_path_factory: pytest.TempPathFactory, seed: int, name: str) -> None:
    made = recorded(POLICIES[name], requests=8, seed=seed, sentences=seed % 3 > 0)
    changes_nothing(told(tmp_path_factory.mktemp("t"), made.records, POLICIES[name]))


def test_several_revisions_and_a_refusal_are_compared_with_one_policy(tmp_path: Path) -> None:
    made = recorded(DENSE, requests=4)
    made.open("a", answer=2)
    made.step(5)
    made.agent.refuse_settings = "unknown marker"
    made.apply(ACTIVE)
    made.agent.refuse_settings = ""
    made.apply(policy(scheduler=EARLY | {"max_think_tokens": 20}))
    made.step(40)
    found = told(tmp_path, made.records, DENSE)
    assert ends(found, "recorded")["a"] == ("hard_cap", 20)
    assert ends(found)["a"] == ("unknown", 20)
    assert (found["changed"], found["refused"]) == (1, {})


WITHOUT_PROBES = agent_pb2.Capabilities.FromString(ALL.SerializeToString())
WITHOUT_PROBES.ClearField("eat_probe")
CAP_ALONE = policy(scheduler=EARLY | {"max_think_tokens": 20}, entropy={"enabled": False})


@pytest.mark.parametrize("earlier", [True, False], ids=["newest policy", "only policy"])
@pytest.mark.parametrize(("capabilities", "error"), [(ALL, "unknown marker"), (WITHOUT_PROBES, "")])
def test_what_the_engine_refused_is_no_refusal_of_the_new_policy(
    tmp_path: Path, earlier: bool, capabilities: agent_pb2.Capabilities, error: str
) -> None:
    made = Recorded(capabilities=capabilities)
    if earlier:
        made.apply(policy(scheduler=EARLY, entropy={"enabled": False}))
    made.agent.refuse_settings = error
    made.apply(ACTIVE)
    assert made.session.nack_error
    made.open("a", think=40, answer=2)
    made.step(50)
    found = told(tmp_path, made.records, CAP_ALONE)
    assert (ends(found), found["refused"]) == ({"a": ("hard_cap", 20)}, {})


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
    made = recorded(POLICIES[new], requests=4)
    for number in range(3):
        made.open(f"before-{number}", think=40, answer=3)
        made.step(3)
        made.freeze(Freeze(number, Match(), "", "an incident", made.now, made.now + timedelta(minutes=9)))
        made.open(f"frozen-{number}", think=9, answer=3)
        made.step(20)
        made.freeze()
        made.step(20)
    changes_nothing(told(tmp_path, made.records, POLICIES[new]))
    other = ends(told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 5})))
    frozen = [end for name, end in other.items() if name.startswith("frozen-")]
    assert frozen == [("natural", 9)] * 3, "a frozen engine gets no cap"


def test_a_recording_that_joined_a_frozen_engine_knows_of_it(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(ACTIVE)
    made.freeze(Freeze(7, Match(), "", "an incident", made.now, made.now + timedelta(minutes=9)))
    made.records = [hello_record(made.session, made.now, joined_late=True), *freeze_records(made.session, made.now)]
    made.records.append(policy_record(made.session, made.now, 1, ACTIVE))
    made.open("a", think=30, answer=3)
    made.step(20)
    assert told(tmp_path, made.records, ACTIVE)["ends"]["new"] == {}
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
    assert found["ends"]["new"] == {"operator": 2, "natural": 1}
    early = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 8}))
    assert early["changed"] == 1, "the operator ended a at fewer tokens than the new cap"
    assert ends(early)["b"] == ("hard_cap", 8)
    assert early["ends"]["new"] == {"operator": 1, "hard_cap": 1, "natural": 1}


# ------------------------------------------------------------------------------------------------------ other policies


def test_an_active_rule_over_a_dense_recording(tmp_path: Path) -> None:
    """The recording's policy applied nothing, and the new rule ends thinking where the live rule does."""
    made = Recorded()
    live = Recorded()
    for each, given_policy in ((made, DENSE), (live, ACTIVE)):
        each.apply(given_policy)
        for number in range(4):
            each.open(f"r{number}", think=30 + number, answer=3)
        each.step(60)
    found = told(tmp_path, made.records, ACTIVE)
    assert found["ends"] == {"recorded": {"natural": 4}, "new": {"eat": 4}}
    decided = {d.life.opened.request_id: d for d in live.log.decisions("force")}
    for name, (_, place) in ends(found).items():
        # The recording has a sample at every token, not at every other token, so an end may come one token earlier.
        assert 0 <= decided[name].signals.think_tokens - place <= 1
    assert ends(found, "recorded") == {f"r{number}": ("natural", 30 + number) for number in range(4)}
    assert found["think_tokens"]["recorded"] == sum(range(30, 34))
    assert found["think_tokens"]["new"] == sum(place for _, place in ends(found).values()) < 80
    shadow = told(tmp_path, made.records, policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True}))
    changes_nothing(shadow)


def test_an_end_that_both_policies_decide_is_no_change(tmp_path: Path) -> None:
    """The new policy differs in its cap alone, which no request reaches before the entropy rule ends its thinking."""
    made = Recorded()
    made.apply(ACTIVE)
    for name in "abc":
        made.open(name, think=60, answer=3)
    made.step(90)
    found = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 50}, entropy=ACTIVE_ENTROPY))
    changes_nothing(found)
    assert found["ends"]["new"] == {"eat": 3}


def test_caps_end_thinking_earlier_and_later_and_anew(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY | {"max_think_tokens": 20}))
    for name, think in (("short", 5), ("middle", 15), ("long", 100)):
        made.open(name, think=think, answer=2)
    made.open("own", think=100, answer=2, own_cap=8)
    made.step(40)
    before = {"short": ("natural", 5), "middle": ("natural", 15), "long": ("hard_cap", 20), "own": ("hard_cap", 8)}
    lower = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 10}))
    assert ends(lower, "recorded") == before
    assert ends(lower) == before | {"middle": ("hard_cap", 10), "long": ("hard_cap", 10)}
    assert lower["think_tokens"] == {"recorded": 48, "new": 33}
    higher = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 50}))
    assert ends(higher) == before | {"long": ("unknown", 20)}
    assert higher["think_tokens"] == {"recorded": 28, "new": 28}, "what is not known is in neither sum"


@pytest.mark.parametrize(
    ("think", "stages", "end"),
    [
        (50, {60: LOWER_CAP}, ("natural", 50)),
        (50, {49: LOWER_CAP}, ("hard_cap", 50)),
        (200, {50: LOWER_CAP}, ("hard_cap", 51)),
        (200, {0: LOWER_CAP, 30: 0}, ("hard_cap", 20)),
        (200, {0: LOWER_CAP, 10: 0}, ("natural", 200)),
    ],
)
def test_a_cap_counts_from_when_it_came_until_the_next_one(
    tmp_path: Path, think: int, stages: dict[int, int], end: tuple[str, int]
) -> None:
    """A budget lowers the cap, or raises it again, after these steps."""
    budget = {"name": "b", "tokens_per_day": 1000, "soft_think_tokens": 10_000, "max_think_tokens": 20, "shadow": False}
    off = {"entropy": {"enabled": False}, "loop": {"enabled": False}}
    recording = policy(scheduler=EARLY | {"max_think_tokens": 1000}, **off, budget=[budget])
    made = Recorded()
    made.apply(recording)
    made.thinks_under(stages, think=think, answer=60)
    found = told(tmp_path, made.records, recording)
    assert list(ends(found, "recorded").values()) == list(ends(found).values()) == [end]
    # Another policy has the same cap from the beginning, so it needs no budget.
    early = told(tmp_path, made.records, policy(scheduler=EARLY | {"max_think_tokens": 15}, **off))
    assert list(ends(early).values()) == [("hard_cap", 15)]


def test_ends_that_an_answer_reserve_adds_moves_or_no_longer_makes(tmp_path: Path) -> None:
    made = Recorded()

    def reserve(tokens: int) -> Policy:
        return policy(scheduler=EARLY | {"answer_reserve_tokens": tokens, "answer_reserve_for": "all"})

    made.apply(reserve(10))
    for name, think, most in (("short", 5, 100), ("middle", 80, 100), ("long", 200, 100), ("cut", 30, 32)):
        made.open(name, think=think, answer=2, max_tokens=most)
    made.step(110)

    def under(tokens: int) -> dict[str, Any]:
        return told(tmp_path, made.records, reserve(tokens))

    same = under(10)
    changes_nothing(same)
    assert same["ends"]["recorded"] == {"answer_reserve": 2, "natural": 2}
    # A larger reserve takes a quarter of max_tokens, together with the end.
    larger = ends(under(30))
    assert larger["middle"] == larger["long"] == ("answer_reserve", 75)
    assert ends(under(5))["long"] == ("unknown", 89)


def test_samples_exist_only_where_they_were_recorded(tmp_path: Path) -> None:
    made = Recorded()
    made.apply(policy(scheduler=EARLY, entropy={"enabled": False}))
    made.open("a", think=30, answer=2)
    made.step(40)
    found = told(tmp_path, made.records, ACTIVE)
    assert (found["changed"], found["probes_without_sample"]) == (0, 1)


def test_a_probe_wants_a_sample_of_its_place(tmp_path: Path) -> None:
    """Samples at sentence ends do not serve a policy that probes at the ends of paragraphs."""
    made = Recorded()
    made.apply(DENSE.model_copy(update={"entropy": DENSE.entropy.model_copy(update=AT_SENTENCES)}))
    made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE | FLAG_PARAGRAPH]))
    made.open("a", think=31, answer=2)
    made.step(40)
    for placement, reason in (("sentence", "eat"), ("paragraph", "natural")):
        entropy = ACTIVE.entropy.model_copy(update={"eat_probe_placement": placement})
        found = told(tmp_path, made.records, ACTIVE.model_copy(update={"entropy": entropy}))
        assert found["ends"]["new"] == {reason: 1}


def test_reports_that_merge_steps_bring_what_the_new_policy_did(tmp_path: Path) -> None:
    """The new policy has other outcomes than the recorded ones, also in reports that list each merged step."""
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
    assert single["ends"]["new"]["eat"] > 0
    assert told(tmp_path, records, ACTIVE) == single


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
    made.step(60)
    assert made.session.part(EnginePressure).levels == {"a": 6}
    same = told(tmp_path, made.records, pressed)
    changes_nothing(same)
    looser = told(tmp_path, made.records, policy(**limits, pressure=[target | {"output_itl_p99_ms": 400}]))
    assert looser["ends"]["new"].get("unknown", 0) == same["ends"]["new"]["hard_cap"] > 3


def test_a_recording_of_an_engine_that_may_hand_over_replays(tmp_path: Path) -> None:
    made = recorded(DENSE)
    handovers = made.session.part(EngineHandovers)
    handovers.pool = (fleet_pb2.AnsweringEngine(engine_id="b"),)
    made.records.insert(1, part_record(made.session, made.session.connected_at, handovers.record()))
    changes_nothing(told(tmp_path, made.records, DENSE))


# ------------------------------------------------------------------------------------------------------- the report


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


def traces_record(made: list[fleet_pb2.TraceRecord], **message: Any) -> fleet_pb2.TraceRecord:
    """Return a further record of a session."""
    known: dict[str, Any] = {"time": made[0].time, "engine_id": made[0].engine_id, "session_id": made[0].session_id}
    return fleet_pb2.TraceRecord(up=agent_pb2.ConnectRequest(**message), **known)


HELLO_AGAIN = agent_pb2.ConnectRequest(hello=hello())


@pytest.mark.parametrize(("first", "think_tokens"), [([HELLO_AGAIN], 3), ([None], 3), ([], 0)])
def test_what_lived_before_a_snapshot_is_left_out_once(tmp_path: Path, first: list[Any], think_tokens: int) -> None:
    """The snapshot lists the same requests, and one from before the trace. Requests that have waited go on."""
    made = traces.records([traces.made_up(n) for n in range(4)], at_once=2)
    made = made[: len(made) // 2]
    lived = told(tmp_path, made, policy())["left_out"]["still under way at the end of the trace"]
    names = ["old", *(opened.request_id for record in made for opened in record.up.step.opened)]
    rows = [agent_pb2.RequestOpened(slot=n, request_id=name, think_tokens=think_tokens) for n, name in enumerate(names)]
    snapshot = agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=rows))
    session_id = "next" if HELLO_AGAIN in first else made[0].session_id
    for up in [*first, snapshot]:
        record = fleet_pb2.TraceRecord(time=made[0].time, engine_id="engine", session_id=session_id, up=up or snapshot)
        made.append(record)
    begun = {"began before the trace": len(names) - lived, "reports were lost": lived}
    wanted = begun if think_tokens else {"still under way at the end of the trace": len(names)}
    assert told(tmp_path, made, policy())["left_out"] == wanted


def test_another_start_of_an_engine_ends_what_lived_before_it(tmp_path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(4)], at_once=2)
    made = made[: len(made) // 2]
    lived = told(tmp_path, made, policy())["left_out"]["still under way at the end of the trace"]
    other = agent_pb2.ConnectRequest(hello=hello(incarnation="2"))
    made.append(fleet_pb2.TraceRecord(time=made[0].time, engine_id="engine", session_id="other", up=other))
    assert told(tmp_path, made, policy())["left_out"] == {"reports were lost": lived}


def of_process(made: list[fleet_pb2.TraceRecord], engine_id: str, incarnation: str) -> list[fleet_pb2.TraceRecord]:
    """Return a session's records as those of another engine process."""
    made[0].up.hello.engine_id, made[0].up.hello.incarnation = engine_id, incarnation
    for record in made:
        record.engine_id, record.session_id = engine_id, f"{engine_id} {incarnation}"
    return made


def test_processes_that_share_a_name_end_no_requests_of_each_other(tmp_path: Path) -> None:
    first, second = (
        of_process(traces.records([traces.made_up(n) for n in numbers]), "engine", str(number))
        for number, numbers in enumerate((range(4), range(4, 8)))
    )
    middle = len(second) // 2
    again = fleet_pb2.TraceRecord(time=first[0].time, engine_id="engine", session_id="new", up=first[0].up)
    found = told(tmp_path, [*first, *second[:middle], again, *second[middle:]], policy())
    assert (found["requests"], found["left_out"]) == (8, {})


def test_engines_may_have_requests_with_the_same_id(tmp_path: Path) -> None:
    """So it is if one engine computes the prompts and another one the tokens."""
    requests = [traces.made_up(n) for n in range(4)]
    first, second = (of_process(traces.records(requests), name, "1") for name in "ab")
    cut = first[: len(first) // 2]
    again = fleet_pb2.TraceRecord(time=first[0].time, engine_id="a", session_id="new", up=first[0].up)
    found = told(tmp_path, [*cut, again, *second], policy())
    assert (found["requests"], found["left_out"]["reports were lost"]) == (4, 4)


def test_an_extension_whose_rules_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"^extension\.own is the section of no known capability$"):
        changes([], policy(extension={"own": {}}))


def test_a_request_in_two_traces_is_refused(tmp_path: Path) -> None:
    """It would count as two."""
    made = traces.records([traces.made_up(0)])
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    traces.write(one, made)
    traces.write(two, made)
    with pytest.raises(FileError) as raised:
        changes([one, two], policy())
    name = traces.made_up(0).request_id
    assert str(raised.value) == f"{two}: cannot be used: an earlier trace holds request {name!r} of engine, too"
    traces.write(other, of_process(made, "other", "1"))
    assert changes([one, other], policy())["requests"] == 2


def test_requests_that_the_agent_found_in_mid_course_are_left_out(tmp_path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(4)])
    made[3].up.step.opened[1].think_tokens = 40
    made[3].up.step.opened[2].output_tokens = 1
    found = told(tmp_path, made, policy())
    assert (found["requests"], found["left_out"]) == (2, {"began before the trace": 2})


@pytest.mark.parametrize("snapshot", [False, True])
def test_requests_that_live_when_a_recording_begins_are_left_out(tmp_path: Path, snapshot: bool) -> None:
    """Each counts once, whether it ends in the recording or a snapshot lists it."""
    made = traces.records([traces.made_up(n) for n in range(5)], at_once=3)
    made[0].joined_late = True
    made = [record for record in made if not record.up.HasField("snapshot")]
    (first,) = (record for record in made[:4] if record.up.step.opened)
    older = first.up.step.opened[:2]
    del first.up.step.opened[:2]
    if snapshot:
        listed = [agent_pb2.RequestOpened(slot=each.slot, request_id=each.request_id, think_tokens=1) for each in older]
        made.insert(made.index(first) + 2, traces_record(made, snapshot=agent_pb2.Snapshot(requests=listed)))
    found = told(tmp_path, made, policy())
    lost = {"reports were lost": 1} if snapshot else {}
    assert (found["requests"], found["left_out"]) == (3 - len(lost), {"began before the trace": 2, **lost})


def test_a_trace_that_breaks_the_contract(tmp_path: Path) -> None:
    made = traces.records([traces.made_up(0)])
    made[5].up.step.tokens.flags.append(1)
    with pytest.raises(FileError, match=r"record 6: step token columns must have one length|record \d+: "):
        told(tmp_path, made, policy())
    with pytest.raises(FileError, match="record 0: its session has no Hello before it"):
        told(tmp_path, made[2:], policy())
