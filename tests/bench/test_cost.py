"""The arithmetic of the cost benchmark, its stop rule and its files, and the load and the echo of its control part."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.bench import cost_control, cost_report
from tests.bench.cost_control import ECHO, OLD, TODAY, Load, Program, Window
from tests.bench.cost_probes import Probes, Step, probe_cost, time_share
from tests.bench.cost_throughput import Rounds
from tests.bench.results import Interval
from tests.processes import ROOT, Control, free_port, wait_for

if TYPE_CHECKING:
    from pathlib import Path

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
    ("half_width", "done", "low", "high", "expected"),
    [
        (None, 7, 0.99, 0.99, True),
        (None, 8, 0.9, 1.1, False),
        (0.005, 7, 0.9905, 0.9905, True),
        (0.005, 8, 0.985, 0.994, True),
        (0.005, 8, 0.986, 0.995, False),
        (0.005, 8, 0.986, 0.996, True),
        (0.005, 9, 0.9, 1.1, False),
    ],
)
def test_rounds_go_on_until_both_sides_are_narrow(
    half_width: float | None, done: int, low: float, high: float, expected: bool
) -> None:
    assert Rounds(8, half_width, most=9).go_on(done, Interval(0.9905, low, high)) is expected


def test_an_interval_of_few_rounds_is_not_trusted() -> None:
    narrow = Interval(1.0, 1.0, 1.0)
    assert [done for done in range(1, 9) if Rounds(1, 0.005, most=9).go_on(done, narrow)] == [1, 2, 3, 4, 5]
    assert not Rounds(1, 0.005, most=2).go_on(2, narrow)


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
            "rounds": 2,
            "step_ms": 20.0,
            "others_cores": 0.0,
            "ratio": {"governed": ratio},
            "ratios": {"governed": [0.99, 0.99]},
            "tokens_per_s": dict.fromkeys(arms, 800.0),
            "cpu_us": {arm: {"worker": 1000.0} for arm in arms},
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
    (tmp_path / "cost.json").write_text(json.dumps({"throughput": {"rounds": 1}, "rows": []}))
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
