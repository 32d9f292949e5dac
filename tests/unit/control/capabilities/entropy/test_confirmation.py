"""Rules that ask for several sentence ends in a row, against a slow reference that goes through a request's tokens one
by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_control.capabilities.entropy.rule import ends
from meridian_control.common.table_columns import PROBE_COLUMNS
from meridian_control.engine.history import Unsampled
from meridian_control.engine.moments import Moments
from meridian_control.engine.request_table import THINK, RequestTable
from meridian_control.engine.token_rows import FLAG_BOUNDARY
from meridian_control.policy.model import Policy
from tests.fakes.tables import add_sample, policy, table, thinking, tokens
from tests.unit.sessions import stream

EAT, RANK, RPDI = agent_pb2.FORCE_REASON_EAT, agent_pb2.FORCE_REASON_RANK, agent_pb2.FORCE_REASON_RPDI
WIDTH, WARM, ALPHA = 3, 2, 0.5


@dataclass(frozen=True)
class Token:
    """One thinking token: its signals, and the EAT sample that comes right after it, if any."""

    ends_sentence: bool
    entropy: float
    rank: int
    eat: float | None


TOKENS = st.lists(
    st.builds(
        Token,
        st.booleans(),
        st.sampled_from([0.125, 0.5, 2.0]),
        st.integers(1, 6),
        st.none() | st.sampled_from([0.0, 0.25, 1.0]),
    ),
    max_size=40,
)
OFF = {"rpdi_threshold": 0.0, "eat_level_threshold_nats": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "rank": OFF | {"rank_conditions": [{"max_ranks": [2, 5]}, {"max_ranks": [3]}]},
    "rpdi": OFF | {"rpdi_threshold": 1.0},
    "eat": {
        "rpdi_threshold": 0.0,
        "ema_alpha": ALPHA,
        "eat_warmup_samples": WARM,
        "eat_level_threshold_nats": 0.6,
        "eat_ema_variance_threshold": 0.1,
    },
}


def rule(name: str, confirm: int, floor: int) -> Policy:
    return policy(
        scheduler={"min_think_tokens": floor}, entropy=RULES[name] | {"confirm_sentence_ends": confirm, "shadow": False}
    )


def columns(request: Sequence[Token]) -> agent_pb2.TokenColumns:
    rows = [(t.ends_sentence * FLAG_BOUNDARY, t.entropy, t.rank) for t in request]
    return tokens([(0, THINK, *row) for row in rows])


def first_end(held: Policy, request: Sequence[Token]) -> int | None:
    """Return the thinking tokens at which the rules of `termination` end the request, told of token by token."""
    made = table(thinking(), window=WIDTH)
    for number, token in enumerate(request, 1):
        made.add_tokens(columns([token]))
        if token.eat is not None:
            add_sample(made, 0, token.eat, ALPHA, 1)
        if ends(held, made):
            return number
    return None


def expected_end(name: str, confirm: int, floor: int, request: Sequence[Token]) -> int | None:
    """Return the same by the rules' definitions: each rule holds or not at each of its places, which are sentence ends
    or EAT samples."""
    holds: Callable[[int], bool | None] = {
        "rank": lambda at: _rank_holds(request, at),
        "rpdi": lambda at: _rpdi_holds(request, at),
        "eat": lambda at: _eat_holds(request, at),
    }[name]
    row = 0
    for at in range(len(request)):
        if (held := holds(at)) is not None:
            row = row + 1 if held else 0
        # EAT stays converged until its next sample; the other rules fire at sentence ends only.
        if row >= confirm and (held is not None or name == "eat") and at + 1 >= floor:
            return at + 1
    return None


def _is_place(request: Sequence[Token], at: int) -> bool:
    """Whether the row of this token reports the signals at a sentence end."""
    return at > 0 and request[at - 1].ends_sentence


def _rank_holds(request: Sequence[Token], at: int) -> bool | None:
    if not _is_place(request, at):
        return None
    ranks = [after.rank for before, after in pairwise(request[: at + 1]) if before.ends_sentence][::-1]
    return ranks[0] <= 3 or (len(ranks) > 1 and ranks[0] <= 2 and ranks[1] <= 5)


def _rpdi_holds(request: Sequence[Token], at: int) -> bool | None:
    if not _is_place(request, at):
        return None
    seen = [token.entropy for token in request[: at + 1]]
    return len(seen) >= WIDTH and (sum(seen[-WIDTH:]) / WIDTH) / (sum(seen) / len(seen)) > 1.0


def _eat_holds(request: Sequence[Token], at: int) -> bool | None:
    if request[at].eat is None:
        return None
    mean, variance, samples = 0.0, 0.0, [token.eat for token in request[: at + 1] if token.eat is not None]
    for number, sample in enumerate(samples):
        mean = ALPHA * sample + (1 - ALPHA) * mean if number else sample
        variance = ALPHA * (sample - mean) ** 2 + (1 - ALPHA) * variance if number else 0.0
    return len(samples) >= WARM and mean < 0.6 and variance < 0.1


@pytest.mark.parametrize("name", RULES)
@given(request=TOKENS, confirm=st.integers(1, 4), floor=st.sampled_from([0, 4, 12]))
def test_a_rule_fires_at_the_nth_place_in_a_row(name: str, request: list[Token], confirm: int, floor: int) -> None:
    expected = expected_end(name, confirm, floor, request)
    assert first_end(rule(name, confirm, floor), request) == expected


def samples(made: RequestTable, *nats: float) -> RequestTable:
    for sample in nats:
        add_sample(made, 0, sample, 1.0, 1)
    return made


def test_the_table_keeps_eat_after_earlier_samples() -> None:
    made = samples(table(thinking()), 4.0, 3.0, 2.0, 1.0, 0.5)
    assert (made.eat_ema_nats[0], made.earlier_eat_ema_nats[0].tolist()) == (0.5, [1.0, 2.0, 3.0])
    assert made.earlier_eat_ema_variance[0].tolist() == [0.0] * 3
    assert np.isnan(samples(table(thinking()), 4.0).earlier_eat_ema_nats[0]).all()


def test_a_moment_before_a_sample_sees_the_earlier_samples_of_then() -> None:
    made = samples(table(thinking()), 4.0, 3.0)
    made.add_tokens(tokens([(0, THINK, 0, 1.0)] * 2))
    made.history.tell_steps(np.array([1, 2]))
    made.history.unsampled = Unsampled(made.packed(made.slot), {0: 2})
    samples(made, 2.0)
    found = Moments(made, np.array([0, 0]), np.array([0, 1]), step=np.array([1, 2]))
    assert found.eat_ema_nats.tolist() == [3.0, 2.0]
    assert found.earlier_eat_ema_nats[:, :2].tolist() == [[4.0, pytest.approx(np.nan, nan_ok=True)], [3.0, 4.0]]
    assert {"earlier_eat_ema_nats", "earlier_eat_ema_variance"} <= set(PROBE_COLUMNS)


@pytest.mark.parametrize("confirm", [1, 2, 4])
def test_the_floor_finds_enough_samples(confirm: int) -> None:
    """Thinking ends at the floor if EAT has been low before, however many sentence ends must agree."""
    rules: dict[str, Any] = {"shadow": False, "eat_level_threshold_nats": 0.1}
    rules |= {"eat_warmup_samples": 4, "eat_probe_interval_tokens": 16, "eat_probe_placement": "anywhere"}
    rules |= {"rpdi_threshold": 0.0, "holdout_share": 0.0}
    made = stream(policy(scheduler={"min_think_tokens": 200}, entropy={**rules, "confirm_sentence_ends": confirm}))
    made.open("r", 400, 2, eat_nats=lambda _: 0.01)
    made.step(300)
    (end,) = [event.decision for event in made.life("r").events if event.decision.kind == "force"]
    assert 200 <= end.outcome_think_tokens <= 202
