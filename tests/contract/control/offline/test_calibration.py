"""Calibration on requests whose behaviour is known: it finds what is there, and nothing if nothing is there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from meridian_control.common.inference import binomial_upper
from meridian_control.offline import calibration_report as frontier
from meridian_control.offline.calibration import Goal, calibrate
from meridian_control.offline.correctness import from_labels
from meridian_control.offline.episodes import UNFINISHED
from meridian_control.offline.halves import halved
from meridian_control.offline.rule_replay import (
    CAP,
    SOFT,
    Replay,
)
from meridian_control.offline.statistics import mean_bound
from meridian_control.offline.trace_file import FileError
from meridian_control.policy import model as schema
from meridian_control.policy.section import INT32_MAX
from tests.fakes import traces
from tests.fakes.replays import GOAL, REQUESTS, made, recorded_in, replay, second_half, separating
from tests.fakes.tables import policy

# ----------------------------------------------------------------------------------------------------------- findings


@pytest.mark.parametrize("labelled", [True, False])
def test_signals_that_tell_are_found(tmp_path: Path, labelled: bool) -> None:
    replayed = replay(tmp_path, made(), labelled)
    found = calibrate(replayed, GOAL)
    assert separating(found) == {"EAT", "rank"}
    assert found.recommended is not None
    assert found.confirmed
    figures = found.recommended.held_out
    assert figures.saved > 0.25
    assert figures.saved_interval.low < figures.saved < figures.saved_interval.high
    # Answers are right or wrong, so the bound is exact.
    assert figures.harm == pytest.approx(figures.harmful / figures.requests)
    assert figures.harm_bound == binomial_upper(figures.harmful, figures.requests, 0.95) > 0
    assert max(found.recommended.fit.harm_bound, figures.harm_bound) <= 0.1
    assert found.fixed_cap is None or found.fixed_cap.held_out.saved < figures.saved
    cap, longest = found.fixed_cap, int(replayed.episodes.natural_tokens.max())
    proved = cap is not None and cap.held_out.harm_bound <= GOAL.max_loss
    tokens = int(cap.rule.scheduler["max_think_tokens"]) if cap is not None and proved else longest
    assert found.policy.scheduler.calibrated_cap_tokens == tokens > found.policy.scheduler.min_think_tokens
    entropy, scheduler = found.policy.entropy, found.policy.scheduler
    assert (entropy.enabled, entropy.shadow, entropy.rpdi_threshold) == (True, False, 0)
    assert scheduler.min_think_tokens < 512


def test_a_blind_eat_is_left_out(tmp_path: Path) -> None:
    """If EAT is near 0 from the first token on, whatever the answer, a level threshold alone would end every request at
    once."""
    found = calibrate(replay(tmp_path, made(eat="blind", same="noise")), GOAL)
    assert separating(found) == {"rank"}
    assert found.recommended is not None
    assert "EAT" not in found.recommended.rule.signals
    assert not [
        family for family, points in found.fronts.items() if points and points[0].rule.either and "EAT" in family
    ]
    entropy = found.policy.entropy
    assert (entropy.eat_level_threshold_nats, entropy.eat_probe_interval_tokens) == (0, INT32_MAX)


@pytest.mark.parametrize("labelled", [True, False])
def test_nothing_is_found_in_noise(tmp_path: Path, labelled: bool) -> None:
    """A late end harms few requests, whatever it is decided from, so the allowed loss is small."""
    goal = replace(GOAL, max_loss=0.05)
    found = calibrate(replay(tmp_path, made(eat="noise", rank="noise", same="noise"), labelled), goal)
    assert separating(found) == set()
    assert (found.recommended, found.confirmed, found.second) == (None, False, None)
    entropy = found.policy.entropy
    assert (entropy.shadow, entropy.eat_level_threshold_nats, entropy.rpdi_threshold) == (True, 0, 0)
    assert (entropy.rank_conditions, found.policy.scheduler.soft_think_tokens) == ((), 0)


def test_a_trace_under_fields_that_were_removed(tmp_path: Path) -> None:
    replayed = replay(tmp_path, made(40))
    assert replayed.episodes.policy is not None
    replayed.episodes.policy.loop.MergeFromString(b"\x30\xe0\x03\x38\x01")  # near_repeated_tokens = 480
    found = calibrate(replayed, GOAL)
    (caution,) = (text for text in frontier.cautions(found, replayed) if "removed" in text)
    assert caution.startswith("The policy of the trace: loop.near_repeated_tokens = 480 has no effect: it was removed ")


@pytest.mark.parametrize(("unfinished", "is_warned"), [(2, False), (3, True)])
def test_a_trace_in_which_long_requests_are_missing(tmp_path: Path, unfinished: int, is_warned: bool) -> None:
    replayed = replay(tmp_path, made(40))
    assert len(replayed.episodes.ids) == 40
    replayed.episodes.left_out[UNFINISHED] = unfinished
    cautions = list(frontier.cautions(calibrate(replayed, GOAL), replayed))
    assert any(text.startswith("3 requests had not finished") for text in cautions) == is_warned


def test_signals_that_were_not_measured(tmp_path: Path) -> None:
    requests = made()
    for request in requests:
        request.probes = dict.fromkeys(request.probes, (float("nan"), 0))
        request.rows = [(phase, flags, float("nan"), rank) for phase, flags, _, rank in request.rows]
    found = calibrate(replay(tmp_path, requests), GOAL)
    why = {s.signal: s.why_not for s in found.separations}
    assert why["EAT"] == why["RPDI"] == "it was not measured"
    assert not why["rank"]
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"rank"}
    told = frontier.report(found, replay(tmp_path / "again", requests), GOAL)
    assert json.loads(json.dumps(told, allow_nan=False))["signals"][0]["auroc"] is None


def test_answers_that_all_begin_alike(tmp_path: Path) -> None:
    """If all answers begin alike, the proxy finds every stop right, so nothing can be told apart and nothing is
    recommended."""
    requests = made(40)
    for request in requests:
        values = request.probes.items()
        request.probes = {at: (eat, number) for number, (at, (eat, _)) in enumerate(values, 1)}
    found = calibrate(replay(tmp_path, requests, labelled=False), GOAL)
    why = {s.why_not for s in found.separations}
    assert why == {"every stop is right: there is nothing to tell apart"}
    assert found.recommended is None


def test_a_signal_that_does_not_tell_is_switched_off_and_the_policy_keeps_what_is_not_calibrated(
    tmp_path: Path,
) -> None:
    """Only EAT tells."""
    ranked = {"rank_conditions": [{"max_ranks": [5000]}], "eat_probe_max_rank": 9, "confirm_sentence_ends": 3}
    base = policy(
        scheduler={"max_think_tokens": 300, "soft_think_tokens": 200},
        model={"m": {"eat_answer_prefix": "x"}},
        fallback={"lease_ms": 500},
        entropy={"rpdi_threshold": 3.0, **ranked},
    )
    found = calibrate(replay(tmp_path, made(rank="noise"), base=base), GOAL)
    assert separating(found) == {"EAT"}
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"EAT"}
    assert found.recommended.held_out.probe_share > 0
    assert not any(points[0].rule.either for points in found.fronts.values() if points), "no two rules on probes"
    made_of = found.policy
    assert (made_of.entropy.eat_probe_max_rank, made_of.entropy.eat_level_threshold_nats > 0) == (0, True)
    assert made_of.entropy.confirm_sentence_ends < 3, "the base policy's number does not belong to the rule"
    assert (made_of.scheduler.max_think_tokens, made_of.fallback, made_of.model) == (300, base.fallback, base.model)
    assert (made_of.scheduler.soft_think_tokens, made_of.entropy.rank_conditions) == (0, ())
    assert made_of.entropy.rpdi_window_tokens == base.entropy.rpdi_window_tokens


def test_a_soft_close_that_would_not_act_is_not_recommended(tmp_path: Path) -> None:
    requests = made(eat="blind", same="noise")
    assert SOFT in calibrate(replay(tmp_path, requests), GOAL).tried
    found = calibrate(replay(tmp_path / "off", requests, base=policy(scheduler={"shadow": True})), GOAL)
    assert not [family for family in found.tried if SOFT in family]


# ------------------------------------------------------------------------------------------------------------ groups


def grouped(folder: Path, requests: list[traces.MadeUp], group_of: list[str]) -> Replay:
    """Return a replay whose labels put each request into a group."""
    episodes = recorded_in(folder, requests)
    rows = [row | {"group": g} for request, g in zip(requests, group_of, strict=True) for row in request.labels()]
    path = folder / "labels.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return Replay(episodes, from_labels(path, episodes), schema.Policy(), delay_tokens=2)


def test_a_group_lies_in_one_half_and_every_split_is_another(tmp_path: Path) -> None:
    names = [f"problem {n % 12}" for n in range(REQUESTS)]
    replayed = grouped(tmp_path, made(), names)
    splits = set()
    for split in range(5):
        fit, held_out, _ = halved(replayed.episodes.ids, replayed.judge, split)
        first, second = ({replayed.judge.groups[n] for n in half} for half in (fit, held_out))
        assert len(first) == len(second) == 6
        assert not first & second
        splits.add(frozenset(first))
    assert len(splits) == 5


@pytest.mark.parametrize("labelled", [True, False])
def test_choices_of_one_request_are_a_group(tmp_path: Path, labelled: bool) -> None:
    requests = [replace(r, request_id=f"{n % 2}_chatcmpl-{n // 2}") for n, r in enumerate(made(40))]
    replayed = replay(tmp_path, requests, labelled)
    judge = replayed.judge
    for half in halved(replayed.episodes.ids, judge, 0)[:2]:
        assert Counter(Counter(judge.groups[n] for n in half).values()) == {2: 10}
    assert not replay(tmp_path / "single", requests[::2], labelled).judge.groups


def test_intervals_and_bounds_count_groups_and_not_requests(tmp_path: Path) -> None:
    """If all requests of a group are the same, more of them give no more certainty; as single requests they would."""
    few, copies = made(30), 4
    many = [replace(request, request_id=f"{request.request_id}-{n}") for request in few for n in range(copies)]
    names = [f"problem {n // copies}" for n in range(len(many))]
    together = calibrate(grouped(tmp_path / "groups", many, names), GOAL)
    apart = calibrate(replay(tmp_path / "single", many), GOAL)
    assert (together.groups, apart.groups) == (30, 0)
    wide, narrow = together.natural, apart.natural
    assert wide.harm_bound == pytest.approx(1 - 0.05 ** (1 / 15))
    assert narrow.harm_bound == pytest.approx(1 - 0.05 ** (1 / narrow.requests))
    spread = [
        point.held_out.saved_interval.high - point.held_out.saved_interval.low
        for found in (together, apart)
        for point in found.fronts[CAP][-1:]
    ]
    assert spread[0] > 1.5 * spread[1]


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ("b", ":{last}: group must be 'a' as in an earlier line; got 'b'"),
        ("", ":{last}: group must be a string that is not empty; got ''"),
        (3, ":{last}: group must be a string that is not empty; got 3"),
        (None, ": gives request '{id}' no group, but it gives other requests one"),
    ],
)
def test_groups_that_cannot_be_used(tmp_path: Path, group: str | int | None, complaint: str) -> None:
    first, second = requests = made(2)
    episodes, path = recorded_in(tmp_path, requests), tmp_path / "labels.jsonl"
    rows = [row | {"group": "a"} for row in first.labels()] + list(second.labels())
    if group is not None:
        rows = [row | {"group": "a"} for row in rows] + [{"request_id": first.request_id, "correct": 1, "group": group}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(FileError) as raised:
        from_labels(path, episodes)
    assert str(raised.value) == f"{path}{complaint.format(last=len(rows), id=second.request_id)}"


# --------------------------------------------------------------------------------------------------------- the proof


def test_the_harm_bound_of_probabilities_is_that_of_means(tmp_path: Path) -> None:
    requests = made()
    episodes = recorded_in(tmp_path, requests)
    path = tmp_path / "labels.jsonl"
    rows = [row | {"correct": 0.9 * row["correct"]} for request in requests for row in request.labels()]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = calibrate(Replay(episodes, from_labels(path, episodes), schema.Policy(), delay_tokens=2), GOAL)
    harmful = [p.held_out for points in found.fronts.values() for p in points if p.held_out.harm > 0]
    assert harmful
    for figures in harmful:
        assert figures.harm == pytest.approx(0.9 * figures.harmful / figures.requests)
        assert figures.harm_bound == mean_bound(figures.harm, figures.requests, 0.95)


def test_only_what_is_proved_is_recommended(tmp_path: Path) -> None:
    """With 60 requests in a half no rule can be proved to lose less than one per cent; less than ten can be
    proved, as the first test shows."""
    found = calibrate(replay(tmp_path, made()), Goal(max_loss=0.01))
    assert (found.best, found.recommended, found.policy.entropy.shadow) == (None, None, True)


def test_a_rule_that_the_other_half_does_not_prove_stays_in_shadow(tmp_path: Path) -> None:
    """In the second half answers become right only at the end of the thinking, which the first half cannot tell."""
    requests = made()
    second = second_half(replay(tmp_path / "before", requests))
    for request in requests:
        if request.request_id in second:
            request.settled_tokens = max(request.probes)
    replayed = replay(tmp_path, requests)
    found = calibrate(replayed, GOAL)
    assert found.best is not None
    assert found.best.fit.harm_bound <= 0.1 < found.best.held_out.harm_bound
    assert (found.confirmed, found.recommended, found.policy.entropy.shadow) == (False, None, True)
    told = frontier.recommendation(found, GOAL)
    bound = f"The rule costs at most {100 * found.best.held_out.harm_bound:.2f} points of accuracy"
    assert bound in told
    assert "which exceeds the allowed 10.0, so the policy stays in shadow: the loss is not proved to be small" in told
    written = frontier.report(found, replayed, GOAL)
    assert (written["recommended"], written["best"]["rule"]) == (None, str(found.best.rule))
    for loss, confidence, said in (
        (0.0125, 0.995, ("99.5 % confidence", "the allowed 1.25,")),
        (0.0004, 0.999, ("99.9 % confidence", "the allowed 0.04,")),
    ):
        told = frontier.recommendation(found, Goal(loss, confidence))
        assert [text for text in said if text in told] == [*said]
