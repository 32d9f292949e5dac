"""KV connectors that record vLLM's calls. Each is one of vLLM's own connectors and works like it.

vLLM imports this module by `kv_connector_module_path`, in the engine core and in each worker, and looks up a class by
name: `RecordedExampleConnector` is vLLM's ExampleConnector, and so on. Each call becomes a line of JSON in a file of
the process: the method, the side, and every request that its arguments or its result name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "CONNECTOR_FOLDER"
PATH = "tests.engine.matrix.connectors"
RECORDED = "Recorded"
# Prefix of the ids of requests whose blocks ExampleConnector keeps here, and the name of the file that ends the
# keeping.
HELD, READ = "held", "read"
# Most time in microseconds for which NIXL's thread sleeps although nothing has arrived.
SLEEP_US = 1000
# How deep an argument is searched for requests.
DEPTH = 8


def folder_of(governed: bool) -> Path:
    """Return the folder in which one of a build's two engines keeps its calls and its connector's data."""
    return Path(os.environ[FOLDER]) / ("governed" if governed else "stock")


def calls(governed: bool) -> list[dict[str, Any]]:
    """Return the calls recorded so far."""
    paths = sorted(folder_of(governed).glob("calls-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def named(value: Any, depth: int = DEPTH) -> set[str]:
    """Return every request that a value names: objects with a request id, and every text in a collection."""
    if isinstance(value, str):
        return {value}
    if depth == 0 or callable(value):
        return set()
    if own := getattr(value, "request_id", None) or getattr(value, "req_id", None):
        return {own}
    within: list[Any] = []
    if isinstance(value, dict):
        within = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        within = list(value)
    elif type(value).__module__.startswith(("vllm.v1.core.sched.output", "vllm.distributed.", "vllm.v1.outputs")):
        within = list(vars(value).values())
    return {found for one in within if not isinstance(one, (int, float)) for found in named(one, depth - 1)}


@contextlib.contextmanager
def courteous() -> Iterator[None]:
    """Keep NIXL's worker from taking the cores of other programs.

    NIXL's worker binds the model's thread to one core and starts a thread that polls without end. Inside the block the
    model's thread gets its cores back, and the thread that is started sleeps until something arrives, as NIXL's C++
    interface allows; the Python interface sets the time of sleeping to zero.
    """
    bindings: Any = importlib.import_module("nixl._bindings")
    cores, config = os.sched_getaffinity(0), bindings.nixlAgentConfig
    sleeps = property(config.pthrDelay.fget, lambda self, _: config.pthrDelay.fset(self, SLEEP_US))
    bindings.nixlAgentConfig = type("nixlAgentConfig", (config,), {"pthrDelay": sleeps})
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config
    os.sched_setaffinity(0, cores)


@functools.cache
def recorded(name: str) -> type:
    """Return vLLM's connector of this name with every method of the interface recorded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    base: Any = KVConnectorFactory.get_connector_class_by_name(name)
    if name == "ExampleConnector":
        base = _holding(base)
    folder = folder_of("MERIDIAN_CONTROL" in os.environ)

    def note(self: Any, call: str, *told: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        line = {"role": self.role.name, "call": call, "requests": sorted(set().union(*map(named, told)))}
        with (folder / f"calls-{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def noting(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            note(self, method.__name__, args, kwargs, result)
            return result

        return call

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        with courteous() if name.startswith("Nixl") else contextlib.nullcontext():
            base.__init__(self, *args, **kwargs)
        if hasattr(self, "_storage_path"):
            self._storage_path = str(folder / "stored")

    names = [n for of in (KVConnectorBase_V1, SupportsHMA) for n, _ in inspect.getmembers(of, inspect.isfunction)]
    methods = {n: noting(getattr(base, n)) for n in names if not n.startswith("_") and hasattr(base, n)}
    return type(f"{RECORDED}{name}", (base,), {**methods, "__init__": begin, "__module__": __name__})


def _holding(base: Any) -> type:
    """Return the connector with a change: it keeps the blocks of requests named HELD until a file says that they were
    read."""

    class Holding(base):  # type: ignore[misc]
        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
            return (True, None) if request.request_id.startswith(HELD) else super().request_finished(request, block_ids)

        def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
            held = getattr(self, "_held", set()) | {r for r in finished_req_ids if r.startswith(HELD)}
            self._held: set[str] = set()
            if (folder_of("MERIDIAN_CONTROL" in os.environ) / READ).exists():
                return held, None
            self._held = held
            return None, None

    return Holding


def __getattr__(name: str) -> Any:
    if not name.startswith(RECORDED):
        raise AttributeError(name)
    return recorded(name.removeprefix(RECORDED))
