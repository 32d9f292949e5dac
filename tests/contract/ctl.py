"""meridianctl against a real server: PolicyService over a real store, and a FleetService whose fleet the test sets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from google.protobuf.message import Message
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, policy_pb2_grpc
from typer.testing import CliRunner, Result

from meridian_control.cli.main import app
from meridian_control.common.errors import NotFound
from meridian_control.policy.diff import Subject
from meridian_control.policy.model import Who
from meridian_control.policy.store import PolicyStore
from meridian_control.server.policy_service import PolicyService
from meridian_control.storage.database import Database
from tests.contract.gated import gated
from tests.fakes.migrated import migrated

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
OK, FAILED, INVALID, UNREACHABLE, REFUSED = range(5)


class FakeFleet(fleet_pb2_grpc.FleetServiceServicer):
    """A FleetService that serves the engines and requests which the test sets, one entry per page."""

    def __init__(self) -> None:
        self.engines: list[fleet_pb2.Engine] = []
        self.requests: list[fleet_pb2.LiveRequest] = []
        self.unreachable: list[str] = []
        self.page_sizes: set[int] = set()
        # Seconds that each list of engines may take.
        self.time_limits_s: list[float] = []
        self.savings = fleet_pb2.GetSavingsResponse()
        self.budgets = fleet_pb2.ListBudgetsResponse()
        self.self_calibrations = fleet_pb2.ListSelfCalibrationsResponse()
        self.refuses_self_calibrations = False
        self.watch_end: grpc.StatusCode | None = None
        # The records that a recording gets, and the status with which the recording then ends; None leaves its stream
        # open.
        self.records: list[fleet_pb2.TraceRecord] = []
        self.end = fleet_pb2.EndThinkingResponse()
        self.records_end: grpc.StatusCode | None = None

    def _page(self, entries: list[Any], request: Any) -> tuple[list[Any], str]:
        self.page_sizes.add(request.page_size)
        index = int(request.page_token or 0)
        return entries[index : index + 1], str(index + 1) if index + 1 < len(entries) else ""

    async def ListEngines(self, request: fleet_pb2.ListEnginesRequest, context: Any) -> fleet_pb2.ListEnginesResponse:  # noqa: N802
        self.time_limits_s.append(context.time_remaining())
        page, token = self._page(self.engines, request)
        return fleet_pb2.ListEnginesResponse(engines=page, next_page_token=token, unreachable_replicas=self.unreachable)

    async def ListRequests(  # noqa: N802
        self, request: fleet_pb2.ListRequestsRequest, context: Any
    ) -> fleet_pb2.ListRequestsResponse:
        found = [live for live in self.requests if request.engine_id in ("", live.engine_id)]
        page, token = self._page(found, request)
        return fleet_pb2.ListRequestsResponse(
            requests=page, next_page_token=token, unreachable_replicas=self.unreachable
        )

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb2.WatchFleetRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        while self.watch_end is None:
            yield fleet_pb2.WatchFleetResponse(engines=self.engines, requests=self.requests)
            await asyncio.sleep(request.interval_ms / 1000)
        await context.abort(self.watch_end, "going away")

    async def ExplainRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListDecisions(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetSavings(self, request: Any, context: Any) -> fleet_pb2.GetSavingsResponse:  # noqa: N802
        return self.savings

    async def ListBudgets(self, request: Any, context: Any) -> fleet_pb2.ListBudgetsResponse:  # noqa: N802
        return self.budgets

    async def ListSelfCalibrations(  # noqa: N802
        self, request: Any, context: Any
    ) -> fleet_pb2.ListSelfCalibrationsResponse:
        if self.refuses_self_calibrations:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        return self.self_calibrations

    async def EndThinking(  # noqa: N802
        self, request: fleet_pb2.EndThinkingRequest, context: Any
    ) -> fleet_pb2.EndThinkingResponse:
        return self.end

    async def RecordTrace(  # noqa: N802
        self, request: fleet_pb2.RecordTraceRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.RecordTraceResponse]:
        for record in self.records:
            if request.engine_id in ("", record.engine_id):
                yield fleet_pb2.RecordTraceResponse(record=record)
        if self.records_end is not None:
            await context.abort(self.records_end, "the end")
        await asyncio.Event().wait()


@asynccontextmanager
async def scripted(**answers: Sequence[Message | grpc.StatusCode | asyncio.Event]) -> AsyncIterator[str]:
    """Yield the address of a server that answers each call of a method with the next message or status of its script,
    and the last one again and again. An event is set, and the call gets no answer. Without a script the status is
    UNAVAILABLE."""

    class Script(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            left = scripts.setdefault(handler_call_details.method.rpartition("/")[2], [grpc.StatusCode.UNAVAILABLE])

            async def answer(_: bytes, context: Any) -> Any:
                told = left.pop(0) if len(left) > 1 else left[0]
                if isinstance(told, Message):
                    return told.SerializeToString()
                if isinstance(told, asyncio.Event):
                    told.set()
                    await asyncio.Event().wait()
                return await context.abort(told, "no answer")

            return grpc.unary_unary_rpc_method_handler(answer)

    scripts = {method: list(script) for method, script in answers.items()}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Script(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Served(Protocol):
    @property
    def target(self) -> str: ...


@dataclass
class Control:
    address: str
    fleet: FakeFleet

    async def __call__(self, *arguments: object) -> Result:
        return await run(*arguments, server=self.address)


async def run(*arguments: object, server: str, typed: str = "") -> Result:
    """Run the command line on a thread, so that the server's event loop goes on."""
    environment = {"MERIDIAN_SERVER": server, "USER": "ann", "NO_COLOR": "1"}
    command = [str(argument) for argument in arguments]
    result = await asyncio.to_thread(CliRunner().invoke, app, command, typed, environment)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


async def ctl(control: Served, *arguments: object) -> Result:
    """Run the command line against a control plane in this process."""
    return await run(*arguments, server=control.target)


def subject(engine_id: str, request_id: str) -> Subject:
    if engine_id != "e":
        raise NotFound(f'no engine "{engine_id}" is connected')
    return Subject(Who("m", engine_labels={"zone": "a"}), "m")


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    store = PolicyStore(await Database.open(migrated(tmp_path / "policy.db")))
    fleet = FakeFleet()
    async with gated(store.database) as (server, target):
        service = PolicyService(store, lambda: NOW, lambda _: None, subject)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
        await server.start()
        yield Control(target, fleet)
    await store.database.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "meridian.toml"
    path.write_text("fallback.lease_ms = 500\n")
    return path


def engine(name: str, acked: int, **fields: Any) -> fleet_pb2.Engine:
    return fleet_pb2.Engine(**{"engine_id": name, "state": CONNECTED, "revision": 1, "acked_revision": acked, **fields})
