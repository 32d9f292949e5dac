"""The command and the environment of a governed vLLM server of the demo's model, and whether a server answers."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

from tests.demo.load import MODEL
from tests.demo.processes import HOST

ROOT = Path(__file__).resolve().parents[2]
# The worker that makes steps as long as `environment` says.
PACED = ("--worker-cls", "tests.demo.pace.PacedWorker")
ANSWER_TIMEOUT_S = 5.0


def command(port: int, model: Path, *options: str) -> list[str]:
    """Return the command of a server on this port. options: further options of vLLM."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", HOST, "--port", str(port)),
        *("--model", str(model), "--served-model-name", MODEL),
        *("--reasoning-parser", "qwen3", "--enforce-eager", "--dtype", "float32"),
        # The CPU attention backend needs a multiple of 32.
        *("--block-size", "32", "--max-model-len", "1024"),
        *options,
    ]


def environment(control: str, engine_id: str, state: Path, step_ms: float, **own: str) -> dict[str, str]:
    """Return the environment of a server. state: folder of the agent's state. step_ms: milliseconds of a step, if the
    worker is PACED. own: further variables."""
    return {
        "MERIDIAN_CONTROL": control,
        "MERIDIAN_ENGINE_ID": engine_id,
        "MERIDIAN_STATE_DIR": str(state),
        "MERIDIAN_DEMO_STEP_MS": str(step_ms),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **own,
    }


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S):
            return True
    except OSError:
        return False
