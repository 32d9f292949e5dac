"""Run simulated engines whose requests come and go, for `cost_control`.

Usage: `python -m tests.bench.cost_load TARGET FIRST COUNT REQUESTS STEP_MS [FILE]`.

Each engine has the agent's real link, tracker and directives, so its reports are those of a real agent. Only the model
is simulated: tokens, signals, and the values of probes. The module also runs in the tree of an older commit, with the
agent of that commit, so it uses only names that both commits have in `tests.fakes`.

The program prints {"ready": true} when all engines have a policy in force. For each line on its standard input it
prints the counts since the line before. It ends when the input ends, and writes the messages that it sent between the
first line and the last one into the file.
"""

from __future__ import annotations

import json
import pickle
import queue
import random
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

from tests.fakes import agent as fake_agent
from tests.fakes import engine as fake_engine
from tests.fakes.linked import LinkedEngine

try:
    from tests.fakes.sentences import ends_by_id
except ImportError:
    # Older commits have the flags by token id instead of a table.
    ends_by_id = bytes  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The names that these modules import lie elsewhere in the older commit's tree.
AGENT: Any = fake_agent
ENGINE: Any = fake_engine
# Tokens of thinking and of the answer of a request, drawn uniformly.
THINK, ANSWER = (200, 2000), (20, 200)
# Tokens that end a sentence and a paragraph, their flags, and the number of thinking tokens between two of each.
SENTENCE, PARAGRAPH = (91, 32, 24), (92, 96, 96)
MAX_TOKENS, PROMPT_TOKENS, PROBE_TOKENS = 8192, 500, 3
# A policy's decisions about signals differ from step to step, so the signals of this many steps take turns.
SIGNALS = 16


def signals(requests: int, seed: int) -> list[Any]:
    """Return the encoded signals of some steps with a row for each request."""
    rng, made, columns = np.random.default_rng(seed), [], len(AGENT.StepSignals.__dataclass_fields__) - 1
    for _ in range(SIGNALS):
        entropy = rng.exponential(0.5, requests).astype(np.float32)
        rank = rng.integers(50, 5000, requests).astype(np.int32)
        values = (entropy, rank, -rank.astype(np.float32) / 100, -entropy)[:columns]
        step = AGENT.StepSignals(None, *values)
        made.append(step.encode() if hasattr(step, "encode") else step.told())
    return made


class Simulated:
    """One engine with all its places taken: a request begins whenever one has ended."""

    def __init__(self, target: str, number: int, requests: int, step_ms: float) -> None:
        self._rng, self._step_ms = random.Random(number), step_ms
        self.linked = LinkedEngine([target], f"cost-{number}", max_num_seqs=requests, num_blocks=64 * requests)
        self._engine = self.linked.engine
        flags = bytearray(PARAGRAPH[0] + 1)
        flags[SENTENCE[0]], flags[PARAGRAPH[0]] = SENTENCE[1], PARAGRAPH[1]
        self._engine.tracker.sentences = ends_by_id(bytes(flags))
        self._engine.open = self._open  # type: ignore[method-assign, assignment]
        self._signals = signals(requests, number)
        # The older commit's record has pairs of names and values, today's has the values alone.
        names = [field.name for field in agent_pb2.AgentCounters.DESCRIPTOR.fields]
        self._counters: Any = (1,) * len(names) if "calm_steps" in names else [(name, 1) for name in names]
        # Thinking tokens and answer tokens of each live request.
        self._lengths: dict[str, tuple[int, int]] = {}
        self._opened = self.rows = 0
        self.trips_ms: list[float] = []
        for _ in range(requests):
            self._begin(self._rng.random())

    @property
    def ready(self) -> bool:
        """Whether a policy is in force."""
        return bool(self.linked.kept)

    def _begin(self, left: float = 1.0) -> None:
        """Begin a request. left: the share of its thinking that is left, for the requests of the first step."""
        self._opened += 1
        name = f"{self.linked.engine_id}-{self._opened}"
        self._lengths[name] = max(1, int(left * self._rng.randint(*THINK))), self._rng.randint(*ANSWER)
        self.linked.open(name)

    def _open(self, name: str) -> Any:
        info = ENGINE.RequestInfo(name, "m", "tenant", "slo", PROMPT_TOKENS, MAX_TOKENS, None)
        ref = SimpleNamespace(is_prefill_chunk=False, num_computed_tokens=PROMPT_TOKENS)
        return self._engine.tracker.open(info, [ENGINE.START], self._engine.step, ref)

    def step(self) -> None:
        """Run one step of a token for each request."""
        engine, linked = self._engine, self.linked
        linked.take_inbox()
        self._probe()
        engine.schedule()
        masks, ended = engine.mask(), []
        for name, live in engine.live.items():
            state, (think, answer) = live.state, self._lengths[name]
            tokens = state.think_tokens
            wanted = ENGINE.TEXT
            if live.state.phase is ENGINE.Phase.THINK:
                wanted = ENGINE.END if tokens >= think else PARAGRAPH[0] if tokens % PARAGRAPH[2] == 0 else wanted
                wanted = SENTENCE[0] if wanted == ENGINE.TEXT and tokens % SENTENCE[2] == 0 else wanted
            elif state.output_tokens >= answer:
                ended.append(name)
            engine.feed(name, [masks[name].get(0, wanted) if name in masks else wanted])
        self._send(ended)

    def _probe(self) -> None:
        """Measure the probes that the control plane has asked for, each at once."""
        directives: Any = self._engine.directives
        if isinstance(asked := directives.probes, list):
            directives.probes = []
        else:
            asked = [asked.take(live) for _, live, *_ in tuple(asked)]
        record = self._engine.tracker.record
        for decision_id, live, _, hold_ms in asked:
            if live.state.phase is not ENGINE.Phase.THINK:
                directives.report(decision_id, ENGINE.Outcome.REFUSED, live, "not thinking")
                continue
            eat_nats = self._rng.uniform(0.3, 2.0)
            record.probes.append((decision_id, live.slot, live.state.think_tokens, eat_nats, PROBE_TOKENS, 1, False))
            record.urgent = record.urgent or hold_ms > 0
            directives.report(decision_id, ENGINE.Outcome.APPLIED)

    def _send(self, ended: list[str]) -> None:
        engine, outbox = self._engine, self.linked.link.outbox
        record = engine.tracker.record
        record.rows, record.told = list(range(len(record.slots))), self._signals[engine.step % SIGNALS]
        record.step_time_ms, record.counters = self._step_ms, self._counters
        self.rows += len(record.slots)
        for name in ended:
            engine.finish(name)
            del self._lengths[name]
        self.linked.send(engine.take())
        for _ in ended:
            self._begin()
        if (not self.trips_ms or outbox.round_trip_ms != self.trips_ms[-1]) and outbox.round_trip_ms:
            self.trips_ms.append(outbox.round_trip_ms)
        # The fakes keep everything, for tests.
        for kept in (engine.records, engine.outcomes, self.linked.taken):
            kept.clear()


class Recorder:
    """Keeps the messages that engines send, with the engine's number and the time. Made before their links start."""

    def __init__(self, engines: list[Simulated]) -> None:
        self._sent: list[tuple[int, float, agent_pb2.ConnectRequest]] = []
        for number, engine in enumerate(engines):
            self._listen(number, engine.linked.link.outbox)

    def _listen(self, number: int, outbox: Any) -> None:
        messages = outbox.messages

        def noted(*args: Any) -> Iterator[agent_pb2.ConnectRequest]:
            for message in messages(*args):
                self._sent.append((number, time.monotonic(), message))
                yield message

        outbox.messages = noted

    def write(self, path: Path | str, began_s: float, ended_s: float) -> None:
        """Write (engine, seconds after `began_s`, bytes) of the messages sent between these times."""
        sent = [
            (n, at - began_s, message.SerializeToString()) for n, at, message in self._sent if began_s <= at < ended_s
        ]
        with open(path, "wb") as file:
            pickle.dump(sent, file)


def run(engines: list[Simulated], step_s: float, lines: queue.Queue[str]) -> tuple[float, float]:
    """Step the engines one after another, each every `step_s`, until the input ends; return the times of the first line
    and of the last one.

    An engine that is late by a step and more leaves steps out, as an engine that is too slow does.
    """
    first_s, counted_s, steps, rows, ready = 0.0, 0.0, 0, 0, False
    began_s = time.monotonic()
    while True:
        for number, engine in enumerate(engines):
            due_s = began_s + step_s * number / len(engines)
            time.sleep(max(0.0, due_s - time.monotonic()))
            engine.step()
        began_s, steps = max(began_s + step_s, time.monotonic() - step_s), steps + len(engines)
        if not ready and (ready := all(engine.ready for engine in engines)):
            print(json.dumps({"ready": True}), flush=True)
        try:
            line = lines.get_nowait()
        except queue.Empty:
            continue
        if not line:
            return first_s, counted_s
        now_s, sent = time.monotonic(), sum(engine.rows for engine in engines)
        trips_ms = [ms for engine in engines for ms in engine.trips_ms]
        counts = {"took_s": now_s - counted_s, "steps": steps, "rows": sent - rows, "trips_ms": trips_ms}
        first_s, counted_s, steps, rows = first_s or now_s, now_s, 0, sent
        for engine in engines:
            engine.trips_ms = []
        print(json.dumps(counts), flush=True)


def read(lines: queue.Queue[str]) -> None:
    """Put each line of the standard input into `lines`, and an empty text at its end."""
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def main() -> None:
    target, first, count, requests, step_ms, *recording = sys.argv[1:]
    engines = [Simulated(target, int(first) + n, int(requests), float(step_ms)) for n in range(int(count))]
    recorder = Recorder(engines) if recording else None
    for engine in engines:
        engine.linked.link.start()
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    times = run(engines, float(step_ms) / 1e3, lines)
    for engine in engines:
        engine.linked.link.stop()
    if recorder is not None:
        recorder.write(recording[0], *times)
    print(json.dumps({"over": True}), flush=True)


if __name__ == "__main__":
    main()
