"""Engines that hand requests over or answer them: their facts, and sessions with reports that a test makes up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover.results import Handovers
from meridian_control.capabilities.handover.rule import ThinkingEngine
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.engine.session import Session
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.policy.model import Policy
from tests.fakes.parts import parts

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
BOTH = agent_pb2.Capabilities(force_end=True, hand_over=True, answer_handed_over=True)
THINKING, ANSWERING = {"pool": "think"}, {"pool": "answer"}
DISAGG = {"enabled": True, "shadow": False, "thinking_pool": THINKING, "answering_pool": ANSWERING}


def disagg(**fields: Any) -> Policy:
    """Return a policy that hands requests over from one pool to another and decides little else."""
    off = {"enabled": False}
    return Policy.model_validate(
        {"disagg": DISAGG | fields, "scheduler": off, "entropy": off, "loop": off, "kv_memory": off}
    )


def pending(results: Handovers) -> int:
    """Return the number of requests without a result."""
    return sum(not request.result for request in results._requests.values())


def hello(engine_id: str = "a", labels: dict[str, str] | None = None, **fields: Any) -> agent_pb2.Hello:
    """Return the Hello of an engine of 100 blocks of 16 tokens."""
    known = {
        "capabilities": BOTH,
        "block_size_tokens": 16,
        "num_blocks": 100,
        "vllm_version": "0.32.0",
        "model": "m",
        "kv_connector": "NixlConnector",
        "url": f"http://{engine_id}:8000",
        "labels": THINKING if labels is None else labels,
    }
    return agent_pb2.Hello(engine_id=engine_id, incarnation="1", **{**known, **fields})


def answering(engine_id: str = "b", **fields: Any) -> fleet_pb2.AnsweringEngine:
    """Return an answering engine that fits the engine of `hello`."""
    known = {
        "block_size_tokens": 16,
        "num_blocks": 100,
        "vllm_version": "0.32.0",
        "model": "m",
        "kv_connector": "NixlConnector",
        "url": f"http://{engine_id}:8000",
        "labels": ANSWERING,
        "transfer_ms": 40.0,
        "transfer_token_ms": 0.005,
    }
    return fleet_pb2.AnsweringEngine(engine_id=engine_id, **{**known, **fields})


def thinking(**fields: Any) -> ThinkingEngine:
    return ThinkingEngine(hello=hello(), **fields)


class HandMade:
    """A session under a policy, with reports that a test makes up."""

    def __init__(
        self,
        policy: Policy,
        said: agent_pb2.Hello,
        results: Handovers | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        self.log, self.now, self.said = log or DecisionLog(), NOW, said
        self.results = results or Handovers()
        journal = Journal(self.log, said.engine_id, said.incarnation, f"s-{said.engine_id}", self.now)
        makers = parts(handover=lambda stream: EngineHandovers(stream, self.results))
        self.session = Session(f"s-{said.engine_id}", said, self.now, journal, parts=makers)
        self.step = self.revision = 0
        self.apply(policy)

    def apply(self, policy: Policy) -> agent_pb2.Directives:
        self.revision += 1
        (told,) = self.session.on_policy(self.revision, policy)
        return self.send(settings_status=agent_pb2.SettingsStatus(nonce=told.settings.nonce, revision=self.revision))

    def pool(self, *engines: fleet_pb2.AnsweringEngine) -> None:
        self.session.part(EngineHandovers).pool = tuple(engines)

    def send(self, **message: Any) -> agent_pb2.Directives:
        """Send a message and return the directives that follow, merged."""
        request = agent_pb2.ConnectRequest(**message)
        made = agent_pb2.Directives()
        for response in self.session.on_message(request, self.now):
            made.MergeFrom(response.directives)
        return made

    def report(self, **fields: Any) -> list[agent_pb2.HandOver]:
        """Report one step and return the handovers that follow."""
        self.step += 1
        self.now += timedelta(milliseconds=10)
        report = agent_pb2.StepReport(step=self.step, steps=1, **fields)
        return list(self.send(step=report).hand_overs)

    def opened(self, slot: int = 0, tokens: int = 160, **fields: Any) -> agent_pb2.RequestOpened:
        known = {"request_id": f"{self.said.engine_id}{slot}", "model": "m", "hand_over_candidate": True}
        phase = agent_pb2.PHASE_THINK
        return agent_pb2.RequestOpened(**{"slot": slot, "prompt_tokens": tokens, "phase": phase, **known, **fields})

    def end_of_thinking(self, slot: int = 0, **closed: Any) -> dict[str, Any]:
        """Return the fields of a report in which the request ends its thinking and is closed."""
        tokens = agent_pb2.TokenColumns(
            slot=[slot, slot],
            phase=[agent_pb2.PHASE_THINK] * 2,
            entropy_nats=[0.5] * 2,
            end_rank=[0] * 2,
            end_logprob_nats=[0.0] * 2,
            flags=[0, agent_pb2.TOKEN_FLAG_MARKER | agent_pb2.TOKEN_FLAG_END],
        )
        stop = agent_pb2.FINISH_REASON_STOP
        return {"tokens": tokens, "closed": [agent_pb2.RequestClosed(slot=slot, **{"reason": stop, **closed})]}
