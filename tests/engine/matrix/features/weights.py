"""Weights that are replaced while the engine runs."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine
from tests.engine.matrix.features.forces import GREEDY
from tests.processes import MODEL, RPC_S, wait_for


@feature("replaced weights have another fingerprint, until the same are back", "v1", "async", "v2", "v2-async", "tp2")
def replaced(engine: Engine) -> None:
    """A rule of self-calibration holds for the fingerprint that it was proved for. All weights of this feature are
    equal, so no token changes."""
    ask, control = Ask(engine.prompt(), {**GREEDY, "max_tokens": 8}), engine.control
    rpc, seen = engine.llm.collective_rpc, [control.engine().model_fingerprint]
    expected = engine.tokens([ask])
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "model"
        shutil.copytree(MODEL, other)
        (other / "config.json").write_text(json.dumps(json.loads((MODEL / "config.json").read_text()), indent=7))
        for way in (load_one, update, other, load_one, MODEL):
            if isinstance(way, Path):
                rpc("reload_weights", kwargs={"weights_path": str(way)})
            else:
                rpc(way)
            assert engine.tokens([ask]) == expected
            wait_for(lambda: control.engine().model_fingerprint != seen[-1], RPC_S, "another fingerprint")
            seen.append(control.engine().model_fingerprint)
    assert [print_.startswith("replaced-") for print_ in seen] == [False, True, True, False, True, False]
    assert seen[-1] == seen[0]
    assert len({*seen}) == 5
    rpc("reload_weights")
    assert engine.tokens([ask]) == expected
    control.settled()
    assert control.engine().model_fingerprint == seen[0]


def load_one(worker: Any) -> None:
    """Load one of the model's weights as a trainer's extension of the worker does."""
    model = worker.model_runner.get_model()
    name = "model.norm.weight"
    model.load_weights([(name, dict(model.named_parameters())[name].detach().clone())])


def update(worker: Any) -> None:
    """Call the method through which trainers send weights; no engine of the matrix has a backend for it, because all of
    vLLM's need GPUs."""
    with contextlib.suppress(RuntimeError):
        worker.update_weights({})
