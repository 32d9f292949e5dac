"""Faults and changes of policy, drawn from a seed: faults of one group one after the other, the groups at the same
time.

The module owns the control plane, the proxy in front of it and its policy. Each fault is undone by the method that
began it. The module has one event loop; blocking calls run on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc

from meridian_control.policy.formats import to_proto
from tests.engine.policies import CONVERGED, DENSE, NEUTRAL
from tests.processes import Control
from tests.sim.policies import NO_LIMITS, draw
from tests.soak.proxy import Proxy

# Mean time between two faults of one group: the run's duration divided by GAPS, within these bounds.
GAPS, SHORTEST_GAP_S, LONGEST_GAP_S = 30, 1.5, 20.0
# The longest time that the control plane is unreachable after a start, so that a recording has begun before.
RECORDED_FIRST_S = 15.0
LONGEST_S = 15.0
INVALID: tuple[dict[str, Any], ...] = (
    {"entropy": {"ema_alpha": 1.5}},
    {"scheduler": {"think_tpot_budget_ms": -1.0}},
    {"fallback": {"lease_ms": 0}},
    {"scheduler": {"strategy": "backwards"}},
)
# Hooks of the agent in the engine core and in the worker; see harm/sitecustomize.py.
HOOKS = (
    *("before_schedule", "after_schedule", "bitmask", "after_update", "opened", "finished", "freeing"),
    *("begin", "before_sampling", "signals", "put_now_or_later"),
)
OBSERVER = "observer"
HARM = Path(__file__).parent / "harm"
# The control plane accepts this policy but the engine refuses it, because no vocabulary has such an id.
REFUSED: dict[str, Any] = {"model": {"maze": {"think_end_token_ids": [1 << 20]}}}
# Status codes of a control plane that is being restarted or has a rollout under way.
NOT_NOW = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
)


class Faults:
    """Runs the faults. `counts` has the number of each kind.

    `untouched` is even while no decision can change an answer, and changes each time such a time begins or ends.
    recorded: returns whether the running control plane is being recorded.
    """

    def __init__(
        self, control: Control, proxy: Proxy, recorded: Callable[[], bool], rng: random.Random, seconds: float
    ) -> None:
        self.control, self.proxy, self._recorded, self._rng = control, proxy, recorded, rng
        self._harm = control.folder / "harm"
        self._gap_s = min(max(seconds / GAPS, SHORTEST_GAP_S), LONGEST_GAP_S)
        self._longest_s = min(LONGEST_S, seconds / 6)
        self.counts: Counter[str] = Counter()
        self.untouched = 0
        self.complaints: list[str] = []
        self._network = asyncio.Lock()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Run faults until `stop`, and then until the faults under way have ended."""
        changes = (self.policy, self.policy, self.invalid, self.refused, self.rollout, self.freeze, self.leave_alone)
        async with asyncio.TaskGroup() as group:
            for faults in (
                (self.kill, self.end, self.hang),
                (self.slow, self.cut, self.half_open, self.unreachable),
                (self.harm,),
                changes,
            ):
                group.create_task(self._group(faults, first=self.leave_alone if faults is changes else None))

    def stop(self) -> None:
        self._over.set()

    async def _group(self, faults: tuple[Callable[[], Any], ...], first: Callable[[], Any] | None = None) -> None:
        if first is not None:
            await first()
        await self._pause(self._rng.uniform(0, self._gap_s))
        while not self._over.is_set():
            fault = self._rng.choice(faults)
            self.counts[fault.__name__] += 1
            await fault()
            await self._pause(self._rng.expovariate(1 / self._gap_s))

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def _a_while(self, shortest_s: float = 0.05) -> float:
        """Draw a duration, mostly short, sometimes longer than leases."""
        return float(min(self._longest_s, shortest_s + self._rng.expovariate(1 / (self._longest_s / 4))))

    # ------------------------------------------------------------------------------------------- the control plane

    async def kill(self) -> None:
        await asyncio.to_thread(self.control.process.kill)
        await self._start_again()

    async def end(self) -> None:
        """Stop the control plane with SIGTERM, so that it announces its end to agents."""
        await asyncio.to_thread(self.control.process.stop)
        await self._start_again()

    async def _start_again(self) -> None:
        await self._pause(self._a_while())
        async with self._network:
            await self.proxy.close()
            await self._start()
            await self.proxy.open()

    async def _start(self) -> None:
        await asyncio.to_thread(self.control.start)
        deadline = time.monotonic() + RECORDED_FIRST_S
        while not self._recorded() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def hang(self) -> None:
        """Let the control plane accept connections and never answer."""
        self.control.process.signal(signal.SIGSTOP)
        await self._pause(self._a_while())
        self.control.process.signal(signal.SIGCONT)

    # -------------------------------------------------------------------------------------------------- the network

    async def slow(self) -> None:
        async with self._network:
            self.proxy.delay_s = self._rng.choice((0.01, 0.05, 0.3, 1.0))
            await self._pause(self._a_while())
            self.proxy.delay_s = 0.0

    async def cut(self) -> None:
        async with self._network:
            self.proxy.cut()

    async def half_open(self) -> None:
        async with self._network:
            self.proxy.die()
            await self._pause(self._a_while())

    async def unreachable(self) -> None:
        async with self._network:
            await self.proxy.close()
            await self._pause(self._a_while())
            await self.proxy.open()

    # ---------------------------------------------------------------------------------------------------- the agent

    @property
    def env(self) -> dict[str, str]:
        """Return the environment with which the soak can make hooks of the server's agent fail."""
        paths = [str(HARM), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"MERIDIAN_SOAK_HARM": str(self._harm), "PYTHONPATH": os.pathsep.join(paths)}

    async def harm(self) -> None:
        """Make a hook of the agent fail, before or after it has done its work; the agent comes back by itself."""
        asked = self._harm.with_suffix(".new")
        asked.write_text(f"{self._rng.choice(('before', 'after'))} {self._rng.choice(HOOKS)}")
        asked.rename(self._harm)
        await self._pause(self._a_while())
        self._harm.unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------------- the policy

    async def _tell(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the control plane; return None if it cannot answer now."""
        try:
            return await asyncio.to_thread(call, *args)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code not in NOT_NOW:
                self.complaints.append(f"{getattr(call, '__name__', call)}: {code}: {error}"[:400])
            return None

    def _meddle(self) -> None:
        """Note that any decision may be in force from now on."""
        self.untouched |= 1

    def _drawn(self) -> dict[str, Any] | policy_pb2.Policy:
        choice = self._rng.random()
        if choice < 0.3:
            return self._rng.choice((CONVERGED, DENSE, {"scheduler": {"max_think_tokens": 30}}))
        closing = {"maze": {"closing_text": "Wait ."}} if choice > 0.8 else {}
        fallback = {"lease_ms": self._rng.choice((500, 2000, 30_000))}
        return to_proto(draw(self._rng, model=closing, fallback=fallback, engine=NO_LIMITS))

    def _set(self, policy: dict[str, Any] | policy_pb2.Policy) -> int:
        message = ParseDict(policy, policy_pb2.Policy()) if isinstance(policy, dict) else policy
        with self.control.channel() as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            return int(stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=message), timeout=5).revision.revision)

    async def policy(self) -> None:
        self._meddle()
        await self._tell(self._set, self._drawn())

    async def invalid(self) -> None:
        try:
            await asyncio.to_thread(self._set, self._rng.choice(INVALID))
            self.complaints.append("an invalid policy is accepted")
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code not in (*NOT_NOW, grpc.StatusCode.INVALID_ARGUMENT):
                self.complaints.append(f"an invalid policy is answered by {code}")

    async def refused(self) -> None:
        self._meddle()
        await self._tell(self._set, REFUSED)
        await self._pause(self._a_while())
        await self._tell(self._set, self._drawn())

    async def rollout(self) -> None:
        self._meddle()
        await self._tell(self._start_rollout)

    def _start_rollout(self) -> None:
        policy = self._drawn()
        message = ParseDict(policy, policy_pb2.Policy()) if isinstance(policy, dict) else policy
        # Half of one engine may be no engine, for which a rollout would wait until somebody ends it.
        steps = [rollout_pb2.RolloutStep(percent=percent, bake_s=1) for percent in (0, 100)]
        guardrails = rollout_pb2.Guardrails(nacks=0)
        plan = rollout_pb2.RolloutPlan(step=steps, guardrails=guardrails, on_violation="rollback")
        with self.control.channel() as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            stub.StartRollout(rollout_pb2.StartRolloutRequest(policy=message, plan=plan), timeout=5)

    async def freeze(self) -> None:
        seconds = max(1, round(self._a_while(1.0)))
        await self._tell(self.control.freeze, seconds)
        await self._pause(self._rng.uniform(0, 1.2 * seconds))
        await self._tell(self.control.thaw)

    # ----------------------------------------------------------------------------------------------------- the calm

    async def leave_alone(self) -> None:
        """Put a policy in force that changes nothing, so that answers equal stock's whatever else goes wrong."""
        if await self._neutral(self._longest_s):
            self.untouched += 1 + (self.untouched + 1) % 2
            await self._pause(self._longest_s)
            self._meddle()

    async def _neutral(self, within_s: float) -> bool:
        revision = await self._tell(self._set, NEUTRAL)
        return bool(revision) and await self._until(lambda e: e.acked_revision == revision, within_s)

    async def _until(self, holds: Callable[[fleet_pb2.Engine], Any], within_s: float) -> bool:
        """Return whether the condition becomes true of the engine in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            engines = await self._tell(self.control.engines) or []
            if any(holds(e) for e in engines if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED):
                return True
            await asyncio.sleep(0.2)
        return False

    async def calm(self) -> None:
        """Restore control plane, network and policy. Raises TimeoutError if the engine does not follow."""
        self.control.process.signal(signal.SIGCONT)
        self.proxy.delay_s = 0.0
        if self.control.process.popen.poll() is not None:
            await self._start()
        await self.proxy.open()
        await self._tell(self.control.thaw)
        # A rollout that goes on after a restart takes a minute, and until then the policy cannot be changed.
        deadline = time.monotonic() + 180
        while not self._recorded():
            if time.monotonic() > deadline:
                raise TimeoutError("the control plane is not recorded although all faults are over")
            await asyncio.sleep(0.1)
        # A busy machine may take long, and a revision that replaces another one begins the wait anew.
        while not await self._neutral(60):
            if time.monotonic() > deadline:
                raise TimeoutError("the engine does not acknowledge a policy although all faults are over")

    async def at_rest(self) -> list[str]:
        """Return what does not come to rest after the last request."""

        def rests(engine: fleet_pb2.Engine) -> bool:
            done = not engine.open_decisions and sum(engine.decisions.values()) == sum(engine.outcomes.values())
            return done and not engine.running and engine.agent_state == agent_pb2.AGENT_STATE_READY

        def harmed(engine: fleet_pb2.Engine) -> bool:
            return not set(engine.faults) <= {*HOOKS, OBSERVER}

        if await self._until(rests, 30):
            others = await self._tell(self.control.engines) or []
            return [
                f"hooks failed that the soak did not harm: {dict(e.faults)}, {e.last_fault}"
                for e in others
                if harmed(e)
            ]
        return [f"not at rest in the end: {[str(e)[:600] for e in await self._tell(self.control.engines) or []]}"]
