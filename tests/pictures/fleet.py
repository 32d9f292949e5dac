"""A fleet with something to see on the status page: a control plane, two vLLM servers under load, and three engines
that only have the agent's stream.

The module owns the processes and the events, in order: rules in shadow, rules enforced with a control group, a short
freeze, a rollout, a freeze, an engine that ends, an engine whose agent is off. The module knows nothing of the page and
has one event loop.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.data import maze
from tests.demo import servers
from tests.demo.fleet import meridianctl
from tests.demo.load import MODEL
from tests.demo.processes import HOST, Children
from tests.fakes.linked import LinkedEngine
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"gpu-a1": "a", "gpu-b1": "b"}
TENANTS = ("acme", "acme", "globex", "initech")
CONCURRENCY, STEP_MS, BLOCKS, START_S, POLL_S = 10, 20, 96, 900.0, 0.5
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


class Fleet:
    """The fleet. Logs and stores go to `folder`; the caller stops `children`, and `close` ends the other engines."""

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder, self._children = folder, children
        self._grpc, self._page = free_port(), free_port()
        self._http = {engine: free_port() for engine in ENGINES}
        self._linked = ExitStack()
        self._lost = ExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def control(self) -> str:
        return f"{HOST}:{self._grpc}"

    @property
    def page(self) -> str:
        return f"http://{HOST}:{self._page}"

    async def start(self) -> None:
        """Start everything and return when all of it is up. Raises ChildDiedError, TimeoutError."""
        listen = ["--listen", self.control, "--metrics-listen", "", "--page-listen", f"{HOST}:{self._page}"]
        links = [word for name, url in LINKS.items() for word in ("--page-link", f"{name}={url}")]
        store = ["--store", str(self._folder / "store.db")]
        self.program = self._children.start(
            "control", [sys.executable, "-m", "meridian_control", *listen, *links, *store], {}
        )
        for engine, zone in ENGINES.items():
            self._children.start(engine, self._command(engine), self._environment(engine, zone))
        async with asyncio.timeout(START_S):
            for port in self._http.values():
                while not await asyncio.to_thread(servers.answers, f"http://{HOST}:{port}/health"):
                    self._children.check()
                    await asyncio.sleep(POLL_S)
        await meridianctl(self.control, "wait")
        await self._apply("rules in shadow first", cap=1000, shadow=True)

    def _rules(self, cap: int, *, shadow: bool) -> Path:
        file = self._folder / "meridian.toml"
        file.write_text(RULES.format(cap=cap, shadow=str(shadow).lower()), encoding="utf-8")
        return file

    def _command(self, engine: str) -> list[str]:
        limits = ("--max-num-seqs", "16", "--num-gpu-blocks-override", str(BLOCKS))
        return servers.command(self._http[engine], ROOT / "tests/data/maze-qwen3", *limits, *servers.PACED)

    def _environment(self, engine: str, zone: str) -> dict[str, str]:
        own = {"MERIDIAN_LABELS": f"zone={zone}", "OMP_NUM_THREADS": "1"}
        return servers.environment(self.control, engine, self._folder, STEP_MS, **own)

    async def live(self, stretch_s: float) -> None:
        """Run the events under load, `stretch_s` seconds each; the load goes on, and a rollout and a freeze are active
        at the end."""
        self._link("gpu-a2")
        lost = LinkedEngine([self.control], "gpu-c2", labels={"zone": "c"})
        self._lost.enter_context(lost)
        self._tasks = [
            asyncio.create_task(self._ask(port, n)) for port in self._http.values() for n in range(CONCURRENCY)
        ]
        await asyncio.sleep(stretch_s)
        await self._apply("enforce EAT, as calibrated on maze", cap=400, shadow=False)
        await asyncio.sleep(2 * stretch_s)
        await self._freeze("20s", "to compare with stock vLLM")
        await asyncio.sleep(20 + stretch_s)
        plan = self._folder / "plan.toml"
        plan.write_text(PLAN, encoding="utf-8")
        why = ("--author", "mara", "--reason", "a lower cap for the long tail")
        candidate = str(self._rules(300, shadow=False))
        await meridianctl(self.control, "rollout", "start", "-f", candidate, "--steps", str(plan), *why)
        self._lost.close()
        self._link("gpu-c1", fault="on_step: KeyError: 'req-17' (tracker.py:212)")
        await asyncio.sleep(stretch_s)
        await self._freeze("25m", "answers' gaps doubled since the kernel update")
        await asyncio.sleep(stretch_s / 2)

    async def _apply(self, reason: str, cap: int, *, shadow: bool) -> None:
        file = str(self._rules(cap, shadow=shadow))
        await meridianctl(self.control, "policy", "apply", "-f", file, "--author", "mara", "--reason", reason)

    async def _freeze(self, duration: str, reason: str) -> None:
        what = ("--for", duration, "--engine", "gpu-b*", "--author", "joao", "--reason", reason)
        await meridianctl(self.control, "freeze", *what)

    def _link(self, engine: str, **said: Any) -> None:
        zone = {"zone": engine[4]}
        self._linked.enter_context(LinkedEngine([self.control], engine, labels=zone, **said))

    async def _ask(self, port: int, worker: int) -> None:
        """Send requests one after the other until cancelled."""
        prompts = maze.prompts(50, port + worker)
        async with AsyncOpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0) as client:
            for number in range(10**6):
                await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": prompts[number % len(prompts)]}],
                    seed=number,
                    max_tokens=700,
                    extra_body={"vllm_xargs": {"meridian_tenant": TENANTS[worker % len(TENANTS)]}},
                )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lost.close()
        self._linked.close()
