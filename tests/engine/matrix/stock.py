"""Stock vLLM of the same build in a process of its own, which runs requests on demand as the reference."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from tests.engine.matrix.asks import Answer, Ask, generate
from tests.engine.matrix.builds import BUILDS, prepare

# Number of times that stock vLLM must draw the same tokens again before another engine is compared with it; beside a
# greedy request it must draw them once more.
REPEATS = 1


class StockFailed(Exception):  # noqa: N818
    """Stock vLLM itself cannot run the request; the text is vLLM's error. A process that ends without an error raises
    EOFError instead."""


def _serve(pipe: Connection, build_name: str) -> None:
    import vllm

    build = BUILDS[build_name]
    prepare(build)
    try:
        llm = vllm.LLM(**build.engine_args())
    except Exception:
        pipe.send(traceback.format_exc())
        return
    while (asks := pipe.recv()) is not None:
        try:
            pipe.send(generate(llm, asks))
        except Exception:
            pipe.send(traceback.format_exc())
            return
    llm.llm_engine.engine_core.shutdown()


class Stock:
    """Starts on demand, or with the first request; after an error it starts again."""

    def __init__(self, build_name: str) -> None:
        self._build_name = build_name
        self._process: BaseProcess | None = None

    def start(self, method: Literal["fork", "spawn"] = "spawn") -> None:
        """Start the process. A fork has what this process has imported, which saves the import while no engine runs
        here."""
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._process = process = context.Process(target=_serve, args=(theirs, self._build_name))
        control = os.environ.pop("MERIDIAN_CONTROL", "")
        process.start()
        os.environ["MERIDIAN_CONTROL"] = control
        theirs.close()

    def ask(self, asks: list[Ask]) -> list[list[Answer]]:
        """Run requests. Raises StockFailed, or EOFError if the process ended without an error."""
        if self._process is None:
            self.start()
        # An engine that could not start has said why, and has ended.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(asks)
        found: Any = self._pipe.recv()
        if isinstance(found, str):
            self.stop()
            raise StockFailed(found)
        answers: list[list[Answer]] = found
        return answers

    def draw(self, asks: list[Ask]) -> list[list[Answer]]:
        """Run sampled requests with seeds.

        Raises StockFailed if the same seeds do not draw the same tokens again, or not beside a greedy request such as a
        probe.
        """
        drawn = self.ask(asks)
        if any(self.ask(asks) != drawn for _ in range(REPEATS)):
            raise StockFailed("answers the same request differently")
        tokens = max(ask.params["max_tokens"] for ask in asks)
        *beside, _ = self.ask([*asks, Ask([1, 2, 3], {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True})])
        if beside != drawn:
            raise StockFailed("a seed does not hold beside a request without one")
        return drawn

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = None
