"""What the environment says: who this engine is and where its control planes are."""

from __future__ import annotations

import os
import platform
import uuid
from typing import Any

from meridian_agent import __version__, hooks


def targets() -> list[str]:
    return [t.strip() for t in os.environ["MERIDIAN_CONTROL"].split(",") if t.strip()]


def identity_of_engine(data_parallel_rank: int = 0) -> dict[str, Any]:
    """Fields of Hello that say which engine this is; every start is another incarnation."""
    default = platform.node() + (f"-dp{data_parallel_rank}" if data_parallel_rank else "")
    pairs = (p.partition("=") for p in os.environ.get("MERIDIAN_LABELS", "").split(",") if "=" in p)
    return {
        "engine_id": os.environ.get("MERIDIAN_ENGINE_ID", default),
        "incarnation": uuid.uuid4().hex,
        "agent_version": __version__,
        "vllm_version": hooks.vllm_version(),
        "labels": {key.strip(): value.strip() for key, _, value in pairs},
    }
