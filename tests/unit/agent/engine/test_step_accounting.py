"""Steps with probes that are accounted as a whole give the same reports as steps that are accounted one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import Directives
from meridian_agent.core.live_request import Ending
from meridian_agent.core.phases import Markers
from meridian_agent.core.probe_admission import Placed
from meridian_agent.core.request_info import PROBE_PREFIX, is_probe
from meridian_agent.core.step_record import Gauges, StepRecord, TextStep
from meridian_agent.core.step_signals import RESULT, StepSignals
from meridian_agent.core.token_cycles import LOOK_TOKENS
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.hand_over import HandOverRunner
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.engine.step_accounting import POSTPONED_S, POSTPONED_STEPS, StepAccounting
from meridian_agent.link.messages import step_report
from meridian_agent.link.unreported import Unreported
from meridian_agent.vllm_adapter.phase_numbers import PhaseNumberSender
from tests.fakes.engine import END, MARKERS, START, TEXT, opened
from tests.fakes.records import in_slot_order
from tests.fakes.sentences import ends_by_id

# A token that ends a sentence, and one that ends thinking with a tool call.
STOP, TOOL_CALL = 4, 5
GAUGES = Gauges(0.5, 2, 0)


class Engine:
    """The accounting of one engine. singly: account each step request by request. drafts: drafts of each request in
    each step."""

    def __init__(self, singly: bool = False, drafts: int = 0) -> None:
        self.tracker, self.singly, self.whole = Tracker(MARKERS, 1 + drafts), singly, 0
        self.rows = 1 + drafts
        self.tracker.sentences = ends_by_id(bytes([0, 0, 0, 0, 32]))
        directives = Directives(self.tracker)
        self.probing = ProbeRunner(self.tracker, directives, 16, True)
        hand_over = HandOverRunner(self.tracker, directives.hand_overs, None, True)
        # The records that were sent, and how many steps were accounted without a record of their own.
        self.sent: list[StepRecord] = []
        self.texts = 0
        self.ring = SimpleNamespace(lacks=lambda: 100)
        outbox: Any = SimpleNamespace(send_text=self.send_text, unreported=Unreported(), ring=self.ring)
        outbox.send = lambda record, _: self.sent.append(record)
        others: Any = {
            "calm": (calm := SimpleNamespace(find_due=lambda _: None, awaited={}, due={})),
            "outbox": outbox,
            "is_async": False,
        }
        self.calm, self.now_s = calm, 1000.0
        others["lease"] = SimpleNamespace(clock=lambda: self.now_s)
        others["phase_numbers"] = PhaseNumberSender(self.tracker)
        self.accounts = StepAccounting(self.tracker, directives, self.probing, hand_over, **others)

    def send_text(self, step: TextStep) -> bool:
        self.texts += 1
        # The outbox reads the gauges when it makes the report.
        self.sent.append(StepRecord(*step, gauges=GAUGES))
        return True

    def open(self, name: str, prompt: list[int]) -> None:
        ref = SimpleNamespace(sampling_params=SimpleNamespace(all_stop_token_ids={9}), output_token_ids=[])
        opened(self.tracker, name, prompt, ref=ref)

    def probe(self, number: int, parent: str) -> str:
        """Place a probe of a request and return its id."""
        live = self.tracker.by_id[parent]
        probe = Placed(number, live, live.state.think_tokens, 0, cost_tokens=3)
        self.probing.placed[f"{PROBE_PREFIX}{number}"] = probe
        return f"{PROBE_PREFIX}{number}"

    def text(self, *tokens: int) -> bool:
        """Account a step as the agent does, with one token for each live request; return whether it was postponed."""
        names = list(self.tracker.by_id)
        outputs: Any = {0: SimpleNamespace(outputs=names, scheduler_stats=None)}
        runner_output: Any = SimpleNamespace(req_ids=names, sampled_token_ids=[[token] for token in tokens])
        scheduler: Any = SimpleNamespace(finished_req_ids=(), current_step=len(self.sent))
        if self.accounts.postpone(scheduler, runner_output, outputs):
            return True
        self.accounts.take_postponed()
        if self.accounts.take_text(scheduler, runner_output, outputs):
            self.accounts.make_room()
        return False

    def step(
        self, tokens: dict[str, list[int]], entropies: list[float], finished: set[str], dropped: str = ""
    ) -> tuple[bytes, list[str]]:
        """Account a step; return its report, and the ids of the outputs that the clients get.

        tokens: the new tokens of each request and probe, in the order of the rows. finished: ids that end in the step.
        dropped: request whose tokens vLLM drops.
        """
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=new, finish_reason="stop" if name in finished else None)
            for name, new in tokens.items()
            if name != dropped
        ]
        group = SimpleNamespace(outputs=outputs, finished_requests=set(finished), scheduler_stats=None)
        runner_output = SimpleNamespace(
            req_ids=list(tokens),
            sampled_token_ids=list(tokens.values()),
            req_id_to_index={name: row for row, name in enumerate(tokens)},
        )
        column = np.array(entropies, np.float32)
        first = np.arange(len(tokens), dtype=np.int32) * self.rows if self.rows > 1 else None
        told = StepSignals(first, column, np.ones(len(column), np.int32), -column, -column).encode()
        setattr(runner_output, RESULT, told)
        usage, counts = SimpleNamespace(usage=GAUGES.kv_used), (GAUGES.running, GAUGES.waiting)
        scheduler = SimpleNamespace(
            finished_req_ids=finished, current_step=1, kv_cache_manager=usage, get_request_counts=lambda: counts
        )
        if not self.accounts.take_text(scheduler, runner_output, {0: group}):
            self.accounts.take(runner_output, {0: group}, told, finished)
            self.accounts.complete(scheduler, told)
            self.accounts.send()
        record = self.sent.pop()
        self.whole += bool(record.text)
        if self.singly:
            self.tracker.run.end()
        report = step_report([in_slot_order(record)]).SerializeToString(deterministic=True)
        return report, [out.request_id for out in group.outputs] + sorted(group.finished_requests)


def states(engine: Engine) -> list[tuple[Any, ...]]:
    live = engine.tracker.by_id.values()
    return [(r.state.phase, r.state.think_tokens, r.state.output_tokens, r.sentence_flags, r.same_answer) for r in live]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_with_probes_as_a_whole_or_one_by_one(seed: int, drafts: int) -> None:
    rng, engines = random.Random(seed), (Engine(drafts=drafts), Engine(singly=True, drafts=drafts))
    opened, probes, with_probes = 0, 0, 0
    for _ in range(200):
        names = list(engines[0].tracker.by_id)
        if not names or (rng.random() < 0.03 and len(names) < 6):
            for engine in engines:
                engine.open(str(opened), [START])
            names.append(str(opened))
            opened += 1
        # A probe is not always measured, and its row is not always the last.
        asked = [rng.choice(names) for _ in range(rng.choice((0, 1, 1, 2)))] if rng.random() < 0.7 else []
        placed: list[str] = []
        for parent in dict.fromkeys(asked):
            probes += 1
            placed = [*placed, *{engine.probe(probes, parent) for engine in engines}]
        ids = [*placed, *names] if rng.random() < 0.1 else [*names, *placed]
        accepted = {name: rng.randint(0, drafts) if name in names else 0 for name in ids}
        tokens = {name: rng.choices((TEXT, STOP, START, END), (80, 20, 1, 1), k=1 + accepted[name]) for name in ids}
        finished = set(placed) | {name for name in names if rng.random() < 0.01}
        entropies, before = [rng.random() for _ in range(len(ids) * (1 + drafts))], engines[0].whole
        told = [engine.step(tokens, entropies, finished) for engine in engines]
        assert told[0] == told[1]
        assert states(engines[0]) == states(engines[1])
        assert not any(is_probe(name) for name in told[0][1])
        with_probes += engines[0].whole > before and bool(placed)
    assert with_probes > 20
    assert engines[0].texts > 20
    assert engines[1].whole == 0


def test_the_output_of_a_probe_that_vllm_ended_is_for_no_client() -> None:
    """vLLM ends a probe with the error of its request if the request's KV cannot be loaded."""
    engine = Engine()
    engine.open("r", [START])
    engine.step({"r": [TEXT]}, [1.0], set())
    probe = engine.probe(1, "r")
    engine.probing.ended(probe)
    assert engine.step({"r": [TEXT], probe: []}, [1.0, 1.0], {probe})[1] == ["r"]


def test_an_end_that_a_logits_processor_forbids_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """No token is left in the mask's row then, so vLLM samples a wrong one."""
    for budget, refused in ((None, True), (7, False)):
        engine = Engine()
        engine.open("r", [START])
        live = engine.tracker.by_id["r"]
        setattr(live.ref.sampling_params, "thinking_token_budget", budget)  # noqa: B010
        live.ending = Ending((END,), 5)
        live.expect_forced_end(0, 1)
        report, _ = engine.step({"r": [TEXT]}, [1.0], set())
        outcomes = [(one.decision_id, one.outcome) for one in agent_pb2.StepReport.FromString(report).outcomes]
        assert outcomes == ([(5, agent_pb2.OUTCOME_REFUSED)] if refused else [])
        assert (live.ending is None, live.allowed) == (refused, not refused)
    (line,) = caplog.messages
    assert "request r: a logits processor of this engine forbids the forced end of its thinking" in line


def test_an_end_is_still_to_be_forced_whose_tokens_vllm_has_dropped() -> None:
    engine = Engine()
    for name in ("r", "other"):
        engine.open(name, [START])
    live = engine.tracker.by_id["r"]
    engine.tracker.by_id["r"].ending = Ending((END,), 5)
    engine.tracker.watch_limit(live)
    live.expect_forced_end(0, 1)
    engine.step({"r": [END], "other": [TEXT]}, [1.0, 1.0], set(), dropped="r")
    assert (live.expected, live.state.think_tokens) == ({}, 0)
    live.expect_forced_end(0, 1)
    engine.step({"r": [END], "other": [TEXT]}, [1.0, 1.0], set())
    assert (live.ending, live.state.ends) == (None, 1)


def test_steps_of_other_requests_come_between_a_mask_and_its_token() -> None:
    """With pipeline parallelism several steps are under way, and each request is in one of them."""
    engine = Engine()
    for name in ("r", "other"):
        engine.open(name, [START])
    live = engine.tracker.by_id["r"]
    engine.tracker.by_id["r"].ending = Ending((TEXT, END), 5)
    engine.tracker.watch_limit(live)
    for at, token in enumerate((TEXT, END)):
        assert live.ending is not None
        assert live.ending.position == at
        live.expect_forced_end(0, 1)
        engine.step({"other": [TEXT]}, [1.0], set())
        report, _ = engine.step({"r": [token]}, [1.0], set())
    assert (live.ending, live.state.ends) == (None, 1)
    assert [flags & agent_pb2.TOKEN_FLAG_FORCED for flags in agent_pb2.StepReport.FromString(report).tokens.flags] == [
        agent_pb2.TOKEN_FLAG_FORCED
    ]


def test_the_log_tells_once_of_an_answer_that_ends_thinking(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.tracker.markers = Markers(((START,),), ((END,), (TOOL_CALL,)))
    for name, prompt, tokens in (
        ("thinks", [TEXT, START], [TEXT, END, TEXT, END]),
        ("begins to think", [TEXT], [START, TEXT, END, TEXT]),
        ("calls a tool", [TEXT], [TEXT, TOOL_CALL, TEXT]),
        ("begins with the marker", [TEXT], [END, TEXT]),
    ):
        engine.open(name, prompt)
        for token in tokens:
            engine.step({name: [token]}, [1.0], set())
    assert not caplog.messages
    for name in ("first", "second"):
        engine.open(name, [TEXT])
        for token in (TEXT, END, TEXT):
            engine.step({name: [token]}, [1.0], set())
    (line,) = caplog.messages
    assert "request first has ended thinking, but neither its prompt nor the model had written a start marker" in line


def two_think(**given: Any) -> Engine:
    """Return an engine with two requests that think, whose newest step was one of text."""
    engine = Engine()
    for name in ("a", "b"):
        engine.open(name, [START])
    engine.step({"a": [TEXT], "b": [TEXT]}, [1.0, 1.0], set())
    for name, value in given.items():
        setattr(engine, name, value)
    return engine


def test_postponed_steps_are_reported_as_if_each_had_been_processed_at_once() -> None:
    rng, engine, at_once = random.Random(7), two_think(), two_think()
    at_once.ring.lacks = lambda: 0
    steps = [rng.choices((TEXT, STOP), k=2) for _ in range(60)]
    assert [engine.text(*tokens) for tokens in steps].count(True) > 50
    assert [at_once.text(*tokens) for tokens in steps] == [False] * 60
    engine.accounts.take_postponed()
    reports = [
        [step_report([record]).SerializeToString(deterministic=True) for record in each.sent]
        for each in (engine, at_once)
    ]
    assert reports[0] == reports[1]
    assert len(reports[0]) == 60
    assert states(engine) == states(at_once)


def near_cap(engine: Engine) -> None:
    live = engine.tracker.by_id["b"]
    live.default_cap = 9
    engine.tracker.watch_limit(live)


def its_turn(engine: Engine) -> None:
    engine.tracker.loops.obey(True)
    engine.tracker.loops._turn = LOOK_TOKENS - 4


@pytest.mark.parametrize(
    ("change", "most"),
    [
        pytest.param(lambda engine: None, POSTPONED_STEPS, id="nothing"),
        pytest.param(lambda engine: setattr(engine.ring, "lacks", lambda: 5), 4, id="a report is due with five more"),
        pytest.param(lambda engine: setattr(engine.ring, "lacks", lambda: 0), 0, id="the reader is awake"),
        pytest.param(lambda engine: engine.calm.due.update(a=0), 0, id="a probe is due"),
        pytest.param(its_turn, 2, id="a request has its turn"),
        pytest.param(near_cap, 6, id="a cap is near"),
    ],
)
def test_so_many_steps_are_postponed(change: Callable[[Engine], None], most: int) -> None:
    engine = two_think()
    change(engine)
    assert not engine.text(TEXT, TEXT)
    assert [engine.text(TEXT, TEXT) for _ in range(most + 1)] == [True] * most + [False]


def test_a_step_is_postponed_unless_it_may_bring_the_end_that_a_probe_waits_for() -> None:
    engine = two_think()
    engine.text(TEXT, TEXT)
    engine.calm.awaited = {1: (1, 1)}
    steps = ((TEXT, TEXT), (STOP, TEXT), (TEXT, STOP), (TEXT, TEXT), (TEXT, TEXT))
    assert [engine.text(*tokens) for tokens in steps] == [True, True, False, False, True]


def test_no_step_waits_long() -> None:
    engine = two_think()
    engine.text(TEXT, TEXT)
    engine.now_s += POSTPONED_S * 0.9
    assert engine.text(TEXT, TEXT)
    engine.now_s += POSTPONED_S * 0.1
    assert not engine.text(TEXT, TEXT)


def test_steps_after_which_the_engine_stood_still_count_as_new() -> None:
    """An answer to their report cannot have come before, so there was no silence."""
    engine = two_think()
    for _ in range(3):
        engine.text(TEXT, TEXT)
    engine.now_s += 1000.0
    engine.accounts.take_postponed()
    assert [engine.now_s - record.ended_s for record in engine.sent] == [1000.0, *[pytest.approx(POSTPONED_S)] * 2]


def test_a_step_that_ends_thinking_is_not_postponed() -> None:
    engine = two_think()
    engine.text(TEXT, TEXT)
    assert engine.text(TEXT, TEXT)
    assert not engine.text(TEXT, END)
    assert len(engine.accounts.postponed) == 0
    assert engine.tracker.by_id["b"].think_tokens == 3
