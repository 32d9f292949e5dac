"""The rule on handovers: which requests move to which engine, and which stay."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.capabilities.handover import rule
from meridian_control.capabilities.handover.measured_costs import AnswerLength, TransferCost
from meridian_control.capabilities.handover.results import Handover
from meridian_control.capabilities.handover.rule import (
    KV_PRESSURE,
    OTHER_ENGINE,
    PREEMPTED_ANSWERS,
    STEP_GAIN,
    TAKEN_BACK,
    Holding,
    Move,
    ThinkingEngine,
    unfit,
)
from meridian_control.policy.disagg_schema import DisaggPolicy
from tests.unit.control.capabilities.handover.engines import answering, disagg, hello, thinking

POLICY = disagg().disagg
# Steps of 50 ms on the thinking engine and of 11 ms on the answering engine, and answers of 100 tokens.
SLOW: dict[str, Any] = {"running": 10, "sequence_ms": 5.0, "answer_tokens": 100.0}
FAST: dict[str, Any] = {"running": 10, "sequence_ms": 1.0}


def holding(*blocks: int) -> list[Holding]:
    return [Holding(slot, count * 16, count) for slot, count in enumerate(blocks)]


def decide(
    policy: DisaggPolicy,
    engine: ThinkingEngine,
    pool: Sequence[fleet_pb2.AnsweringEngine],
    holding: Sequence[Holding],
    in_force: dict[int, Move],
) -> list[Move]:
    return rule.decide(policy, engine, rule.by_room(policy, pool), holding, in_force)


def where(moves: Sequence[Move]) -> list[tuple[int, str, str]]:
    return [(move.slot, move.engine.engine_id if move.engine is not None else "", move.reason) for move in moves]


def in_force(*moves: Move) -> dict[int, Move]:
    return {move.slot: move for move in moves}


# ------------------------------------------------------------------------------------------------------------- pressure


FULL: dict[str, Any] = {"kv_used": 1.0}
SPREAD = [answering("b", kv_used=0.2), answering("c", kv_used=0.3), answering("d", kv_used=0.9)]
DECIDED: dict[
    str, tuple[dict[str, Any], list[fleet_pb2.AnsweringEngine], tuple[int, ...], list[tuple[int, str, str]]]
] = {
    "no pressure": ({"kv_used": 0.8}, [answering()], (9,), []),
    # 95 blocks less 12 are above 80, and less 12 and 9 are not.
    "the largest until the rest fits": (
        {"kv_used": 0.95},
        [answering()],
        (6, 9, 12, 5),
        [(2, "b", KV_PRESSURE), (1, "b", KV_PRESSURE)],
    ),
    "as many blocks as preempted answers need": (
        {"kv_used": 0.5, "waiting_blocks": 10},
        [answering()],
        (6, 6, 6),
        [(0, "b", PREEMPTED_ANSWERS), (1, "b", PREEMPTED_ANSWERS)],
    ),
    "steps that are not measured there": (SLOW, [answering(running=1)], (10,), []),
    "steps that are not measured here": ({"running": 10, "answer_tokens": 100}, [answering(**FAST)], (10,), []),
    "a full engine": (FULL, [answering(kv_used=0.75)], (6,), []),
    "an engine with just enough room": (FULL, [answering(kv_used=0.75)], (5,), [(0, "b", KV_PRESSURE)]),
    "room that is promised": (FULL, [answering(kv_used=0.5, promised={"requests": 2, "blocks": 25})], (6,), []),
    "a smaller request where a larger one has no room": (
        FULL,
        [answering(kv_used=0.75)],
        (6, 5),
        [(1, "b", KV_PRESSURE)],
    ),
    "over the engines with room": (FULL, SPREAD, (8,) * 9, [(n, "bbc"[n], KV_PRESSURE) for n in range(3)]),
}


@pytest.mark.parametrize(("here", "pool", "blocks", "moves"), DECIDED.values(), ids=DECIDED)
def test_which_requests_move(
    here: dict[str, Any],
    pool: list[fleet_pb2.AnsweringEngine],
    blocks: tuple[int, ...],
    moves: list[tuple[int, str, str]],
) -> None:
    assert where(decide(POLICY, thinking(**here), pool, holding(*blocks), {})) == moves


def test_moves_say_what_they_follow_from() -> None:
    moves = decide(POLICY, thinking(kv_used=0.95), [answering()], holding(6, 9, 12, 5), {})
    assert [round(move.thinking_kv_used, 2) for move in moves] == [0.95, 0.83]
    moves = decide(POLICY, thinking(kv_used=0.5, waiting_blocks=10), [answering()], holding(6, 6, 6), {})
    assert [move.waiting_blocks for move in moves] == [10, 4]
    moves = decide(disagg(offload_threshold_blocks=7).disagg, thinking(**FULL), [answering()], holding(6, 7), {})
    assert where(moves) == [(1, "b", KV_PRESSURE)], "requests below the threshold stay"
    moves = decide(POLICY, thinking(**FULL, waiting_blocks=100), SPREAD, holding(*[8] * 9), {})
    assert sorted(name for _, name, _ in where(moves)) == ["b"] * 5 + ["c"] * 4


def test_shorter_steps_move_requests_if_they_gain_more_than_the_transfer_and_two_steps() -> None:
    (move,) = decide(POLICY, thinking(**SLOW), [answering(**FAST)], holding(10), {})
    assert (move.reason, move.gain_ms) == (STEP_GAIN, 100 * (50.0 - 11.0))
    assert move.least_gain_ms == pytest.approx(40 + 0.005 * 160 + 2 * 11.0)
    just = move.least_gain_ms / (50.0 - 11.0)
    for answer_tokens, moves in ((just - 0.01, 0), (just + 0.01, 1)):
        engine = thinking(**SLOW | {"answer_tokens": answer_tokens})
        assert len(decide(POLICY, engine, [answering(**FAST)], holding(10), {})) == moves


def test_steps_gain_less_with_each_request_that_leaves() -> None:
    moves = decide(POLICY, thinking(**SLOW), [answering(running=6, sequence_ms=4.0)], holding(4, 4, 4, 4, 4), {})
    gains = [move.gain_ms for move in moves]
    assert 0 < len(moves) < 5
    assert gains == sorted(gains, reverse=True)


# ----------------------------------------------------------------------------------------------------------------- pool


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"engine_id": "a"}, "it is the engine itself"),
    ({"labels": {}}, "it is not in disagg.answering_pool"),
    ({"model": "other"}, "its model is other, not m"),
    ({"vllm_version": "0.31.0"}, "its vllm_version is 0.31.0, not 0.32.0"),
    ({"block_size_tokens": 32}, "its block_size_tokens is 32, not 16"),
    ({"unfit": "it is frozen"}, "it is frozen"),
    ({"kv_connector": "MooncakeConnector"}, 'its KV connector "MooncakeConnector" is not of disagg.fabric nixl'),
    ({"kv_connector": ""}, "no KV connector"),
]


@pytest.mark.parametrize(("fields", "reason"), UNFIT)
def test_why_an_engine_does_not_fit(fields: dict[str, Any], reason: str) -> None:
    assert unfit(POLICY, hello(), answering(**{"engine_id": "b", **fields})) == reason


# ----------------------------------------------------------------------------------------------------------- hysteresis


def moved(pool: Sequence[fleet_pb2.AnsweringEngine]) -> dict[int, Move]:
    return in_force(*decide(POLICY, thinking(kv_used=0.88), pool, holding(9), {}))


def test_a_handover_stays_when_the_pressure_ends() -> None:
    before = moved([answering()])
    assert len(before) == 1
    assert decide(POLICY, thinking(kv_used=0.1), [answering()], holding(9), before) == []


@pytest.mark.parametrize("gone", [[], [answering(kv_used=0.91)]])
def test_a_handover_is_taken_back_if_the_engine_is_gone_or_full(gone: list[fleet_pb2.AnsweringEngine]) -> None:
    before = moved([answering()])
    assert where(decide(POLICY, thinking(kv_used=0.5), gone, holding(9), before)) == [(0, "", TAKEN_BACK)]
    others = [*gone, answering("c")]
    (other,) = decide(POLICY, thinking(kv_used=0.5), others, holding(9), before)
    # There is no pressure any more, which would be a false reason.
    assert where([other]) == [(0, "c", OTHER_ENGINE)]
    assert other.why == ("the KV cache of b is too full" if gone else "b cannot answer any more")
    rows = [*Handover("", other).compared(disagg())]
    assert [signal for signal, *_ in rows] == ["blocks", "answering_kv_used"]


@pytest.mark.parametrize("seed", range(2))
def test_noise_around_the_limits_does_not_let_decisions_oscillate(seed: int) -> None:
    """Loads that vary by a few per cent around both limits lead to some decisions, at most one for each request."""
    rng, made, count = random.Random(seed), dict[int, Move](), 0
    for _ in range(500):
        pool = [answering(name, kv_used=rng.uniform(0.68, 0.86), **FAST) for name in "bc"]
        here = {"kv_used": rng.uniform(0.7, 0.9), "waiting_blocks": rng.choice((0, 0, 8))}
        engine = thinking(**here, running=10, sequence_ms=rng.uniform(0.9, 1.1))
        for move in decide(POLICY, engine, pool, holding(5, 6, 7, 8), made):
            count += 1
            assert move.engine is not None
            made[move.slot] = move
    assert 0 < count == len(made) <= 4


# --------------------------------------------------------------------------------------------------------------- costs


def test_the_transfer_cost_begins_with_a_guess_and_follows_the_measurements() -> None:
    cost, rng = TransferCost(), random.Random(1)
    assert cost.coefficients == pytest.approx((40.0, 0.005))
    for _ in range(200):
        tokens = rng.randrange(100, 4000)
        cost.add_transfer(tokens, 12 + 0.02 * tokens + rng.gauss(0, 1))
    base_ms, token_ms = cost.coefficients
    assert base_ms == pytest.approx(12, abs=2)
    assert token_ms == pytest.approx(0.02, rel=0.1)


def test_the_transfer_cost_survives_equal_and_broken_measurements() -> None:
    cost = TransferCost()
    for _ in range(5000):
        cost.add_transfer(512, 30.0)
    for broken in (math.nan, math.inf, -1.0, 1e9):
        cost.add_transfer(512, broken)
    base_ms, token_ms = cost.coefficients
    assert base_ms + 512 * token_ms == pytest.approx(30.0, abs=0.1)


def test_the_mean_answer_length_follows_the_newest_answers() -> None:
    answers = AnswerLength()
    assert answers.tokens == 0
    answers.add_answer(100)
    assert answers.tokens == 100
    for _ in range(300):
        answers.add_answer(20)
    assert answers.tokens == pytest.approx(20, abs=0.1)
