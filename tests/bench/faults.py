"""Measure what faults of the control plane and of the network cost an engine: `make bench-faults`.

The protocol is in tests/bench/faults.md. Two engines have the same load, and one at a time runs, so that a window has
the same steps of the load in both arms.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tests.bench import harness, random_model
from tests.bench import scheduling_load as load
from tests.bench.harness import BenchError, Column
from tests.bench.machine import machine
from tests.bench.streamed import BLOCK_TOKENS, MAX_MODEL_LEN
from tests.chaos.driver import Engine
from tests.chaos.network import NoNamespacesError
from tests.chaos.scene import FAULTS, TARGET, Scene
from tests.processes import wait_for
from tests.soak.watch import children

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from tests.bench.harness import Figures, Session
    from tests.chaos.reports import Report

ARMS = GOVERNED, STOCK = "governed", "stock"
MEASURED = ["killed", "hung", "mute", "slow-10ms", "slow-1s", "slow-10s", "partition", "half-open-up", "half-open-down"]
ALL = "all faults"
# Rounds before, during and after a fault, and the number of steps in a window.
BEFORE, DURING, AFTER, STEPS = 70, 10, 16, 16
COLUMNS = (
    Column("tokens_per_s", "tokens/s", 0, "ratio"),
    Column("tokens_per_cpu_s", "tokens per processor second", 0, "ratio"),
    Column("longest_s", "longest gap, ms", 0, factor=1e3),
)
NAMES = ("tokens_per_s", "tokens_per_cpu_s")
# Requests always in flight, the number of different requests, which repeat, and the seed. Prompts and lengths are those
# of bench-scheduling.
IN_FLIGHT, REQUESTS, SEED = 16, 96, 7
ENGINE: dict[str, Any] = {
    "served_model_name": "random",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 2 * IN_FLIGHT,
    "num_gpu_blocks_override": 1024,
    "block_size": BLOCK_TOKENS,
    "worker_cls": "tests.bench.metered.MeteredWorker",
    # vLLM's server runs the worker in its own process; with the engine core in the caller's process, vLLM's default
    # would not.
    "distributed_executor_backend": "mp",
}
# The budgets are so large that no request is left out of a step. The leases are so short that they end in each fault
# that silences the control plane.
POLICY: dict[str, Any] = {
    "scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0},
    "fallback": {"lease_ms": 2000},
}
# Turns off the pace of tests.demo.pace, from which the metered worker derives, so that steps have their own duration.
# The variable is named here, because tests.demo.pace imports all of vLLM.
UNPACED = {"MERIDIAN_DEMO_STEP_MS": "0"}
# After WARM_STEPS enough requests have ended and begun that those in flight are at all stages of their lengths.
WARM_STEPS, BACK_S = 300, 90.0


def cases() -> list[dict[str, Any]]:
    """Return requests that think and answer for a given number of tokens, whether governed or not."""

    def case(request: Any) -> dict[str, Any]:
        own = {"meridian_max_think_tokens": request.think_tokens}
        length = request.think_tokens + 1 + request.answer_tokens
        return {"prompt_ids": list(request.prompt), "sampling": {"max_tokens": length, "extra_args": own}}

    return [case(request) for request in load.requests(SEED, REQUESTS)]


class Arm:
    """One engine, whose worker is stopped between the windows, because it would otherwise poll for work for a
    second."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.ready()
        self._workers = children(engine.process.popen.pid)
        self.stepped, self.states = 0, list[str]()

    def window(self, steps: int) -> Figures:
        """Return the figures of some steps. cpu_s: processor time of the arm's processes; longest_s: longest gap
        between the tokens of two steps."""
        self._signal(signal.SIGCONT)
        before = self._engine.pause()
        report = self._noted(self._engine.steps(steps))
        self._signal(signal.SIGSTOP)
        self.states += [state for _, state, _ in (*before.states, *report.states)]
        cpu_s = report.cpu_s - before.cpu_s
        return {
            "tokens_per_s": report.tokens / report.busy_s,
            "tokens_per_cpu_s": report.tokens / cpu_s,
            **{"tokens": report.tokens, "busy_s": report.busy_s, "cpu_s": cpu_s, "longest_s": report.longest_s},
        }

    def until_governed(self) -> float:
        """Let the engine go on until decisions are in force; return the time at which they were first seen to be."""
        self._signal(signal.SIGCONT)
        seen_s = 0.0

        def governed() -> bool:
            nonlocal seen_s
            # The newest state of the report is the agent's present state.
            at_s, state, decided = (self._noted(self._engine.run()).states or [(0.0, "", False)])[-1]
            seen_s = at_s
            return state == "READY" and decided

        wait_for(governed, BACK_S, "decisions to be in force again")
        self._noted(self._engine.pause())
        self._signal(signal.SIGSTOP)
        return seen_s

    def _noted(self, report: Report) -> Report:
        self.stepped += report.steps
        return report

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._engine.stop()

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Sides:
    """Both arms, and the network and control plane of the governed one."""

    def __init__(self, scene: Scene, arms: dict[str, Arm]) -> None:
        self.scene, self.arms = scene, arms

    def back_s(self) -> float:
        """Return the seconds from now until decisions are in force again, and let stock do the steps taken in that
        time."""
        began_s, stock, governed = time.monotonic(), self.arms[STOCK], self.arms[GOVERNED]
        back_s = max(0.0, governed.until_governed() - began_s)
        stock.window(governed.stepped - stock.stepped)
        return back_s


@contextlib.contextmanager
def sides(folder: Path) -> Iterator[Sides]:
    """Yield both arms, warmed up. Raises NoNamespacesError if the network cannot be emulated."""
    model = random_model.make(folder / "model")
    scene = Scene(folder, SEED)
    started: list[Engine] = []
    arms: dict[str, Arm] = {}
    wanted: dict[str, Any] = {"cases": cases(), "in_flight": IN_FLIGHT, "sampling": {"ignore_eos": True}}
    wanted |= {"metered": True, "salted": True}
    more: dict[str, Any] = {"load": wanted, "engine": {**ENGINE, "model": str(model)}, "environment": UNPACED}
    try:
        scene.control.start()
        within = scene.network.within("engine")
        for name, target, before in (("governed", TARGET, within), ("stock", "", ())):
            started.append(Engine(folder, name, target, before, **more))
        for name, one in zip(ARMS, started, strict=True):
            arms[name] = Arm(one)
        scene.control.apply(POLICY)
        made = Sides(scene, arms)
        for arm in arms.values():
            arm.window(WARM_STEPS)
        made.back_s()
        yield made
    finally:
        for arm in arms.values():
            arm.close()
        for one in started:
            one.process.stop()
        scene.stop()


# ------------------------------------------------------------------------------------------------------------- faults


class Benchmark:
    """Runs the windows before, during and after each fault."""

    def __init__(self, session: Session, sides: Sides) -> None:
        self.session, self.sides, self.steps = session, sides, session.options.steps
        self.found: dict[str, dict[str, Any]] = {}
        self._pooled = itertools.count()

    async def _windows(self, fault: str, when: str, rounds: int) -> None:
        case, longest_s = f"{fault}, {when}", dict.fromkeys(ARMS, 0.0)
        found = self.found.setdefault(fault, {"back_s": 0.0, "longest_gap_s": {}, "others_cores": 0.0})

        def run(arm: str, _: int) -> Figures:
            figures = self.sides.arms[arm].window(self.steps)
            longest_s[arm] = max(longest_s[arm], figures["longest_s"])
            return figures

        measured = len(self.session.others_cores)
        await self.session.rounds(ARMS, run, rounds, case=case, mirrored=True)
        found["others_cores"] = max(found["others_cores"], *self.session.others_cores[measured:])
        if when == "during":
            found["longest_gap_s"] = longest_s
        runs = self.session.runs
        if fault != "none":
            for number in range(rounds):
                pooled = next(self._pooled)
                for run_of in [r for r in runs.all if r.case == case and r.round == number]:
                    runs.add(run_of.arm, run_of.figures, pooled, case=f"{ALL}, {when}")

    async def run(self) -> None:
        given, scene = self.session.options, self.sides.scene
        await self._windows("none", "after", given.before)
        for fault in (fault for name in given.faults for fault in FAULTS if fault.name == name):
            states = self.sides.arms[GOVERNED].states
            states.clear()
            fault.begin(scene)
            try:
                await self._windows(fault.name, "during", given.during)
            finally:
                fault.end(scene)
            self.found[fault.name]["states"] = ", ".join(dict.fromkeys(states))
            self.found[fault.name]["back_s"] = self.sides.back_s()
            await self._windows(fault.name, "after", given.after)
        faults = list(self.found.values())
        self.found[ALL] = {"back_s": max(f["back_s"] for f in faults), "others_cores": max(self.session.others_cores)}
        longest = [f["longest_gap_s"] for f in faults if f["longest_gap_s"]]
        self.found[ALL]["longest_gap_s"] = {arm: max(gaps[arm] for gaps in longest) for arm in ARMS} if longest else {}

    def last_line(self) -> dict[str, Any]:
        faults = []
        for fault, found in self.found.items():
            of = {when: self._plain(f"{fault}, {when}") for when in ("during", "after")}
            faults.append({"fault": fault, **{k: v for k, v in found.items() if k != "states"}, **of})
        return {"faults": faults, "over_before": self.over_before(), "machine": machine()}

    def over_before(self) -> dict[str, Any]:
        """Return the governed engine's share of stock after all faults, over its share before any."""
        runs = self.session.runs
        after, before = (
            {name: runs.ratio(GOVERNED, STOCK, name, f"{fault}, after") for name in NAMES} for fault in (ALL, "none")
        )
        return {name: asdict(after[name].over(before[name])) for name in NAMES}

    def _plain(self, case: str) -> dict[str, Any]:
        runs = self.session.runs
        rounds: dict[int, dict[str, list[float]]] = defaultdict(dict)
        for run in (run for run in runs.all if run.case == case):
            rounds[run.round][run.arm] = [round(run.figures[n], 4) for n in ("tokens", "busy_s", "cpu_s", "longest_s")]
        ratios = {name: asdict(runs.ratio(GOVERNED, STOCK, name, case)) for name in NAMES if rounds}
        return {**ratios, "pairs": [[found[arm] for arm in ARMS] for found in rounds.values()]}

    def text(self) -> str:
        runs, unlike = self.session.runs, 0
        for case in runs.cases():
            ours, theirs = (runs.values(arm, "tokens", case) for arm in ARMS)
            unlike += sum(ours[at] != theirs[at] for at in ours) if not case.startswith(ALL) else 0
        states = "; ".join(
            f"{fault}: {found['states']}, decisions in force again after {found['back_s']:.1f} s"
            for fault, found in self.found.items()
            if "states" in found
        )
        changed = ", ".join(
            f"{name} {v['value']:.3f} ({v['low']:.3f} to {v['high']:.3f})" for name, v in self.over_before().items()
        )
        return (
            f"Windows of {self.steps} steps; in {unlike} rounds the arms generated different numbers of tokens. After "
            f"all faults over before any: {changed}. The agent's states during the faults: {states}."
        )


async def measure(session: Session) -> dict[str, Any]:
    try:
        with sides(session.fresh()) as made:
            benchmark = Benchmark(session, made)
            await benchmark.run()
    except NoNamespacesError as error:
        raise BenchError(f"network namespaces and TUN devices cannot be made here: {error}") from error
    session.table("During and after faults", benchmark.text(), COLUMNS, STOCK)
    return benchmark.last_line()


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--faults", nargs="+", default=MEASURED, choices=[fault.name for fault in FAULTS])
    add("--before", type=int, default=BEFORE, help="rounds of four windows before any fault")
    add("--during", type=int, default=DURING, help="rounds while a fault lasts")
    add("--after", type=int, default=AFTER, help="rounds once it is past")
    add("--steps", type=int, default=STEPS, help="steps of a window")


if __name__ == "__main__":
    harness.main("faults", "What faults cost an engine", __doc__, options, measure)
