"""vLLM's OpenAI server in a process of its own, with or without a control plane, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import httpx
import openai
from meridian.v1 import fleet_pb2
from prometheus_client.parser import text_string_to_metric_families

from tests.certificates import Issued
from tests.data import maze
from tests.engine import ENGINE_ARGS
from tests.processes import ENGINE_ENV, RPC_S, Control, Process, free_port, wait_for

PROMPTS = maze.prompts(6, seed=5)
# Blocks of the KV cache, several times as many as the most requests need. At its start vLLM writes zeros to all of
# them, which for a whole gigabyte takes half a second.
BLOCKS = 2048
# Most tokens of a request: thinking up to a budget, and the beginning of an answer.
TOKENS = 60
# Text that vLLM writes when a budget is used up, before the end marker, and its number of tokens.
CLOSING, CLOSING_TOKENS = "Wait .", 2
REASONING = json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": f"{CLOSING} </think>"})
# The model's own template with the switch of Qwen3.6's, by which turns keep their thinking.
STRIPS, SWITCH = "loop.index0 < ns.last_user", "loop.index0 < ns.last_user and not preserve_thinking"
KEEPS = {"preserve_thinking": True}
# Options of a server on which conversations have several turns.
TURNS = ("--enable-prompt-tokens-details", "--trust-request-chat-template")
# Headers in which a gateway names the tenant and the SLO class.
TENANT, CLASS = "X-Tenant", "X-Class"
# Core and worker are one process, as in vLLM on a GPU, or two, as in vLLM on a CPU.
TOGETHER, APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# A client gets these of a request: reasoning, content, finish reason, and the tokens of the prompt and of the output.
Said = tuple[str, str, str, int, int]


class Served:
    """The server and its client's address. options: more of vLLM's own options. more: more of its environment.
    port: its own choice by default."""

    def __init__(
        self,
        folder: Path,
        control_target: str,
        own: Issued | None = None,
        options: Sequence[str] = (),
        more: dict[str, str] | None = None,
        *,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", ENGINE_ARGS["model"]]
        command += ["--served-model-name", "maze", "--reasoning-parser", "qwen3", "--enforce-eager"]
        command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "8"]
        command += ["--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--seed", "0", *options]
        env = {**ENGINE_ENV, "MERIDIAN_CONTROL": control_target, "MERIDIAN_ENGINE_ID": "served"}
        env |= {**TOGETHER, "MERIDIAN_URL": f"http://127.0.0.1:{self.port}"}
        # The folder is the server's own, because another server of the same name has left settings that hold without a
        # control plane.
        env["MERIDIAN_STATE_DIR"] = str(folder / f"state-{self.port}")
        if own is not None:
            env |= {
                "MERIDIAN_TLS_CA": str(own.ca),
                "MERIDIAN_TLS_CERT": str(own.cert),
                "MERIDIAN_TLS_KEY": str(own.key),
            }
        self.process = Process(command, folder / "served.log", {**env, **(more or {})})

    def ready(self) -> bool:
        assert self.process.popen.poll() is None, self.process.output()[-3000:]
        try:
            # A client of HTTP takes far longer to make, and a server listens only at the end of its start.
            socket.create_connection(("127.0.0.1", self.port), 2).close()
            # Without `verify=False` each call reads all certificate authorities, which takes longer than the call.
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2, verify=False).status_code == 200
        except (httpx.HTTPError, OSError):
            return False

    def client(self) -> openai.AsyncOpenAI:
        return client_of(self.port)


def client_of(port: int) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, http_client=http)


async def ask(port: int, prompt: str, **more: Any) -> Said:
    """Send one streaming chat request, and return what comes."""
    reasoning, content, finish, counted = "", "", "", (0, 0)
    async with client_of(port) as client:
        chunks = await client.chat.completions.create(
            model="maze",
            messages=[{"role": "user", "content": prompt}],
            stream=True,
            stream_options={"include_usage": True},
            temperature=0.0,
            **{"max_tokens": 700, **more},
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                finish = choice.finish_reason or finish
            if chunk.usage is not None:
                counted = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    return reasoning, content, finish, *counted


async def stream(served: Served, prompt: str, **extra: Any) -> tuple[str, str, str]:
    """Send one streaming chat request; return reasoning, content and finish reason."""
    return (await ask(served.port, prompt, extra_body=extra))[:3]


async def all_of(served: Served, **extra: Any) -> list[tuple[str, str, str]]:
    return list(await asyncio.gather(*(stream(served, prompt, **extra) for prompt in PROMPTS)))


@contextlib.contextmanager
def paused(served: Served) -> Iterator[None]:
    """Let the engine make no step inside the block. The server runs in vLLM's development mode."""
    url = f"http://127.0.0.1:{served.port}"
    assert httpx.post(f"{url}/pause", params={"mode": "keep"}, timeout=RPC_S, verify=False).status_code == 200
    try:
        yield
    finally:
        assert httpx.post(f"{url}/resume", timeout=RPC_S, verify=False).status_code == 200


def phase_metrics(port: int, *engines: str) -> defaultdict[str, float]:
    """Return the agent's metrics in vLLM's own /metrics, by name and phase: sums over these engines, or over all."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=RPC_S, verify=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = defaultdict[str, float](float)
    for sample in samples:
        chosen = sample.name.startswith("meridian_vllm_") and "le" not in sample.labels
        if chosen and (not engines or sample.labels["engine"] in engines):
            found["/".join([sample.name, *filter(None, [sample.labels.get("phase")])])] += sample.value
    return found


class Client:
    """A client of one server, and an operator of its control plane."""

    def __init__(self, served: Served, control: Control) -> None:
        self.control, self._port = control, served.port
        self.process, self.open = served.process, served.client

    def post(
        self, path: str, body: dict[str, Any], name: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Send a request whose id contains `name`, and return the answer."""
        sent = {"model": "maze", "temperature": 0.0, **body}
        sent_headers = {**headers, **({"X-Request-Id": name} if name else {})}
        answer = httpx.post(
            f"http://127.0.0.1:{self._port}/v1{path}", json=sent, headers=sent_headers, timeout=RPC_S * 5, verify=False
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def chat(self, name: str = "", **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": TOKENS, **more}
        return self.post("/chat/completions", body, name)

    def life(self, name: str) -> fleet_pb2.RequestLife:
        """Return what `meridianctl explain` shows of a request that has ended."""

        def ended() -> fleet_pb2.RequestLife | None:
            with contextlib.suppress(grpc.RpcError):
                life = self.control.explain(name)
                return life if life.HasField("close_time") else None
            return None

        life: fleet_pb2.RequestLife = wait_for(ended, 20, f"the end of {name}")
        return life

    def phase_metric(self, name: str) -> float:
        """Return one of the agent's metrics in vLLM's own /metrics."""
        return phase_metrics(self._port)[f"meridian_vllm_{name}"]

    def metric(self, name: str) -> float:
        """Return the value of a series of the control plane; 0 as long as there is no such series."""
        text = httpx.get(f"http://{self.control.options[-1]}/metrics", timeout=RPC_S, verify=False).text
        lines = text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextlib.contextmanager
def governed(
    folder: Path,
    options: Sequence[str] = (),
    more: dict[str, str] | None = None,
    policy: dict[str, Any] | None = None,
    kind: type[Control] = Control,
) -> Iterator[tuple[Served, Control]]:
    """Run a server and its control plane in a new folder, with a policy in force. The control plane's last options are
    the addresses of its page and of its metrics."""
    folder.mkdir()
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    control = kind(folder, options=["--page-listen", listen[0], "--metrics-listen", listen[1]])
    served = Served(folder, control.target, options=options, more=more)
    try:
        wait_for(served.ready, 300, "vLLM to serve")
        control.engine()
        if policy is not None:
            control.apply(policy)
        yield served, control
    finally:
        served.process.stop()
        control.process.stop()
