"""A small fleet with events to show: two vLLM servers short of memory, a control plane, and a Prometheus.

The module owns the processes and the events, in order: rules in shadow, rules enforced, a rollout that succeeds, a
rollout that is taken back, a freeze, an engine that ends. The module knows nothing of dashboards and has one event
loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from tests.data import maze
from tests.demo import servers
from tests.demo.fleet import meridianctl
from tests.demo.load import Load
from tests.demo.processes import HOST, Children
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tests/demo"
ENGINES = {"vllm-0": "canary", "vllm-1": "main"}
CONCURRENCY, STEP_MS = 12, 15
# Fewer KV blocks than the load would use, so that requests are preempted.
BLOCKS = 56
START_S, POLL_S = 300.0, 0.5
PLAN = """
guardrails = {{ ttot_p99_ms = {ttot_p99_ms}, empty_answer_rate = 0.5, min_observations = 20 }}
[[step]]
engine_labels = {{ pool = "canary" }}
bake_s = 20
[[step]]
percent = 100
bake_s = 20
"""
SCRAPE = """
global: {{ scrape_interval: 1s, evaluation_interval: 5s }}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: meridian-control
    static_configs: [{{ targets: ["{target}"] }}]
"""


class Fleet:
    """The fleet. Logs and stores go to `folder`; `prometheus` is its program; the caller stops `children`."""

    def __init__(self, folder: Path, prometheus: str, children: Children) -> None:
        self._folder, self._program, self._children = folder, prometheus, children
        self._grpc, self._metrics, self._prometheus = free_port(), free_port(), free_port()
        self._http = {engine: free_port() for engine in ENGINES}

    @property
    def control(self) -> str:
        return f"{HOST}:{self._grpc}"

    @property
    def prometheus(self) -> str:
        return f"http://{HOST}:{self._prometheus}"

    async def start(self) -> None:
        """Start everything and return when all of it is up. Raises ChildDiedError, TimeoutError."""
        listen = ["--listen", self.control, "--metrics-listen", f"{HOST}:{self._metrics}", "--page-listen", ""]
        store = ["--policy", str(DEMO / "before.toml"), "--store", str(self._folder / "store.db")]
        self._children.start("control", [sys.executable, "-m", "meridian_control", *listen, *store], {})
        config = self._folder / "prometheus.yaml"
        rules = ROOT / "deploy/prometheus/rules.yaml"
        config.write_text(SCRAPE.format(rules=rules, target=f"{HOST}:{self._metrics}"))
        data = f"--storage.tsdb.path={self._folder / 'tsdb'}"
        address = f"--web.listen-address={HOST}:{self._prometheus}"
        self._children.start("prometheus", [self._program, f"--config.file={config}", data, address], {})
        for engine, pool in ENGINES.items():
            self.engine = self._children.start(engine, self._engine_command(engine), self._engine_env(engine, pool))
        for url in (*(f"http://{HOST}:{port}/health" for port in self._http.values()), f"{self.prometheus}/-/ready"):
            await self._answering(url)
        await meridianctl(self.control, "wait")

    def _engine_command(self, engine: str) -> list[str]:
        limits = ("--max-num-seqs", "20", "--num-gpu-blocks-override", str(BLOCKS))
        return servers.command(self._http[engine], ROOT / "tests/data/maze-qwen3", *limits, *servers.PACED)

    def _engine_env(self, engine: str, pool: str) -> dict[str, str]:
        own = {"MERIDIAN_LABELS": f"pool={pool}", "OMP_NUM_THREADS": "1"}
        return servers.environment(self.control, engine, self._folder, STEP_MS, **own)

    async def _answering(self, url: str) -> None:
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(servers.answers, url):
                self._children.check()
                await asyncio.sleep(POLL_S)

    async def live(self, stretch_s: float) -> tuple[float, float]:
        """Run the events under load, `stretch_s` seconds each; return the begin and the end in Unix time."""
        began = time.time()
        loads = [Load(f"http://{HOST}:{port}/v1", maze.prompts(20, port)) for port in self._http.values()]
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(load.run(CONCURRENCY)) for load in loads]
            await asyncio.sleep(stretch_s)
            await meridianctl(self.control, "policy", "apply", "-f", str(DEMO / "after.toml"))
            await asyncio.sleep(stretch_s)
            await self._rollout("max_think_tokens = 120", 5000)
            await asyncio.sleep(max(stretch_s, 55))
            await self._rollout("max_think_tokens = 60", 20)
            await asyncio.sleep(stretch_s)
            await meridianctl(self.control, "freeze", "--for", "15s", "--engine", "vllm-0", "--reason", "to be seen")
            await asyncio.sleep(20)
            tasks[-1].cancel()
            self.engine.process.terminate()
            await asyncio.sleep(15)
            loads[0].send_rest()
        return began, time.time()

    async def _rollout(self, cap: str, ttot_p99_ms: int) -> None:
        candidate, plan = self._folder / "candidate.toml", self._folder / "plan.toml"
        candidate.write_text((DEMO / "after.toml").read_text().replace("max_think_tokens = 160", cap))
        plan.write_text(PLAN.format(ttot_p99_ms=ttot_p99_ms))
        await meridianctl(self.control, "rollout", "start", "-f", str(candidate), "--steps", str(plan))
