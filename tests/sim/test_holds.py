"""How long a probed request waits, on the virtual clock: exactly as the policy says, while other requests go on."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("vllm")

from meridian_control.policy.model import Policy
from tests.sim.engine import Script, Shape, words
from tests.sim.test_sim import EVERYWHERE, NEVER, started

pytestmark = pytest.mark.filterwarnings("ignore")
STEP_MS = 1.0
# Steps that last longer than the default hold, and a rule that ends thinking after the first probe.
SLOW_MS = 60.0
AT_ONCE = {"eat_level_threshold_nats": 1e3, "eat_ema_variance_threshold": 1e3, "eat_warmup_samples": 1}
# Mean latency, which is too long for the answer to arrive in the step of its probe.
LATENCY_MS = 2.0
# Rounding error of a clock that adds up steps.
ROUNDING_MS = 1e-6


def probed(**entropy: Any) -> Policy:
    """Return a policy with probes everywhere and no rule that ends thinking; holds have their default."""
    probes = {name: value for name, value in EVERYWHERE.items() if name != "eat_hold_ms"}
    rules = {**probes, **NEVER, "shadow": False, "holdout_share": 0.0, "rpdi_threshold": 0.0, **entropy}
    return Policy.model_validate({"entropy": rules, "scheduler": {"min_think_tokens": 0}})


def waited_ms(policy: Policy, is_async: bool, answered: bool, step_ms: float = STEP_MS) -> float:
    """Return the time from the step of a probe until its request is in a step again.

    Another request answers meanwhile and is in every step. answered: False if the control plane falls silent when the
    probe is placed. step_ms: duration of a step.
    """
    start, end, *_ = words()
    with started(Shape(is_async=is_async, places=8, blocks=200), policy) as world:
        (plant,) = world.plants
        world.step_ms, world.network.latency_ms = 0.0, LATENCY_MS
        assert plant.link is not None
        with world.timeline.running():
            while not plant.link.lease.revision:
                world.pass_time(step_ms / 1e3)
            plant.open("thinks", [start], Script(1, 10_000, 40, restless=False, max_tokens=90), {})

            def step() -> dict[str, int]:
                if "answers" not in plant.engine.live:
                    answering = Script(2, 1000, 10_000, restless=False, max_tokens=100)
                    plant.open("answers", [start, end], answering, {})
                world.pass_time(step_ms / 1e3)
                return plant.engine.schedule[-1]

            while not plant.engine.agent.probing.held:
                step()
                assert "thinks" in plant.engine.live, "it was never probed"
            began_s = world.timeline.now_s
            if not answered:
                plant.link.stalled_until_s = math.inf
            while "thinks" not in (scheduled := step()):
                assert "answers" in scheduled or "answers" not in plant.engine.live
            waited_s = world.timeline.now_s - began_s
            plant.link.stalled_until_s = 0.0
            plant.engine.abort("thinks")
    return waited_s * 1e3


@pytest.mark.parametrize("is_async", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("hold_ms", [7, 200])
def test_a_request_waits_for_exactly_its_hold(hold_ms: int, is_async: bool) -> None:
    """The request is in the first step after its hold is over, and in none before."""
    assert hold_ms < waited_ms(probed(eat_hold_ms=hold_ms), is_async, answered=False) <= hold_ms + STEP_MS + ROUNDING_MS


def test_by_default_a_request_waits_50_ms_at_most() -> None:
    assert 50 < waited_ms(probed(), is_async=False, answered=False) <= 50 + STEP_MS + ROUNDING_MS


@pytest.mark.parametrize("is_async", [False, True], ids=["", "asynchronous"])
def test_slow_steps_do_not_end_the_wait(is_async: bool) -> None:
    """An answer cannot arrive before the end of the step after the probe's, which may come after the hold."""
    assert waited_ms(probed(), is_async, answered=False, step_ms=SLOW_MS) == pytest.approx(4 * SLOW_MS)
    waited = waited_ms(probed(**AT_ONCE), is_async, answered=True, step_ms=SLOW_MS)
    assert waited == pytest.approx((3 if is_async else 2) * SLOW_MS)


def test_an_answer_ends_the_wait() -> None:
    assert waited_ms(probed(eat_hold_ms=200), is_async=False, answered=True) < 100
