"""A small fleet with events to show: two vLLM servers short of memory, a control plane, and a Prometheus.

The module owns the processes and the events, in order: rules in shadow, rules enforced, a rollout that succeeds, a
rollout that is taken back, a freeze, an engine that ends. The module knows nothing of dashboards and has one event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from pathlib import Path

import httpx

from tests.data import maze
from tests.demo.live import START_S, Live
from tests.demo.load import Load
from tests.processes import ROOT, Process, free_port, wait_for

DEMO = ROOT / "tests/demo"
ENGINES = {"vllm-0": "pool=canary", "vllm-1": "pool=main"}
CONCURRENCY, STEP_MS = 12, 15
# Fewer KV blocks than the load would use, so that requests are preempted.
BLOCKS = 56
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


class Fleet(Live):
    """The fleet. program: that of Prometheus."""

    def __init__(self, folder: Path, program: str) -> None:
        scraped, self.prometheus = (f"127.0.0.1:{free_port()}" for _ in range(2))
        limits = ("--max-num-seqs", "20", "--num-gpu-blocks-override", str(BLOCKS))
        control = ["--metrics-listen", scraped, "--policy", str(DEMO / "before.toml")]
        super().__init__(folder, ENGINES, STEP_MS, limits, control)
        config = folder / "prometheus.yaml"
        config.write_text(SCRAPE.format(rules=ROOT / "deploy/prometheus/rules.yaml", target=scraped))
        data, address = f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={self.prometheus}"
        self._program = Process([program, f"--config.file={config}", data, address], folder / "prometheus.log")

    async def started(self) -> None:
        await super().started()
        await asyncio.to_thread(wait_for, self._scrapes, START_S, "Prometheus to be ready")

    def _scrapes(self) -> bool:
        assert self._program.popen.poll() is None, self._program.output()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://{self.prometheus}/-/ready", verify=False).is_success
        return False

    async def live(self, stretch_s: float) -> tuple[float, float]:
        """Run the events under load, `stretch_s` seconds each; return the begin and the end in Unix time."""
        began, ports = time.time(), [engine.port for engine in self.engines.values()]
        loads = [Load(f"http://127.0.0.1:{port}/v1", maze.prompts(20, port)) for port in ports]
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(load.run(CONCURRENCY)) for load in loads]
            await asyncio.sleep(stretch_s)
            await self.ctl("policy", "apply", "-f", str(DEMO / "after.toml"))
            await asyncio.sleep(stretch_s)
            await self._roll_out(120, 5000)
            await asyncio.sleep(max(stretch_s, 55))
            await self._roll_out(60, 20)
            await asyncio.sleep(stretch_s)
            await self.ctl("freeze", "--for", "15s", "--engine", "vllm-0", "--reason", "to be seen")
            await asyncio.sleep(20)
            tasks[-1].cancel()
            self.engines["vllm-1"].process.signal(signal.SIGTERM)
            await asyncio.sleep(15)
            loads[0].send_rest()
        return began, time.time()

    async def _roll_out(self, cap: int, ttot_p99_ms: int) -> None:
        policy = re.sub(r"max_think_tokens = \d+", f"max_think_tokens = {cap}", (DEMO / "after.toml").read_text())
        await self.roll_out(policy, PLAN.format(ttot_p99_ms=ttot_p99_ms))

    def close(self) -> None:
        super().close()
        self._program.stop()
