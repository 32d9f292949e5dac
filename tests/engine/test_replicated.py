"""A real vLLM server and simulated agents under two replicas on a real PostgreSQL.

The policy changes, rollouts succeed or are taken back, a replica is killed in the middle of each, and no request is
affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, policy_pb2, rollout_pb2, rollout_pb2_grpc

from tests.engine.served import Served, all_of
from tests.engine.test_served import ROUNDS
from tests.fakes.agent import hello
from tests.fakes.linked import LinkedEngine
from tests.postgres import Postgres
from tests.processes import wait_for
from tests.replicated import Client, Replicated, client, until_answer

SIMULATED = [f"simulated-{number}" for number in range(6)]
NAMES = sorted([*SIMULATED, "served"])
CANARIES = SIMULATED[:3]
COMPLETED, ROLLED_BACK = rollout_pb2.ROLLOUT_STATE_COMPLETED, rollout_pb2.ROLLOUT_STATE_ROLLED_BACK


class Simulated(LinkedEngine):
    def hello(self) -> agent_pb2.Hello:
        pool = "canary" if self.engine_id in CANARIES else "main"
        return hello(self.engine_id, revision=self.link.lease.revision, labels={"pool": pool})


@pytest.fixture(scope="module")
def replicated(folder: Path, postgres: Postgres) -> Iterator[Replicated]:
    made = Replicated(folder / "replicated", postgres)
    made.folder.mkdir()
    asyncio.run(made.pair())
    yield made
    for process in made.processes:
        process.kill()


@pytest.fixture(scope="module")
def served(replicated: Replicated) -> Iterator[Served]:
    targets = ",".join(process.target for process in replicated.processes)
    served = Served(replicated.folder, targets)
    wait_for(served.ready, 180, "vLLM to serve")
    yield served
    served.process.stop()


@asynccontextmanager
async def fleet(replicated: Replicated) -> AsyncIterator[list[Simulated]]:
    """Start both replicas, and connect the engine and all simulated agents to either."""
    for process in replicated.processes:
        if process.popen is None or process.popen.poll() is not None:
            await process.started()
    targets = [process.target for process in replicated.processes]
    with ExitStack() as stack:
        simulated = []
        for number, name in enumerate(SIMULATED):
            simulated.append(Simulated(targets if number % 2 else targets[::-1], name))
            stack.enter_context(simulated[-1])
        async with client(replicated.processes[0]) as asked:
            await until_answer(lambda: _names(asked), NAMES)
        yield simulated


def capped(tokens: int) -> policy_pb2.Policy:
    """Return a policy that caps the thinking of every request: no request is in the control group."""
    return policy_pb2.Policy(
        scheduler=policy_pb2.SchedulerPolicy(max_think_tokens=tokens),
        entropy=policy_pb2.EntropyPolicy(holdout_share=0.0),
    )


async def update(asked: Client, tokens: int) -> None:
    """Change the policy and wait until all engines have applied it, on whichever replica they are."""
    answer = await asked.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=capped(tokens)))
    await until_answer(lambda: _acked(asked), dict.fromkeys(NAMES, answer.revision.revision))


async def thinking(served: Served) -> list[int]:
    """Return the words of thinking in answers to some prompts; the model's words are its tokens."""
    return [len(reasoning.split()) for reasoning, _, _ in await all_of(served)]


async def _names(asked: Client) -> list[str]:
    return sorted(await asked.connected())


async def _acked(asked: Client) -> dict[str, int]:
    return {e.engine_id: e.acked_revision for e in (await asked.engines()).engines}


async def test_a_replica_is_killed_between_two_changes(served: Served, replicated: Replicated) -> None:
    one, two = replicated.processes
    async with fleet(replicated), client(one) as asked_one, client(two) as asked_two:
        alone = await all_of(served)
        await update(asked_two, 12)
        assert max(await thinking(served)) <= 12
        await update(asked_one, 10_000)

        where = await asked_one.connected()
        (own,) = {e.replica for e in (await asked_one.engines(local_only=True)).engines}
        doomed, asked = (one, asked_two) if where["served"] == own else (two, asked_one)
        streaming = asyncio.gather(*(all_of(served) for _ in range(ROUNDS)))
        async with asyncio.timeout(120):
            while not await asked.requests(engine_id="served") or streaming.done():
                # On a busy machine all answers may have ended before they are seen.
                if streaming.done():
                    streaming = asyncio.gather(*(all_of(served) for _ in range(ROUNDS)))
                await asyncio.sleep(0.01)
        doomed.kill()
        assert not streaming.done()
        assert await streaming == [alone] * ROUNDS, "as if nothing had happened"

        await until_answer(lambda: _names(asked), NAMES)
        assert len(set((await asked.connected()).values())) == 1
        await update(asked, 20)
        assert max(await thinking(served)) <= 20


async def test_rollouts_go_on_although_the_leader_is_killed(served: Served, replicated: Replicated) -> None:
    async with fleet(replicated) as simulated:
        async with asyncio.timeout(120):
            while not (address := (await replicated.leader())[0]):
                await asyncio.sleep(0.1)
        (leader,) = [process for process in replicated.processes if process.target == address]
        (other,) = [process for process in replicated.processes if process is not leader]
        async with client(other) as asked, grpc.aio.insecure_channel(other.target) as channel:
            rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(channel)

            async def state() -> int:
                return int((await rollouts.GetRollout(rollout_pb2.GetRolloutRequest())).rollout.state)

            await update(asked, 10_000)
            # On a busy machine the first step may be over before it is seen; the next attempt takes longer.
            for bake_s in (3, 12, 48):
                before = max((await _acked(asked)).values())
                await rollouts.StartRollout(staged(7, bake_s))
                while not {*CANARIES} <= {*(found := await _with(asked, before + 1))}:
                    await asyncio.sleep(0.05)
                if found == CANARIES:
                    break
                await until_answer(state, COMPLETED, 60)
            else:
                pytest.fail("the canaries were never ahead of the others")
            leader.kill()
            await until_answer(state, COMPLETED, 60)
            await until_answer(lambda: _with(asked, before + 1), NAMES)
            assert max(await thinking(served)) <= 7

            # The engine is in the last step of the rollout, so it never gets a policy that a canary refuses.
            simulated[0].refusal = "cannot be"
            await rollouts.StartRollout(staged(3))
            await until_answer(state, ROLLED_BACK, 60)
            await until_answer(lambda: _with(asked, before + 3), [name for name in NAMES if name != SIMULATED[0]])
            violation = (await rollouts.GetRollout(rollout_pb2.GetRolloutRequest())).rollout.violation
            assert (violation.guardrail, violation.value) == ("nacks", 1)
            assert max(await thinking(served)) in range(4, 8), "as before the rollout"
            for engine in simulated:
                given = [settings.revision for settings in engine.settings]
                assert given == sorted(given), "never backwards"


def staged(tokens: int, bake_s: int = 3) -> rollout_pb2.StartRolloutRequest:
    """Return a rollout to the canaries first and then to all; it is taken back if an engine refuses."""
    steps = [
        rollout_pb2.RolloutStep(engine_labels={"pool": "canary"}, bake_s=bake_s),
        rollout_pb2.RolloutStep(percent=100, bake_s=1),
    ]
    guardrails = rollout_pb2.Guardrails(nacks=0)
    plan = rollout_pb2.RolloutPlan(step=steps, guardrails=guardrails, on_violation="rollback")
    return rollout_pb2.StartRolloutRequest(policy=capped(tokens), plan=plan)


async def _with(asked: Client, revision: int) -> list[str]:
    """Return the engines that have applied a revision."""
    return sorted(name for name, acked in (await _acked(asked)).items() if acked == revision)
