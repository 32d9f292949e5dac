"""A fleet with something to see on the status page: a control plane, two vLLM servers under load, and three engines
that only have the agent's stream.

The module owns the processes and the events, in order: rules in shadow, rules enforced with a control group, a short
freeze, a rollout, a freeze, an engine that ends, an engine whose agent is off. The module knows nothing of the page and
has one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.data import maze
from tests.demo.live import Live
from tests.demo.load import Load
from tests.fakes.linked import LinkedEngine
from tests.processes import free_port

ENGINES = {"gpu-a1": "zone=a", "gpu-b1": "zone=b"}
TENANTS = ("acme", "acme", "globex", "initech")
CONCURRENCY, STEP_MS, BLOCKS = 10, 20, 96
LINKS = {"Grafana": "https://grafana.example/d/meridian-fleet", "Runbooks": "https://wiki.example/meridian/alerts"}
RULES = """
[scheduler]
min_think_tokens = 10
max_think_tokens = {cap}

[entropy]
shadow = {shadow}
holdout_share = 0.4
max_loss = 0.05
ema_alpha = 1.0
eat_warmup_samples = 1
eat_ema_variance_threshold = 1e-4
eat_level_threshold_nats = 0.01
eat_probe_interval_tokens = 1
eat_probe_placement = "paragraph"
rpdi_threshold = 0.0

[telemetry]
shadow_sample_ratio = 1.0

[[budget]]
name = "acme"
tenant = "acme"
tokens_per_minute = 5_000
soft_think_tokens = 200
max_think_tokens = 250
shadow = false

[[budget]]
name = "everybody"
tokens_per_day = 20_000_000
shadow = false
"""
PLAN = """
guardrails = { ttot_p99_ms = 4000, output_itl_p99_ms = 2500, nacks = 0, empty_answer_rate_increase = 0.2 }
[[step]]
engine_labels = { zone = "a" }
bake_s = 120
[[step]]
percent = 50
bake_s = 900
[[step]]
percent = 100
bake_s = 900
"""


class Fleet(Live):
    """The fleet, with the engines that only have the agent's stream."""

    def __init__(self, folder: Path) -> None:
        self.page = f"127.0.0.1:{free_port()}"
        links = [word for name, url in LINKS.items() for word in ("--page-link", f"{name}={url}")]
        limits = ("--max-num-seqs", "16", "--num-gpu-blocks-override", str(BLOCKS))
        super().__init__(folder, ENGINES, STEP_MS, limits, ["--page-listen", self.page, *links])
        self._linked, self._lost = ExitStack(), ExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def live(self, stretch_s: float) -> None:
        """Run the events under load, `stretch_s` seconds each; the load goes on, and a rollout and a freeze are active
        at the end."""
        await self._apply("rules in shadow first", cap=1000, shadow=True)
        self._link("gpu-a2")
        self._lost.enter_context(LinkedEngine([self.control.target], "gpu-c2", labels={"zone": "c"}))
        for port in (engine.port for engine in self.engines.values()):
            load = Load(f"http://127.0.0.1:{port}/v1", maze.prompts(50, port), TENANTS)
            self._tasks.append(asyncio.create_task(load.run(CONCURRENCY)))
        await asyncio.sleep(stretch_s)
        await self._apply("enforce EAT, as calibrated on maze", cap=400, shadow=False)
        await asyncio.sleep(2 * stretch_s)
        await self._freeze("20s", "to compare with stock vLLM")
        await asyncio.sleep(20 + stretch_s)
        why = ("--author", "mara", "--reason", "a lower cap for the long tail")
        await self.roll_out(rules(300, shadow=False), PLAN, *why)
        self._lost.close()
        self._link("gpu-c1", fault="on_step: KeyError: 'req-17' (tracker.py:212)")
        await asyncio.sleep(stretch_s)
        await self._freeze("25m", "answers' gaps doubled since the kernel update")
        await asyncio.sleep(stretch_s / 2)

    async def _apply(self, reason: str, cap: int, *, shadow: bool) -> None:
        file = self.folder / "meridian.toml"
        file.write_text(rules(cap, shadow=shadow), encoding="utf-8")
        await self.ctl("policy", "apply", "-f", str(file), "--author", "mara", "--reason", reason)

    async def _freeze(self, duration: str, reason: str) -> None:
        await self.ctl("freeze", "--for", duration, "--engine", "gpu-b*", "--author", "joao", "--reason", reason)

    def _link(self, engine: str, **said: Any) -> None:
        zone = {"zone": engine[4]}
        self._linked.enter_context(LinkedEngine([self.control.target], engine, labels=zone, **said))

    async def end(self) -> None:
        """End the load and all engines and processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lost.close()
        self._linked.close()
        self.close()


def rules(cap: int, *, shadow: bool) -> str:
    return RULES.format(cap=cap, shadow=str(shadow).lower())
