"""The numbers of phases on their way from the engine's tracker to Prometheus metrics."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from meridian_agent.core.directives import Directives
from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from meridian_agent.core.phases import Markers
from meridian_agent.core.tracker import Tracker
from meridian_agent.vllm_adapter import phase_numbers, server_metrics
from meridian_agent.vllm_adapter.phase_numbers import FIELD, INTERVAL_S, PhaseNumbers, PhaseNumberSender, add_field
from tests.fakes.engine import END, MARKERS, START, TEXT, opened


class Engine:
    """A tracker, its sender, and clocks that stand still until they are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tracker = Tracker(MARKERS)
        self.sender = PhaseNumberSender(self.tracker)
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(phase_numbers, "time", clock)

    def open(self, name: str, prompt: list[int], handed_over_ref: str = "") -> LiveRequest:
        request = SimpleNamespace(arrival_time=self.now - 2.0, num_computed_tokens=10)
        return opened(self.tracker, name, prompt, ref=request, handed_over_ref=handed_over_ref)

    def step(self, seconds: float = 0.0, stats: Any = True) -> Any:
        """Return the field that a step's statistics have, after the clock was moved."""
        self.now += seconds
        sent = SimpleNamespace() if stats is True else stats
        self.sender.add_to(sent, self.now)
        return getattr(sent, FIELD, None)

    def numbers(self) -> PhaseNumbers:
        return PhaseNumbers.decode(self.step(INTERVAL_S))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_numbers_by_phase(engine: Engine) -> None:
    tracker = engine.tracker
    thinking, undecided, _ = engine.open("t", [START]), engine.open("u", []), engine.open("o", [START, END])
    tracker.feed(thinking, [TEXT, TEXT], 0)
    first = engine.numbers()
    assert (first.requests, first.kv_tokens) == ([1, 1, 1, 0], [10, 10, 10, 0])
    assert (first.think_tokens, first.ttfvt_s) == (2, [])
    assert engine.step() == [], "numbers go out once in an interval, and steps in between say that the agent is on"
    tracker.feed(thinking, [TEXT, END], 0)
    tracker.feed(undecided, [TEXT], 1)
    second = engine.numbers()
    assert (second.requests, second.think_tokens) == ([0, 0, 3, 0], 1)
    assert second.ttfvt_s == [2.0 + 2 * INTERVAL_S], "the marker is no answer token"
    for live in list(tracker.by_id.values()):
        tracker.close(live, 1)
    last = PhaseNumbers.decode(engine.step())
    assert (last.requests, last.kv_tokens) == ([0] * 4, [0] * 4), "no step may follow"


def test_thinking_of_a_request_that_begins_and_ends_between_two_messages(engine: Engine) -> None:
    other = engine.open("other", [])
    engine.numbers()
    brief = engine.open("brief", [START])
    engine.tracker.feed(brief, [TEXT] * 3, 0)
    engine.tracker.close(brief, 1)
    assert engine.step() == []
    assert engine.numbers().think_tokens == 3
    engine.tracker.close(other, 1)
    assert engine.numbers().think_tokens == 0


def test_brief_requests_one_after_the_other_are_seen(engine: Engine) -> None:
    for _ in range(3):
        live = engine.open("r", [START])
        engine.tracker.feed(live, [TEXT], 0)
        assert PhaseNumbers.decode(engine.step()).requests == [0, 1, 0, 0]
        assert engine.step(INTERVAL_S / 4) == []
        engine.tracker.close(live, 1)
        assert PhaseNumbers.decode(engine.step(INTERVAL_S / 4)).requests == [0] * 4


def test_tokens_that_a_marker_takes_back(engine: Engine) -> None:
    """A counter never falls: the tokens that were taken back are missing in the next message."""
    engine.tracker.use(Markers(((START, 5),), ((END, 5),)))
    live = engine.open("r", [START, 5])
    engine.tracker.feed(live, [TEXT, END], 0)
    assert engine.numbers().think_tokens == 2
    engine.tracker.feed(live, [5], 0)
    assert engine.numbers().think_tokens == 0
    engine.tracker.feed(live, [START, 5, TEXT, TEXT], 0)
    assert engine.numbers().think_tokens == 1


def test_each_request_has_one_first_answer_token(engine: Engine) -> None:
    live, continued = engine.open("r", [START]), engine.open("c", [START, END], handed_over_ref="thinking engine")
    engine.tracker.feed(live, [END, TEXT, START, TEXT, END, TEXT], 0)
    engine.tracker.feed(continued, [TEXT], 1)
    assert len(engine.numbers().ttfvt_s) == 1, "a request that was handed over has another engine's arrival"
    engine.tracker.feed(live, [TEXT], 0)
    assert engine.numbers().ttfvt_s == []


def test_the_beginning_of_a_start_marker_is_no_answer(engine: Engine) -> None:
    """A model that writes its start marker itself, token by token, has not answered yet."""
    engine.tracker.use(Markers(((START, 5),), ((END,),)))
    thinks, answers = engine.open("t", []), engine.open("a", [])
    engine.tracker.feed(thinks, [START], 0)
    engine.tracker.feed(answers, [START], 1)
    assert engine.numbers().ttfvt_s == [], "both may become markers"
    engine.tracker.feed(thinks, [5], 0)
    engine.tracker.feed(answers, [TEXT], 1)
    assert len(engine.numbers().ttfvt_s) == 1
    assert not engine.tracker.before_answer, "a request that thinks waits for no answer token"
    engine.tracker.feed(thinks, [TEXT, END, TEXT], 0)
    assert engine.numbers().ttfvt_s == [2.0 + 3 * INTERVAL_S]


def test_without_statistics_nothing_is_kept(engine: Engine) -> None:
    live = engine.open("r", [START])
    engine.tracker.feed(live, [END, TEXT], 0)
    assert engine.step(INTERVAL_S, stats=None) is None
    assert engine.numbers().ttfvt_s == []
    assert not engine.tracker.answered


def test_a_first_answer_token_that_the_run_counts(engine: Engine) -> None:
    """After the marker the request may be one of those that are counted together."""
    tracker, live = engine.tracker, engine.open("r", [START])
    waiting = engine.open("waits", [START, END])
    for token in (TEXT, END, TEXT):
        others = tracker.note(["r"], [[token]])
        tracker.count(others)
        for row in others:
            tracker.feed(live, [token], row)
        tracker.looked_at(others)
    assert live.run_row >= 0
    assert list(tracker.before_answer) == [live], "a request that waits for its first step costs the others nothing"
    assert engine.numbers().ttfvt_s == [2.0 + INTERVAL_S]
    tracker.feed(waiting, [TEXT], 0)
    assert len(engine.numbers().ttfvt_s) == 1
    assert not tracker.before_answer


@pytest.mark.parametrize(("by_cap", "shadow", "saved"), [(False, False, 17), (True, False, 0), (False, True, 0)])
def test_saved_tokens(engine: Engine, by_cap: bool, shadow: bool, saved: int) -> None:
    """Only a rule's end saves tokens, and only up to a cap in force."""
    live = engine.open("r", [START])
    live.set_cap(Cap(1, 20, shadow))
    engine.tracker.feed(live, [TEXT] * 3, 0)
    live.ending = Ending((END,), 2, by_cap)
    live.expect_forced_end(0, 1)
    Directives(engine.tracker).after_tokens(live, engine.tracker.feed(live, [END], 0))
    assert engine.numbers().saved_tokens == saved
    assert engine.numbers().saved_tokens == 0


def test_a_front_end_without_the_field_skips_it() -> None:
    @dataclass
    class Stats:
        running: int = 0
        hits: dict[str, int] = field(default_factory=dict)

    @dataclass
    class Stock:
        running: int = 0
        hits: dict[str, int] = field(default_factory=dict)

    for _ in range(2):
        add_field(Stats)
    silent, telling = Stats(running=3), Stats(running=3)
    setattr(telling, FIELD, [1, 2.5])
    encode = msgspec.msgpack.encode
    assert encode(silent) == encode(Stock(running=3)), "a step without the agent costs no byte"
    assert msgspec.msgpack.decode(encode(telling), type=Stock) == Stock(running=3)
    assert getattr(msgspec.msgpack.decode(encode(telling), type=Stats), FIELD) == [1, 2.5]
    assert getattr(msgspec.msgpack.decode(encode(silent), type=Stats), FIELD) is None


class StatLogger:
    """The part of vLLM's PrometheusStatLogger that the agent uses."""

    def __init__(self, engine_indexes: list[int]) -> None:
        self.registry = CollectorRegistry()
        self._gauge_cls, self._counter_cls, self._histogram_cls = (
            functools.partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)
        )
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
        self.engine_indexes = engine_indexes
        self.recorded = 0

    def record(self, scheduler_stats: Any, engine_idx: int = 0) -> None:
        self.recorded += 1


@pytest.fixture
def stat_logger() -> Any:
    wrapped = type("Wrapped", (StatLogger,), {})
    server_metrics._wrap(wrapped)
    return wrapped([0, 1])


def values(stat_logger: Any, name: str, engine: int = 0) -> list[float | None]:
    read, labels = stat_logger.registry.get_sample_value, {"model_name": "m", "engine": str(engine)}
    if name in (server_metrics.REQUESTS, server_metrics.KV_TOKENS):
        return [read(name, {**labels, "phase": phase}) for phase in ("prompt", "think", "output", "unknown")]
    return [read(name, labels)]


def stats(numbers: PhaseNumbers | list[float] | None) -> Any:
    said = numbers.encode() if isinstance(numbers, PhaseNumbers) else numbers
    return SimpleNamespace(num_running_reqs=4, num_waiting_reqs=2, num_skipped_waiting_reqs=1, **{FIELD: said})


def test_metrics(stat_logger: Any) -> None:
    assert values(stat_logger, server_metrics.REQUESTS) == [0, 0, 0, 0]
    for _ in range(2):
        stat_logger.record(stats(PhaseNumbers([1, 2, 3, 0], [10, 20, 30, 0], 5, 6, [0.2, 4.0])), engine_idx=1)
        stat_logger.record(stats([]), engine_idx=1)
    stat_logger.record(None)
    assert values(stat_logger, server_metrics.REQUESTS, 1) == [1, 2, 3, 0]
    assert values(stat_logger, server_metrics.KV_TOKENS, 1) == [10, 20, 30, 0]
    assert values(stat_logger, "meridian_vllm_think_tokens_total", 1) == [10]
    assert values(stat_logger, "meridian_vllm_tokens_saved_against_cap_total", 1) == [12]
    assert values(stat_logger, "meridian_vllm_ttfvt_seconds_count", 1) == [4]
    assert values(stat_logger, "meridian_vllm_ttfvt_seconds_sum", 1) == [8.4]
    assert values(stat_logger, server_metrics.REQUESTS, 0) == [0, 0, 0, 0], "the other engine said nothing"
    stat_logger.record(stats(PhaseNumbers([9, 0, 0, 0], [0] * 4, 0, 0, [])), engine_idx=2)
    assert stat_logger.recorded == 6, "an engine that has come later is vLLM's own concern"


def test_phases_are_unknown_while_the_agent_is_off(stat_logger: Any) -> None:
    stat_logger.record(stats(PhaseNumbers([1, 2, 3, 0], [10, 20, 30, 0], 5, 6, [])), engine_idx=0)
    stat_logger.record(stats(None), engine_idx=0)
    assert values(stat_logger, server_metrics.REQUESTS) == [0, 0, 0, 7]
    assert values(stat_logger, server_metrics.KV_TOKENS) == [0, 0, 0, 0]
    assert values(stat_logger, "meridian_vllm_think_tokens_total") == [5]


def test_an_exception_costs_the_numbers_only(stat_logger: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        stat_logger.record(stats([1.0]), engine_idx=0)
    assert stat_logger.recorded == 2
    assert [record.getMessage() for record in caplog.records] == [
        "meridian: vLLM's /metrics has no further numbers of phases"
    ]


def test_another_logger_in_the_same_process_uses_the_same_metrics(stat_logger: Any) -> None:
    """vLLM builds another logger when engines are added, and a registry takes each name once."""
    kinds = stat_logger._gauge_cls, stat_logger._counter_cls, stat_logger._histogram_cls
    stat_logger.record(stats(PhaseNumbers([1, 0, 0, 0], [0] * 4, 5, 0, [])))
    assert server_metrics._families(*kinds) is server_metrics._families(*kinds)
    second = server_metrics._PhaseMetrics(stat_logger)
    second.record(stats(PhaseNumbers([2, 0, 0, 0], [0] * 4, 5, 0, [])), 0)
    assert values(stat_logger, server_metrics.REQUESTS) == [2, 0, 0, 0]
    assert values(stat_logger, "meridian_vllm_think_tokens_total") == [10]
