"""A real engine whose control plane sends everything that is allowed and absurd: requests end, the agent stays on."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core import directives, probe_admission
from tests.engine import Run, cases
from tests.engine.test_equality import WHOLE
from tests.engine.test_faults import rebuilt  # noqa: F401 - a fixture
from tests.fuzz import agent as hostile

SEEDS, PER_STEP = range(15), 2


def messages() -> itertools.chain[agent_pb2.ConnectResponse]:
    made = (hostile.make(random.Random(seed)) for seed in SEEDS)
    return itertools.chain.from_iterable([record.down for record in case] for case in made)


@pytest.mark.usefixtures("rebuilt")
def test_a_hostile_control_plane(llm: Any, agent: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directives, "MAX_SKIP_STEPS", 3)
    monkeypatch.setattr(probe_admission, "MAX_HOLD_MS", 10)
    link = agent.link
    link.stop()
    link._thread.join(10)
    run, said = Run(llm), messages()
    chosen = [{**case, "template": {"open_think": True}} for case in cases()]
    for name, case in enumerate(chosen * 2):
        run.add(f"hostile-{name}", case, copy.deepcopy(WHOLE))
    while llm.llm_engine.has_unfinished_requests():
        for message in itertools.islice(said, PER_STEP):
            link._receive(message)
        run.step()
    assert not scheduler._guard.fault
    assert next(said, None) is None, "the requests ended before everything was sent"
    assert set(run.finished.values()) <= {"stop", "length"}
    assert len(run.finished) == 2 * len(chosen)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    assert all(0 <= token < vocabulary for tokens in run.tokens.values() for token in tokens)
