"""Run a short soak, and check that each of its checks can fail."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.offline.trace_file import TraceWriter, read
from tests.contract.control.fleet.test_record import stream_of
from tests.fakes.agent import FakeAgent
from tests.processes import Control, wait_for
from tests.soak import asks, trace, watch
from tests.soak.record import Recording
from tests.soak.run import Soak
from tests.soak.watch import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

SECONDS, SEED = 8.0, 4
STOCK = [7, 8, asks.END, 20, 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    return asyncio.run(Soak(folder, SEED, SECONDS, clients=4, together=True).run())


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_short_soak(summary: dict[str, Any]) -> None:
    assert (summary["failed"], summary["violations"]) == (0, 0)
    assert summary["decisions"] == summary["outcomes"] > 0
    assert min(summary[name] for name in ("requests", "faults", "reports")) > 2
    assert summary["equal_to_stock"]["compared"] > 0


def settled_in(folder: Path) -> tuple[list[fleet_pb2.TraceRecord], fleet_pb2.TraceRecord, fleet_pb2.TraceRecord]:
    """Return the records of a trace, one with decisions, and a later one with an outcome of these.

    The session is one that the recording has from its beginning; of others it need not show every decision.
    """
    for path in folder.glob("*.trace"):
        records = list(read(path))
        late = {r.session_id for r in records if r.joined_late}
        whole = [r for r in records if r.session_id not in late]
        made = {(r.session_id, number): r for r in whole for number in trace._ids(r.down.directives)}
        for record in records:
            for outcome in record.up.step.outcomes:
                if decided := made.get((record.session_id, outcome.decision_id)):
                    return records, decided, record
    raise AssertionError("no trace has a decision and its outcome")


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", ["a decision", "an outcome twice"])
def test_what_is_wrong_in_a_trace_is_found(summary: dict[str, Any], folder: Path, tmp_path: Path, harm: str) -> None:
    """The trace is that of the short soak, with one record repeated or left out."""
    assert not summary["violations"]
    records, made, settled = settled_in(folder)
    if harm == "a decision":
        records.remove(made)
    else:
        settled.up.step.outcomes.append(settled.up.step.outcomes[0])
    with TraceWriter(tmp_path / "harmed.trace") as out:
        for record in records:
            out.write(record)
    assert trace.audit([tmp_path / "harmed.trace"]).violations


async def test_what_was_said_last_is_in_the_trace(tmp_path: Path) -> None:
    """The recorder is paused while an engine sends everything it has, until the control plane has ended."""
    control = Control(tmp_path)
    recording = Recording(tmp_path, control)
    try:
        await asyncio.to_thread(wait_for, lambda: "recording begins" in control.process.output(), 30, "a recording")
        recording.process.signal(signal.SIGSTOP)
        agent = FakeAgent()
        await stream_of(control.target, agent, 100)
        finishing = asyncio.create_task(recording.finish())
        await asyncio.to_thread(wait_for, lambda: control.process.popen.poll() is not None, 20, "the end")
        recording.process.signal(signal.SIGCONT)
        await finishing
    finally:
        for process in (recording.process, control.process):
            process.kill()
    assert max(record.up.step.step for path in recording.paths for record in read(path)) == agent.engine.step


@pytest.mark.parametrize(("why", "found"), [("injected by the soak, before bitmask", 0), ("no such slot", 3)])
def test_errors_in_a_log_that_nobody_ordered(tmp_path: Path, why: str, found: int) -> None:
    for log in ("control.log", "record.log"):
        (tmp_path / log).write_text("")
    lines = [f"agent off; bitmask: RuntimeError: {why}; for 2 s", "Traceback (most recent call last):", "  in run"]
    served = [f"(EngineCore pid=1) ERROR 11-20 17:05:08 [guard.py:78] {line}" for line in lines]
    (tmp_path / "served.log").write_text("\n".join(["INFO [link.py:1] connected", *served, "INFO [link.py:1] on"]))
    assert len(Soak(tmp_path, 1, 1.0, clients=1)._logged()) == found


def words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def answer(*tokens: int, finish: str = "stop") -> asks.Answer:
    thinking, saying = asks.split(asks.OPENED, list(tokens))
    return asks.Answer("test", list(tokens), words(thinking), words(saying), finish)


def ask(**fields: Any) -> asks.Ask:
    return asks.Ask("test", {"max_tokens": 10, "temperature": 0.0}, asks.OPENED, **fields)


def test_an_answer_that_is_as_it_should_be() -> None:
    assert not asks.complaints(ask(), answer(*STOCK), words)
    assert not asks.complaints(ask(choices=["20 21"]), answer(*STOCK), words)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda a: setattr(a, "finish", ""), "finish reason ''"),
        (lambda a: a.tokens.append(asks.END), "2 end markers"),
        (lambda a: setattr(a, "content", "7 8"), "content is '7 8'"),
        (lambda a: setattr(a, "reasoning", "7"), "reasoning is '7'"),
        (lambda a: a.tokens.extend([30] * 10), "15 tokens"),
    ],
)
def test_an_answer_that_is_not(spoil: Callable[[asks.Answer], object], what: str) -> None:
    given = answer(*STOCK)
    spoil(given)
    assert any(what in found for found in asks.complaints(ask(known=0), given, words))


def test_a_marker_drawn_in_the_midst_is_no_word() -> None:
    thinking = [7, asks.START, 8]
    for shown in ("7 8", "7 <think>8"):
        given = asks.Answer("test", [*thinking, asks.END, 20], shown, "20", "stop")
        assert not asks.complaints(ask(), given, words)


def test_an_answer_that_is_none_of_the_choices() -> None:
    assert "none of the choices" in asks.complaints(ask(choices=["20"]), answer(*STOCK), words)[-1]
    assert not asks.complaints(ask(choices=["20"]), answer(7, 8, 9), words), "it stopped before it came to an answer"


def test_another_end_marker_in_an_answer() -> None:
    """There is no answer of stock vLLM to compare with, so another end marker is no violation."""
    apart, together = ([7, asks.END, 20, asks.END, 22], [7, asks.END, asks.END, 20, 22])
    for tokens in (apart, together):
        given = asks.Answer("test", tokens, "7", "20 22", "stop")
        assert not asks.complaints(ask(), given, words)
        assert "2 end markers" in asks.complaints(ask(known=0), given, words)


@pytest.mark.parametrize(
    ("tokens", "untouched", "complaint"),
    [
        (STOCK, True, ""),
        ([7, asks.END, 20], False, ""),
        ([7, asks.WAIT, 6, asks.END, 20], False, ""),
        ([7, asks.END, 20], True, "although nothing was decided"),
        ([7, 9, 8], True, "although nothing was decided"),
        ([7, 30, asks.END], False, "other than by an end of thinking"),
        ([7, 8, asks.END, 20, asks.END], False, "other than by an end of thinking"),
        ([7, 8], False, "other than by an end of thinking"),
    ],
)
def test_against_stock(tokens: list[int], untouched: bool, complaint: str) -> None:
    found = asks.against_stock(ask(known=0), answer(*tokens), STOCK, untouched)
    assert bool(found) == bool(complaint)
    assert complaint in "".join(found)


@pytest.mark.parametrize(("second", "found"), [(asks.FULL_STOP, 0), (6, 1)])
def test_a_closing_text_whose_first_word_stock_says_too(second: int, found: int) -> None:
    given = answer(7, asks.WAIT, second, asks.END, 20)
    assert len(asks.against_stock(ask(known=0), given, [7, asks.WAIT, 9, 8, asks.END, 20], untouched=False)) == found


@pytest.mark.parametrize(("mb_per_hour", "grows"), [(0, False), (300, True)])
def test_growth_is_seen_through_noise_and_restarts(mb_per_hour: float, grows: bool) -> None:
    """Two lives of a process, each with a warm-up, noise and single peaks."""
    rng, samples = random.Random(1), []
    for second in range(1200):
        life, age = divmod(second, 600)
        mb = 100 + min(age, 60) + age * mb_per_hour / 3600 + rng.gauss(0, 2) + 200 * (rng.random() < 0.02)
        samples.append(Sample(second, watch.CONTROL, life, mb, 10, 20))
    worst, found = watch.grown(samples, 100.0, 1200.0, 10**7)
    assert bool(found) == grows
    assert abs(worst - mb_per_hour / 3) < 5


def test_a_process_that_gains_threads() -> None:
    samples = [Sample(second, watch.FRONT, 1, 100.0, 10 + second // 200, 20) for second in range(1200)]
    assert ["threads" in found for found in watch.grown(samples, 100.0, 1200.0, 0)[1]] == [True]


@pytest.mark.parametrize(("steps", "grows"), [(0, True), (300_000, False)])
def test_what_stock_keeps_of_its_steps_is_not_ours(steps: int, grows: bool) -> None:
    samples = [Sample(second, "worker", 1, 100.0 + second / 60, 10, 20) for second in range(1200)]
    assert bool(watch.grown(samples, 100.0, 1200.0, steps)[1]) == grows


def test_a_decision_without_an_outcome_is_owed_in_the_end_only(tmp_path: Path) -> None:
    """A session that joined late, whose stream either ends first or does not."""
    hello = agent_pb2.ConnectRequest(hello=agent_pb2.Hello(engine_id="e"))
    down = agent_pb2.ConnectResponse()
    down.directives.tiers.add(decision_id=1, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    first = [fleet_pb2.TraceRecord(session_id="one", up=hello, joined_late=True)]
    first += [fleet_pb2.TraceRecord(session_id="one", down=down)]
    for name, records in (("end", first), ("other", [*first, fleet_pb2.TraceRecord(session_id="two", up=hello)])):
        with TraceWriter(tmp_path / name) as out:
            for record in records:
                out.write(record)
    assert trace.audit([tmp_path / "end"]).violations == ["1 decisions have no outcome in the end"]
    assert trace.audit([tmp_path / "other"]).violations == []
    assert trace.audit([tmp_path / "end", tmp_path / "other"]).unheard == 2
