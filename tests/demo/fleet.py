"""The demo's view of the control plane: its services over gRPC, and the operators' own client.

The module owns the observed state of the engine. Calls run on threads, because the event loop is busy with the load.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, policy_pb2, policy_pb2_grpc

from tests.demo.processes import DemoError
from tests.demo.report import NATURAL
from tests.processes import RPC_S, Control

ENGINE_ID = "demo-engine"
LOOK_S = 0.5
ACK_POLL_S = 0.003
ACK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One change of policy.

    accepted_s: time at which the control plane accepted meridianctl's UpdatePolicy; it is the revision's own
    create_time, taken before the revision is written to the store. acked_s: time at which FleetService first showed the
    engine's acknowledgement. Both times are time.time() seconds of one host.
    """

    revision: int
    accepted_s: float
    acked_s: float

    @property
    def duration_ms(self) -> float:
        """Return the time for storing, sending, applying and acknowledging, plus up to one polling interval."""
        return (self.acked_s - self.accepted_s) * 1e3


class Fleet:
    """A client of the control plane, with the newest state that it reported."""

    def __init__(self, server: str) -> None:
        self.server, self._control = server, Control.existing(server)
        self.engine, self.live = fleet_pb2.Engine(), list[fleet_pb2.LiveRequest]()

    async def reachable(self) -> bool:
        """Return whether the control plane answers."""
        try:
            await self.refresh()
        except grpc.RpcError:
            return False
        return True

    async def refresh(self) -> fleet_pb2.Engine:
        """Request the engine's state; the message is empty if the engine has not connected."""
        self.engine = _demo_engine(await asyncio.to_thread(self._control.engines))
        return self.engine

    def check(self) -> None:
        """Raise DemoError if the agent has stepped aside."""
        if self.engine.fault:
            raise DemoError(f"the agent is off, and the engine runs as stock vLLM: {self.engine.fault}")

    async def follow(self) -> None:
        """Keep engine and live requests up to date until cancelled."""
        while True:
            await self.refresh()
            self.live = await asyncio.to_thread(self._control.requests)
            await asyncio.sleep(LOOK_S)

    async def ends(self, completion_ids: Iterable[str]) -> dict[str, str]:
        """Return how the thinking of finished requests ended, by completion id: "natural", "eat", "hard_cap",
        "natural, eat shadowed", ...; without requests that did not think. The decision log has the life of each."""
        found = {}
        for completion_id in completion_ids:
            life = await asyncio.to_thread(self._control.explain, completion_id)
            forces = (event.decision for event in life.events if event.decision.kind == "force")
            shadowed = next((f", {decision.reason} shadowed" for decision in forces if decision.shadow), "")
            if how := next((event.detail for event in life.events if event.kind == "think_end"), ""):
                found[completion_id] = how + (shadowed if how == NATURAL else "")
        return found

    def phases(self) -> Mapping[str, int]:
        """Return the number of live requests by phase."""
        names = ("prompt", "think", "output")
        return {name: sum(r.phase == number for r in self.live) for number, name in enumerate(names, start=1)}

    async def settled(self, within_s: float) -> fleet_pb2.Engine:
        """Return the engine when every decision has its outcome, or as it is after `within_s`."""
        deadline = time.monotonic() + within_s
        while (await self.refresh()).open_decisions and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return self.engine

    async def self_calibration(self) -> fleet_pb2.SelfCalibration:
        """Return what self-calibration has found for the demo's requests; an empty message before it has seen any."""
        with self._control.channel() as channel:
            list_all = fleet_pb2_grpc.FleetServiceStub(channel).ListSelfCalibrations
            answer = await asyncio.to_thread(list_all, fleet_pb2.ListSelfCalibrationsRequest(), RPC_S)
        return next(iter(answer.self_calibrations), fleet_pb2.SelfCalibration())

    async def apply_policy(self, file: Path) -> PolicyChange:
        """Apply `file` with meridianctl, and wait until the engine acknowledges it. Raises DemoError."""
        known = (await self.refresh()).acked_revision
        given_up = threading.Event()
        watching = asyncio.create_task(asyncio.to_thread(_acknowledged, self.server, known, given_up))
        try:
            await meridianctl(self.server, "policy", "apply", "-f", str(file))
            acked_s = await asyncio.wait_for(watching, ACK_TIMEOUT_S)
        except TimeoutError:
            raise DemoError(f"the engine did not acknowledge the policy within {ACK_TIMEOUT_S:.0f} s") from None
        finally:
            given_up.set()
            watching.cancel()
        with self._control.channel() as channel:
            get = policy_pb2_grpc.PolicyServiceStub(channel).GetPolicy
            revision = (await asyncio.to_thread(get, policy_pb2.GetPolicyRequest(), RPC_S)).revision
        return PolicyChange(revision.revision, revision.create_time.ToNanoseconds() / 1e9, acked_s)


def _demo_engine(engines: Iterable[fleet_pb2.Engine]) -> fleet_pb2.Engine:
    return next((engine for engine in engines if engine.engine_id == ENGINE_ID), fleet_pb2.Engine())


def _acknowledged(server: str, known: int, given_up: threading.Event) -> float:
    """Return when FleetService first showed an acknowledged revision newer than `known`. Raises DemoError if it is
    refused.
    """
    with grpc.insecure_channel(server) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        while not given_up.wait(ACK_POLL_S):
            answer = fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=RPC_S)
            now_s, engine = time.time(), _demo_engine(answer.engines)
            if engine.acked_revision > known:
                return now_s
            if engine.nack_error:
                raise DemoError(f"the engine refused the policy: {engine.nack_error}")
    return math.nan


async def meridianctl(server: str, *arguments: str) -> str:
    """Run the operators' client of this environment and return its output. Raises DemoError."""
    command = (str(Path(sys.executable).with_name("meridianctl")), "--server", server, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output = (await process.communicate())[0].decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise DemoError(f"`{' '.join(command)}` failed with status {process.returncode}:\n{output}")
    return output
