"""A control plane with several paced vLLM servers of the demo's model, as pictures and dashboards show it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.demo.fleet import meridianctl
from tests.engine.pools import STEP_MS
from tests.engine.served import APART, Served
from tests.processes import Control, wait_for

START_S = 300.0


class Live:
    """The processes, whose logs and stores go to `folder`. labels: those of each engine by its name. options: vLLM's.
    control: further options of the control plane."""

    def __init__(
        self, folder: Path, labels: Mapping[str, str], step_ms: int, options: Sequence[str], control: Sequence[str]
    ) -> None:
        self.folder, self.control = folder, Control(folder, options=control)
        self.engines: dict[str, Served] = {}
        for name, label in labels.items():
            (folder / name).mkdir(exist_ok=True)
            paced = [*options, "--worker-cls", "tests.demo.pace.PacedWorker"]
            own = {"MERIDIAN_ENGINE_ID": name, "MERIDIAN_LABELS": label, STEP_MS: str(step_ms)}
            self.engines[name] = Served(folder / name, self.control.target, options=paced, more={**APART, **own})

    async def started(self) -> None:
        """Return when all of it is up. Raises TimeoutError."""
        for name, engine in self.engines.items():
            await asyncio.to_thread(wait_for, engine.ready, START_S, f"{name} to serve")
        await self.ctl("wait")

    async def ctl(self, *arguments: str) -> None:
        await meridianctl(self.control.target, *arguments)

    async def roll_out(self, policy: str, plan: str, *why: str) -> None:
        """Start a rollout of this policy by this plan, both in TOML. why: options for author and reason."""
        candidate, steps = self.folder / "candidate.toml", self.folder / "plan.toml"
        candidate.write_text(policy, encoding="utf-8")
        steps.write_text(plan, encoding="utf-8")
        await self.ctl("rollout", "start", "-f", str(candidate), "--steps", str(steps), *why)

    def close(self) -> None:
        for process in (*(engine.process for engine in self.engines.values()), self.control.process):
            process.stop()
