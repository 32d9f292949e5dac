"""Where each rule stops a recorded request: at the place where a live table fires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meridian_control.engine.request_table import RequestTable
from meridian_control.offline.rule_replay import (
    CAP,
    EAT_GATED,
    EAT_PARAGRAPH,
    EAT_SENTENCE,
    EAT_SETTLED,
    RANK,
    RPDI,
    StoppingRule,
    either,
)
from meridian_control.policy import model as schema
from meridian_control.policy import schema as sections
from meridian_control.policy.schema import RankCondition
from tests.fakes import traces
from tests.fakes.replays import made, replay
from tests.fakes.tables import add_sample


def eat(family: str, **fields: Any) -> StoppingRule:
    values = {
        "ema_alpha": 1.0,
        "eat_warmup_samples": 1,
        "eat_ema_variance_threshold": 1e-4,
        "eat_level_threshold_nats": 0.3,
        "eat_probe_interval_tokens": 1,
        "eat_probe_placement": "sentence",
        "eat_probe_max_rank": 0,
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


@pytest.mark.parametrize("confirm", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_where_rules_at_sentence_ends_stop(tmp_path: Path, seed: int, confirm: int) -> None:
    """Each rule stops where a slow reference finds the n-th sentence end in a row at which the rule holds."""
    requests = [traces.made_up(n, seed) for n in range(12)]
    replayed = replay(tmp_path, requests)
    by_id, width = {request.request_id: request for request in requests}, replayed.window_tokens
    rng = np.random.default_rng(seed)
    conditions = tuple(RankCondition(max_ranks=tuple(rng.integers(5, 300, d).tolist())) for d in (1, 2, 4))
    rules = [
        StoppingRule(RANK, {"rank_conditions": conditions}),
        StoppingRule(RPDI, {"rpdi_threshold": 1.05}),
    ]
    stopped = 0
    for rule in rules:
        confirmed = StoppingRule(rule.family, {**rule.entropy, "confirm_sentence_ends": confirm})
        stops = replayed.stops(confirmed)
        stopped += np.isfinite(stops.at_tokens).sum()
        assert not stops.probes.any()
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
        if rule.family == RANK:
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
        (EAT_SETTLED, {"ema_alpha": 0.4, "eat_warmup_samples": 5, "eat_ema_variance_threshold": 0.1}),
        (EAT_SENTENCE, {"confirm_sentence_ends": 2}),
        (EAT_GATED, {"eat_probe_max_rank": 200, "confirm_sentence_ends": 3}),
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
    requests = made(30)
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
            if hold_ms and family != EAT_GATED:
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
        asked += 1
        add_sample(table, 0, request.probes[tokens][0], fields["ema_alpha"], tokens)
        flat = table.eat_ema_variance[0] < fields["eat_ema_variance_threshold"]
        low = table.eat_ema_nats[0] < fields["eat_level_threshold_nats"]
        held = held + 1 if table.eat_count[0] >= fields["eat_warmup_samples"] and flat and low else 0
        if held >= fields["confirm_sentence_ends"]:
            return tokens, asked
    return None, asked


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
