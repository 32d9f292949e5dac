"""Models with several KV cache groups, because some layers keep KV only for a window of tokens."""

from __future__ import annotations

import numpy as np

from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine, Observed
from tests.engine.offline import entropy
from tests.engine.policies import DENSE

# Number of probes of each request that are compared with stock vLLM.
CHECKED = 3


@feature(
    "several KV cache groups: output as stock's beside EAT probes, their value, caps",
    "windows-v1",
    "windows",
    "windows-v2",
    "windows-v2-async",
)
def groups(engine: Engine) -> None:
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert len({type(manager) for manager in managers}) > 1
    params = {"temperature": 1.0, "max_tokens": 60 if engine.slow else 150, "ignore_eos": True}
    asks = [Ask(engine.prompt(i), {**params, "seed": i}) for i in range(3)]
    expected = engine.stock.draw(asks)
    engine.control.apply(DENSE)
    with engine.watched() as seen:
        runs = engine.paced(asks)
    assert runs == [answer.tokens for (answer,) in expected]
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        engine.check_phases(ask.prompt, tokens, said)
        _check_probes(engine, ask.prompt, tokens, said)
    cap = 20
    engine.control.apply({"scheduler": {"max_think_tokens": cap}})
    for (free,), after in zip(expected, engine.tokens(asks), strict=True):
        assert after[: after.index(engine.end)] == free.tokens[: min(cap, (*free.tokens, engine.end).index(engine.end))]


def _check_probes(engine: Engine, prompt: list[int], tokens: list[int], said: Observed) -> None:
    """Compare probes with stock vLLM's own log-probabilities after the same tokens."""
    assert said.probes
    some = said.probes[:: max(1, len(said.probes) // CHECKED)]
    logprobs = {"temperature": 0.0, "max_tokens": 1, "logprobs": -1}
    asks = [Ask([*prompt, *tokens[: probe.think_tokens], engine.end], logprobs) for probe in some]
    vocabulary = engine.llm.llm_engine.model_config.get_vocab_size()
    for probe, (answer,) in zip(some, engine.stock.ask(asks), strict=True):
        (row,) = answer.all_logprobs(vocabulary)
        assert np.isclose(probe.eat_nats, entropy(row), rtol=0, atol=1e-5)
