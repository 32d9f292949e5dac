"""Run vLLM's own tests of its scheduler and KV connectors in four arms, and print the differences.

The arms are stock vLLM, stock vLLM again, and the agent in front of every scheduler without and with a control plane.
The program fails if a result differs, if the agent was not at work in every step of every scheduler that it may govern,
if the agent was at work in another scheduler, or if a run did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.processes import ROOT, Answering, free_port
from tests.vllm_suite import compare, models, sources

# The oldest and the newest version in which the agent installs itself.
VERSIONS = ("0.26.0", "0.33.0")
# Stock runs twice, because a test that does not end alike in both runs shows nothing about the agent.
ARMS = ("stock", "stock again", "absent", "live")
INSIDE = Path(__file__).parent / "inside"
# Largest number of seconds for a single test.
TEST_S = 120
# Number of reasons printed for tests that fail in stock vLLM, the most frequent ones first.
MOST_REASONS = 8
# The default policy with a report for every step, because the tests look after one step, not after sixteen.
POLICY = {"telemetry": {"report_interval_steps": 1}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_suite", description=__doc__)
    parser.add_argument("--vllm", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="below vLLM's root; all that make schedulers")
    parser.add_argument("--break", dest="broken", default="", choices=["reorder", "drop", "fault", "not in front"])
    asked = parser.parse_args()
    stock, differences, wrong = {}, 0, []
    for version in asked.vllm:
        tests = asked.tests
        if not tests:
            tests, left_out = sources.with_schedulers(sources.tree(version))
            print(f"{version}: {len(tests)} files; {left_out} that make no scheduler are left out", flush=True)
        runs = run_arms(version, tests, asked.broken)
        stock[version] = runs["stock"]
        different, problems = report(version, runs)
        differences += different
        wrong += [f"{version}, {problem}" for problem in problems]
    for problem in wrong:
        print(f"wrong: {problem}")
    print(compare.last_line(stock, differences))
    sys.exit(bool(differences or wrong))


def run_arms(version: str, tests: list[str], broken: str) -> dict[str, compare.Run]:
    """Run every arm, two at a time."""
    python, tree = sources.python(), sources.tree(version)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        models.put_into_cache(Path(folder) / "hub")
        arms = {arm: pool.submit(_run, arm, Path(folder), [str(python), str(tree)], tests, broken) for arm in ARMS}
        return {arm: run.result() for arm, run in arms.items()}


def _run(arm: str, folder: Path, where: list[str], tests: list[str], broken: str) -> compare.Run:
    """Run pytest in vLLM's tree; its output is kept beside the tree."""
    python, tree = where
    name, own = arm.replace(" ", "-"), folder / arm.replace(" ", "-")
    own.mkdir()
    (own / "results").touch()
    path = [tree, str(INSIDE), str(ROOT), str(ROOT / "proto"), str(ROOT / "kernels")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("MERIDIAN_")} | {
        "PYTHONPATH": os.pathsep.join(path),
        "SUITE_RESULTS": str(own / "results"),
        "SUITE_ARM": arm.partition(" ")[0],
        "SUITE_BREAK": broken,
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # By default all runs have one port, so of two runs at a time one would wait for the port until the other's test
        # is over.
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(own),
    }
    # The traceback is Python's own: pytest's parses sources to show them, which fails after a RecursionError and ends
    # the run.
    options = ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "agent_in_front", "--tb=native"]
    command = [python, "-m", "pytest", "-q", *options, f"--timeout={TEST_S}", *tests]
    with _control(arm, own) as target, Path(tree).with_name(f"{name}.log").open("w") as log:
        if target:
            env |= {"MERIDIAN_CONTROL": target, "MERIDIAN_STATE_DIR": str(own / "state")}
        subprocess.run(command, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    return compare.read((own / "results").read_text().splitlines())


@contextlib.contextmanager
def _control(arm: str, folder: Path) -> Iterator[str]:
    """Yield the address for this arm's agents: none, one without a listener, or that of a control plane of its own."""
    if arm != "live":
        yield "" if arm.startswith("stock") else f"127.0.0.1:{free_port()}"
        return
    control = Answering(folder)
    try:
        control.set_policy(POLICY)
        yield control.target
    finally:
        control.process.stop()


def report(version: str, runs: dict[str, compare.Run]) -> tuple[int, list[str]]:
    """Print the results of a version; return how many tests differ, and what was wrong with the runs."""
    stock, again = runs["stock"], runs["stock again"]
    wrong = [f"{arm}: pytest did not finish" for arm, run in runs.items() if not run.finished]
    for outcome, number in sorted(Counter(result.outcome for result in stock.results.values()).items()):
        print(f"{version} stock: {number} {outcome}")
    failed = Counter(compare.plain(r.reason) for r in stock.results.values() if r.outcome == "failed")
    for reason, number in failed.most_common(MOST_REASONS):
        print(f"    {number} failed as stock: {reason}")
    for name, result in stock.results.items():
        if result.outcome == "not collected":
            print(f"{version} not run, as stock cannot: {name}: {result.reason}")
    excluded = compare.unsteady(stock, again)
    for name in excluded:
        print(f"{version} not compared, stock differs from itself: {name}: {stock.results.get(name)}")
        print(f"    the second time: {again.results.get(name)}")
    number = 0
    for arm in ("absent", "live"):
        run = runs[arm]
        print(f"{version} {arm}: {' '.join(f'{what}={count}' for what, count in run.counts.items())}")
        wrong += [f"{arm}: {problem}" for problem in compare.not_in_front(run)]
        found = compare.different(stock, run, excluded)
        number += len(found)
        for name, (without, with_agent) in found.items():
            print(f"{version} {arm} differs: {name}\n    stock: {without}\n    agent: {with_agent}", flush=True)
    return number, wrong


if __name__ == "__main__":
    main()
