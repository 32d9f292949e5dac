"""A policy's way to one agent: what it is sent, what it has taken, what it has refused.

Owns nonces and refusals. Knows nothing of what is decided from a policy. Pure; one session at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.decisions import capabilities, termination
from meridian_control.decisions.request_table import MAX_TEXT
from meridian_control.policy.schema import ModelPolicy

if TYPE_CHECKING:
    from meridian_control.policy.model import Policy
    from meridian_control.session.counters import Totals


# Steps merged into a report where the policy says nothing: what a report costs the machine is a multiple of what its
# steps do, and no decision that follows from a phase, an arrival or a probe waits for others.
USUAL_INTERVAL_STEPS = 8


class Delivery:
    """`revision` is the newest that was wanted, `nack_error` why it is not in force; `agent_revision` is in force
    on the engine, as it says. What `refused` has is not sent to it again."""

    def __init__(self, hello: agent_pb2.Hello, totals: Totals) -> None:
        self._hello, self._totals = hello, totals
        self.revision, self.agent_revision = 0, hello.revision
        self.nack_error = ""
        self.refused = dict(hello.refused)
        # Under way to the agent, and the nonce of what was sent last.
        self.pending: tuple[int, Policy] | None = None
        self.nonce = 0

    def offer(self, revision: int, policy: Policy) -> agent_pb2.Settings | None:
        """The settings to send for a revision; None where the engine has refused it before, or cannot honour it.

        An agent that is off is sent nothing: it says Hello anew when it comes back.
        """
        self.revision, self.nack_error = revision, self.refused.get(revision, "")
        if not self.nack_error and (error := capabilities.missing(policy, self._hello)):
            self._refuse(revision, error)
        return None if self.nack_error or self._hello.fault else self.send(revision, policy)

    def send(self, revision: int, policy: Policy) -> agent_pb2.Settings:
        self.nonce += 1
        self.pending = (revision, policy)
        return settings(revision, self.nonce, policy, self._hello)

    def answered(self, status: agent_pb2.SettingsStatus) -> tuple[int, Policy] | None:
        """Take in what the agent says; the revision that has come into force, if one has."""
        if self.pending is None or status.nonce != self.nonce:
            return None
        taken, self.pending = self.pending, None
        self.agent_revision = status.revision
        if status.error:
            self._refuse(taken[0], status.error[:MAX_TEXT])
        return None if status.error else taken

    def _refuse(self, revision: int, error: str) -> None:
        self._totals.nacks += 1
        self.nack_error = self.refused[revision] = error


def model_of(policy: Policy, hello: agent_pb2.Hello) -> ModelPolicy:
    """The policy's section for the model that an engine serves."""
    return policy.model.get(hello.model) or ModelPolicy()


def report_interval_steps(policy: Policy) -> int:
    """The policy's own, or what suits its rules: deadlines go by when the newest tokens came, what fires at a sentence
    end is to end thinking there, not when a report is full, and a probe is asked for once the one before is known."""
    reads = termination.reads_sentence_ends(policy) or termination.probes_within(policy, USUAL_INTERVAL_STEPS)
    every_step = policy.scheduler.strategy == "deadline" or reads
    return policy.telemetry.report_interval_steps or (1 if every_step else USUAL_INTERVAL_STEPS)


def settings(revision: int, nonce: int, policy: Policy, hello: agent_pb2.Hello) -> agent_pb2.Settings:
    """The part of a policy that the agent itself must know."""
    model = model_of(policy, hello)
    made = agent_pb2.Settings(
        revision=revision,
        nonce=nonce,
        think_start_token_ids=model.think_start_token_ids,
        think_end_token_ids=model.think_end_token_ids,
        reasoning_parser=model.reasoning_parser,
        supports_think_disable=model.supports_think_disable,
        closing_text=model.closing_text,
        eat_answer_prefix=model.eat_answer_prefix,
        observe_entropy=termination.needs_signals(policy) and hello.capabilities.token_entropy,
        report_interval_steps=report_interval_steps(policy),
        lease_ms=policy.fallback.lease_ms,
        scheduler_lease_ms=policy.scheduler.lease_ms,
        entropy_lease_ms=policy.entropy.lease_ms,
        kv_memory_lease_ms=policy.kv_memory.lease_ms,
    )
    if policy.scheduler.enabled and not policy.scheduler.shadow and hello.capabilities.force_end:
        made.max_think_tokens = policy.scheduler.max_think_tokens
    return made
