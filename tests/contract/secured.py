"""A control plane in the test's process with TLS and an access file, and clients that call it by their names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from meridian_agent.link import credentials as agent
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.model import Policy
from meridian_control.policy.store import EMPTY_ETAG, PolicyStore
from meridian_control.server import server as control_server
from meridian_control.server.rate_limits import CallLimits
from meridian_control.server.roles import Access
from meridian_control.server.server_tls import server_credentials
from meridian_control.storage.database import Database
from tests.certificates import Authority
from tests.contract.clients import OWN_CONNECTION, Clients
from tests.fakes.control import control_plane, utc_now
from tests.fakes.linked import until
from tests.fakes.migrated import migrated

# A client whose certificate has one of these common names has the role of the same name; the client "nobody" has a
# certificate and no role.
ROLES = ("viewer", "operator", "admin", "agent")
ACCESS = "".join(f'[[identity]]\ncn = "{role}"\nrole = "{role}"\n' for role in ROLES)
SERVICES = (*control_server.SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
METHODS = [
    f"{name}/{method.name}" for name in SERVICES for method in descriptor_pool.Default().FindServiceByName(name).methods
]
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Secured:
    """A control plane with TLS; a `start` after a `stop` keeps port and store."""

    def __init__(
        self, folder: Path, store: PolicyStore, limits: CallLimits | None = None, client_ca: bool = True
    ) -> None:
        self.folder, self.store, self.limits, self.client_ca = folder, store, limits, client_ca
        self.authority = Authority(folder)
        self.authority.issue("server")
        self.access = folder / "access.toml"
        self.access.write_text(ACCESS)
        self.port = 0

    async def start(self) -> None:
        parts = control_plane(self.store, access=Access(self.access), limits=self.limits)
        self.fleet, self.server, self.gate = parts.whole.fleet, parts.server, parts.gate
        stored = await self.store.current()
        if stored is None:
            stored = await self.store.append(Policy(), etag=EMPTY_ETAG, author="test", reason="", now=utc_now())
        self.fleet.set_policy(stored)
        await parts.look()
        server = [self.folder / f"server.{kind}" for kind in ("crt", "key")]
        tls = server_credentials(server[0], server[1], self.authority.file if self.client_ca else None)
        self.port = await self.server.start(self.target, tls)

    async def stop(self) -> None:
        await self.server.stop(0)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def credentials(self, name: str) -> ClientCredentials:
        return self.authority.issue(name).credentials()

    def agent(self, name: str) -> agent.AgentCredentials:
        return agent.AgentCredentials(**vars(self.credentials(name)))

    def channel(self, who: str | ClientCredentials) -> grpc.aio.Channel:
        """Open a connection of its own with the credentials of `who`."""
        credentials = self.credentials(who) if isinstance(who, str) else who
        tls = credentials.channel()
        if tls is None:
            return grpc.aio.insecure_channel(self.target)
        return grpc.aio.secure_channel(self.target, tls, OWN_CONNECTION)

    @asynccontextmanager
    async def calling(self, who: str | ClientCredentials) -> AsyncIterator[Clients]:
        async with self.channel(who) as channel:
            yield Clients(channel)


@asynccontextmanager
async def securing(
    folder: Path, address: str = "", limits: CallLimits | None = None, client_ca: bool = True
) -> AsyncIterator[Secured]:
    """Run a `Secured` on the database at `address`, by default a SQLite file in `folder`."""
    store = PolicyStore(await Database.open(address or migrated(folder / "meridian.db")))
    secured = Secured(folder, store, limits, client_ca)
    try:
        await secured.start()
        yield secured
        await secured.stop()
    finally:
        await store.database.close()


async def code_of(fleet: Fleet, channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """Call a method with an empty message and return its status code, which is OK if a stream or a recording begins.

    If the server refuses a call before its message is written, gRPC can lose the server's code
    (https://github.com/grpc/grpc/issues/36066); `code_of` then calls again.
    """
    while True:
        try:
            await _begin(fleet, channel.stream_stream(f"/{method}")())
        except grpc.aio.AioRpcError as error:
            if error.details() != "Internal error from Core":
                return error.code()
        else:
            return grpc.StatusCode.OK


async def _begin(fleet: Fleet, call: Any) -> None:
    await call.write(b"")
    await call.done_writing()
    reading = asyncio.ensure_future(call.read())
    await until(lambda: reading.done() or fleet.recordings)
    for recording in fleet.recordings:
        recording.close()
    await reading
    call.cancel()
