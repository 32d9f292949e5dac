"""Run one build in a process of its own: start the governed engine and print a JSON line for each feature.

`python -m tests.engine.matrix.child BUILD CONTROL_TARGET [FEATURE...]`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.matrix import features_of, grown
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.builds import BUILDS, prepare, version_here
from tests.engine.matrix.stock import Stock, StockFailed
from tests.engine.pacing import SOON_S
from tests.needed import vocabulary_folder
from tests.processes import Control

if TYPE_CHECKING:
    from tests.engine.matrix import Feature
    from tests.engine.matrix.builds import Build
    from tests.engine.matrix.engine import Engine

# A request that every build must answer without the agent; its output repeats itself, so that drafts are made.
PLAIN = Ask([1, 2, 3] * 8, {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True})


def start(build: Build, control: Control, stock: Stock) -> Engine:
    import vllm

    from meridian_agent.link import control_stream
    from tests.engine.matrix.engine import Engine

    prepare(build)
    # Other markers take effect with the next stream.
    control_stream.BACKOFF_S = SOON_S
    llm = vllm.LLM(**build.engine_args())
    control.engine()
    engine = Engine(build, llm, control, stock)
    classes = [c.__name__ for c in type(engine.scheduler).__mro__]
    assert ("AsyncScheduler" in classes) == build.asynchronous, classes
    assert engine.scheduler.use_v2_model_runner == build.v2
    return engine


def cannot(stock: Stock) -> str:
    """Return stock vLLM's error if it cannot answer even a plain request, or an empty string."""
    try:
        stock.ask([PLAIN])
    except StockFailed as error:
        return str(error)
    return ""


def tried(chosen: Feature, engine: Engine) -> tuple[str, str]:
    """Return the result and its detail. A feature that stock vLLM itself cannot do, or that cannot take effect on the
    build, counts as unsupported."""
    from tests.engine.matrix.engine import NotForBuild

    try:
        engine.reset()
        chosen.check(engine)
        engine.check_over()
    except (StockFailed, NotForBuild) as error:
        return "not supported", str(error)[-2000:]
    except Exception as error:
        # pytest does not rewrite the assertions of this process, so the last frame's values are said here.
        *_, last = traceback.TracebackException.from_exception(error, capture_locals=True).stack
        values = "\n".join(f"{name} = {value[:600]}" for name, value in (last.locals or {}).items())
        failed = f"{values[-6000:]}\n{traceback.format_exc()[-4000:]}"
        # A stock engine that is not `alone` has answered a request before.
        reason = cannot(engine.stock) if engine.build.alone else ""
        return ("not supported", reason[-2000:]) if reason else ("failed", failed)
    return "passed", ""


def main() -> None:
    build, control = BUILDS[sys.argv[1]], Control.existing(sys.argv[2])
    chosen = [f for f in features_of(build.name) if not sys.argv[3:] or f.name in sys.argv[3:]]
    os.environ.update(
        MERIDIAN_CONTROL=control.target, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1"
    )
    stock = Stock(build.name)

    def say(name: str, result: str, detail: str, seconds: float) -> None:
        said: dict[str, Any] = {"build": build.name, "feature": name, "result": result, "detail": detail}
        print("\n" + json.dumps({**said, "vllm": version_here(), "seconds": round(seconds, 1)}), flush=True)

    try:
        if build.vocabulary:
            grown.write(Path(os.environ[grown.FOLDER]), vocabulary_folder() / build.vocabulary, build.size)
        # Both engines start at the same time. A build that is `alone` needs a stock engine only if a feature fails.
        if not build.alone:
            from vllm import LLM  # noqa: F401

            if build.vocabulary:
                from vllm.tokenizers.registry import cached_get_tokenizer

                # Both engines find the tokenizer, which takes seconds to read, in vLLM's cache.
                asked = {"tokenizer_mode": "auto", "revision": None, "trust_remote_code": False}
                cached_get_tokenizer(build.args["tokenizer"], runner_type="generate", **asked)
            # Each start of an engine collects garbage several times, and would go through all modules each time.
            gc.freeze()
            stock.start("fork")
        try:
            engine = start(build, control, stock)
            reason = "" if build.alone else cannot(stock)
        except Exception:
            if not (reason := cannot(stock)):
                raise
        if reason:
            for one in chosen:
                say(one.name, "not supported", reason[-2000:], 0.0)
            return
        for one in chosen:
            began = time.monotonic()
            say(one.name, *tried(one, engine), time.monotonic() - began)
    finally:
        stock.stop()
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
