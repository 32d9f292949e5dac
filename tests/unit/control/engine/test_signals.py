"""EAT's moving mean and variance, and RPDI, against plain loops over the published definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core.phases import FLAG_MARKER
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.signals import add_eat_samples, rpdi
from tests.fakes.tables import add_sample, table, thinking, tokens


def eat_reference(samples: list[float], alpha: float) -> tuple[float, float]:
    """Compute mean and variance by the rule of arXiv 2509.26522 as it is written there."""
    mean, variance = samples[0], 0.0
    for x in samples[1:]:
        mean = alpha * x + (1 - alpha) * mean
        variance = alpha * (x - mean) ** 2 + (1 - alpha) * variance
    return mean, variance


@given(st.lists(st.floats(0, 12), min_size=1, max_size=60), st.floats(0.01, 1))
def test_eat_mean_and_variance(samples: list[float], alpha: float) -> None:
    made = table(thinking(), thinking())
    for x in samples:
        add_sample(made, 1, x, alpha, 1)
    mean, variance = eat_reference(samples, alpha)
    assert math.isclose(made.eat_ema_nats[1], mean, abs_tol=1e-12)
    assert math.isclose(made.eat_ema_variance[1], variance, abs_tol=1e-12)
    assert (made.eat_nats[1], made.eat_count[1]) == (samples[-1], len(samples))
    assert made.eat_count[0] == 0
    assert math.isnan(made.eat_ema_nats[0])


@given(st.lists(st.lists(st.floats(0, 12) | st.just(math.nan), min_size=3, max_size=3), max_size=12))
def test_samples_of_several_requests_at_once_are_those_of_each_alone(rounds: list[list[float]]) -> None:
    together, alone, slots = table(*[thinking()] * 5), table(*[thinking()] * 5), np.array([3, 0, 2])
    alphas = np.array([0.2, 1.0, 0.7])
    for number, eat_nats in enumerate(rounds):
        add_eat_samples(together, slots, np.array(eat_nats), alphas, np.array([number, 7, 9]))
        for slot, value, alpha, place in zip(slots.tolist(), eat_nats, alphas.tolist(), (number, 7, 9), strict=True):
            add_sample(alone, slot, value, alpha, place)
    assert together.packed(together.slot).tobytes() == alone.packed(alone.slot).tobytes()


@pytest.mark.parametrize("sample", [math.nan, math.inf])
def test_a_sample_that_was_not_measured_spoils_nothing(sample: float) -> None:
    made = table(thinking())
    for x in (1.0, sample, 1.0):
        add_sample(made, 0, x, 0.2, 1)
    assert (made.eat_count[0], made.eat_ema_nats[0], made.eat_nats[0]) == (2, 1.0, 1.0)


# ------------------------------------------------------------------------------------------------------------- RPDI


def rpdi_reference(entropies: list[float], width: int) -> float:
    """Compute LTF / GTF of arXiv 2603.14251 over the entropies that were measured."""
    measured = [float(np.float32(h)) for h in entropies if math.isfinite(h)]
    if len(measured) < width or not any(measured):
        return math.nan
    return (math.fsum(measured[-width:]) / width) / (math.fsum(measured) / len(measured))


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.floats(0, 12, width=32), st.sampled_from([math.nan, 0.0, 1e-6, 10.0])), max_size=40),
    st.integers(1, 40),
)
def test_rpdi(width: int, entropies: list[float], merged: int) -> None:
    """RPDI is exact with several rows of one slot in a report, after the window wraps around, and with tokens that were
    not measured."""
    made = table(thinking(), thinking(), window=width)
    for at in range(0, len(entropies), merged):
        rows = [(0, THINK, 0, h) for h in entropies[at : at + merged]]
        others = [(1, OUTPUT, 0, 9.0), (0, THINK, FLAG_MARKER, 9.0)]
        made.add_tokens(tokens([*rows, *others]))
    expected = rpdi_reference(entropies, width)
    np.testing.assert_allclose(rpdi(made)[0], expected, rtol=1e-9, atol=1e-12)
    assert math.isnan(rpdi(made)[1])


def test_rpdi_of_large_and_then_small_entropies() -> None:
    """Entropies that leave the window leave no rounding error behind."""
    made = table(thinking(), window=4)
    made.add_tokens(tokens([(0, THINK, 0, h) for h in [10.0] * 4 + [1e-6] * 4]))
    np.testing.assert_allclose(rpdi(made)[0], float(np.float32(1e-6)) / 5.0000005, rtol=1e-6)


def test_rpdi_of_closed_requests() -> None:
    made = table(thinking(), window=1)
    made.add_tokens(tokens([(0, THINK, 0, 1.0)]))
    assert rpdi(made)[0] == 1.0
    made.close(0)
    assert math.isnan(rpdi(made)[0])
