"""Delivers policy revisions to one agent as settings, and keeps which revisions the agent confirmed or refused.

The module owns nonces and refusals, and makes no decisions. The code does no I/O and reads no clock; each object
belongs to one session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.opened_request import MAX_TEXT
from meridian_control.policy import effects
from meridian_control.policy import needed_capabilities as capabilities
from meridian_control.policy.schema import ModelPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_control.engine.totals import Totals
    from meridian_control.policy.model import Policy


# Steps merged into a report if the policy sets no number: if no rule in force reads reports, and if one does. A report
# costs the machine several times as much as the steps in it, but the ends that a rule decides come later.
USUAL_INTERVAL_STEPS, RULED_INTERVAL_STEPS = 24, 8
# Milliseconds that reports which rules read are apart at least, about twice a decision's way at the slowest.
RULED_INTERVAL_MS = 40
# Smallest cap, in thinking tokens, that may arrive as late as other decisions and still be exact.
LEAST_LATE_CAP = 128
# Largest number of requests in a row that an engine measures as one cluster of its sample.
MEASURED_CLUSTER = 64


class Delivery:
    """The delivery of policy revisions to one agent.

    `revision` is the newest revision that the engine should have, and `nack_error` the reason why that revision is not
    in force. `agent_revision` is in force on the engine, as the agent reports. Revisions in `refused` are not sent
    again. `reads_signals` returns whether a capability of one's own reads signals under a policy.
    """

    reads_signals: Callable[[Policy], bool] = staticmethod(lambda policy: False)

    def __init__(self, hello: agent_pb2.Hello, totals: Totals) -> None:
        self._hello, self._totals = hello, totals
        self.revision, self.agent_revision = 0, hello.revision
        self.nack_error = ""
        self.refused = dict(hello.refused)
        # Revision and policy that were sent but not yet confirmed; nonce of the settings that were sent last.
        self.pending: tuple[int, Policy] | None = None
        self.nonce = 0
        # Limits that the policy in force sets for the engine, by name; and the values of all its limits as the agent
        # reports them, None if it has reported none.
        self.wanted_limits: dict[str, int] = {}
        self.engine_limits: agent_pb2.EngineLimitValues | None = None

    def offer(self, revision: int, policy: Policy) -> agent_pb2.Settings | None:
        """Return the settings to send for a revision.

        The result is None if the engine refused the revision before, if the engine lacks a capability that the policy
        needs, or if the agent is off; an agent that comes back sends a new Hello.
        """
        self.revision, self.nack_error = revision, self.refused.get(revision, "")
        if not self.nack_error and (error := capabilities.missing(policy, self._hello)):
            self._refuse(revision, error)
        return None if self.nack_error or self._hello.fault else self.send(revision, policy)

    def send(self, revision: int, policy: Policy) -> agent_pb2.Settings:
        self.nonce += 1
        self.pending = (revision, policy)
        return settings(revision, self.nonce, policy, self._hello, self.reads_signals(policy))

    def answered(self, status: agent_pb2.SettingsStatus) -> tuple[int, Policy] | None:
        """Take in the agent's answer; return the revision and policy that have come into force, None if none have."""
        if self.pending is None or status.nonce != self.nonce:
            return None
        sent, self.pending = self.pending, None
        self.agent_revision = status.revision
        if status.error:
            self._refuse(sent[0], status.error[:MAX_TEXT])
            return None
        self.wanted_limits = sent[1].engine_limits(self._hello.labels)
        self.engine_limits = status.engine_limits if status.HasField("engine_limits") else None
        return sent

    def _refuse(self, revision: int, error: str) -> None:
        self._totals.nacks += 1
        self.nack_error = self.refused[revision] = error


def model_of(policy: Policy, hello: agent_pb2.Hello) -> ModelPolicy:
    """Return the policy's section for the model that the engine serves."""
    return policy.model.get(hello.model) or ModelPolicy()


def report_interval_steps(policy: Policy) -> int:
    """Return the number of steps that the agent merges into a report."""
    return policy.telemetry.report_interval_steps or _chosen_steps(policy)


def _chosen_steps(policy: Policy) -> int:
    """Return the number of steps that a report merges if the policy leaves it open, 0 if it sets a number.

    The result is 1 for deadline scheduling, which needs the time of the newest tokens, for rules that read sentence
    ends, which should end thinking at the sentence end, for dense probes, which wait for the previous probe's outcome,
    and for extensions, because nothing says which tokens their rules read. Otherwise the result is RULED_INTERVAL_STEPS
    if a rule in force may end thinking or change a cap by a report, and USUAL_INTERVAL_STEPS if none may.
    """
    if policy.telemetry.report_interval_steps:
        return 0
    reads = effects.reads_sentence_ends(policy) or effects.probes_within(policy, RULED_INTERVAL_STEPS)
    if policy.scheduler.strategy == "deadline" or reads or effects.has_extension(policy):
        return 1
    ruled = effects.in_force(policy) or effects.loops_in_force(policy)
    return RULED_INTERVAL_STEPS if ruled else USUAL_INTERVAL_STEPS


def report_interval_ms(policy: Policy) -> int:
    """Return the milliseconds for which a fast engine's reports wait although rules in force read them, 0 for none. A
    report costs an engine the same however short its steps are."""
    return RULED_INTERVAL_MS if _chosen_steps(policy) == RULED_INTERVAL_STEPS else 0


def merge_openings(policy: Policy) -> bool:
    """Return whether the agent's report of a new request may wait for further steps: no decision about its first tokens
    depends on it, and its cap is none that its first tokens may reach."""
    return not effects.concerns_first_tokens(policy) and effects.least_cap(policy) >= LEAST_LATE_CAP


def merge_answers(policy: Policy) -> bool:
    """Return whether the agent's report of an answer that begins may wait for further steps: the agent itself puts
    answers first, and unless the policy sets times per token the share of a step does not depend on who answers."""
    scheduler = policy.scheduler
    return (
        not scheduler.enabled
        or scheduler.strategy == "stock"
        or (scheduler.strategy == "output_first" and not effects.sets_token_times(policy))
    )


def merge_unmeasured(policy: Policy) -> bool:
    """Return whether the agent's reports may wait for further steps while the engine measures nothing: no decision
    depends on when they come."""
    usual = _chosen_steps(policy) == USUAL_INTERVAL_STEPS
    return usual and merge_openings(policy) and merge_answers(policy)


def settings(
    revision: int, nonce: int, policy: Policy, hello: agent_pb2.Hello, reads_signals: bool = False
) -> agent_pb2.Settings:
    """Return the part of a policy that the agent needs. reads_signals: whether a capability of one's own reads all
    signals."""
    policy = policy.on_engine(hello.labels, hello.model_fingerprint)
    model = model_of(policy, hello)
    observe_entropy = (reads_signals or effects.needs_signals(policy)) and hello.capabilities.token_entropy
    message = agent_pb2.Settings(
        revision=revision,
        nonce=nonce,
        # The section has the names of the message.
        **dict(model),
        observe_entropy=observe_entropy,
        only_sentence_ends=observe_entropy and not (reads_signals or effects.reads_every_token(policy)),
        report_interval_steps=report_interval_steps(policy),
        report_interval_ms=report_interval_ms(policy),
        lease_ms=policy.fallback.lease_ms,
        scheduler_lease_ms=policy.scheduler.lease_ms,
        entropy_lease_ms=policy.entropy.lease_ms,
        kv_memory_lease_ms=policy.kv_memory.lease_ms,
        find_loops=effects.finds_loops(policy) and hello.capabilities.force_end,
        merge_openings=merge_openings(policy),
        merge_answers=merge_answers(policy),
        merge_loops=not effects.loops_in_force(policy),
        merge_unmeasured=merge_unmeasured(policy),
        client_slo_classes=policy.gateway.client_slo_classes,
    )
    if observe_entropy and not reads_signals and (share := effects.measured_share(policy)) < 1:
        message.measured_share = share
        message.measured_cluster_requests = 0 if effects.needs_independent_sample(policy) else MEASURED_CLUSTER
    if policy.kv_memory.enabled and not policy.kv_memory.shadow:
        message.keep_thinking_s = policy.kv_memory.keep_thinking_s
    if limits := policy.engine_limits(hello.labels):
        message.engine_limits.CopyFrom(agent_pb2.EngineLimitValues(**limits))
    if policy.scheduler.enabled and not policy.scheduler.shadow and hello.capabilities.force_end:
        message.max_think_tokens = policy.scheduler.max_think_tokens
        if policy.scheduler.answer_reserve_for == "all":
            message.answer_reserve_tokens = policy.scheduler.answer_reserve_tokens
        else:
            message.chat_answer_reserve_tokens = policy.scheduler.answer_reserve_tokens
    if policy.scheduler.enabled and not policy.scheduler.shadow:
        message.answer_only_stops = policy.scheduler.answer_only_stops
    return message
