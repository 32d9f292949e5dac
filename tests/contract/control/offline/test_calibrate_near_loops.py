"""Rules on near-loops: they stop where a live session ends thinking, and one is recommended only if it harms few."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meridian_control.offline.calibration import Calibration, Goal, calibrate
from meridian_control.offline.calibration_report import report, sentences
from meridian_control.offline.candidates import NEAR_RECORDED, NEAR_REPEATED, loosened
from meridian_control.offline.policy_replay import SessionReplay
from meridian_control.offline.rule_replay import NEAR_LOOP, Replay, StoppingRule
from meridian_control.offline.trace_file import read
from tests.fakes import traces
from tests.fakes.replays import made, replay
from tests.fakes.tables import policy

if TYPE_CHECKING:
    from pathlib import Path

    from meridian_control.policy.model import Policy

# With 24 requests in a half and none harmed, the bound is 11.7 per cent.
GOAL = Goal(max_loss=0.15)
# No signal tells when an answer is settled.
NOISE = {"eat": "noise", "rank": "noise", "same": "noise"}
IN_FORCE = {"enabled": True, "shadow": False, "near_shadow": False}


def recording(tokens: int = NEAR_RECORDED, **loop: Any) -> Policy:
    """Return a policy to record with: agents report repeated tokens from this number on, and no rule ends thinking."""
    return policy(loop={"near_repeated_tokens": tokens, **loop})


RECORDED = recording()


def near_loop(tokens: int, ratio: float) -> StoppingRule:
    fields = {"near_repeated_tokens": tokens, "entropy_collapse_ratio": ratio}
    return StoppingRule(NEAR_LOOP, loop=IN_FORCE | fields)


def mixed(count: int = 48) -> list[traces.MadeUp]:
    """Return requests of which a quarter near-loop and end wrong."""
    return [traces.near_looping(n) if n % 4 == 0 else traces.made_up(n, **NOISE) for n in range(count)]  # type: ignore[arg-type]


def turned_right(request: traces.MadeUp) -> traces.MadeUp:
    """Return the request with an answer that becomes right at its end."""
    return replace(request, natural_right=True, settled_tokens=max(request.probes))


def told(found: Calibration, replayed: Replay) -> str:
    return " ".join(sentences(found, replayed, GOAL))


# ----------------------------------------------------------------------------------------------------------- the replay


@pytest.mark.parametrize(("tokens", "ratio"), [(600, 0.0), (720, 0.5), (760, 0.45)])
def test_a_rule_stops_where_a_live_session_decides_to_end(tmp_path: Path, tokens: int, ratio: float) -> None:
    """Near-loops and exact loops both count, because the section has one shadow for both rules."""
    requests = [*map(traces.near_looping, range(6)), traces.near_looping(6, entropies=(0.1, 1.0)), *made(3)]
    requests[1].cycles = {900: (40, 120), 960: (40, 200)}
    replayed = replay(tmp_path, requests, recorded=RECORDED, base=recording(min_rounds=4, min_tokens=150))
    rule = near_loop(tokens, ratio)
    stops = replayed.stops(rule)
    records = list(read(tmp_path / "a.trace"))
    # The recording has no answer of the agent to the policy.
    records[0].joined_late = True
    live, ends = SessionReplay(records[0], replayed.policy(rule)), dict[str, tuple[str, int]]()
    for record in records[1:]:
        opened = list(live.live.values())
        live.take(record, [])
        ends |= {each.opened.request_id: each.new.end for each in opened if each.new.end is not None}
    ids = replayed.episodes.ids
    assert {ids[n]: int(stops.first_tokens[n]) for n in np.flatnonzero(np.isfinite(stops.at_tokens))} == {
        request_id: decided for request_id, (_, decided) in ends.items()
    }
    reasons = {request.request_id: ends.get(request.request_id, ("", 0))[0] for request in requests}
    assert list(reasons.values()) == ["near_loop", "loop", *["near_loop"] * 4, "near_loop" * (not ratio), "", "", ""]
    stopped = np.isfinite(stops.at_tokens)
    assert set(stops.at_tokens[stopped] - stops.first_tokens[stopped]) == {1}, "one token later, as after a rank"


def test_repetitions_are_those_of_thinking_that_goes_on(tmp_path: Path) -> None:
    request = traces.near_looping(1)
    over = len(request.rows) - 4
    request.repeats = {1100: 600, over: 1000}
    # The report that brings the end marker counts as many thinking tokens as the report before it.
    found = replay(tmp_path, [request], recorded=RECORDED).episodes.repetitions
    assert (found.think_tokens.tolist(), found.repeated_tokens.tolist()) == ([1100, over], [600, 1000])
    assert found.entropy_count.tolist() == [1100, over]


def test_a_loosened_rule_needs_fewer_repeated_tokens_and_less_collapse() -> None:
    laxer = loosened(near_loop(720, 0.5))
    assert (laxer.loop["near_repeated_tokens"], laxer.loop["entropy_collapse_ratio"]) == (576, 0.625)
    assert str(near_loop(720, 0.5)) == "a loop or 720 repeated tokens, RPDI <= 0.5"
    assert str(near_loop(720, 0.0)) == "a loop or 720 repeated tokens"


# ----------------------------------------------------------------------------------------------------------- the choice


def test_near_loops_that_end_wrong_are_recommended(tmp_path: Path) -> None:
    replayed = replay(tmp_path, mixed(), recorded=RECORDED, base=RECORDED)
    found = calibrate(replayed, GOAL)
    assert found.recommended is not None
    assert (found.recommended.rule.family, found.confirmed) == (NEAR_LOOP, True)
    figures = found.recommended.held_out
    assert (figures.harmful, figures.probe_share) == (0, 0)
    assert figures.saved > 0.05
    loop, entropy = found.policy.loop, found.policy.entropy
    assert (loop.enabled, loop.shadow, loop.near_shadow) == (True, False, False)
    assert loop.near_repeated_tokens == found.recommended.rule.loop["near_repeated_tokens"] in NEAR_REPEATED
    assert loop.entropy_collapse_ratio == found.recommended.rule.loop["entropy_collapse_ratio"]
    assert (loop.min_rounds, loop.min_tokens) == (RECORDED.loop.min_rounds, RECORDED.loop.min_tokens)
    assert (entropy.eat_level_threshold_nats, entropy.rank_conditions, entropy.rpdi_threshold) == (0, (), 0)
    assert found.policy.scheduler.min_think_tokens == 0, "no floor holds for loops"
    written = report(found, replayed, GOAL)
    assert written["recommended"]["loop"] == dict(found.recommended.rule.loop)
    assert "near-loops are left out" not in told(found, replayed)


def test_only_a_collapse_tells_near_loops_from_tables(tmp_path: Path) -> None:
    """Tables repeat as many tokens, their answers become right at the end, and their entropy stays as it is."""
    tables = [turned_right(traces.near_looping(1000 + n, entropies=(1.0, 1.0))) for n in range(16)]
    replayed = replay(tmp_path, [*mixed(32), *tables], recorded=RECORDED, base=RECORDED)
    found = calibrate(replayed, GOAL)
    assert found.recommended is not None
    assert found.recommended.rule.family == NEAR_LOOP
    assert found.confirmed
    assert 0 < found.policy.loop.entropy_collapse_ratio < 1
    assert found.policy.entropy.rpdi_window_tokens == replayed.window_tokens


def test_near_loops_that_become_right_are_refused(tmp_path: Path) -> None:
    requests = [turned_right(request) if request.repeats else request for request in mixed()]
    replayed = replay(tmp_path, requests, recorded=RECORDED, base=recording(near_shadow=False))
    found = calibrate(replayed, GOAL)
    assert found.fronts[NEAR_LOOP], "it was tried"
    assert found.fronts[NEAR_LOOP][-1].held_out.harmful > 2
    assert found.recommended is None or NEAR_LOOP not in {part.family for part in found.recommended.rule.parts}
    loop = found.policy.loop
    assert (loop.near_repeated_tokens, loop.near_shadow, loop.shadow) == (0, True, True)


def test_exact_loops_that_become_right_refuse_the_rule_too(tmp_path: Path) -> None:
    requests = mixed()
    for request in requests:
        if not request.repeats and request.natural_right:
            request.cycles, request.settled_tokens = {60: (10, 60)}, max(request.probes)
    base = recording(min_tokens=50)
    assert calibrate(replay(tmp_path / "1", requests, recorded=RECORDED, base=base), GOAL).recommended is None
    base = recording(min_tokens=100)
    found = calibrate(replay(tmp_path / "2", requests, recorded=RECORDED, base=base), GOAL).recommended
    assert found is not None
    assert found.rule.family == NEAR_LOOP


def test_near_loops_join_a_rule_on_answers_that_settle(tmp_path: Path) -> None:
    looping = [traces.near_looping(n, eat_nats=(2.2, 3.0)) for n in range(12)]
    requests = [*looping, *made(36, rank="noise", same="noise")]
    found = calibrate(replay(tmp_path, requests, recorded=RECORDED, base=RECORDED), GOAL)
    assert found.recommended is not None
    families = {part.family for part in found.recommended.rule.parts}
    assert families >= {NEAR_LOOP}
    assert any("EAT" in family for family in families)
    assert (found.policy.loop.shadow, found.policy.loop.near_shadow) == (False, False)
    assert found.policy.entropy.eat_level_threshold_nats > 0
    assert found.policy.scheduler.min_think_tokens < 1024, "the floor is that of the rule on EAT"


# ------------------------------------------------------------------------------------------------- what was not counted


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        (recording(0), "the trace has no counts of repeated tokens; record with loop.near_repeated_tokens = 480"),
        (recording(enabled=False), "the trace has no counts of repeated tokens; record with"),
        (recording(900), "the trace counts repeated tokens only from 900 on; record with loop.near_repeated_tokens = "),
        (recording(768), "on the half on which rules are chosen no thinking ends at 960 repeated tokens."),
    ],
)
def test_a_trace_without_the_counts(tmp_path: Path, recorded: Policy, reason: str) -> None:
    base = recording(720, near_shadow=False)
    replayed = replay(tmp_path, mixed(32), recorded=recorded, base=base)
    found = calibrate(replayed, GOAL)
    assert NEAR_LOOP not in found.fronts
    assert f"Rules on near-loops are left out: {reason}" in told(found, replayed)
    if not replayed.episodes.repeats_from_tokens:
        assert found.policy.loop == base.loop, "nothing is known about near-loops"
