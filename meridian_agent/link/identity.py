"""Reads from the environment who this engine is and where its control planes are."""

from __future__ import annotations

import os
import platform
import uuid
from typing import Any

from meridian_agent import __version__
from meridian_agent.core.request_info import clean

# Largest number of characters of all labels together.
MAX_LABELS = 65_536


def targets() -> list[str]:
    return [t.strip() for t in os.environ["MERIDIAN_CONTROL"].split(",") if t.strip()]


def rank_of(parallel_config: Any) -> int:
    """Return the engine's number among the data-parallel engines; for a dense model vLLM sets the index only, not the
    rank."""
    return int(getattr(parallel_config, "data_parallel_index", 0) or getattr(parallel_config, "data_parallel_rank", 0))


def identity_of_engine(vllm_version: str, data_parallel_rank: int = 0) -> dict[str, Any]:
    """Return the fields of Hello that identify this engine; every start of the engine is a new incarnation."""
    # Bytes that are not UTF-8 would not fit into a message, and control characters belong in no name.
    name = clean(os.environ.get("MERIDIAN_ENGINE_ID", platform.node()))
    labels = clean(os.environ.get("MERIDIAN_LABELS", "").strip(), MAX_LABELS)
    pairs = (p.partition("=") for p in labels.split(",") if "=" in p)
    return {
        "engine_id": name + (f"-dp{data_parallel_rank}" if data_parallel_rank else ""),
        "incarnation": uuid.uuid4().hex,
        "agent_version": __version__,
        "vllm_version": vllm_version,
        "labels": {key.strip(): value.strip() for key, _, value in pairs},
        "url": clean(os.environ.get("MERIDIAN_URL", "").strip()).rstrip("/"),
    }
