"""The arithmetic of the cost benchmark, its stop rule, gate and files, and the load and echo of its control part."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from tests.bench import cost_control, cost_report, cost_throughput, streamed, thinking
from tests.bench.cost_control import ECHO, OLD, TODAY, Load, Program, Window
from tests.bench.cost_probes import Probes, Step, probe_cost, time_share
from tests.bench.cost_throughput import Plan, Start
from tests.bench.gate import GATE, Keeper, Passed
from tests.bench.results import Interval, between
from tests.processes import ROOT, Control, free_port, wait_for

KEYS = {
    "agent_of_stock",
    "agent_of_stock_short",
    "throughput",
    "throughput_interval",
    "token_events_per_core_s",
    "engines_per_core",
    "engines_per_core_before",
    "of_echo",
    "probe_time_share",
}


def window(events_per_core_s: float, latency_ms: tuple[float, ...] = ()) -> Window:
    return Window(2 * events_per_core_s, int(4 * events_per_core_s), 2.0, 10.0, 100.0, 1.0, latency_ms, 0.0)


@pytest.mark.parametrize(
    ("half_width", "done", "took_s", "bounds", "expected"),
    [
        (None, 6, 600, (0.99, 0.99), True),
        (None, 7, 600, (0.9, 1.1), False),
        (0.005, 6, 5000, (0.9905, 0.9905), True),
        (0.005, 7, 600, (0.985, 0.994), True),
        (0.005, 7, 600, (0.986, 0.995), False),
        (0.005, 7, 600, (0.986, 0.996), True),
        (0.005, 9, 1080, (0.9, 1.1), True),
        (0.005, 9, 1081, (0.9, 1.1), False),
    ],
)
def test_starts_go_on_until_both_sides_are_narrow_or_time_is_up(
    half_width: float | None, done: int, took_s: float, bounds: tuple[float, float], expected: bool
) -> None:
    assert Plan(7, half_width, 1200, 10).go_on(done, took_s, Interval(0.9905, *bounds)) is expected


def test_an_interval_of_few_starts_is_not_trusted() -> None:
    narrow = Interval(1.0, 1.0, 1.0)
    assert [done for done in range(1, 9) if Plan(1, 0.005, 1200, 10).go_on(done, 60.0, narrow)] == [1, 2, 3, 4, 5]
    assert not Plan(1, 0.005, 1200, 10).go_on(2, 1000, narrow)


def test_the_interval_contains_the_differences_between_starts() -> None:
    """Rounds that agree within each start say no more than the starts do."""
    found = between([[0.99] * 20, [1.0, 0.98, *[0.99] * 18], [1.01] * 20])
    assert found.value == pytest.approx((0.99 * 0.99 * 1.01) ** (1 / 3), rel=1e-4)
    # The quantile of Student's distribution with two degrees of freedom is 4.303.
    assert math.log(found.high / found.low) == pytest.approx(2 * 4.303 * math.log(1.01 / 0.99) / 3, rel=1e-2)
    assert between([[0.9, 1.1, 1.0]]) == between([[0.9], [1.1], [1.0]])
    assert asdict(between([[0.9]])) == pytest.approx(dict.fromkeys(("value", "low", "high"), 0.9))


def steps(took_s: float, prompt_tokens: int = 50) -> cost_throughput.Window:
    """Return a window of 24 steps, of whose time a fifth lies between steps, and the worker has no core for a tenth."""
    return cost_throughput.Window(Passed(took_s, 768, prompt_tokens, took_s / 5, took_s / 10), {"client": took_s})


def test_a_round_has_two_windows_of_each_arm() -> None:
    """Governed steps take longer, the second start is slower, and one arm once reads another prompt."""
    starts = [
        Start([{arm: steps(s) + steps(s) for arm, s in (("stock", 1.0), ("governed", 1.25))}]),
        Start(
            [{arm: steps(s) + steps(s, p) for arm, s, p in (("stock", 2.0, 50), ("governed", 2.5, 60))}],
            0.5,
            steps=40,
            calm_steps=30,
            probe_tokens=20,
        ),
    ]
    found = cost_throughput.summary(starts)
    assert found.ratios == {"governed": [[pytest.approx(0.8)]] * 2}
    assert (found.starts, found.rounds, found.unlike, found.others_cores) == (2, 2, 1, 0.5)
    assert found.ratio["governed"].value == pytest.approx(0.8)
    assert found.tokens_per_s["stock"] == pytest.approx(4 * 768 / 6)
    assert found.cpu_us["governed"]["client"] == pytest.approx(7.5 / (4 * 768) * 1e6)
    assert found.parts_ms["stock"] == pytest.approx({"between": 12.5, "starved": 6.25, "computing": 43.75})
    # The governed engine's steps take 10.4 ms more in the first start, and 20.8 ms more in the second one.
    assert {part: more.value for part, more in found.more_ms.items()} == pytest.approx(
        {"between": 3.125, "starved": 1.5625, "computing": 10.9375}
    )
    assert found.more_ms["between"].high > 4.17
    assert (found.probe_tokens, found.calm_share) == (0.5, 0.75)


def test_thinking_has_sentences_and_paragraphs_and_ends_by_itself() -> None:
    tokens = [thinking.due(generated, 100) for generated in range(140)]
    paragraph, end = [thinking.PARAGRAPH_END], [streamed.END_ID]
    sentence = [None] * 23 + [thinking.SENTENCE_END]
    assert tokens == sentence * 3 + [None] * 23 + paragraph + [None] * 4 + end + [None] * 39


# Stands in for a worker whose steps need the process of the argument.
WORKER = """
import sys
from tests.bench.gate import Gate
from tests.bench.test_cost import state
from tests.processes import wait_for
gate = Gate()
while True:
    gate.step()
    wait_for(lambda: state(int(sys.argv[1])) != "T", 2, "the other process to go on")
    gate.tokens += 2
    gate.prompt_tokens += 3
    gate.done()
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_gate_lets_steps_pass_and_stops_the_other_processes_between_windows(tmp_path: Path) -> None:
    keeper, other = Keeper(tmp_path / "gate"), subprocess.Popen(["sleep", "600"])
    environment = os.environ | {GATE: str(tmp_path / "gate")}
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(other.pid)], env=environment, cwd=ROOT)
    try:
        await keeper.reached()
        for count in (3, 1):
            passed = await keeper.opened(count, [other.pid])
            assert (passed.tokens, passed.prompt_tokens) == (2 * count, 3 * count)
            assert 0 < passed.between_s < passed.took_s
            assert 0 <= passed.starved_s < passed.took_s
            assert 0 < passed.computing_s < passed.took_s
            wait_for(lambda: state(other.pid) == "T", 5, "the other process to stop")
        keeper.leave_open([other.pid])
        wait_for(lambda: state(other.pid) == "S", 5, "the other process to go on")
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()
        keeper.close()


def test_a_probe_costs_the_slope_and_arrivals_do_not_count() -> None:
    """A probe token takes 1 ms; the two windows have steps of 10 and 20 ms, and a step with an arrival takes 1 s."""
    windows = [[Step(base + tokens / 1e3, tokens, False) for tokens in (0, 1, 2, 0, 3)] for base in (0.01, 0.02)]
    windows[0].append(Step(1.0, 0, True))
    found = probe_cost(windows)
    assert found.us_per_token == pytest.approx(1000)
    assert found.decode_s == pytest.approx(1.162)
    assert found.time_share == pytest.approx(0.012 / 1.162)
    assert found.time_share_error == pytest.approx(0, abs=1e-12)
    assert found.tokens_per_step == pytest.approx(12 / 11)


def test_no_probes_take_no_time() -> None:
    assert probe_cost([[Step(0.01, 0, False), Step(0.02, 0, False)]]).time_share == 0


def test_the_share_of_all_windows_is_weighted_by_time() -> None:
    assert time_share([Probes(1.0, 1, 1, 0.1, 0), Probes(9.0, 1, 1, 0.0, 0)]) == pytest.approx(0.01)


def test_servers_are_compared_within_a_round() -> None:
    """The machine is twice as fast in the second round, which changes no ratio."""
    rounds = [
        {TODAY: window(600e3 * speed, (5.0, 7.0)), OLD: window(200e3 * speed), ECHO: window(1200e3 * speed)}
        for speed in (1, 2)
    ]
    found = cost_control.compare(rounds, Load(), "")
    assert found.over == pytest.approx({OLD: 3.0, ECHO: 0.5})
    assert found.arms[TODAY].token_events_per_core_s == pytest.approx(900e3)
    assert found.arms[TODAY].engines_per_core == pytest.approx(900e3 / (64 * 50))
    assert found.arms[TODAY].latency_ms == pytest.approx((6.0, 7.0))
    assert found.arms[ECHO].latency_ms == ()
    assert found.arms[TODAY].cores == pytest.approx(0.2)
    assert found.arms[TODAY].received == pytest.approx(0.5)


def parts() -> dict[str, cost_report.Part]:
    row = {
        **dict.fromkeys(("agent_us", "critical_us", "with_us", "agent_cpu_us", "observe_us"), 10.0),
        **dict.fromkeys(("stock_us", "stock_cpu_us", "worker_us", "step_ms", "round_trip_ms"), 100.0),
        "hooks_us": {"mask": 1.0},
        "requests": 64,
        "ratio": 0.1234,
    }
    long = row | {"long": True, "probes": asdict(Probes(1.0, 2.0, 3.0, 0.04, 0.001))}
    rounds = [{TODAY: window(640e3), OLD: window(320e3), ECHO: window(1280e3)}]
    ratio = asdict(Interval(0.99, 0.985, 0.995))
    arms = ("stock", "governed")
    return {
        "steps": {"rows": [row | {"long": False, "probes": None}, long]},
        "throughput": {
            "starts": 1,
            "rounds": 2,
            "unlike": 0,
            "step_ms": 20.0,
            "others_cores": 0.0,
            "ratio": {"governed": ratio},
            "ratios": {"governed": [[0.99, 0.99]]},
            "tokens_per_s": dict.fromkeys(arms, 800.0),
            "cpu_us": {arm: {"client": 1000.0} for arm in arms},
            "parts_ms": {arm: {"between": 1.0, "starved": 2.0, "computing": 17.0} for arm in arms},
            "more_ms": dict.fromkeys(("between", "starved", "computing"), asdict(Interval(0.1, 0.0, 0.2))),
            "probe_tokens": 0.5,
            "calm_share": 0.75,
        },
        "control": asdict(cost_control.compare(rounds, Load(), "")),
    }


def test_the_last_line_has_the_keys_of_all_parts() -> None:
    assert cost_report.summary(parts()) == {
        "agent_of_stock": {"64": 0.123},
        "agent_of_stock_short": {"64": 0.123},
        "throughput": 0.99,
        "throughput_interval": [0.985, 0.995],
        "token_events_per_core_s": 640_000,
        "engines_per_core": 200.0,
        "engines_per_core_before": 100.0,
        "of_echo": 0.5,
        "probe_time_share": 0.04,
    }


def test_a_part_that_has_not_run_is_null() -> None:
    assert cost_report.summary({}) == dict.fromkeys(KEYS)
    control = asdict(cost_control.compare([{TODAY: window(1.0), ECHO: window(1.0)}], Load(), "this clone is shallow"))
    found = cost_report.summary({"control": control})
    assert set(found) == KEYS
    assert found["engines_per_core_before"] is None
    assert found["of_echo"] == 1.0


def test_a_part_is_stored_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"throughput": {"rounds": 1, "measured": "2026-11-23"}, "rows": []}))
    stored = cost_report.Stored(tmp_path)
    assert stored.parts() == {}, "figures of another layout"
    for name, part in parts().items():
        stored.put(name, part | {"took_s": 60})
    stored.put("control", parts()["control"] | {"took_s": 90, "no_before": "this clone is shallow"})
    assert set(stored.parts()) == {"steps", "throughput", "control"}
    text = (tmp_path / "cost.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Per step",
        "## Throughput",
        "## The control plane",
    ]
    assert "in 1.5 minutes" in text
    assert "`before` is missing: this clone is shallow." in text


def test_an_older_commit_is_found_or_its_absence_said(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "tests" / "bench").mkdir(parents=True)
    (repository / "tests" / "bench" / "size.py").touch()
    git = ("git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "Add a file")):
        subprocess.run([*git, *command], check=True)
    assert cost_control.tree_of("HEAD", tmp_path / "head", repository) == ""
    assert {path.name for path in (tmp_path / "head" / "tests" / "bench").iterdir()} == {"size.py", "cost_load.py"}
    assert "no commit 8206ef5" in cost_control.tree_of("8206ef5", tmp_path / "missing", repository)


def tokens(control: Control) -> dict[str, int]:
    """Return the tokens that the control plane knows of, by engine."""
    found: dict[str, int] = defaultdict(int)
    for request in control.requests():
        found[request.engine_id] += request.think_tokens + request.output_tokens
    return found


def differs(control: Control, before: dict[str, int]) -> bool:
    """Return whether the tokens of each engine have changed."""
    return all(now != before[engine] for engine, now in tokens(control).items())


def test_the_load_sends_reports_of_requests_that_come_and_go_and_the_echo_answers_each(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    control, recording, log = Control(tmp_path), tmp_path / "sent", tmp_path / "log"
    try:
        load = ("tests.bench.cost_load", control.target, "0", "2", "4", "20", str(recording))
        with Program(ROOT, cores, log, *load) as program:
            assert program.answer() == {"ready": True}
            program.ask()
            program.answer()
            # A first report may have been under way before the line.
            for _ in range(2):
                wait_for(partial(differs, control, tokens(control)), 20, "a report of each engine")
            program.ask()
            counts = program.answer()
            assert counts["rows"] == 4 * counts["steps"] > 0
            program.end()
    finally:
        control.process.stop()
    sent = pickle.loads(recording.read_bytes())
    assert {engine for engine, *_ in sent} == {0, 1}
    target = f"127.0.0.1:{free_port()}"
    with Program(ROOT, cores, log, "tests.bench.cost_echo", "serve", target) as server:
        server.answer()
        with Program(ROOT, cores, log, "tests.bench.cost_echo", "send", target, str(recording)) as sender:
            sender.answer()
            sender.ask()
            assert sender.answer() == {"answers": len(sent)}
