"""The second threshold of a calibration: a give-up rule if hopeless requests can be told, and none if it harms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from meridian_control.cli.main import app
from meridian_control.common.inference import binomial_upper
from meridian_control.engine.request_table import RequestTable
from meridian_control.offline.calibrated_policy import policy_of
from meridian_control.offline.calibration import PAIR_MUST_ADD, SPARE, calibrate
from meridian_control.offline.calibration_report import report, second_threshold
from meridian_control.offline.candidates import give_ups, single_rules
from meridian_control.offline.correctness import from_labels, from_probes
from meridian_control.offline.rule_replay import EAT_SENTENCE, GIVE_UP, RANK, Replay, StoppingRule, either
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from meridian_control.policy import schema as sections
from meridian_control.policy.schema import RankCondition
from tests.fakes import traces
from tests.fakes.replays import GOAL, recorded_in, second_half
from tests.fakes.tables import add_sample
from tests.unit.control.offline.test_rule_replay import sentence_ends

# Only EAT tells.
ONLY_EAT = {"rank": "noise", "same": "noise"}
# A split in which the first half has enough hopeless requests for the choice of a give-up rule.
SPLIT = 1


def is_hopeless(request: traces.MadeUp) -> bool:
    return min(eat for eat, _ in request.probes.values()) > 2.1


def mixed(count: int, **kinds: Any) -> list[traces.MadeUp]:
    """Return requests of which four in ten are hopeless."""
    return [traces.hopeless(n, **kinds) if n % 10 < 4 else traces.made_up(n, **kinds) for n in range(count)]


def replay(folder: Path, requests: list[traces.MadeUp], labelled: bool = True, hold_ms: int = 50) -> Replay:
    episodes = recorded_in(folder, requests)
    judge = from_labels(traces.write_labels(folder / "labels.jsonl", requests), episodes)
    base = schema.Policy(entropy=sections.EntropyPolicy(eat_hold_ms=hold_ms))
    return Replay(episodes, judge if labelled else from_probes(episodes), base, delay_tokens=2)


def give_up(tokens: int, nats: float, **fields: Any) -> StoppingRule:
    entropy = {
        "eat_level_threshold_nats": 0.0,
        "ema_alpha": 0.4,
        "eat_warmup_samples": 3,
        "eat_probe_interval_tokens": 1,
        "eat_probe_placement": "sentence",
        "eat_probe_max_rank": 0,
    }
    return StoppingRule(GIVE_UP, entropy | {"give_up_tokens": tokens, "give_up_eat_nats": nats} | fields)


# ----------------------------------------------------------------------------------------------------------- the replay


def slow_stop(request: traces.MadeUp, rule: StoppingRule, since: int) -> tuple[int | None, int]:
    """Return the thinking tokens of the probe at which a live table gives up, and the number of probes until then."""
    table, fields, asked = RequestTable(4), rule.entropy, 0
    table.live[0] = True
    for tokens, _, _ in sentence_ends(request):
        if tokens < since:
            continue
        asked += 1
        add_sample(table, 0, request.probes[tokens][0], fields["ema_alpha"], tokens)
        warm = table.eat_count[0] >= fields["eat_warmup_samples"]
        if warm and tokens >= fields["give_up_tokens"] and table.eat_ema_nats[0] >= fields["give_up_eat_nats"]:
            return tokens, asked
    return None, asked


@pytest.mark.parametrize("hold_ms", [0, 50])
@pytest.mark.parametrize(("fields", "since"), [({}, 197), ({"eat_level_threshold_nats": 0.1}, 0)])
def test_where_a_give_up_rule_stops(tmp_path: Path, hold_ms: int, fields: dict[str, float], since: int) -> None:
    """It stops where a live table gives up. If no other rule reads probes, they begin three tokens before the rule."""
    requests = mixed(30)
    replayed, rule = replay(tmp_path, requests, hold_ms=hold_ms), give_up(200, 1.2, **fields)
    stops = replayed.stops(rule)
    by_id, stopped = {request.request_id: request for request in requests}, 0
    for number, request_id in enumerate(replayed.episodes.ids):
        expected, asked = slow_stop(by_id[request_id], rule, since)
        natural = replayed.episodes.natural_tokens[number]
        if expected is not None and expected < natural - 6:
            stopped += 1
            late = stops.at_tokens[number] - expected
            assert late == 0 if hold_ms else 2 <= late <= 4
            assert asked <= stops.probes[number] <= asked + 1
        elif expected is None:
            assert stops.at_tokens[number] == np.inf
    assert 8 <= stopped < 25


def test_together_the_first_to_fire_stops_and_both_read_the_same_probes(tmp_path: Path) -> None:
    replayed = replay(tmp_path, mixed(30))
    shared = {"ema_alpha": 1.0, "eat_warmup_samples": 1, "eat_level_threshold_nats": 0.1}
    eat = StoppingRule(EAT_SENTENCE, {**give_up(0, 1.0, **shared).entropy, "eat_ema_variance_threshold": 1.0})
    given_up = give_up(200, 2.3, **shared)
    rank = StoppingRule(RANK, {"rank_conditions": (RankCondition(max_ranks=(9,)),)})
    both = either(either(rank, eat), given_up)
    stops, parts = replayed.stops(both), [replayed.stops(part) for part in both.parts]
    assert [part.family for part in both.parts] == [RANK, EAT_SENTENCE, GIVE_UP]
    at = np.array([part.at_tokens for part in parts])
    assert (stops.at_tokens == at.min(axis=0)).all()
    first = at.argmin(axis=0)
    assert set(first.tolist()) == {0, 1, 2}
    assert (stops.right == np.array([part.right for part in parts])[first, np.arange(len(first))]).all()
    assert (stops.probes <= replayed.stops(eat).probes).all(), "the probes count once"


# ----------------------------------------------------------------------------------------------------------- the choice


def test_hopeless_requests_are_given_up_and_the_loss_of_both_rules_is_proved(tmp_path: Path) -> None:
    requests = mixed(140, **ONLY_EAT)
    replayed = replay(tmp_path, requests)
    found = calibrate(replayed, GOAL, SPLIT)
    assert found.recommended is not None
    assert found.second is not None
    figures, first = found.second.together.held_out, found.recommended.held_out
    assert (found.second.proved, found.second.in_force) == (True, True)
    assert figures.harm_bound == binomial_upper(figures.harmful, figures.requests, 0.95) <= 0.1
    assert figures.saved > first.saved + 0.02
    assert found.second.given_up >= 5
    assert found.second.together.fit.harm_bound <= 0.1
    entropy = found.policy.entropy
    assert (entropy.shadow, entropy.give_up_shadow) == (False, False)
    assert entropy.give_up_tokens == found.second.rule.entropy["give_up_tokens"] > 0
    assert entropy.give_up_eat_nats == found.second.rule.entropy["give_up_eat_nats"]
    assert found.policy.scheduler.min_think_tokens <= entropy.give_up_tokens
    told = second_threshold(found, replayed, GOAL)
    assert f"gives up {found.second.given_up} of {figures.requests} requests. Both cost at most" in told
    assert told.endswith(" at most the allowed 10.0 points of accuracy with 95 % confidence.")
    written = json.loads(json.dumps(report(found, replayed, GOAL), allow_nan=False))["second_threshold"]
    assert (written["proved"], written["rule"]) == (True, str(found.second.rule))
    assert written["together"]["held_out"]["harm_bound"] == figures.harm_bound


def test_what_is_not_proved_on_the_other_half_stays_in_shadow(tmp_path: Path) -> None:
    """In the second half the requests with a high EAT are right in the end, which the first half cannot tell."""
    requests = mixed(140, **ONLY_EAT)
    second = second_half(replay(tmp_path / "before", requests), SPLIT)
    for request in requests:
        if request.request_id in second and is_hopeless(request):
            request.natural_right, request.settled_tokens = True, max(request.probes)
    replayed = replay(tmp_path, requests)
    found = calibrate(replayed, GOAL, SPLIT)
    assert found.second is not None
    assert found.second.together.held_out.harm_bound > 0.1 >= found.second.together.fit.harm_bound
    assert (found.second.proved, found.second.in_force) == (False, False)
    entropy = found.policy.entropy
    assert (entropy.shadow, entropy.give_up_shadow) == (not found.confirmed, True)
    assert entropy.give_up_tokens == found.second.rule.entropy["give_up_tokens"] > 0
    told = second_threshold(found, replayed, GOAL)
    assert "which exceeds the allowed 10.0, so the second threshold stays in shadow: the loss is not proved" in told


def test_after_a_rule_that_is_not_proved_it_stays_in_shadow(tmp_path: Path) -> None:
    """In the second half, answers are still wrong where the target stops, and right where safer rules stop. The give-up
    rule is tested after the target, so that its own bound proves nothing then."""
    requests = mixed(140, **ONLY_EAT)
    before = calibrate(replay(tmp_path / "before", requests), GOAL, SPLIT)
    assert before.recommended is not None
    halves, tried = before.halves, before.tried[before.recommended.rule.family]
    target = halves.target(tried, SPARE)
    assert target is not None
    assert target.rule == before.recommended.rule
    early, late = target.stops.at_tokens, halves.path(tried, target)[0].stops.at_tokens
    where = {halves.replay.episodes.ids[n]: early[n] for n in halves.held_out if early[n] < late[n]}
    for request in requests:
        if request.request_id in where and not is_hopeless(request):
            request.settled_tokens = int(where[request.request_id]) + 1
    found = calibrate(replay(tmp_path, requests), GOAL, SPLIT)
    assert found.recommended is not None
    assert found.recommended.held_out.saved < before.recommended.held_out.saved
    assert found.second is not None
    assert (found.second.proved, found.second.in_force, found.policy.entropy.give_up_shadow) == (True, False, True)
    told = second_threshold(found, halves.replay, GOAL)
    assert told.endswith("but not all rules that are tested before are proved, so the second stays in shadow.")
    (together,), alone = halves.tried([either(target.rule, found.second.rule)]), halves.target(tried)
    assert alone is not None
    assert together.saved > alone.saved + PAIR_MUST_ADD, "else a rule beyond the target would save as much"


@pytest.mark.parametrize(("family", "shadowed"), [(RANK, False), (EAT_SENTENCE, True)])
def test_in_shadow_it_is_left_out_beside_a_rule_without_probes(tmp_path: Path, family: str, shadowed: bool) -> None:
    """The figures of the first rule count no probes, so its policy must have none."""
    replayed = replay(tmp_path, mixed(40))
    requests = np.arange(len(replayed.episodes.ids))
    rule = single_rules(replayed, requests)[family][3]
    second = give_ups(replayed, requests, rule, 0)[0]
    entropy = policy_of(replayed, rule, {"EAT", RANK}, requests, requests, second=(second, False)).entropy
    assert (entropy.shadow, entropy.give_up_shadow, entropy.give_up_tokens > 0) == (False, True, shadowed)
    assert (entropy.eat_probe_interval_tokens == 1) is shadowed


def test_alone_it_may_be_in_force_while_every_other_rule_is_off(tmp_path: Path) -> None:
    """For the command that is a success, and the written policy has it."""
    requests = mixed(140, eat="noise", rank="noise", same="noise")
    recorded_in(tmp_path, requests)
    labels = traces.write_labels(tmp_path / "labels.jsonl", requests)
    out, told = tmp_path / "policy.toml", tmp_path / "report.json"
    given = ["calibrate", tmp_path / "a.trace", "--labels", labels, "--max-loss", 0.1, "--out", out, "--report", told]
    result = CliRunner().invoke(app, list(map(str, given)), env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    said, found = " ".join(result.stdout.split()), json.loads(told.read_text())
    assert found["recommended"] is None
    assert found["second_threshold"]["together"]["held_out"]["saved"] > 0.05
    assert "Nothing is recommended" in said
    assert "Second threshold, for thinking that will not converge: EAT >= " in said
    assert " of the thinking and gives up " in said
    assert ". It costs at most " in said
    policy = forms.load_config(out)
    entropy = policy.entropy
    assert (entropy.shadow, entropy.give_up_shadow, entropy.eat_probe_interval_tokens) == (False, False, 1)
    assert (entropy.eat_level_threshold_nats, entropy.rpdi_threshold, entropy.rank_conditions) == (0, 0, ())
    assert (entropy.give_up_tokens > 0, policy.scheduler.soft_think_tokens) == (True, 0)


def test_requests_that_become_right_late_are_not_given_up(tmp_path: Path) -> None:
    """EAT is high until just before the end, and the answer is right in the end."""
    requests = mixed(100)
    for request in filter(is_hopeless, requests):
        request.natural_right, request.settled_tokens = True, max(request.probes)
    base = schema.Policy(entropy=sections.EntropyPolicy(give_up_tokens=7, give_up_shadow=False))
    replayed = replay(tmp_path, requests)
    replayed.base = base
    found = calibrate(replayed, GOAL)
    assert found.second is None
    assert (found.policy.entropy.give_up_tokens, found.policy.entropy.give_up_shadow) == (0, True)
    assert report(found, replayed, GOAL)["second_threshold"] is None
    told = second_threshold(found, replayed, GOAL)
    assert "none that saves more keeps the upper bound of the harm within 10.0 %" in told
    assert told.endswith("the bound needs at least 29 requests in each half.")


def test_the_proxy_cannot_judge_it(tmp_path: Path) -> None:
    replayed = replay(tmp_path, mixed(60), labelled=False)
    found = calibrate(replayed, GOAL)
    assert found.second is None
    assert "without labels" in second_threshold(found, replayed, GOAL)
