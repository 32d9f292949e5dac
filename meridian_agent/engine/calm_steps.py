"""Finds out which steps are calm: nothing has happened that the agent would act on before vLLM schedules the step.

A full look at the engine takes in messages, orders the queues and places probes. The module owns the facts that the
newest full look left behind, and so knows whether another look would change nothing. Runs on the engine-core thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.vllm_adapter import scheduler_api

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

    from meridian_agent.core.directives import Directives, DispatchPlan
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.text_run import Awaited
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.probe_runner import ProbeRunner
    from meridian_agent.engine.queue_order import Limit, QueueOrder
    from meridian_agent.link.control_stream import ControlStream
    from meridian_agent.vllm_types import Scheduler


class CalmSteps:
    """The calm steps of one engine. They follow a full look while all requests of the steps are members of the run, and
    the run stays the same, because its number changes as soon as anything changes for a live request."""

    def __init__(
        self, tracker: Tracker, directives: Directives, probing: ProbeRunner, queues: QueueOrder, link: ControlStream
    ) -> None:
        self._tracker, self._directives, self._probing, self._queues = tracker, directives, probing, queues
        self._run, self._lease, self._mailbox = tracker.run, link.lease, link.mailbox
        # Numbers of steps so far with and without a full look.
        self.full_steps = self.calm_steps = 0
        # Number of the run with which steps are calm; 0 if the coming step needs a full look.
        self.number = 0
        # The findings of full looks: the scheduler's limits to lower in calm steps; whether a stream was up, and until
        # which time on the lease's clock the leases change neither what is in force nor the agent's state, 0 if not
        # known.
        self.limits: list[Limit] = []
        self._connected = False
        self._until_s = 0.0
        # The plan of the newest full look, and whether another one with other ranks has come since.
        self._plan: DispatchPlan | None = None
        self._reranked = False
        # The tokens that probes wait for, by row of the run; whether one of the probes needs a free place; and the
        # requests for which such a token has come, each with the number of tokens after it.
        self.awaited: dict[int, Awaited] = {}
        self.needs_places = False
        # Number of running places that were free for probes at the newest full look.
        self._reserved = 0
        self.due: dict[LiveRequest, int] = {}

    def end(self) -> None:
        """Let the coming step have a full look."""
        self.number = 0

    def begin_full_look(self, now_s: float) -> bool:
        """Count a step with a full look; return whether a message, a lease or the stream may have changed what is in
        force since the newest full look. now_s: the time on the lease's clock."""
        self.full_steps += 1
        self.number, self.due, self._reranked = 0, {}, False
        lease = self._lease
        if lease.attention:
            lease.give_attention()
            self._until_s = 0.0
        elif lease.connected is not self._connected or now_s >= self._until_s:
            self._until_s = 0.0
        return self._until_s == 0.0

    def took(self, message: agent_pb2.Directives | None) -> None:
        """End the calm if a message, which the agent has taken in, has decisions that act before vLLM schedules the
        coming step; None is the mark of a new stream. A cap acts there only by taking a request that thinks out of the
        run, and a tier acts when vLLM frees the request's blocks. A plan that differs from the one before only in its
        ranks changes the order alone. A probe that waits for the end of a sentence or a paragraph joins the awaited
        ones, unless it needs a place that the newest full look has not kept free."""
        if message is None or message.forces or message.hand_overs or message.preempts:
            self.number = 0
        elif message.HasField("plan"):
            self._reranked = True
            if self._directives.plan != self._plan:
                self.number = 0
        if self.number and message is not None and message.probes:
            kept = self.needs_places
            if self.number != self._run.number or not self._await_probes() or (self.needs_places and not kept):
                self.number = 0

    def only_decisions_wait(self, now_s: float) -> bool:
        """Return whether the coming step would be calm, if no decisions waited for the engine. now_s: the time on the
        lease's clock. The caller then takes the decisions in."""
        if not self._steady(now_s):
            return False
        self._lease.give_attention()
        if self._mailbox.arrived:
            self._lease.call_for_attention()
        return not self._lease.attention

    def hold(self, now_s: float) -> bool:
        """Return whether the coming step is calm. now_s: the time on the lease's clock."""
        return not self._lease.attention and self._steady(now_s)

    def _steady(self, now_s: float) -> bool:
        number, lease = self.number, self._lease
        return (
            number != 0 and number == self._run.number and lease.connected is self._connected and now_s < self._until_s
        )

    def go_on(self, scheduler: Scheduler) -> bool:
        """Order the queues if ranks have changed, place the probes that have come due since the newest look, and keep
        the places that probes need. Return False, and the step needs a full look, if one of them cannot be a row of its
        request, if probes are placed together in this step, or if the places that were kept for probes are free
        again."""
        if not (self.due or self.needs_places or self.limits or self._reranked):
            return True
        if self._reranked:
            self._reranked = False
            if (plan := self._directives.active_plan()) is not None:
                self._queues.obey(scheduler, plan)
        if self.due:
            due, self.due = self.due, {}
            if not self._probing.place_rows(scheduler, due):
                return False
            for live in due:
                del self.awaited[live.run_row]
        if self._probing.collects(scheduler):
            return False
        if self.needs_places and self.awaited:
            self._probing.keep_places(scheduler)
        return not self.limits or self._probing.reserved(scheduler) == self._reserved

    def end_full_look(self, scheduler: Scheduler, plan: DispatchPlan | None, limits: list[Limit]) -> None:
        """Find out whether calm steps follow. plan: the plan that the engine obeys. limits:
        the scheduler's limits that the full look lowers."""
        run, lease = self._run, self._lease
        if not (run.members and run.whole and self._nothing_due(plan) and self._await_probes()):
            return
        if self.awaited and run.at_ends(self.awaited):
            self.awaited = {}
            return
        if limits and not self._limits_stay(scheduler):
            return
        if self._until_s == 0.0:
            self._connected, self._until_s = lease.connected, lease.steady_until()
        self.limits, self._reserved, self.number = limits, self._probing.reserved(scheduler), run.number
        self._plan = self._directives.plan

    def _nothing_due(self, plan: DispatchPlan | None) -> bool:
        """Return whether no request is due for a forced token or waits for a decision, and no share of the plan leaves
        requests out."""
        tracker, probing = self._tracker, self._probing
        if tracker.due or tracker.preempted or probing.placed or probing.held or self._directives.preempts.claims:
            return False
        if plan is None:
            return True
        thinks = plan.think_per_step is not None and tracker.answering
        answers = plan.output_per_step is not None and tracker.thinking
        return not (thinks or answers or self._queues.prompts_last)

    def _await_probes(self) -> bool:
        """Note the probes that wait for the end of a sentence or a paragraph; return False if another probe waits."""
        probes, drafts = self._directives.probes, self._run.tokens_per_step - 1
        self.awaited, self.needs_places = {}, False
        if not probes:
            return True
        enough, waits = self._probing.enough, [each for each in probes if each[1] not in probes.reached]
        awaited = {live.run_row: (flags, enough(hold_ms)) for _, live, flags, hold_ms in waits}
        if -1 in awaited or not all(flags for flags, _ in awaited.values()):
            return False
        if drafts:
            # The end of a sentence need not be the newest token.
            far = self._probing.waiting(probes)
            near = ((live, flags, enough(hold_ms)) for _, live, flags, hold_ms in probes if live not in far)
            if any(live.since_end(flags, drafts + 1, which) is not None for live, flags, which in near):
                return False
        self.awaited, self.needs_places = awaited, self._probing.needs_places
        return True

    def _limits_stay(self, scheduler: Scheduler) -> bool:
        """Return whether the limits are the same in the coming steps, or no request waits on which they would act. The
        limit that holds back admission depends on requests that wait with KV blocks."""
        return not (self._directives.hold_admission and scheduler_api.anything_waits(scheduler))

    def scheduled(self, requests: int) -> None:
        """End the calm if the step has more or fewer requests than the run, such as one that vLLM has just admitted."""
        if requests != self._run.members:
            self.number = 0

    def find_due(self, scheduler: Scheduler) -> None:
        """Find out which of the awaited probes belong behind the newest tokens of the run's members."""
        if self.awaited and self.number == self._run.number:
            self.due = self._run.at_ends(self.awaited)
            if self.due and not self._probing.rows_possible:
                if not self._probing.reach(scheduler, self.due):
                    self.number = 0
                    return
                for live in self.due:
                    del self.awaited[live.run_row]
                self.due = {}
