"""The agent's stream uses a proxy only if MERIDIAN_PROXY names it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import HealthServicer  # type: ignore[import-untyped]

from meridian_agent.link.control_stream import CHANNEL_OPTIONS
from meridian_agent.link.credentials import AgentCredentials
from tests.certificates import Authority
from tests.contract.proxies import proxy


@contextmanager
def server(tls: grpc.ServerCredentials | None = None) -> Iterator[str]:
    found = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), found)
    port = found.add_secure_port("localhost:0", tls) if tls else found.add_insecure_port("localhost:0")
    found.start()
    yield f"localhost:{port}"
    found.stop(None)


def check(target: str) -> None:
    with AgentCredentials.from_environment().open(target, CHANNEL_OPTIONS) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)


def test_the_proxy_that_is_meant(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with proxy() as meant, server() as target, caplog.at_level("INFO"):
        monkeypatch.setenv("MERIDIAN_PROXY", f"http://user:secret@127.0.0.1:{meant.port}")
        check(target)
        assert [line.split()[0] for line in meant.asked] == ["CONNECT"]
    (record,) = (r for r in caplog.records if "proxy" in r.getMessage())
    assert record.getMessage() == f"meridian: the stream goes through the proxy 127.0.0.1:{meant.port}"


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_proxy_for_other_programs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    tls = None
    if with_tls:
        issued = Authority(tmp_path).issue("server", dns="localhost")
        tls = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.cert.read_bytes())])
        monkeypatch.setenv("MERIDIAN_TLS_CA", str(issued.ca))
    with proxy() as other, server(tls) as target:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
        check(target)
        assert other.asked == []
