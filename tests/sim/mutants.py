"""Mutations of the product as patches of its source; each is a bug that the simulator has to notice.

Some of these bugs were in the product once. Bugs that cannot happen in the simulator are not here. For example, the
loss of a tier's outcome when its request is aborted takes a KV connector that keeps the blocks
(`tests/unit/agent/core/test_directives.py` has this case).
"""

from __future__ import annotations

from typing import NamedTuple

AGENT, DIRECTIVES, MAILBOX = (
    "meridian_agent/engine/agent.py",
    "meridian_agent/core/directives.py",
    "meridian_agent/link/mailbox.py",
)
QUEUES, PROBING, MASKS = (
    "meridian_agent/engine/queue_order.py",
    "meridian_agent/engine/probe_runner.py",
    "meridian_agent/engine/token_masks.py",
)
ACCOUNTS, BLOCKS = "meridian_agent/engine/step_accounting.py", "meridian_agent/engine/kv_blocks.py"
OUTBOX, LIVE = "meridian_agent/link/outbox.py", "meridian_agent/core/live_request.py"
INFO = "meridian_agent/core/request_info.py"
LIMIT, PHASES = "meridian_agent/core/think_limit.py", "meridian_agent/core/phases.py"
RUN = "meridian_agent/core/text_run.py"
TRACKER, MESSAGES, SHARE = (
    "meridian_agent/core/tracker.py",
    "meridian_agent/link/messages.py",
    "meridian_agent/engine/queue_order.py",
)
SESSION, ENDS = "meridian_control/engine/session.py", "meridian_control/capabilities/entropy/rule.py"
EFFECTS = "meridian_control/policy/effects.py"
POLICY_DELIVERY, HISTORY = "meridian_control/fleet/policy_delivery.py", "meridian_control/table/history.py"
TABLE = "meridian_control/table/request_table.py"
INTAKE, DELIVERY = "meridian_control/engine/report_intake.py", "meridian_control/engine/settings_delivery.py"


class Mutant(NamedTuple):
    """A mutation: `old`, which is in `path` exactly once, becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MUTANTS: tuple[Mutant, ...] = (
    # Outcomes: each decision has one, on its own stream.
    Mutant(
        "outcomes of dropped reports lost",
        OUTBOX,
        "            self._kept_outcomes += record.outcomes\n",
        "",
    ),
    Mutant(
        "outcomes kept for the next stream",
        OUTBOX,
        "        if self.snapshot_due:\n            self._kept_outcomes = []\n",
        "",
    ),
    Mutant(
        "outcomes of the old stream said",
        DIRECTIVES,
        "        self._tracker.record.outcomes.clear()\n",
        "",
    ),
    Mutant(
        "record of the old stream sent",
        OUTBOX,
        "        if not lease.connected or self._inbox.new_stream_waits():",
        "        if not lease.connected:",
    ),
    Mutant(
        "no outcome for a replaced probe",
        "meridian_agent/core/probe_admission.py",
        "        self.drop(Outcome.SUPERSEDED, live)\n",
        "        self.drop(None, live)\n",
    ),
    Mutant(
        "no outcome for a replaced plan",
        DIRECTIVES,
        "            self.report(self.plan.decision_id, Outcome.SUPERSEDED)\n",
        "            pass\n",
    ),
    Mutant(
        "no outcome for caps at a freeze",
        DIRECTIVES,
        "            self._close_cap(live, Outcome.AGENT_OFF)\n            live.void_decisions()\n",
        "            live.void_decisions()\n",
    ),
    Mutant(
        "two outcomes for a superseded force",
        DIRECTIVES,
        "            self.report(force.decision_id, Outcome.SUPERSEDED, live)\n        else:",
        "            self.report(force.decision_id, Outcome.SUPERSEDED, live)\n"
        "            self.report(force.decision_id, Outcome.SUPERSEDED, live)\n        else:",
    ),
    Mutant(
        "nobody answers for an idle engine",
        MAILBOX,
        "if report := self._inbox.settle_if_idle(directives):",
        "if report := None:",
    ),
    # Streams: a new stream voids the decisions of the old one, and a snapshot follows a hole in the reports.
    Mutant(
        "forces outlive their stream",
        DIRECTIVES,
        "        self.drop(ALL_BUT_CAPS, report=False)\n",
        "",
    ),
    Mutant(
        "no snapshot after a dropped report",
        OUTBOX,
        "        if self.ring.qsize() >= RING_RECORDS:\n            self._streaming = False\n",
        "        if self.ring.qsize() >= RING_RECORDS:\n",
    ),
    Mutant(
        "no snapshot after a thaw",
        AGENT,
        '            logger.info("meridian: no longer frozen")\n            self.link.outbox.resync()\n',
        '            logger.info("meridian: no longer frozen")\n',
    ),
    Mutant(
        "a freeze that no step saw",
        AGENT,
        "            self._suspend(scheduler, lapsed, True)\n",
        "            pass\n",
    ),
    Mutant(
        "snapshot forgets who is preempted",
        LIVE,
        "self.forced, self.preempted, queued)",
        "self.forced, False, queued)",
    ),
    Mutant(
        "snapshot forgets who waits for a first step",
        LIVE,
        "self.forced, self.preempted, queued)",
        "self.forced, self.preempted, False)",
    ),
    Mutant(
        "a first step is lost on the control plane",
        TABLE,
        "            self.queued[slot] = False\n",
        "            pass\n",
    ),
    Mutant(
        "a request waits on after its first step",
        LIVE,
        "        queued_s, self.queued_s = self.queued_s, None\n",
        "        queued_s = self.queued_s\n",
    ),
    Mutant(
        "snapshot adds to the table",
        INTAKE,
        "        table.clear()\n",
        "",
    ),
    Mutant(
        "reports merged over a reused slot",
        MESSAGES,
        "        if any(row[0] in closed for row in following.opened):\n            return False\n",
        "",
    ),
    Mutant(
        "reports merged over a preemption",
        MESSAGES,
        "    return not any(slot in record.resumed for record in records for slot in following.preempted)",
        "    return True",
    ),
    Mutant(
        "merged outcomes of the last report only",
        MESSAGES,
        "    for decision_id, outcome, think_tokens, detail in record.outcomes:",
        "    for decision_id, outcome, think_tokens, detail in record.outcomes[:1]:",
    ),
    Mutant(
        "slot free before its close is told",
        TRACKER,
        "        self.record.closed.append((live.slot, reason))\n",
        "        self.record.closed.append((live.slot, reason))\n        heapq.heappush(self._free, live.slot)\n",
    ),
    Mutant(
        "a counter begins anew",
        OUTBOX,
        "        self.snapshot_due, self._streaming = False, True\n",
        "        self.snapshot_due, self._streaming, self.reports_dropped = False, True, 0\n",
    ),
    # Decisions: they apply only to the request for which they were made, and only until they are void.
    Mutant(
        "decisions for the slot's next request",
        DIRECTIVES,
        "        if live is None or live.opened_step > step:",
        "        if live is None:",
    ),
    Mutant(
        "ranks for the slot's next request",
        DIRECTIVES,
        "            if live is not None and max(live.opened_step, live.phase_step) <= step:",
        "            if live is not None:",
    ),
    Mutant(
        "ranks of an earlier phase",
        DIRECTIVES,
        "            if live is not None and max(live.opened_step, live.phase_step) <= step:",
        "            if live is not None and live.opened_step <= step:",
    ),
    Mutant(
        "inbox taken past the lease",
        AGENT,
        " and (not self._lapsed or inbox.new_stream_waits()):",
        ":",
    ),
    Mutant(
        "plan in force past the lease",
        DIRECTIVES,
        "        self._drop_plan(parts, report)\n",
        "",
    ),
    Mutant(
        "ranks in force past the lease",
        DIRECTIVES,
        "                live.set_rank(None)\n            if live.ending",
        "                pass\n            if live.ending",
    ),
    Mutant(
        "a shadowed force is applied",
        DIRECTIVES,
        "        elif force.shadow:",
        "        elif False:",
    ),
    Mutant(
        "a shadowed plan is obeyed",
        DIRECTIVES,
        "        return None if plan.shadow or plan.stock else plan",
        "        return None if plan.stock else plan",
    ),
    Mutant(
        "forced while frozen",
        AGENT,
        "        if self.frozen or not (self.tracker.due",
        "        if not (self.tracker.due",
    ),
    Mutant(
        "order kept while frozen",
        AGENT,
        "        if ended & ORDER:\n            self.queues.undo(scheduler)\n",
        "",
    ),
    Mutant(
        "decided while frozen",
        SESSION,
        "        return None if self.hello.fault or freezing.frozen or freezing.void else self.policy",
        "        return None if self.hello.fault or freezing.void else self.policy",
    ),
    # Caps and floors: a cap applies to the token, and no rule ends thinking before the floor.
    Mutant(
        "rules ignore the floor",
        ENDS,
        " = seen.think_tokens >= np.maximum(scheduler.min_think_tokens, seen.own_min_think_tokens)",
        " = seen.think_tokens >= 0",
    ),
    Mutant(
        "rules ignore a request's own floor",
        ENDS,
        " = seen.think_tokens >= np.maximum(scheduler.min_think_tokens, seen.own_min_think_tokens)",
        " = seen.think_tokens >= scheduler.min_think_tokens",
    ),
    Mutant(
        "soft close ignores a request's floor",
        ENDS,
        "(seen.think_tokens >= np.maximum(policy.soft_think_tokens, seen.own_min_think_tokens))",
        "(seen.think_tokens >= policy.soft_think_tokens)",
    ),
    Mutant(
        "cap not clamped by the request's own",
        EFFECTS,
        "    return limit if opened.max_think_tokens is None else min(opened.max_think_tokens, limit)",
        "    return limit",
    ),
    Mutant(
        "own cap forgotten under a policy's",
        LIVE,
        "        return policy if own is None else own if policy is None else min(own, policy)",
        "        return own if policy is None else policy",
    ),
    Mutant(
        "cap one token late",
        LIMIT,
        "state.phase is Phase.THINK and state.think_tokens >= limit.tokens:\n            return row",
        "state.phase is Phase.THINK and state.think_tokens > limit.tokens:\n            return row",
    ),
    Mutant(
        "cap not seen within drafts",
        LIMIT,
        "        state.feed(drafts[row], markers)\n    return None",
        "        return None\n    return None",
    ),
    Mutant(
        "reserve one token short",
        LIMIT,
        "    left = most_tokens - reserve_tokens - _room(state, markers) - state.generated_tokens\n",
        "    left = most_tokens - reserve_tokens - _room(state, markers) - state.generated_tokens + 1\n",
    ),
    Mutant(
        "reserve without room for the closing text",
        LIMIT,
        "    whole = len(markers.ending_of(state.start))\n",
        "    whole = len(markers.end_of(state.start))\n",
    ),
    Mutant(
        "reserve does not count markers",
        PHASES,
        "        self.marker_tokens += length + 1\n",
        "",
    ),
    Mutant(
        "reserve of max_tokens only",
        INFO,
        "        return min(self.max_tokens, self.context_tokens)\n",
        "        return self.max_tokens\n",
    ),
    Mutant(
        "no reserve before the first decision",
        AGENT,
        "        self.default_reserve = settings.answer_reserve_tokens\n",
        "        self.default_reserve = 0\n",
    ),
    Mutant(
        "a shadowed reserve is applied",
        LIVE,
        "self.cap is None else 0 if self.cap.shadow else self.cap.answer_reserve_tokens",
        "self.cap is None else self.cap.answer_reserve_tokens",
    ),
    Mutant(
        "drafts that are not known kept near a cap",
        MASKS,
        "                live.ref.spec_token_ids = []\n",
        "                pass\n",
    ),
    Mutant(
        "step under way makes one token",
        AGENT,
        "(1 + scheduler.num_spec_tokens if self.is_async else 0)\n",
        "(1 if self.is_async else 0)\n",
    ),
    Mutant(
        "no cap on thinking anew in drafts",
        MASKS,
        "        for live in [*self._tracker.due, *self._drafted_to_think(output)]:",
        "        for live in [*self._tracker.due]:",
    ),
    Mutant(
        "drafts of a calm step not looked at",
        AGENT,
        "self.calm.number == self.tracker.run.number and not drafted:",
        "self.calm.number == self.tracker.run.number:",
    ),
    Mutant(
        "a cap passed by a step of several tokens",
        RUN,
        "        self._steps_until_cap -= max(several.lengths) - 1\n",
        "",
    ),
    Mutant(
        "ending of two tokens cut by one",
        LIVE,
        "        if self.position < len(self.tokens):\n            return 0",
        "        if self.position < len(self.tokens) - 1:\n            return 0",
    ),
    Mutant(
        "a second token of an ending forgotten",
        LIVE,
        "        left = ending.tokens[ending.position :]",
        "        left = ending.tokens[-1:]",
    ),
    Mutant(
        "an ending in a mask not begun",
        DIRECTIVES,
        "(live.ending.position > 0 or bool(live.expected))",
        "live.ending.position > 0",
    ),
    Mutant(
        "caps gone with the stream",
        DIRECTIVES,
        "        for live in self._tracker.by_id.values():\n            live.void_decisions()\n",
        "        for live in self._tracker.by_id.values():\n            live.set_cap(None)\n",
    ),
    Mutant(
        "no wait for tokens before a force",
        AGENT,
        "            output.pending_structured_output_tokens = True\n",
        "            pass\n",
    ),
    # Order and share: no request is left out for too long, and dispatch orders end with their plan.
    Mutant(
        "left out for ever",
        SHARE,
        "    return [live for live in by_wait[per_step:] if live.skipped_steps < max_skip_steps]",
        "    return by_wait[per_step:]",
    ),
    Mutant(
        "left out two steps more",
        SHARE,
        "live.skipped_steps < max_skip_steps]",
        "live.skipped_steps < max_skip_steps + 2]",
    ),
    Mutant(
        "nobody is left out",
        SHARE,
        "    if per_step is None or len(sequences) <= per_step:",
        "    if True:",
    ),
    Mutant(
        "order not made anew",
        TRACKER,
        "                self.reorder = True\n                answers = ",
        "                answers = ",
    ),
    Mutant(
        "prompts not held back",
        QUEUES,
        "        return tokens if tokens < scheduler.max_num_scheduled_tokens else None",
        "        return None",
    ),
    Mutant(
        "admission not held",
        QUEUES,
        "        if hold:\n            ahead = ",
        "        if False:\n            ahead = ",
    ),
    Mutant(
        "a preemption not noticed as over",
        ACCOUNTS,
        "            if live.preempted and not request_api.waits_preempted(live.ref):",
        "            if live.preempted:",
    ),
    Mutant(
        "rank in the priority for good",
        QUEUES,
        "            request.priority = math.floor(request.priority)\n\n",
        "            pass\n\n",
    ),
    Mutant(
        "a prompt that is done stays last",
        QUEUES,
        "(tracker.reorder or self.prompts_last or not",
        "(tracker.reorder or not",
    ),
    Mutant(
        "an admitted request stays last, whatever its rank",
        QUEUES,
        "is_prefill_chunk or live.effective_rank > rank_after:",
        "is_prefill_chunk:",
    ),
    Mutant(
        "answers resumed in pieces counted twice",
        QUEUES,
        "        return [request for request in found if request_api.waits_preempted(request)]",
        "        return found",
    ),
    Mutant(
        "waits for a step before the first",
        AGENT,
        "        if due and not (self.frozen or self.accounts.settled) and self.masks",
        "        if due and not self.frozen and self.masks",
    ),
    # Probes and blocks: a probe needs room in its step, and clients never see one.
    Mutant(
        "a probe beside a prompt in pieces",
        "meridian_agent/engine/queue_order.py",
        "        if probes:\n",
        "        if False:\n",
    ),
    Mutant(
        "a probe in a step without room",
        PROBING,
        "            if not prefill_limits.leave_room(scheduler, wanted, [*placed, cost], self._shares_blocks):\n",
        "            if False:\n",
    ),
    Mutant(
        "a probe past the end of its sentence",
        PROBING,
        "            known = len(live.ref.all_token_ids) - (past or 0)\n",
        "            known = len(live.ref.all_token_ids)\n",
    ),
    Mutant(
        "a piece's limit not taken back",
        "meridian_agent/engine/scheduler_mixin.py",
        "        for owner, name, limit in self._stock_limits:\n            setattr(owner, name, limit)\n",
        "        for owner, name, limit in self._stock_limits:\n"
        "            setattr(owner, name, limit) if owner is self else None\n",
    ),
    Mutant("a policy's limits stay in a freeze", AGENT, "        self.facts.limits.freeze(frozen)\n", ""),
    Mutant(
        "a policy's limits are not bounded",
        "meridian_agent/vllm_adapter/scheduler_limits.py",
        "else max(self.lowest, min(wanted, self.highest))",
        "else wanted",
    ),
    Mutant(
        "collected probes measured behind the newest token",
        "meridian_agent/core/probe_admission.py",
        "            return past\n        del",
        "            return 0\n        del",
    ),
    Mutant(
        "a probe takes the last place",
        "meridian_agent/core/probe_admission.py",
        "        (room.sequences < 2, NO_PLACE),\n",
        "",
    ),
    Mutant(
        "probes held for ever",
        PROBING,
        "            if answered or not waits or live.phase is not Phase.THINK or live.preempted:",
        "            if answered or live.phase is not Phase.THINK or live.preempted:",
    ),
    Mutant(
        "a probe's output reaches clients",
        PROBING,
        "        stock_restore.hide_probes([group])\n",
        "",
    ),
    Mutant(
        "shared blocks unhashed",
        BLOCKS,
        "lambda b: pool[b].ref_cnt - probed[b])",
        "lambda b: 1)",
    ),
    # Settings: an acknowledged revision is in force, and a refused one is not sent again.
    Mutant(
        "acknowledged before it holds",
        MAILBOX,
        "                self._waiting.append(arrived)\n",
        "                self._waiting.append(arrived)\n                self.confirm(arrived)\n",
    ),
    Mutant(
        "settings never put in force",
        AGENT,
        '        self.default_cap = settings.max_think_tokens if settings.HasField("max_think_tokens") else None\n',
        "        self.default_cap = None\n",
    ),
    Mutant(
        "a refused revision sent again",
        DELIVERY,
        '        self.revision, self.nack_error = revision, self.refused.get(revision, "")',
        '        self.revision, self.nack_error = revision, ""',
    ),
    Mutant(
        "an old revision sent",
        POLICY_DELIVERY,
        "            is_due = wanted is not None and wanted.revision > session.revision and not ahead\n",
        "            is_due = wanted is not None and not ahead\n",
    ),
    Mutant(
        "decided by the policy before its ACK",
        SESSION,
        "        settings = self.delivery.offer(revision, policy)\n",
        "        settings = self.delivery.offer(revision, policy)\n        self._groups.apply(revision, policy)\n",
    ),
    # The request table counts every token as the agent does.
    Mutant(
        "taken-back tokens stay counted",
        HISTORY,
        "        back = rows.flags >> TAKE_BACK_SHIFT\n",
        "        back = rows.flags * 0\n",
    ),
)
