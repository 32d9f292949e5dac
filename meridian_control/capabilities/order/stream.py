"""Sends an engine the ranks of its requests and their share of a step, whenever they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_control.capabilities.order import rule
from meridian_control.engine.merged_steps import steps
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from datetime import datetime

    from meridian.v1 import agent_pb2

    from meridian_control.engine.part import Stream, Turn

NOBODY = np.zeros(0, np.intp)
# Steps that took longer than this many milliseconds were interrupted, so their durations are not used.
MAX_STEP_MS = 600_000


class Order(Part):
    """The plan of one engine, of which only changes are sent."""

    def __init__(self, stream: Stream) -> None:
        hello = stream.hello
        self._table, self._ledger, self._cost = stream.table, stream.ledger, stream.step_cost
        self._can = hello.capabilities.dispatch
        self._kv_tokens = hello.num_blocks * hello.block_size_tokens
        self._share, self._hold, self._kv_used = rule.Share(), False, 0.0
        # Whether a request of the engine has thought since the stream began.
        self._has_thought = False
        self._revises = False

    def revise(self) -> None:
        self._revises = True

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> None:
        """Update the estimate of the step cost with the report's steps."""
        self._kv_used = report.kv_used
        for sequences, prefill_tokens, took_ms in steps(report, self._table.history.rows):
            if sequences + prefill_tokens and 0 <= took_ms <= MAX_STEP_MS:
                self._cost.add_step_time(sequences, prefill_tokens, took_ms)

    def decide(self, turn: Turn) -> None:
        revises, self._revises = self._revises, False
        if not self._can:
            return
        scheduler, memory, table = turn.policy.scheduler, turn.policy.kv_memory, self._table
        hold = rule.hold_admission(memory, table, self._kv_tokens, self._kv_used) and not memory.shadow
        share, slots, ranks = rule.Share(), NOBODY, table.rank
        stock = not scheduler.enabled or scheduler.strategy == "stock"
        if not stock:
            if revises:
                table.forget_ranks()
            self._has_thought = self._has_thought or bool(table.think_tokens.any())
            budgets = rule.budgets(scheduler, table, self._cost, self._has_thought)
            slots, ranks = rule.changed_ranks(scheduler, table, budgets, turn.now_ms)
            table.set_ranks(ranks)
            share = rule.share(scheduler, table, budgets, self._cost, self._share)
        if not len(slots) and (share, hold) == (self._share, self._hold) and not revises:
            return
        self._share, self._hold = share, hold
        plan = turn.out.plan
        plan.decision_id = self._ledger.make("plan", "stock" if stock else scheduler.strategy)
        plan.slot.extend(slots.tolist())
        plan.rank.extend(ranks[slots].tolist())
        for name in rule.LIMITS:
            if (limit := getattr(share, name)) is not None:
                setattr(plan, name, limit)
        plan.hold_admission, plan.shadow, plan.stock = hold, scheduler.shadow, stock
