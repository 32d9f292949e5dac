"""What all vLLM engines of the benchmarks have in common while they start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.bench.machine import output_into
from tests.processes import ENGINE_ENV, ROOT, Control


@contextlib.contextmanager
def starting(folder: Path, control: Control | None, **variables: str) -> Iterator[None]:
    """Prepare this process for an engine that starts within the block, and write the engine's output to `engine.log`.

    control: the engine's control plane; None for stock vLLM. variables: further ones of the environment.
    """
    os.environ.pop("MERIDIAN_CONTROL", None)
    os.environ.update(ENGINE_ENV)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # vLLM must not fork this process, because it has gRPC threads, which a fork does not survive.
        VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.update(variables)
    if control is not None:
        os.environ["MERIDIAN_CONTROL"] = control.target
    import torch

    torch.set_num_threads(1)
    with output_into(folder / "engine.log"):
        yield
