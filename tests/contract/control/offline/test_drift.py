"""Drift: signals of live requests are compared with the calibration, and a change is found soon and without false
alarms."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_control.capabilities.control_group import savings
from meridian_control.capabilities.control_group.harm_guard import FALSE_ALARM_RATE, Watch, _drift
from meridian_control.capabilities.control_group.rule import held_out
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.cli.tables import savings_lines
from meridian_control.common.inference import ShiftTest
from meridian_control.engine.session import Session
from meridian_control.offline.calibrated_policy import policy_of
from meridian_control.offline.calibration import calibrate
from meridian_control.offline.candidates import give_ups, single_rules
from meridian_control.offline.rule_replay import EAT_GATED, EAT_SENTENCE, RANK, RPDI, SOFT, either
from meridian_control.policy.drift_schema import SIGNALS, Bins, EatBin, SignalBin, bin_of
from meridian_control.policy.model import Policy
from tests.fakes import traces
from tests.fakes.agent import hello
from tests.fakes.engine import TEXT
from tests.fakes.replays import GOAL, replay
from tests.fakes.replays import made as requests_that_separate
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, NOW, Stream, stream

FLOOR = 8
BINS = 5


def described(samples: Sequence[float], signal: str = "eat") -> Bins:
    """Return the description that a calibration on these samples writes."""
    ordered = sorted(samples)
    edges = sorted({ordered[-(-len(ordered) * number // BINS) - 1] for number in range(1, BINS + 1)})
    counts = [sum(before < x <= edge for x in ordered) for before, edge in zip([-1.0, *edges], edges, strict=False)]
    found = list(zip(edges, counts, strict=True))
    if signal == "eat":
        return tuple(EatBin(max_nats=edge, requests=count) for edge, count in found)
    return tuple(SignalBin(max_value=edge, requests=count) for edge, count in found)


def eat(rng: random.Random, times: float = 1.0) -> float:
    """Draw an EAT sample in nats, with a median of 0.37 before it is multiplied."""
    return times * rng.lognormvariate(-1.0, 0.8)


def rank(rng: random.Random, times: float = 1.0) -> int:
    """Draw a rank above 1, with a mean of about 3000 before it is multiplied."""
    return 2 + int(times * rng.expovariate(1 / 3000))


DRAWN: dict[str, Callable[..., float]] = {"eat": eat, "rank": rank}
# The field of a script that holds each signal.
FIELDS = {"eat": "eat_nats", "rank": "end_rank"}


def rules(reference: Bins, **entropy: Any) -> Policy:
    """Return a policy whose EAT rule hardly ever fires, with a description of EAT."""
    told = [each.model_dump() for each in reference]
    fields = {**CALIBRATED, "eat_warmup_samples": 1, "eat_level_threshold_nats": 1e-6, "holdout_share": 0.0}
    return policy(scheduler={"min_think_tokens": FLOOR}, entropy={**fields, "eat_reference": told, **entropy})


def rank_rules(reference: Bins, **entropy: Any) -> Policy:
    """Return a policy whose only rule is a rank rule that hardly ever fires, with a description of the rank."""
    told = [each.model_dump() for each in reference]
    only = {"eat_level_threshold_nats": 0.0, "rank_conditions": [{"max_ranks": [1]}], "rank_reference": told}
    return rules((), **{**only, **entropy})


# ------------------------------------------------------------------------------------------------------------ the test


def live(test: ShiftTest, reference: Bins, samples: Sequence[float]) -> float:
    counts = [0] * len(reference)
    for sample in samples:
        counts[bin_of(reference, sample)] += 1
    return test.add_counts(counts) * FALSE_ALARM_RATE


@pytest.mark.parametrize("calibrated", [40, 100, 400])
@pytest.mark.parametrize("signal", DRAWN)
def test_twenty_clean_runs_of_2000_requests_raise_no_alarm(signal: str, calibrated: int) -> None:
    draw = DRAWN[signal]
    for seed in range(20):
        rng = random.Random(seed)
        reference = described([draw(rng) for _ in range(calibrated)], signal)
        test = ShiftTest([each.requests for each in reference])
        assert max(live(test, reference, [draw(rng) for _ in range(20)]) for _ in range(100)) < 0.1


@pytest.mark.parametrize(
    ("signal", "calibrated", "times", "within"),
    [
        *[("eat", 40, 0.1, 100), ("eat", 40, 10.0, 100), ("eat", 100, 0.3, 300), ("eat", 100, 3.0, 300)],
        *[("rank", 100, 0.1, 150), ("rank", 100, 10.0, 150)],
        *[("rank", 400, 0.2, 300), ("rank", 400, 5.0, 300)],
    ],
)
def test_a_change_after_500_requests_is_found_within_the_stated_number(
    signal: str, calibrated: int, times: float, within: int
) -> None:
    draw = DRAWN[signal]
    for seed in range(10):
        rng = random.Random(seed)
        reference = described([draw(rng) for _ in range(calibrated)], signal)
        test = ShiftTest([each.requests for each in reference])
        for _ in range(50):
            assert live(test, reference, [draw(rng) for _ in range(10)]) < 1
        for _ in range(within // 10):
            evidence = live(test, reference, [draw(rng, times) for _ in range(10)])
        assert evidence >= 1


def test_a_calibration_with_one_bin_tells_nothing() -> None:
    test = ShiftTest([50])
    assert [test.add_counts([100]) for _ in range(3)] == [1.0, 1.0, 1.0]


# --------------------------------------------------------------------------------------------------------- the counts


def told_of(made: Stream) -> fleet_pb2.Savings:
    """Return the counts under the rules in force."""
    answer = fleet_pb2.GetSavingsResponse(savings=savings.messages(made.session.part(ControlGroup).experiments, None))
    return savings.merged([answer]).savings[0]


def samples(made: Stream) -> dict[str, list[int]]:
    return made.session.part(ControlGroup).experiments.newest()[0].samples


def seen(made: Stream) -> list[int]:
    return samples(made)["eat"]


REFERENCE = (EatBin(max_nats=0.1, requests=30), EatBin(max_nats=1.0, requests=40), EatBin(max_nats=2.0, requests=30))


def run_one(made: Stream, values: Mapping[int, float], **fields: Any) -> None:
    """Run one request whose EAT at a number of thinking tokens is the newest of `values`."""
    run_signal(made, "eat", values, **fields)


def run_signal(made: Stream, signal: str, values: Mapping[int, float], name: str = "a", **fields: Any) -> None:
    """Run one request whose signal at a number of thinking tokens is the newest of `values`."""
    told = {FIELDS[signal]: lambda tokens: values[max(at for at in values if at <= tokens)]}
    made.open(name, 20, 1, **told, **fields)
    while made.agent.engine.live:
        made.step()


def with_sentences(first: Policy) -> Stream:
    """Return a stream of an engine of whose thinking each token ends a sentence."""
    made = stream(first)
    made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))
    return made


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_each_request_counts_once_with_the_first_sample_that_a_rule_could_read(share: float) -> None:
    made = stream(rules(REFERENCE, holdout_share=share))
    for before, after in ((0.05, 0.5), (0.05, 0.5), (0.05, 5.0), (5.0, 0.05)):
        run_one(made, {0: before, FLOOR - 2: after, FLOOR + 6: 0.3})
    assert seen(made) == [1, 2, 1]
    assert [each.calibrated for each in told_of(made).eat_samples] == [30, 40, 30]


def test_of_the_choices_of_one_prompt_only_the_first_counts() -> None:
    made = stream(rules(REFERENCE))
    for choice in range(4):
        run_one(made, {0: 0.5}, name=f"{choice}_chatcmpl-a")
    assert seen(made) == [0, 1, 0]


def test_requests_with_other_rules_another_floor_or_no_sample_do_not_count() -> None:
    override = [
        {"tenant": "other", "entropy": {"eat_warmup_samples": 3}},
        {"tenant": "same", "entropy": {"ema_alpha": 1.0}},
    ]
    base = rules(REFERENCE)
    made = stream(base.model_copy(update={"override": policy(override=override).override}))
    for fields in ({"tenant": "other"}, {"min_think_tokens": FLOOR + 4}):
        run_one(made, {0: 0.5}, **fields)
    run_one(made, {0: math.nan})
    assert seen(made) == [0, 0, 0]
    run_one(made, {0: 0.5}, tenant="same")
    run_one(made, {0: 0.5}, min_think_tokens=FLOOR)
    assert seen(made) == [0, 2, 0]


def test_rules_in_shadow_and_requests_from_before_the_rules_do_not_count() -> None:
    made = stream(rules(REFERENCE, shadow=True))
    made.open("a", 20, 1)
    made.step(4)
    made.apply(rules(REFERENCE))
    made.step(40)
    assert seen(made) == [0, 0, 0]
    made.apply(rules(REFERENCE, shadow=True))
    run_one(made, {0: 0.5})
    assert seen(made) == [0, 0, 0]


def test_a_request_counts_once_under_a_revision_with_the_same_rules() -> None:
    made = stream(rules(REFERENCE))
    made.open("a", 40, 1, eat_nats=lambda _: 0.5)
    made.step(4)
    same = rules(REFERENCE)
    made.apply(same.model_copy(update={"telemetry": same.telemetry.model_copy(update={"report_interval_steps": 2})}))
    made.step(60)
    assert seen(made) == [0, 1, 0]


def test_a_policy_without_a_description_is_not_compared() -> None:
    made = stream(rules(()))
    run_one(made, {0: 0.5})
    assert samples(made) == {}
    watch = Watch()
    watch.look({"alone": fleet_pb2.Savings(rules="r", since_revision=1, max_loss=1.0)})
    assert watch.drift is None


# ---------------------------------------------------------------------------------------------- EAT that goes bad


def watched(seed: int, requests: int, bad_from: int, signal: str = "eat") -> tuple[int | None, Stream]:
    """Run requests, 20 at a time, whose signal falls to a tenth from request `bad_from` on. Return the number of the
    last request that had closed when the watch found drift, None if it did not."""
    rng, draw = random.Random(seed), DRAWN[signal]
    reference = described([draw(rng) for _ in range(100)], signal)
    made, watch = with_sentences((rules if signal == "eat" else rank_rules)(reference)), Watch()
    for begin in range(0, requests, 20):
        for number in range(begin, begin + 20):
            value = draw(rng, 0.1 if number >= bad_from else 1.0)
            made.open(f"r{number}", 12, 1, **{FIELDS[signal]: lambda _, value=value: value})
        while made.agent.engine.live:
            made.step()
        watch.look({"alone": told_of(made)})
        assert watch.drift is not None
        if watch.drift >= 1:
            return begin + 20, made
    return None, made


@pytest.mark.parametrize("signal", DRAWN)
def test_signals_that_go_bad_after_200_requests_are_found_within_100_more(signal: str) -> None:
    for seed in range(1):
        found, made = watched(seed, requests=300, bad_from=200, signal=signal)
        assert found is not None
        assert 200 < found <= 300
        reason = _drift(told_of(made))
        assert reason.startswith({"eat": "EAT has left", "rank": "The end marker's rank has left"}[signal])
        assert "have a first sample up to " in reason
        assert "where the calibration had 20 of 100" in reason


# -------------------------------------------------------------------------------------------------- several replicas


def part(*counts: int, **fields: Any) -> fleet_pb2.Savings:
    samples = [
        fleet_pb2.EatSamples(max_nats=each.max_nats, calibrated=each.requests, seen=count)
        for each, count in zip(REFERENCE, counts, strict=True)
    ]
    return fleet_pb2.Savings(**{"rules": "r", "since_revision": 3, "max_loss": 1.0, "eat_samples": samples, **fields})


def test_the_watch_takes_each_sample_in_once_and_begins_anew_with_new_rules() -> None:
    watch = Watch()
    watch.look({"a": part(40, 1, 1), "b": part(10, 1, 0)})
    first = watch.drift
    assert first is not None
    watch.look({"a": part(40, 1, 1), "b": part(10, 1, 0)})
    assert watch.drift == first, "no new request, no new evidence"
    watch.look({"a": part(90, 1, 1)})
    assert watch.drift is not None
    assert watch.drift > max(1, first)
    watch.look({"a": part(1, 1, 1, since_revision=9)})
    assert watch.drift < 1


def test_samples_of_replicas_add_and_the_reason_names_the_bin_that_gained() -> None:
    told = savings.merged(fleet_pb2.GetSavingsResponse(savings=[each]) for each in (part(1, 2, 30), part(4, 5, 60)))
    assert [each.seen for each in told.savings[0].eat_samples] == [5, 7, 90]
    assert "90 of 102 requests have a first sample above 1 nats, where the calibration had 30 of 100" in _drift(
        told.savings[0]
    )
    assert "up to 0.1 nats" in _drift(part(9, 1, 1))
    assert "from 0.1 to 1 nats" in _drift(part(1, 90, 1))


# ------------------------------------------------------------------------------------------------------- calibration


def test_calibration_describes_the_samples_that_its_rule_could_read(tmp_path: Path) -> None:
    replayed = replay(tmp_path, requests_that_separate(rank="noise"))
    found = calibrate(replayed, GOAL)
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"EAT"}
    bins = found.policy.entropy.eat_reference
    assert len(bins) == BINS
    floor = found.policy.scheduler.min_think_tokens
    only_paragraphs = found.policy.entropy.eat_probe_placement == "paragraph"
    episodes, samples = replayed.episodes, dict[int, float]()
    for place, sample in enumerate(episodes.sample.tolist()):
        is_probed = sample >= 0 and (episodes.paragraph[place] or not only_paragraphs)
        if is_probed and episodes.sample_tokens[sample] >= floor - found.policy.entropy.eat_warmup_samples:
            samples.setdefault(int(episodes.owner[place]), float(episodes.eat_nats[sample]))
    assert sum(each.requests for each in bins) == len(samples)
    counts = [0] * len(bins)
    for value in samples.values():
        counts[bin_of(bins, float(f"{value:.4g}"))] += 1
    assert counts == [each.requests for each in bins]


def described_signals(found: Policy) -> set[str]:
    return {signal for signal in SIGNALS if getattr(found.entropy, f"{signal}_reference")}


def test_calibration_describes_each_signal_that_an_entropy_rule_reads(tmp_path: Path) -> None:
    replayed = replay(tmp_path, requests_that_separate())
    requests = np.arange(len(replayed.episodes.ids))
    tried = {family: found[-1] for family, found in single_rules(replayed, requests[:30]).items()}
    wanted = [
        (tried[EAT_SENTENCE], {"eat"}),
        (tried[EAT_GATED], {"eat", "rank"}),
        (tried[RANK], {"rank"}),
        (tried[RPDI], {"rpdi"}),
        (either(tried[EAT_SENTENCE], tried[RANK]), {"eat", "rank"}),
        (either(tried[EAT_SENTENCE], tried[SOFT]), {"eat"}),
        (tried[SOFT], set()),
    ]
    for rule, signals in wanted:
        found = policy_of(replayed, rule, {"EAT", RANK, RPDI}, requests, requests)
        assert described_signals(found) == signals, str(rule)
        assert found.entropy.shadow is False
    assert described_signals(policy_of(replayed, None, {"EAT", RANK}, requests, requests)) == set()
    too_few_groups = policy_of(replayed, tried[EAT_GATED], {"EAT"}, requests, requests // 10)
    assert described_signals(too_few_groups) == set()


def test_a_give_up_rule_alone_is_described_by_the_probes_that_it_reads(tmp_path: Path) -> None:
    replayed = replay(tmp_path, requests_that_separate())
    requests, episodes = np.arange(len(replayed.episodes.ids)), replayed.episodes
    rule = give_ups(replayed, requests, None, 0)[0]
    found = policy_of(replayed, None, {"EAT"}, requests, requests, second=(rule, True))
    since = rule.entropy["give_up_tokens"] - rule.entropy["eat_warmup_samples"]
    read = set(episodes.owner[(episodes.sample >= 0) & (episodes.think_tokens >= since)].tolist())
    assert described_signals(found) == {"eat"}
    assert sum(each.requests for each in found.entropy.eat_reference) == len(read)


# ------------------------------------------------------------------------------------------------------ sentence ends


def test_live_requests_count_as_the_calibration_counts_them(tmp_path: Path) -> None:
    made, family = requests_that_separate(), RPDI
    replayed = replay(tmp_path, made)
    requests = np.arange(len(replayed.episodes.ids))
    rule = single_rules(replayed, requests[:30])[family][3]
    in_force = policy_of(replayed, rule, {family}, requests, requests)
    reference = getattr(in_force.entropy, f"{family.lower()}_reference")
    assert in_force.scheduler.min_think_tokens > 1
    assert len(reference) == BINS
    session = Session("s", hello(), NOW, parts=STREAM_PARTS)
    (response,) = session.on_policy(1, in_force)
    answer = agent_pb2.SettingsStatus(nonce=response.settings.nonce, revision=1)
    session.on_message(agent_pb2.ConnectRequest(settings_status=answer), NOW)
    for record in traces.records(made):
        if record.up.WhichOneof("message") in ("snapshot", "step"):
            session.on_message(record.up, NOW)
    counted = session.part(ControlGroup).experiments.newest()[0].samples[family.lower()]
    assert sum(counted) == sum(each.requests for each in reference) >= 40
    # An edge is a rounded sample, which may lie on either side of the edge.
    assert max(abs(count - each.requests) for count, each in zip(counted, reference, strict=True)) <= 1


RANKS = (SignalBin(max_value=5, requests=50), SignalBin(max_value=50, requests=50))


def test_each_request_counts_once_with_the_first_rank_from_the_floor_on() -> None:
    """Rank 0 was not measured."""
    made = with_sentences(rank_rules(RANKS))
    for number, values in enumerate(({0: 90, FLOOR: 2}, {0: 2, FLOOR: 90}, {0: 2, FLOOR + 1: 90})):
        run_signal(made, "rank", values, name=f"r{number}")
    assert samples(made) == {"rank": [2, 1]}
    run_signal(made, "rank", {0: 0, FLOOR + 5: 90})
    run_signal(made, "rank", {0: 0})
    run_signal(made, "rank", {0: 2}, min_think_tokens=FLOOR + 1)
    assert samples(made) == {"rank": [2, 2]}, "the first measured value, under the calibrated floor"
    lines = list(savings_lines(told_of(made)))
    assert "first rank at a sentence end of 4 requests: 50 % (calibrated 50 %) up to 5, " in lines[-1]


def test_with_rules_on_several_signals_only_the_control_group_is_compared() -> None:
    eats = [each.model_dump() for each in REFERENCE]
    both = {"eat_level_threshold_nats": 1e-6, "eat_reference": eats, "holdout_share": 0.5}
    made = with_sentences(rank_rules(RANKS, **both))
    names = [f"r{number}" for number in range(12)]
    for name in names:
        run_signal(made, "rank", {0: 2}, name=name)
    control = sum(held_out(name, 0.5) for name in names)
    assert 0 < control < len(names)
    assert samples(made) == {"eat": [control, 0, 0], "rank": [control, 0]}


def test_the_evidence_is_the_mean_over_the_signals() -> None:
    bins = {"rank": (90, 10), "rpdi": (10, 90)}

    def told(**seen: tuple[int, int]) -> fleet_pb2.Savings:
        made = fleet_pb2.Savings(rules="r", since_revision=1, max_loss=1.0)
        for signal, counts in seen.items():
            for edge, calibrated, count in zip((1.0, 2.0), bins[signal], counts, strict=True):
                getattr(made, f"{signal}_samples").add(max_value=edge, calibrated=calibrated, seen=count)
        return made

    def evidence(**seen: tuple[int, int]) -> float:
        watch = Watch()
        watch.look({"alone": told(**seen)})
        assert watch.drift is not None
        return watch.drift

    drifted, stayed = evidence(rank=(0, 60)), evidence(rpdi=(6, 54))
    assert evidence(rank=(0, 60), rpdi=(6, 54)) == pytest.approx((drifted + stayed) / 2)
    assert drifted > 1 > stayed
    reason = _drift(told(rank=(0, 60), rpdi=(0, 0)))
    assert reason.startswith("The end marker's rank has left")
    assert "60 of 60 requests have a first sample above 1, where the calibration had 10 of 100" in reason
