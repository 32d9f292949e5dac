"""A control plane without access control: callers on its own host may change things, other hosts may connect engines
and read.

The stranger connects to this machine's own network address, so that the server sees a caller address which is not a
loopback address.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import audit_pb2, fleet_pb2, policy_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.errors import PermissionDenied, ReplicaUnavailable
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.membership import Replica, own_host
from meridian_control.fleet.peers import CALL_TIMEOUT_S, Peers
from meridian_control.fleet.thinking_ends import end_thinking
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.policy.store import PolicyStore
from meridian_control.server.roles import Access, Role, rule_of
from meridian_control.server.server_tls import server_credentials
from meridian_control.storage.database import Database
from tests.certificates import Authority
from tests.contract.clients import OWN_CONNECTION, Clients, calling
from tests.contract.raw_engine import RawEngine
from tests.contract.secured import DENIED, METHODS, code_of
from tests.fakes.control import asking, control_plane, utc_now
from tests.fakes.fleets import requests_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.migrated import migrated

HERE = "127.0.0.1"
UPDATE = policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy())
FLAGS = ("--access FILE", "--client-ca FILE", "--insecure")


def elsewhere() -> str:
    """Return an address of this machine that is not loopback."""
    if (host := own_host()).startswith(("127.", "::1")) or not host[0].isdigit():
        pytest.skip("this machine has no network address but loopback")
    return f"[{host}]" if ":" in host else host


@dataclass
class Open:
    """A server on all addresses; `tls` is the authority of its certificate, or None for a server without TLS."""

    fleet: Fleet
    port: int
    tls: Authority | None

    @asynccontextmanager
    async def calling(self, host: str) -> AsyncIterator[Clients]:
        if self.tls is None:
            channel = grpc.aio.insecure_channel(f"{host}:{self.port}", OWN_CONNECTION)
        else:
            # The certificate names only the loopback address, so the client expects that name.
            options: list[tuple[str, Any]] = [*OWN_CONNECTION, ("grpc.ssl_target_name_override", HERE)]
            credentials = grpc.ssl_channel_credentials(self.tls.file.read_bytes())
            channel = grpc.aio.secure_channel(f"{host}:{self.port}", credentials, options)
        async with channel:
            yield Clients(channel)


@asynccontextmanager
async def opened(folder: Path, access: Access, tls: bool = False, listen: str = "[::]:0") -> AsyncIterator[Open]:
    store = PolicyStore(await Database.open(migrated(folder / "meridian.db")))
    parts = control_plane(store, access=access)
    authority = Authority(folder) if tls else None
    issued = authority.issue("server") if authority else None
    try:
        port = await parts.server.start(listen, server_credentials(issued.cert, issued.key) if issued else None)
        yield Open(parts.whole.fleet, port, authority)
    finally:
        await parts.server.stop(0)
        await store.database.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_strangers_read_and_connect_and_this_host_does_everything(tmp_path: Path, tls: bool) -> None:
    async with opened(tmp_path, Access(), tls) as running:
        for host in (HERE, elsewhere()):
            async with running.calling(host) as clients:
                for method in METHODS:
                    needed = rule_of(f"/{method}").role or Role.NONE
                    allowed = host == HERE or needed <= Role.VIEWER
                    assert (await code_of(running.fleet, clients.channel, method) not in DENIED) == allowed, (
                        f"{host}: {method}"
                    )


async def test_an_engine_of_another_host_connects(tmp_path: Path) -> None:
    async with opened(tmp_path, Access()) as running, running.calling(elsewhere()) as stranger:
        _engine = await RawEngine(stranger.channel, "far").welcomed()
        assert (await stranger.fleet.ListEngines(fleet_pb2.ListEnginesRequest())).engines[0].engine_id == "far"


async def test_a_stranger_is_told_what_would_let_it_in_and_is_recorded(tmp_path: Path) -> None:
    async with opened(tmp_path, Access()) as running:
        async with running.calling(elsewhere()) as stranger:
            status = await rpc_status.aio.from_call(stranger.policy.UpdatePolicy(UPDATE))
        assert status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert status.message.startswith("PolicyService/UpdatePolicy is for callers on the control plane's own host")
        assert all(flag in status.message for flag in FLAGS), "the message was cut"
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.reason, dict(info.metadata)) == ("HOST_ONLY", {"flags": "--access --client-ca --insecure"})
        async with running.calling(HERE) as here:
            (record,) = (await here.audit.ListAudit(audit_pb2.ListAuditRequest())).records
        assert (record.method, record.outcome) == ("meridian.v1.PolicyService/UpdatePolicy", "PERMISSION_DENIED")
        assert elsewhere() in record.peer
        assert record.role == "guest"


async def test_insecure_or_a_certificate_of_the_ca_lets_strangers_change_things(tmp_path: Path) -> None:
    async with opened(tmp_path, Access(everybody=True)) as running, running.calling(elsewhere()) as stranger:
        await stranger.policy.UpdatePolicy(UPDATE)


async def test_a_unix_socket_is_this_host(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path / 'socket'}"
    async with opened(tmp_path, Access(), listen=socket), calling(socket) as here:
        await here.policy.UpdatePolicy(UPDATE)


@pytest.mark.usefixtures("_patient")
async def test_a_replica_on_another_host_answers_and_says_why_it_does_not_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading from the replica needs no role. A recording names the replica as unreachable, and the log has the reason
    once."""
    async with (
        opened(tmp_path, Access()) as running,
        asking([Replica("other", f"{elsewhere()}:{running.port}")]) as whole,
    ):
        assert await whole.engines() == ([], [])
        for _ in range(2):
            async with whole.recording("", local_only=False) as recording:
                await until(lambda recording=recording: recording.unreachable == ["other"])  # type: ignore[misc]
    (line,) = denials(caplog)
    assert line.startswith(
        "replica other does not record: StatusCode.PERMISSION_DENIED: FleetService/RecordTrace is for"
    )


@pytest.mark.usefixtures("_patient")
async def test_a_replica_on_another_host_refuses_to_end_thinking_and_the_caller_learns_why(tmp_path: Path) -> None:
    async with opened(tmp_path, Access()) as running:
        address, replica_id = elsewhere(), "alone"
        live = [Replica(replica_id, f"{address}:{running.port}")]
        peers = Peers(lambda: live, ClientCredentials())
        whole = WholeFleet(Fleet(utc_now, capabilities=CAPABILITIES), "asking", peers, lambda: True)
        request = fleet_pb2.EndThinkingRequest(request_id="a")
        with LinkedEngine([f"{HERE}:{running.port}"]) as linked:
            linked.open("a")
            await linked.steps_until(lambda: requests_of(running.fleet))
            with pytest.raises(PermissionDenied) as refused:
                await end_thinking(whole, request)
        why = "replica alone, which the call needs, refuses calls of this replica: FleetService/EndThinking is for "
        assert str(refused.value).startswith(why)
        await until(lambda: not running.fleet.connections)
        # Nobody listens there.
        live[:] = [Replica("gone", f"{HERE}:1")]
        with pytest.raises(ReplicaUnavailable) as away:
            await end_thinking(whole, request)
        assert str(away.value) == "replicas that the call needs did not answer: gone"
        with pytest.raises(ReplicaUnavailable, match=r"did not answer: gone \(UNAVAILABLE: "):
            await peers.ask_one("gone", lambda peer: peer.fleet.EndThinking(request, timeout=CALL_TIMEOUT_S))
        with pytest.raises(ReplicaUnavailable, match="it is not among the live replicas"):
            await peers.ask_one("other", lambda peer: peer.fleet.EndThinking(request, timeout=CALL_TIMEOUT_S))
        await peers.close()


def denials(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "does not record" in record.getMessage()]
