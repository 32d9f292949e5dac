"""Calibration on requests whose behaviour is known: it finds what is there, and nothing if nothing is there."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from meridian_control.cli.main import app
from meridian_control.decisions.request_table import RequestTable
from meridian_control.decisions.signals import add_eat_sample
from meridian_control.offline import calibration_report as frontier
from meridian_control.offline.calibration import Calibration, Goal, calibrate
from meridian_control.offline.candidates import loosened, paired, same_answer, single_rules
from meridian_control.offline.correctness import Judge, from_labels, from_probes
from meridian_control.offline.episodes import collect
from meridian_control.offline.halves import TooFewRequests, first_half, halved
from meridian_control.offline.rule_replay import (
    CAP,
    EAT_GATED,
    EAT_NEAR,
    EAT_PARAGRAPH,
    EAT_SENTENCE,
    EAT_SETTLED,
    MARGIN,
    RANK,
    RPDI,
    SOFT,
    Replay,
    StoppingRule,
    either,
)
from meridian_control.offline.statistics import Area, harmful_bound, mean_bound, needed_to_prove
from meridian_control.offline.trace_file import FileError
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from meridian_control.policy import schema as sections
from meridian_control.policy.schema import RankCondition
from meridian_control.policy.section import INT32_MAX
from tests.fakes import traces
from tests.fakes.tables import policy

if TYPE_CHECKING:
    from pathlib import Path

    from meridian_control.policy.model import Policy

REQUESTS = 120
OK, FAILED, INVALID = range(3)


def made(count: int = REQUESTS, **kinds: str) -> list[traces.MadeUp]:
    return [traces.made_up(n, **kinds) for n in range(count)]  # type: ignore[arg-type]


def replay(folder: Path, requests: list[traces.MadeUp], labelled: bool = True, base: Policy | None = None) -> Replay:
    folder.mkdir(exist_ok=True)
    episodes = collect([traces.write(folder / "a.trace", traces.records(requests))])
    judge = from_probes(episodes)
    if labelled:
        judge = from_labels(traces.write_labels(folder / "labels.jsonl", requests), episodes)
    return Replay(episodes, judge, base or schema.Policy(), delay_tokens=2)


def separating(found: Calibration) -> set[str]:
    return {s.signal for s in found.separations if s.separates and s.signal not in ("entropy", "position")}


# ----------------------------------------------------------------------------------------------------------- findings


@pytest.mark.parametrize("labelled", [True, False])
def test_signals_that_tell_are_found(tmp_path: Path, labelled: bool) -> None:
    found = calibrate(replay(tmp_path, made(), labelled), Goal())
    assert separating(found) == {"EAT", "rank"} | ({"same answer"} if labelled else set())
    assert found.recommended is not None
    assert found.confirmed
    figures = found.recommended.held_out
    assert figures.saved > 0.25
    assert figures.saved_interval.low < figures.saved < figures.saved_interval.high
    assert figures.accuracy_change >= -0.01
    assert 0 < figures.harm_bound < 0.1
    assert found.fixed_cap is None or found.fixed_cap.held_out.saved < figures.saved
    entropy, scheduler = found.policy.entropy, found.policy.scheduler
    assert (entropy.enabled, entropy.shadow, entropy.rpdi_threshold) == (True, False, 0)
    assert scheduler.min_think_tokens < 512


def test_a_margin_that_tells_is_found(tmp_path: Path) -> None:
    found = calibrate(replay(tmp_path, made(60, eat="noise", rank="noise", margin="tells")), Goal(max_loss=0.05))
    assert separating(found) - {"same answer"} == {"margin"}
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"margin"}
    assert found.recommended.held_out.saved > 0.2
    entropy = found.policy.entropy
    assert entropy.margin_threshold_nats > 0
    assert entropy.confirm_sentence_ends == found.recommended.rule.entropy["confirm_sentence_ends"]
    assert (entropy.rank_conditions, entropy.rpdi_threshold, entropy.eat_level_threshold_nats) == ((), 0, 0)


def test_a_margin_that_does_not_tell_is_switched_off(tmp_path: Path) -> None:
    base = policy(entropy={"margin_threshold_nats": 2.0, "eat_probe_max_margin_nats": 3.0, "confirm_sentence_ends": 3})
    requests = made(60, rank="noise", margin="noise")
    found = calibrate(replay(tmp_path, requests, base=base), Goal(max_loss=0.05))
    assert separating(found) - {"same answer"} == {"EAT"}
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"EAT"}
    entropy = found.policy.entropy
    assert (entropy.margin_threshold_nats, entropy.eat_probe_max_margin_nats) == (0, 0)
    assert entropy.confirm_sentence_ends < 3, "the base policy's number does not belong to the rule"


def test_a_trace_of_an_older_agent_has_no_margin(tmp_path: Path) -> None:
    requests = made(40, margin="tells")
    for request in requests:
        request.margins = []
    found = calibrate(replay(tmp_path, requests), Goal(max_loss=0.1))
    assert {s.signal: s.why_not for s in found.separations}["margin"] == "it was not measured"
    assert not {MARGIN, EAT_NEAR} & set(found.fronts)
    assert separating(found) == {"EAT", "rank", "same answer"}


def test_pairs_agree_on_how_many_sentence_ends(tmp_path: Path) -> None:
    replayed = replay(tmp_path, made(30, margin="tells"))
    single = single_rules(replayed, np.arange(30))
    confirmed = {family: {r.entropy.get("confirm_sentence_ends") for r in rules} for family, rules in single.items()}
    assert confirmed.pop(CAP) == confirmed.pop(SOFT) == {None}
    assert set(confirmed) >= {EAT_SENTENCE, EAT_NEAR, EAT_SETTLED, RANK, MARGIN}
    assert set(map(frozenset, confirmed.values())) == {frozenset({1, 2})}
    # Rules of both kinds alternate, so that thinning keeps both.
    mixed = {family: sorted(rules, key=str) for family, rules in single.items() if family != CAP}
    pairs = [pair for found in paired(mixed, 8).values() for pair in found]
    assert {pair.entropy["confirm_sentence_ends"] for pair in pairs} == {1, 2}
    for pair in pairs:
        wanted = pair.entropy["confirm_sentence_ends"]
        assert all(part.entropy.get("confirm_sentence_ends", wanted) == wanted for part in pair.parts)


def test_a_loosened_margin_is_larger_and_needs_as_many_sentence_ends() -> None:
    rule = StoppingRule(MARGIN, {"margin_threshold_nats": 0.4, "confirm_sentence_ends": 2})
    assert loosened(rule).entropy == {"margin_threshold_nats": 0.5, "confirm_sentence_ends": 2}
    assert str(rule) == "margin <= 0.4 nats, 2 times in a row"


def test_a_blind_eat_is_left_out(tmp_path: Path) -> None:
    """If EAT is near 0 from the first token on, whatever the answer, a level threshold alone would end every request at
    once."""
    found = calibrate(replay(tmp_path, made(eat="blind", same="noise")), Goal())
    assert separating(found) == {"rank"}
    assert found.recommended is not None
    assert "EAT" not in found.recommended.rule.signals
    assert not [
        family for family, points in found.fronts.items() if points and points[0].rule.either and "EAT" in family
    ]
    entropy = found.policy.entropy
    assert (entropy.eat_level_threshold_nats, entropy.eat_probe_interval_tokens) == (0, INT32_MAX)


def test_eat_alone(tmp_path: Path) -> None:
    found = calibrate(replay(tmp_path, made(rank="noise", same="noise")), Goal())
    assert separating(found) == {"EAT"}
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"EAT"}
    assert found.policy.entropy.rank_conditions == ()
    assert found.policy.scheduler.soft_think_tokens == 0
    assert found.policy.entropy.eat_level_threshold_nats > 0
    assert found.recommended.held_out.probe_share > 0


@pytest.mark.parametrize("labelled", [True, False])
def test_nothing_is_found_in_noise(tmp_path: Path, labelled: bool) -> None:
    found = calibrate(replay(tmp_path, made(eat="noise", rank="noise", same="noise"), labelled), Goal())
    assert separating(found) == set()
    assert (found.recommended, found.confirmed) == (None, False)
    entropy = found.policy.entropy
    assert (entropy.shadow, entropy.eat_level_threshold_nats, entropy.rpdi_threshold) == (True, 0, 0)
    assert (entropy.rank_conditions, found.policy.scheduler.soft_think_tokens) == ((), 0)


def test_signals_that_were_not_measured(tmp_path: Path) -> None:
    requests = made(40)
    for request in requests:
        request.probes = dict.fromkeys(request.probes, (float("nan"), 0))
        request.rows = [(phase, flags, float("nan"), rank) for phase, flags, _, rank in request.rows]
    found = calibrate(replay(tmp_path, requests), Goal(max_loss=0.1))
    why = {s.signal: s.why_not for s in found.separations}
    assert why["EAT"] == why["RPDI"] == why["entropy"] == why["same answer"] == "it was not measured"
    assert not why["rank"]
    assert found.recommended is not None
    assert found.recommended.rule.signals == {"rank"}
    told = frontier.report(found, replay(tmp_path / "again", requests), Goal())
    assert json.loads(json.dumps(told, allow_nan=False))["signals"][0]["auroc"] is None


def test_answers_that_all_begin_alike(tmp_path: Path) -> None:
    """If all answers begin alike, the proxy finds every stop right, so nothing can be told apart and nothing is
    recommended."""
    requests = made(40)
    for request in requests:
        values = request.probes.items()
        request.probes = {at: (eat, number) for number, (at, (eat, _)) in enumerate(values, 1)}
    found = calibrate(replay(tmp_path, requests, labelled=False), Goal())
    why = {s.why_not for s in found.separations if s.signal not in ("margin", "same answer")}
    assert why == {"every stop is right: there is nothing to tell apart"}
    assert found.recommended is None


def test_it_is_the_same_every_time(tmp_path: Path) -> None:
    requests = made(60)
    first = calibrate(replay(tmp_path / "1", requests), Goal())
    second = calibrate(replay(tmp_path / "2", requests), Goal())
    assert first == second


def test_too_few_requests(tmp_path: Path) -> None:
    with pytest.raises(TooFewRequests, match="10 requests are needed in each half"):
        calibrate(replay(tmp_path, made(12)), Goal())


def test_the_policy_keeps_what_is_not_calibrated(tmp_path: Path) -> None:
    base = policy(
        scheduler={"max_think_tokens": 300, "soft_think_tokens": 200},
        model={"m": {"eat_answer_prefix": "x"}},
        fallback={"lease_ms": 500},
        entropy={"rpdi_threshold": 3.0, "rank_conditions": [{"max_ranks": [5000]}]},
    )
    found = calibrate(replay(tmp_path, made(rank="noise"), base=base), Goal())
    made_of = found.policy
    assert (made_of.scheduler.max_think_tokens, made_of.fallback, made_of.model) == (300, base.fallback, base.model)
    assert (made_of.scheduler.soft_think_tokens, made_of.entropy.rank_conditions) == (0, ())
    assert made_of.entropy.rpdi_window_tokens == base.entropy.rpdi_window_tokens


# ------------------------------------------------------------------------------------------------------------ the rules


def eat(family: str, **fields: Any) -> StoppingRule:
    values = {
        "ema_alpha": 1.0,
        "eat_warmup_samples": 1,
        "eat_ema_variance_threshold": 1e-4,
        "eat_level_threshold_nats": 0.3,
        "eat_probe_interval_tokens": 1,
        "eat_probe_placement": "sentence",
        "eat_probe_max_rank": 0,
        "eat_probe_max_margin_nats": 0.0,
        "confirm_sentence_ends": 1,
    }
    return StoppingRule(family, {**values, **fields})


def ranks(*bounds: int) -> StoppingRule:
    return StoppingRule(RANK, {"rank_conditions": (RankCondition(max_ranks=bounds),)})


def sentence_ends(request: traces.MadeUp) -> list[tuple[int, int, bool]]:
    """Return thinking tokens, end-marker rank and whether a paragraph ends, for each sentence end after which thinking
    goes on."""
    found = []
    for at, (_, flags, _, _) in enumerate(request.rows[:-5]):
        if flags & traces.SENTENCE:
            found.append((at + 1, request.rows[at + 1][3], flags == traces.PARAGRAPH))
    return found


@pytest.mark.parametrize("bounds", [(20,), (100, 20), (30, 300, 1000)])
def test_where_a_rank_rule_stops(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    requests = made(30)
    replayed = replay(tmp_path, requests)
    stops = replayed.stops(ranks(*bounds))
    by_id = {request.request_id: request for request in requests}
    for number, request_id in enumerate(replayed.episodes.ids):
        ends = sentence_ends(by_id[request_id])
        at = next(
            (
                ends[i][0] + 2
                for i in range(len(bounds) - 1, len(ends))
                if all(ends[i - k][1] <= bound for k, bound in enumerate(bounds))
            ),
            np.inf,
        )
        assert stops.at_tokens[number] == (at if at < replayed.episodes.natural_tokens[number] else np.inf)
    assert not stops.probes.any()


@pytest.mark.parametrize("confirm", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_where_rules_at_sentence_ends_stop(tmp_path: Path, seed: int, confirm: int) -> None:
    """Each rule stops where a slow reference finds the n-th sentence end in a row at which the rule holds."""
    requests = [traces.made_up(n, seed, margin="tells") for n in range(12)]
    replayed = replay(tmp_path, requests)
    by_id, width = {request.request_id: request for request in requests}, replayed.window_tokens
    rng = np.random.default_rng(seed)
    conditions = tuple(RankCondition(max_ranks=tuple(rng.integers(5, 300, d).tolist())) for d in (1, 2, 4))
    rules = [
        StoppingRule(MARGIN, {"margin_threshold_nats": float(rng.uniform(0.3, 2))}),
        StoppingRule(RANK, {"rank_conditions": conditions}),
        StoppingRule(RPDI, {"rpdi_threshold": 1.05}),
    ]
    stopped = 0
    for rule in rules:
        confirmed = StoppingRule(rule.family, {**rule.entropy, "confirm_sentence_ends": confirm})
        stops = replayed.stops(confirmed)
        stopped += np.isfinite(stops.at_tokens).sum()
        for number, request_id in enumerate(replayed.episodes.ids):
            at = slow_stop(by_id[request_id], rule, confirm, width)
            natural = replayed.episodes.natural_tokens[number]
            assert stops.at_tokens[number] == (at if at is not None and at < natural else np.inf)
    assert stopped > 5


def slow_stop(request: traces.MadeUp, rule: StoppingRule, confirm: int, width: int) -> int | None:
    """Return the thinking tokens at which the rule stops the request, two tokens after a sentence end."""
    row, ranks = 0, list[int]()
    for tokens, rank, _ in sentence_ends(request):
        ranks.insert(0, rank)
        entropies = [entropy for _, _, entropy, _ in request.rows[: tokens + 1]]
        if rule.family == MARGIN:
            holds = request.margins[tokens] <= rule.entropy["margin_threshold_nats"]
        elif rule.family == RANK:
            bounds = [condition.max_ranks for condition in rule.entropy["rank_conditions"]]
            holds = any(
                len(ranks) >= len(b) and all(r <= most for r, most in zip(ranks, b, strict=False)) for b in bounds
            )
        else:
            ratio = np.mean(entropies[-width:]) / np.mean(entropies)
            holds = len(entropies) >= width and ratio > rule.entropy["rpdi_threshold"]
        row = row + 1 if holds else 0
        if row >= confirm:
            return tokens + 2
    return None


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (EAT_SENTENCE, {}),
        (EAT_PARAGRAPH, {"eat_probe_placement": "paragraph"}),
        (EAT_GATED, {"eat_probe_max_rank": 100}),
        (EAT_NEAR, {"eat_probe_max_margin_nats": 1.0}),
        (EAT_SETTLED, {"ema_alpha": 0.4, "eat_warmup_samples": 5, "eat_ema_variance_threshold": 0.1}),
        (EAT_SENTENCE, {"confirm_sentence_ends": 2}),
        (EAT_NEAR, {"eat_probe_max_margin_nats": 2.0, "confirm_sentence_ends": 3}),
        (
            EAT_SETTLED,
            {"ema_alpha": 0.4, "eat_warmup_samples": 3, "eat_ema_variance_threshold": 0.1, "confirm_sentence_ends": 4},
        ),
    ],
)
@pytest.mark.parametrize("hold_ms", [0, 50])
def test_where_an_eat_rule_stops(tmp_path: Path, family: str, fields: dict[str, Any], hold_ms: int) -> None:
    """An EAT rule stops where a live table fires that gets the samples one by one; if requests are held, where EAT was
    measured."""
    requests = made(30, margin="tells")
    base = schema.Policy(entropy=sections.EntropyPolicy(eat_hold_ms=hold_ms))
    replayed = replay(tmp_path, requests, base=base)
    rule = eat(family, **fields)
    stops = replayed.stops(rule)
    by_id = {request.request_id: request for request in requests}
    for number, request_id in enumerate(replayed.episodes.ids):
        request = by_id[request_id]
        expected, asked = live_eat(request, rule)
        natural = replayed.episodes.natural_tokens[number]
        if expected is not None and expected < natural - 6:
            late = stops.at_tokens[number] - expected
            if hold_ms and family not in (EAT_GATED, EAT_NEAR):
                assert late == 0
            else:
                assert 2 <= late <= 4, "a probe takes a step or two"
            assert asked <= stops.probes[number] <= asked + 1
        elif expected is None:
            assert stops.at_tokens[number] == np.inf


def live_eat(request: traces.MadeUp, rule: StoppingRule) -> tuple[int | None, int]:
    """Return the thinking tokens of the sample at which the rule fires, and the number of probes until then."""
    table, fields = RequestTable(4), rule.entropy
    table.live[0] = True
    asked = held = 0
    for tokens, rank, paragraph in sentence_ends(request):
        wanted = paragraph or fields["eat_probe_placement"] == "sentence"
        if not wanted or (fields["eat_probe_max_rank"] and rank > fields["eat_probe_max_rank"]):
            continue
        if (gate := fields["eat_probe_max_margin_nats"]) and request.margins[tokens] > gate:
            continue
        asked += 1
        add_eat_sample(table, 0, request.probes[tokens][0], fields["ema_alpha"], tokens)
        flat = table.eat_ema_variance[0] < fields["eat_ema_variance_threshold"]
        low = table.eat_ema_nats[0] < fields["eat_level_threshold_nats"]
        held = held + 1 if table.eat_count[0] >= fields["eat_warmup_samples"] and flat and low else 0
        if held >= fields["confirm_sentence_ends"]:
            return tokens, asked
    return None, asked


@pytest.mark.parametrize(("hold_ms", "late"), [(0, {2, 3, 4}), (50, {0})])
def test_where_a_same_answer_rule_stops(tmp_path: Path, hold_ms: int, late: set[int]) -> None:
    """The rule stops at the first sample that is the third with its answer, or once the decision from it has come."""
    requests = made(30)
    base = schema.Policy(entropy=sections.EntropyPolicy(eat_hold_ms=hold_ms))
    replayed = replay(tmp_path, requests, base=base)
    stops = replayed.stops(same_answer(3))
    by_id = {request.request_id: request for request in requests}
    for number, request_id in enumerate(replayed.episodes.ids):
        ends = [tokens for tokens, _, _ in sentence_ends(by_id[request_id])]
        probes = by_id[request_id].probes
        at = next((tokens for tokens in ends if probes[tokens][1] >= 3), None)
        natural = replayed.episodes.natural_tokens[number]
        if at is not None and at < natural - 6:
            assert stops.at_tokens[number] - at in late
            assert stops.probes[number] >= sum(tokens <= at for tokens in ends)
        elif at is None:
            assert stops.at_tokens[number] == np.inf
    assert np.isfinite(stops.at_tokens).sum() > 20


def test_a_same_answer_rule_that_helps_is_found_and_its_policy_ends_thinking_nowhere_else(tmp_path: Path) -> None:
    requests = made(eat="noise", rank="noise")
    for request in requests:
        runs = ((at, eat, run if at >= request.settled_tokens else 1) for at, (eat, run) in request.probes.items())
        request.probes = {at: (eat, run) for at, eat, run in runs}
    found = calibrate(replay(tmp_path, requests), Goal())
    assert separating(found) == {"same answer"}
    assert found.recommended is not None
    assert found.confirmed
    entropy = found.policy.entropy
    assert entropy.same_answer_samples == found.recommended.rule.entropy["same_answer_samples"] > 0
    assert (entropy.eat_level_threshold_nats, entropy.eat_probe_interval_tokens) == (0, 1)
    assert (entropy.shadow, entropy.rank_conditions, entropy.rpdi_threshold) == (False, (), 0)
    assert found.policy.scheduler.min_think_tokens == 0


def test_without_labels_the_trial_answers_do_not_judge_themselves(tmp_path: Path) -> None:
    found = calibrate(replay(tmp_path, made(eat="noise", rank="noise"), labelled=False), Goal(max_loss=0.05))
    (same,) = (s for s in found.separations if s.signal == "same answer")
    assert same.why_not == "without labels the same trial answers judge it"
    assert found.recommended is None


def test_two_rules_on_probes_are_not_paired(tmp_path: Path) -> None:
    found = calibrate(replay(tmp_path, made(rank="noise")), Goal(max_loss=0.05))
    assert separating(found) == {"EAT", "same answer"}
    assert not any(points[0].rule.either for points in found.fronts.values() if points)


def test_a_fixed_cap(tmp_path: Path) -> None:
    replayed = replay(tmp_path, made(30))
    stops = replayed.stops(StoppingRule(CAP, {}, {"max_think_tokens": 150}))
    natural = replayed.episodes.natural_tokens
    assert (np.isfinite(stops.at_tokens) == (natural > 150)).all()
    assert set(stops.at_tokens[natural > 150]) == {150.0}


def test_of_two_rules_the_first_to_fire_stops(tmp_path: Path) -> None:
    replayed = replay(tmp_path, made(30))
    one, other = ranks(15), eat(EAT_SENTENCE, eat_level_threshold_nats=0.05)
    both, a, b = (replayed.stops(rule) for rule in (either(one, other), one, other))
    assert (both.at_tokens == np.minimum(a.at_tokens, b.at_tokens)).all()
    sooner = a.at_tokens < b.at_tokens
    assert sooner.any()
    assert (both.probes[sooner] <= b.probes[sooner]).all()
    assert both.probes.sum() < b.probes.sum()
    later = b.at_tokens < a.at_tokens
    assert (both.right[later] == b.right[later]).all()
    assert str(either(one, other)) == "end marker <= [15] or EAT < 0.05 nats"


# --------------------------------------------------------------------------------------------------- right answers


def test_labels_are_looked_up_where_a_stop_takes_effect() -> None:
    judge = Judge(np.array([0, 0, 1]), np.array([10, 20, 5]), np.array([0.0, 1.0, 0.5]), np.array([1.0, 0.25]), False)
    owner, tokens = np.array([0, 0, 0, 0, 1, 1]), np.array([1, 10, 11, 21, 5, 6])
    assert judge.at(owner, tokens).tolist() == [0, 0, 1, 1, 0.5, 0.25]


def test_the_proxy_is_the_last_unbroken_run(tmp_path: Path) -> None:
    requests = made(30)
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    judge = from_probes(episodes)
    settled = {request.request_id: request.settled_tokens for request in requests}
    for number, request_id in enumerate(episodes.ids):
        here = judge.owner == number
        right = judge.think_tokens[here] >= settled[request_id]
        # By chance the run of right answers may begin a little before the request settled; it never begins later.
        assert (judge.right[here][right] == 1).all()
        assert judge.right[here].sum() < here.sum()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"request_id": "nobody", "correct": true}', "request_id 'nobody' is not in the trace"),
        ("{", "is not JSON: "),
        ("[]", "must be an object"),
        ('{"request_id": 7, "correct": true}', "request_id must be a string; got 7"),
        ('{"request_id": "x", "correct": "yes"}', "correct must be true, false or in [0, 1]; got 'yes'"),
        ('{"request_id": "x", "correct": 1.5}', "correct must be true, false or in [0, 1]; got 1.5"),
        ('{"request_id": "x", "correct": NaN}', "correct must be true, false or in [0, 1]; got nan"),
        ('{"request_id": "x", "correct": 1, "think_tokens": -1}', "think_tokens must be an integer >= 0; got -1"),
        ('{"request_id": "x", "correct": 1, "tokens": 1}', "['tokens'] are not known keys"),
    ],
)
def test_labels_that_cannot_be_used(tmp_path: Path, row: str, complaint: str) -> None:
    requests = made(3)
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    path = traces.write_labels(tmp_path / "labels.jsonl", requests)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "", row, *lines[1:]]))
    with pytest.raises(FileError) as raised:
        from_labels(path, episodes)
    assert str(raised.value).startswith(f"{path}:3: {complaint}")


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
def test_labels_may_leave_out_what_vllm_adds_to_an_id(tmp_path: Path, prefix: str) -> None:
    requests = made(3)
    for request in requests:
        request.request_id = prefix + request.request_id
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    path = traces.write_labels(tmp_path / "labels.jsonl", requests)
    full = from_labels(path, episodes)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["request_id"] = row["request_id"].removeprefix(prefix).rpartition("-")[0]
    path.write_text("\n".join(map(json.dumps, rows)))
    again = from_labels(path, episodes)
    assert (full.right == again.right).all()
    assert (full.natural == again.natural).all()


def test_a_request_with_half_its_labels_is_not_judged(tmp_path: Path) -> None:
    requests = made(3)
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    path = tmp_path / "labels.jsonl"
    natural_only = {"request_id": requests[0].request_id, "correct": 1}
    cut_only = {"request_id": requests[1].request_id, "correct": 1, "think_tokens": 5}
    path.write_text("\n".join(json.dumps(row) for row in (natural_only, cut_only, *requests[2].labels())))
    judge = from_labels(path, episodes)
    assert [episodes.ids[n] for n in np.flatnonzero(~np.isnan(judge.natural))] == [requests[2].request_id]
    assert set(judge.owner.tolist()) == {episodes.ids.index(requests[2].request_id)}


# ------------------------------------------------------------------------------------------------------------ groups


def grouped(folder: Path, requests: list[traces.MadeUp], group_of: list[str]) -> Replay:
    """Return a replay whose labels put each request into a group."""
    folder.mkdir(exist_ok=True)
    episodes = collect([traces.write(folder / "a.trace", traces.records(requests))])
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


def test_intervals_and_bounds_count_groups_and_not_requests(tmp_path: Path) -> None:
    """If all requests of a group are the same, more of them give no more certainty; as single requests they would."""
    few, copies = made(30), 6
    many = [replace(request, request_id=f"{request.request_id}-{n}") for request in few for n in range(copies)]
    names = [f"problem {n // copies}" for n in range(len(many))]
    together = calibrate(grouped(tmp_path / "groups", many, names), Goal())
    apart = calibrate(replay(tmp_path / "single", many), Goal())
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


def test_too_few_groups(tmp_path: Path) -> None:
    replayed = grouped(tmp_path, made(), [f"problem {n % 9}" for n in range(REQUESTS)])
    with pytest.raises(TooFewRequests, match="5 groups of requests are needed in each half; there are 4, 5"):
        calibrate(replayed, Goal())


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"group": "b"}], ":{last}: group must be 'a' as in an earlier line; got 'b'"),
        ([{"group": ""}], ":{last}: group must be a string that is not empty; got ''"),
        ([{"group": 3}], ":{last}: group must be a string that is not empty; got 3"),
    ],
)
def test_groups_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], complaint: str) -> None:
    requests = made(2)
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    good = [row | {"group": "a"} for request in requests for row in request.labels()]
    bad = [{"request_id": requests[0].request_id, "correct": 1} | row for row in rows]
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(map(json.dumps, good + bad)))
    with pytest.raises(FileError) as raised:
        from_labels(path, episodes)
    assert str(raised.value) == f"{path}{complaint.format(last=len(good) + 1)}"


def test_a_request_without_a_group_among_others_with_one(tmp_path: Path) -> None:
    requests = made(2)
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    rows = [*(row | {"group": "a"} for row in requests[0].labels()), *requests[1].labels()]
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(FileError, match=r"gives request '.*' no group, but it gives other requests one"):
        from_labels(path, episodes)


# --------------------------------------------------------------------------------------------------------- the proof


def test_the_harm_bound_is_exact_for_single_requests_that_are_right_or_wrong(tmp_path: Path) -> None:
    found = calibrate(replay(tmp_path, made()), Goal())
    assert found.recommended is not None
    figures = found.recommended.held_out
    assert figures.harm == pytest.approx(figures.harmful / figures.requests)
    assert figures.harm_bound == harmful_bound(figures.harmful, figures.requests, 0.95)


def test_the_harm_bound_of_probabilities_is_that_of_means(tmp_path: Path) -> None:
    requests = made()
    episodes = collect([traces.write(tmp_path / "a.trace", traces.records(requests))])
    path = tmp_path / "labels.jsonl"
    rows = [row | {"correct": 0.9 * row["correct"]} for request in requests for row in request.labels()]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = calibrate(Replay(episodes, from_labels(path, episodes), schema.Policy(), delay_tokens=2), Goal())
    harmful = [p.held_out for points in found.fronts.values() for p in points if p.held_out.harm > 0]
    assert harmful
    for figures in harmful:
        assert figures.harm == pytest.approx(0.9 * figures.harmful / figures.requests)
        assert figures.harm_bound == mean_bound(figures.harm, figures.requests, 0.95)


def test_a_strict_goal_recommends_only_what_is_proved(tmp_path: Path) -> None:
    """With 60 requests in a half no rule can be proved to lose less than one per cent, but less than ten per cent."""
    replayed = replay(tmp_path, made())
    loose = calibrate(replayed, Goal(max_loss=0.01))
    assert (loose.confirmed, loose.proved) == (True, False)
    strict = calibrate(replayed, Goal(max_loss=0.01, strict=True))
    assert (strict.recommended, strict.confirmed, strict.policy.entropy.shadow) == (None, False, True)
    wide = calibrate(replayed, Goal(max_loss=0.1, strict=True))
    assert wide.recommended is not None
    assert (wide.confirmed, wide.proved, wide.policy.entropy.shadow) == (True, True, False)
    assert max(wide.recommended.fit.harm_bound, wide.recommended.held_out.harm_bound) <= 0.1


def test_the_numbers_that_a_proof_needs() -> None:
    assert needed_to_prove(0.01, 0.95) == 299
    assert harmful_bound(0, 299, 0.95) <= 0.01 < harmful_bound(0, 298, 0.95)
    assert needed_to_prove(0.0, 0.95) == float("inf")
    assert needed_to_prove(1.0, 0.95) == 1


# --------------------------------------------------------------------------------------------------- the statistics


def test_the_bound_on_harm() -> None:
    # For 0 harmful of n the bound is 1 - (1 - confidence) ** (1 / n), the rule of three.
    assert harmful_bound(0, 300, 0.95) == pytest.approx(1 - 0.05 ** (1 / 300))
    assert harmful_bound(3, 100, 0.95) == pytest.approx(0.0757, abs=1e-3)
    assert harmful_bound(5, 5, 0.95) == 1


def test_the_bound_on_a_mean() -> None:
    """Without harm the bound is the exact one; else it lies above the exact one for counts, and holds as often as it
    should."""
    assert mean_bound(0.0, 300, 0.95) == pytest.approx(harmful_bound(0, 300, 0.95))
    assert mean_bound(0.03, 100, 0.95) > harmful_bound(3, 100, 0.95)
    assert mean_bound(1.0, 10, 0.95) == 1
    # The p-value of Learn then Test, computed here from its definition.
    mean, count, bound = 0.1, 50, mean_bound(0.1, 50, 0.9)
    entropy = mean * math.log(mean / bound) + (1 - mean) * math.log((1 - mean) / (1 - bound))
    bentkus = math.e * sum(math.comb(count, k) * bound**k * (1 - bound) ** (count - k) for k in range(6))
    assert min(math.exp(-count * entropy), bentkus) == pytest.approx(0.1)
    rng = np.random.default_rng(5)
    means = rng.beta(0.2, 1.8, (400, 60)).mean(axis=1)
    assert np.mean([mean_bound(float(value), 60, 0.9) >= 0.1 for value in means]) >= 0.9


def test_the_area_under_the_curve_counts_pairs() -> None:
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(6), 7)
    score, right = rng.integers(0, 5, len(owner)).astype(float), rng.random(len(owner)) < 0.4
    weights = rng.integers(0, 3, (4, 6)).astype(float)
    found = Area(score, right, owner, 6)(weights)
    for sample, value in zip(weights, found, strict=True):
        drawn = np.repeat(np.arange(len(owner)), sample[owner].astype(int))
        ones, others = score[drawn][right[drawn]], score[drawn][~right[drawn]]
        pairs = (ones[:, None] > others).mean() + (ones[:, None] == others).mean() / 2
        assert value == pytest.approx(pairs)


def test_the_area_is_the_same_whether_boundaries_or_scores_are_summed() -> None:
    """With few distinct scores the area is computed from counts by score and owner."""
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(5), 200)
    score, right = rng.integers(0, 4, len(owner)).astype(float), rng.random(len(owner)) < 0.4
    weights = rng.integers(0, 3, (6, 5)).astype(float)
    counted, summed = Area(score, right, owner, 5), Area(score, right, owner, 5)
    assert counted._counts
    summed._counts.clear()
    assert counted(weights) == pytest.approx(summed(weights))


def test_the_halves_are_about_equal() -> None:
    firsts = sum(first_half(f"chatcmpl-{n}") for n in range(1000))
    assert 450 < firsts < 550


# ------------------------------------------------------------------------------------------------------- the command


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)], env={"NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_the_command(tmp_path: Path) -> None:
    requests = made()
    trace = traces.write(tmp_path / "a.trace", traces.records(requests))
    labels = traces.write_labels(tmp_path / "labels.jsonl", requests)
    out, plot, report = tmp_path / "policy.toml", tmp_path / "frontier.png", tmp_path / "report.json"
    result = run(trace, "--labels", labels, "--out", out, "--plot", plot, "--report", report)
    assert result.exit_code == OK, result.output
    told = " ".join(result.stdout.split())
    assert "fixed cap" in told
    assert "RPDI does not separate right from wrong stops on this model and is left out" in told
    assert "Best: " in told
    assert "proxy" not in told
    policy = forms.load(out)
    assert not policy.entropy.shadow
    found = json.loads(report.read_text())
    assert found["policy"] == tomllib.loads(out.read_text())
    assert found["recommended"]["held_out"]["saved"] > 0.25
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_is_proved(tmp_path: Path) -> None:
    requests = made()
    trace = traces.write(tmp_path / "a.trace", traces.records(requests))
    labels, report = traces.write_labels(tmp_path / "labels.jsonl", requests), tmp_path / "report.json"
    result = run(trace, "--labels", labels, "--report", report)
    assert result.exit_code == OK
    bound = json.loads(report.read_text())["recommended"]["held_out"]["harm_bound"]
    assert (
        f"The rule costs at most {100 * bound:.1f} points of accuracy with 95% confidence, which exceeds the allowed "
        "1.0: the loss is not proved to be small, for which the other half needs at least 299 requests."
    ) in " ".join(result.stdout.split())
    assert json.loads(report.read_text())["proved"] is False
    result = run(trace, "--labels", labels, "--strict", "--report", report)
    assert result.exit_code == FAILED
    told = " ".join(result.stdout.split())
    assert "half of the allowed loss, with an upper bound of at most 1.0%. The policy stays in shadow." in told
    result = run(trace, "--labels", labels, "--strict", "--max-loss", 0.1)
    assert result.exit_code == OK
    assert ", which is within the allowed 10.0." in " ".join(result.stdout.split())


def test_the_command_says_how_many_groups_there_are(tmp_path: Path) -> None:
    requests = made()
    trace, labels = traces.write(tmp_path / "a.trace", traces.records(requests)), tmp_path / "labels.jsonl"
    rows = [row | {"group": f"p{n % 14}"} for n, request in enumerate(requests) for row in request.labels()]
    labels.write_text("\n".join(map(json.dumps, rows)))
    told = " ".join(run(trace, "--labels", labels).stdout.split())
    assert "The requests belong to 14 groups." in told
    assert "for which the other half needs at least 299 groups." in told
    rows = [row | {"group": "all"} for row in rows]
    labels.write_text("\n".join(map(json.dumps, rows)))
    result = run(trace, "--labels", labels)
    assert result.exit_code == FAILED
    assert result.stderr.startswith("5 groups of requests are needed in each half; there are 0, 1\n")


def test_the_command_without_labels_says_that_it_uses_a_proxy(tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    trace = traces.write(tmp_path / "a.trace", traces.records(made(60, eat="noise", rank="noise")))
    result = run(trace, "--out", out)
    assert result.exit_code == FAILED
    told = " ".join(result.stdout.split())
    assert "This is a proxy for accuracy" in told
    assert "Nothing is recommended" in told
    assert forms.load(out).entropy.shadow


def test_the_command_takes_several_traces_and_a_base(tmp_path: Path) -> None:
    recorded = policy(model={"m": {"eat_answer_prefix": "so "}})
    halves = [made()[:60], made()[60:]]
    paths = [
        traces.write(tmp_path / f"{n}.trace", traces.records(half, policy=recorded)) for n, half in enumerate(halves)
    ]
    out, base = tmp_path / "policy.toml", tmp_path / "base.toml"
    assert run(*paths, "--out", out).exit_code == OK
    assert forms.load(out).model["m"].eat_answer_prefix == "so "
    base.write_text("[fallback]\nlease_ms = 700\n")
    result = run(*paths, "--out", out, "--base", base)
    assert forms.load(out).fallback.lease_ms == 700
    assert "recorded with the answer prefix 'so ' for m; the base policy has ''" in " ".join(result.stdout.split())


def test_the_command_with_files_it_cannot_use(tmp_path: Path) -> None:
    good = traces.write(tmp_path / "a.trace", traces.records(made(4)))
    bad = tmp_path / "b.trace"
    bad.write_text("no")
    result = run(bad)
    assert (result.exit_code, result.stderr) == (
        INVALID,
        f"{bad}: at byte 0 (uncompressed) is not a trace: not gzip\n",
    )
    assert run(good, "--base", tmp_path / "none.toml").exit_code == INVALID
    empty = traces.write(tmp_path / "c.trace", [])
    result = run(empty)
    assert (result.exit_code, result.stderr) == (FAILED, "10 requests are needed in each half; there are 0, 0\n")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    for name in ("calibration", "separation", "statistics"):
        monkeypatch.delitem(sys.modules, f"meridian_control.offline.{name}")
        monkeypatch.delattr(f"meridian_control.offline.{name}")
    result = run(tmp_path / "a.trace")
    assert result.exit_code == FAILED
    assert result.stderr == "calibrate needs scipy: pip install 'meridian-llm[calibrate]'\n"
