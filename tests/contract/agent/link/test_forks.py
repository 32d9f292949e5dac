"""Forks of an engine's process beside a stream: neither that process nor a child ever hangs, and streams go on.

The link, its server and the forks are real. The forks run in a process of their own, so that the test can set gRPC's
environment variables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

from tests.certificates import Authority
from tests.processes import Process


class Answers(agent_pb2_grpc.AgentServiceServicer):
    """A server that welcomes agents and answers each report at once. `shown` lists the tokens that the streams
    presented."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def Connect(  # noqa: N802
        self, requests: Iterator[agent_pb2.ConnectRequest], context: Any
    ) -> Iterator[agent_pb2.ConnectResponse]:
        self.shown += [value for key, value in context.invocation_metadata() if key == "authorization"]
        yield agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s"))
        for request in requests:
            if request.WhichOneof("message") == "step":
                yield agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Answers, str, str]]:
    """Yield the service, its address without TLS and its address with TLS; `ca.pem` in the folder is the authority."""
    answers, issued = Answers(), Authority(tmp_path).issue("server")
    server = grpc.server(ThreadPoolExecutor(16))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(answers, server)
    pair = (issued.key.read_bytes(), issued.cert.read_bytes())
    plain = server.add_insecure_port("127.0.0.1:0")
    tls = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield answers, f"127.0.0.1:{plain}", f"127.0.0.1:{tls}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("how", "support", "forks"),
    [("serving", "1", 60), ("anew", "1", 50), ("anew", "0", 50), ("token", "1", 40)],
)
def test_nobody_stands_still(
    server: tuple[Answers, str, str], tmp_path: Path, how: str, support: str, forks: int
) -> None:
    """Even without GRPC_ENABLE_FORK_SUPPORT, which is gRPC's default, gRPC's core stops its threads for a fork."""
    answers, plain, tls = server
    arguments = [plain, str(forks), "" if how == "serving" else "anew"]
    if how == "token":
        (tmp_path / "token").write_text("a.b.c\n")
        arguments = [tls, *arguments[1:], str(tmp_path / "ca.pem"), str(tmp_path / "token")]
    command = [sys.executable, "-m", "tests.contract.forking", *arguments]
    process = Process(command, tmp_path / "log", {"GRPC_ENABLE_FORK_SUPPORT": support})
    try:
        assert process.popen.wait(600) == 0, process.output()[-4000:]
    finally:
        # This call also kills children that hang.
        process.kill()
    said = re.search(rf"forked {forks} times over (\d+) streams", process.output())
    assert said, process.output()[-4000:]
    streams = int(said[1])
    assert streams == 1 if how == "serving" else streams > forks / 10
    assert answers.shown == ["Bearer a.b.c"] * len(answers.shown)
    assert (len(answers.shown) >= streams) == (how == "token")
