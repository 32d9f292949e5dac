"""Two pools of engines with NIXL, each pool one server, behind a relay: A thinks, and B answers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from meridian.v1 import fleet_pb2

from tests.engine.matrix.builds import NIXL
from tests.engine.served import Served
from tests.processes import Control, Process, free_port, wait_for

# As in tests.demo.pace, which imports vLLM.
STEP_MS = "MERIDIAN_DEMO_STEP_MS"
RELAY = "from meridian_relay.__main__ import run; raise SystemExit(run())"
# Blocks of each engine's KV cache. The thinking engine is under pressure from its first request on, and the answering
# engine never is.
BLOCKS = {"A": 128, "B": 4096}
FULL = 0.05
# Requests that each engine runs at once, if nobody says otherwise.
PLACES = 16
# Seconds for which the thinking engine keeps the blocks of a request that was handed over.
LEASE_S = 30
POLICY: dict[str, Any] = {
    "entropy": {"enabled": False},
    "disagg": {
        "enabled": True,
        "shadow": False,
        "offload_threshold_blocks": 1,
        "max_pool_kv_used": FULL,
        "thinking_pool": {"pool": "think"},
        "answering_pool": {"pool": "answer"},
    },
}


class Pools:
    """The control plane, the engines and the relay. step_ms: least duration of a step in milliseconds. options: more of
    vLLM's own options. blocks: blocks of each engine's KV cache. places: requests that each engine runs at once."""

    def __init__(
        self,
        folder: Path,
        step_ms: float = 5.0,
        options: Sequence[str] = (),
        blocks: Mapping[str, int] = BLOCKS,
        *,
        places: int = PLACES,
    ) -> None:
        self.folder, self._step_ms, self._options, self._blocks = folder, step_ms, options, blocks
        self._places = places
        self._engines: dict[str, Served] = {}
        self._listening = {name: f"127.0.0.1:{free_port()}" for name in ("control", "relay")}
        self.relay_port = free_port()
        self.relay: Any = None
        self.control = Control(folder, options=["--metrics-listen", self._listening["control"]])

    def __enter__(self) -> Pools:
        try:
            for name in BLOCKS:
                self.start(name)
            self.wait_for_engines()
            self.start_relay()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for_engines(self) -> None:
        for name, engine in self._engines.items():
            wait_for(engine.ready, 180, f"engine {name} to serve")

    def start(self, name: str) -> None:
        """Start an engine; an engine of that name must not run."""
        extra = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 0} if name == "B" else {}
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, **extra},
        }
        options = ["--kv-transfer-config", json.dumps(config), "--worker-cls", "tests.engine.nixl_worker.Worker"]
        options += ["--num-gpu-blocks-override", str(self._blocks[name]), "--max-num-seqs", str(self._places)]
        options += self._options
        more = {
            **NIXL,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "MERIDIAN_ENGINE_ID": name,
            "MERIDIAN_LABELS": f"pool={'think' if name == 'A' else 'answer'}",
            STEP_MS: str(self._step_ms),
        }
        (self.folder / name).mkdir(exist_ok=True)
        self._engines[name] = Served(self.folder / name, self.control.target, options=options, more=more)

    def start_relay(self) -> None:
        command = [sys.executable, "-c", RELAY, "--listen", f"127.0.0.1:{self.relay_port}"]
        command += ["--thinking", f"http://127.0.0.1:{self['A'].port}", "--metrics-listen", self._listening["relay"]]
        self.relay = Process(command, self.folder / "relay.log")
        wait_for(self._relays, 30, "the relay to serve")

    def _relays(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.relay_port}/health", timeout=5, verify=False).status_code == 200
        return False

    def __getitem__(self, name: str) -> Served:
        return self._engines[name]

    def apply(self, policy: dict[str, Any]) -> None:
        """Put a policy in force on both engines."""
        revision = self.control.set_policy(policy)
        self.until(lambda engine: engine.acked_revision == revision, f"revision {revision}")

    def until(self, holds: Callable[[fleet_pb2.Engine], bool], what: str) -> dict[str, fleet_pb2.Engine]:
        """Wait until something holds for both engines, and return the engines by name."""

        def both() -> dict[str, fleet_pb2.Engine] | None:
            connected = [e for e in self.control.engines() if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
            found = {e.engine_id: e for e in connected if holds(e)}
            return found if found.keys() == BLOCKS.keys() else None

        found: dict[str, fleet_pb2.Engine] = wait_for(both, 30, what)
        return found

    def metrics(self, name: str, beginning: str) -> dict[str, float]:
        """Return the metrics of the relay or the control plane whose lines begin so."""
        text = httpx.get(f"http://{self._listening[name]}/metrics", timeout=30, verify=False).text
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(beginning))
        return {key: float(value) for key, _, value in lines if float(value)}

    def stop(self) -> None:
        processes = [engine.process for engine in self._engines.values()]
        for process in (*([self.relay] if self.relay else []), *processes, self.control.process):
            process.stop()
