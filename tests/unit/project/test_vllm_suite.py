"""The comparison of two runs of vLLM's tests by `make test-vllm`: their differences, and runs that prove nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.vllm_suite import compare, sources
from tests.vllm_suite.compare import Result, Run

if TYPE_CHECKING:
    from pathlib import Path

ALL_STEPS = {"schedulers": 2, "steps": 5, "worked": 5}


def run(**results: Result) -> Run:
    return Run(results, dict(ALL_STEPS), finished=True)


PASSED = Result("passed")


def test_reads_what_the_plugin_writes() -> None:
    lines = [
        {"collected": 2},
        {"id": "a", "outcome": "passed", "reason": ""},
        {"id": "b", "outcome": "failed", "reason": "KeyError: 'x'"},
        {"counts": ALL_STEPS, "problems": ["a: no agent"]},
        {"finished": True},
    ]
    found = compare.read(json.dumps(line) for line in lines)
    assert found == Run({"a": PASSED, "b": Result("failed", "KeyError: 'x'")}, ALL_STEPS, ["a: no agent"], True)
    assert not compare.read(json.dumps(line) for line in lines[:-1]).finished
    assert not compare.read(json.dumps(line) for line in [*lines[:-1], {"finished": False}]).finished


@pytest.mark.parametrize(
    "other",
    [
        Result("failed", "AssertionError: assert 1 == 2"),
        Result("passed"),
        Result("skipped", "OSError: no file"),
        Result("error in teardown", "OSError: no file"),
        None,
    ],
)
def test_another_end_or_another_reason_differs(other: Result | None) -> None:
    stock = run(a=PASSED, b=Result("failed", "OSError: no file"))
    governed = run(a=PASSED, **({"b": other} if other else {}))
    assert compare.different(stock, governed, []) == {"b": (stock.results["b"], other)}


def test_a_test_that_only_the_governed_run_has_differs() -> None:
    assert compare.different(run(), run(a=PASSED), []) == {"a": (None, PASSED)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: <Request object at 0x7f10>", "ValueError: <Request object at 0x55ab>"),
        ("OSError: /tmp/a1/x.db is gone", "OSError: /tmp/b2/x.db is gone"),
        ("OSError: tcp://127.0.0.1:40001", "OSError: tcp://127.0.0.1:51234"),
        ("KeyError: 'ae0b65170cb74f5a8ec8129282e394bd'", "KeyError: '0123456789abcdef0123456789abcdef'"),
        ("TypeError: GovernedScheduler.x()", "TypeError: Scheduler.x()"),
    ],
)
def test_what_a_run_makes_up_does_not_differ(one: str, other: str) -> None:
    assert compare.same(Result("failed", one), Result("failed", other))


def test_only_what_differs_within_stock_is_left_out() -> None:
    stock, again = run(a=PASSED, b=PASSED), run(a=PASSED, b=Result("failed", "flaky"))
    excluded = compare.unsteady(stock, again)
    assert excluded == ["b"]
    governed = run(a=Result("failed", "lost"), b=Result("failed", "lost"))
    assert list(compare.different(stock, governed, excluded)) == ["a"]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "no scheduler had the agent in front"),
        ({**ALL_STEPS, "schedulers": 0}, "no scheduler had the agent in front"),
        ({**ALL_STEPS, "worked": 4}, "the agent did its work in 4 of 5 steps"),
        ({**ALL_STEPS, "connected": 1}, "1 of 2 schedulers had a control plane"),
        ({"schedulers": 1, "steps": 0, "worked": 0}, "the agent did its work in 0 of 0 steps"),
    ],
)
def test_a_run_without_the_agent_says_nothing(counts: dict[str, int], said: str) -> None:
    assert said in compare.not_in_front(Run(counts=counts))


def test_a_fault_of_the_agent_says_nothing() -> None:
    assert compare.not_in_front(run()) == []
    assert compare.not_in_front(Run(counts=ALL_STEPS, problems=["a: KeyError"])) == ["a: KeyError"]


def test_the_last_line_counts_stock() -> None:
    stock = run(a=PASSED, b=Result("failed", "x"), c=Result("error in setup", "y"), d=Result("skipped", "z"))
    line = json.loads(compare.last_line({"0.26.0": stock, "0.33.0": run(a=PASSED)}, 3))
    assert line == {"vllm": ["0.26.0", "0.33.0"], "passed": 2, "failed": 2, "different": 3}


def test_files_that_make_schedulers_are_chosen(tmp_path: Path) -> None:
    core, unit = (tmp_path / folder for folder in sources.FOLDERS)
    files = {
        core / "test_scheduler.py": "from .utils import create_scheduler, mock_kv",
        core / "test_random.py": "from .test_scheduler import create_scheduler_with_priority",
        core / "test_caches.py": "manager = KVCacheManager(config)",
        core / "utils.py": "def create_scheduler(): ...",
        unit / "deep" / "test_offloading.py": "def test_it(request_runner): ...",
        unit / "test_hma.py": "from vllm.v1.core.sched.scheduler import Scheduler",
        unit / "test_stats.py": "connector = NixlConnectorScheduler(config); scheduler_output = SchedulerOutput()",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    chosen, left_out = sources.with_schedulers(tmp_path)
    assert [path.rpartition("/")[2] for path in chosen] == [
        "test_random.py",
        "test_scheduler.py",
        "test_offloading.py",
        "test_hma.py",
    ]
    assert left_out == 2
