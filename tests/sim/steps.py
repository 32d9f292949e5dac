"""Invariants of a step under the plan in force: order, share, prompts, admission, probes, blocks.

The module looks at the scheduler itself, right after the agent has prepared a step and again after vLLM has made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meridian_agent.core.directives import ORDER, DispatchPlan
from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import FLAG_GOES_ON, Phase
from meridian_agent.core.probe_admission import free_blocks
from meridian_agent.core.request_info import is_probe
from meridian_agent.core.sentences import CERTAIN
from tests.sim.engine import BLOCK, Engine, sentences
from tests.sim.policies import NEAR

# Steps for which a request may wait even if they last longer than its hold, as the README says.
HOLD_STEPS = 4
LONGEST_HOLD_S = max(NEAR["eat_hold_ms"]) / 1e3


@dataclass
class Prepared:
    """Bounds of the coming step."""

    running: set[str]
    # Probes that have just been placed.
    probes: set[str] = field(default_factory=set)
    # Sequences of the phase that is left out, and the number of them that may join.
    shared: set[str] = field(default_factory=set)
    may_join: int = 0
    # Running requests that are past their prompt; and the largest number of tokens of all others together, if prompts
    # are held back, otherwise None.
    decodes: set[str] = field(default_factory=set)
    prompt_tokens: int | None = None
    # Requests that may be admitted while admission is held, and whether they are first in the queue.
    admitted: set[str] | None = None
    are_first: bool = True


class Steps:
    """The steps of one agent. clock: returns the agent's monotonic time in seconds."""

    def __init__(self, engine: Engine, agent: Any, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._scheduler, self._agent = engine.scheduler, agent
        self._prepared: Prepared | None = None
        self._held: dict[Any, tuple[float, float, int]] = {}
        # Whether the running list has an order that a plan gave it.
        self._is_ordered = False
        self._before, self._evict = self._agent.before_schedule, self._scheduler.kv_cache_manager.evict_blocks
        self._agent.before_schedule = self._watched_before
        self._scheduler.kv_cache_manager.evict_blocks = self._watched_evict

    def _watched_before(self, scheduler: Any) -> Any:
        placed = set(self._agent.probing.placed)
        asked = {decision_id: flags for decision_id, _, flags, _ in self._agent.directives.probes}
        skipped = {name: live.skipped_steps for name, live in self._agent.tracker.by_id.items()}
        running = self._running()
        limits = self._before(scheduler)
        # A request that has just been preempted for a waiting one leaves the list.
        self._check_disorder([name for name in running if name in self._running()])
        newly_placed = set(self._agent.probing.placed) - placed
        self._prepared = Prepared({r.request_id for r in scheduler.running}, newly_placed)
        self._check_held()
        self._check_places(newly_placed)
        self._check_boundaries(newly_placed, asked)
        plan = self._agent.directives.plan
        if plan is not None and not self._agent.frozen:
            self._prepare(plan, self._prepared, skipped)
        return limits

    def _prepare(self, plan: DispatchPlan, prepared: Prepared, skipped: dict[str, int]) -> None:
        agent = self._agent
        waiting = {live.info.request_id for live in agent.tracker.preempted if live.state.phase is Phase.OUTPUT}
        if plan.hold_admission and waiting:
            prepared.admitted = waiting | prepared.running
            # In vLLM's own order, in shadow and under its priority policy another request may be ahead of an answer.
            prepared.are_first = self._engine.shape.policy == "fcfs" and not (plan.shadow or plan.stock)
        if plan.shadow or plan.stock:
            return
        self._check_order()
        streaming = {live.state.phase for live in self._complete()}
        if plan.think_per_step is not None and Phase.OUTPUT in streaming:
            self._share(Phase.THINK, plan.think_per_step, plan.max_skip_steps, prepared, skipped)
        elif plan.output_per_step is not None and Phase.THINK in streaming:
            self._share(Phase.OUTPUT, plan.output_per_step, plan.max_skip_steps, prepared, skipped)
        if plan.prefill_tokens_per_step is not None and Phase.OUTPUT in streaming:
            prepared.decodes = {r.request_id for r in self._scheduler.running if not r.is_prefill_chunk}
            # Draft tokens that are not there leave their places to the first piece of a prompt, and probes that find no
            # blocks leave theirs to any.
            has_pieces = len(prepared.decodes) < len(self._scheduler.running)
            spare = 0 if has_pieces else len(prepared.decodes) * self._scheduler.num_spec_tokens
            probes = sum(not placed.cost_tokens for placed in agent.probing.placed.values())
            spare += probes * (1 + len(agent.tracker.markers.probe))
            prepared.prompt_tokens = spare + max(1, plan.prefill_tokens_per_step)

    def _share(
        self, phase: Phase, per_step: int, max_skip_steps: int, prepared: Prepared, skipped: dict[str, int]
    ) -> None:
        """Note the sequences of a phase and how many may join. skipped: how often in a row each was left out before."""
        prepared.shared = {live.info.request_id for live in self._complete() if live.state.phase is phase}
        prepared.may_join = per_step + sum(skipped.get(name, 0) >= max_skip_steps for name in prepared.shared)

    def _complete(self) -> list[Any]:
        """Return the running requests, as the agent knows them, whose prompts are complete."""
        by_id = self._agent.tracker.by_id
        found = (by_id.get(r.request_id) for r in self._scheduler.running if not r.is_prefill_chunk)
        return [live for live in found if live is not None]

    def _running(self) -> list[str]:
        """Return the running requests in vLLM's order, without probes."""
        return [r.request_id for r in self._scheduler.running if not is_probe(r.request_id)]

    def _check_disorder(self, before: list[str]) -> None:
        """Check that the list is in vLLM's order if no plan orders it, and in order of arrival right after such a plan
        ends.

        A plan that leaves the order to vLLM does not undo the order of an older plan.
        """
        agent = self._agent
        plan, after = agent.directives.plan, self._running()
        came = [name for name in self._scheduler.requests if name in after]
        if agent.frozen or agent._lapsed & ORDER:
            wanted, self._is_ordered = came if self._is_ordered else before, False
            assert after == wanted, f"{after} run in this order without one in force, not {wanted}"
        elif plan is None or plan.shadow or plan.stock:
            # A freeze that is over before a step sees it ends an order, too.
            ended = self._is_ordered and after == came
            assert after == before or ended, f"{before} are put into the order {after} by nobody"
        else:
            self._is_ordered = True

    def _check_order(self) -> None:
        """Check the order of the ranks.

        Under asynchronous scheduling a prompt is done a step before its first token shows it, so the check does not
        apply.
        """
        if self._agent.is_async:
            return
        by_id, ranks = self._agent.tracker.by_id, []
        for request in self._scheduler.running:
            live = by_id.get(request.request_id)
            rank = live.effective_rank if live is not None else PHASE_RANK[Phase.PROMPT]
            ranks.append((bool(request.is_prefill_chunk), rank))
        assert ranks == sorted(ranks), f"a step goes by the order {ranks}"

    def _check_held(self) -> None:
        """Check that no request waits for an answer about a probe for longer than the policy allows."""
        held, now, step = self._agent.probing.held, self._clock(), self._scheduler.current_step
        self._held = {live: since for live, since in self._held.items() if live in held}
        for live in held:
            until, since, first = self._held.get(live, (0.0, 0.0, step))
            if until != live.held_until:
                self._held[live] = until, since, first = live.held_until, now, step
            assert until <= since + LONGEST_HOLD_S + 1e-6, f"{live.info.request_id} is to be held for {until - since} s"
            assert now <= until or step - first < HOLD_STEPS, (
                f"{live.info.request_id} is held for {now - since:.3f} s, until {until - since:.3f}"
            )

    def _check_places(self, newly_placed: set[str]) -> None:
        scheduler = self._scheduler
        waiting = sum(not placed.cost_tokens for placed in self._agent.probing.placed.values())
        left = scheduler.max_num_running_reqs - len(scheduler.running) - waiting
        assert not newly_placed or left > 0, "a probe takes the last place"

    def _check_boundaries(self, newly_placed: set[str], asked: dict[int, int]) -> None:
        """Check that each probe begins after a token of the requested kind, which is known to end a sentence.

        A probe whose decision arrives in this step is not known yet, so it is not checked.
        """
        table = sentences()
        for placed in map(self._agent.probing.placed.__getitem__, newly_placed):
            live, flags = placed.parent, asked.get(placed.decision_id, 0)
            if not (placed.decision_id and flags):
                continue
            tokens, state = live.ref.all_token_ids, live.own_state
            # The text of the phase of thinking, with the steps that the run has counted meanwhile.
            text_tokens = state.text_run + live.think_tokens - state.think_tokens
            generated = tokens[len(tokens) - text_tokens : placed.shared_tokens + 2]
            states = [table.state_of(generated[:n]) for n in (len(generated) - 1, len(generated))]
            past = len(tokens) - placed.shared_tokens - 1
            here = table.flags[states[-1 if past == 0 else 0]]
            # After a certain end, such as that of a paragraph, further ends belong to the same one.
            ended = past == 0 or here & CERTAIN or not table.flags[states[1]] & FLAG_GOES_ON
            flags &= here if ended else 0
            assert flags, f"{live.info.request_id} is probed after {tokens[placed.shared_tokens]}, which ends nothing"

    def _check_probes(self, prepared: Prepared) -> None:
        """Check that each placed probe is in the step, because its request sits out for it.

        In a step that preempts a request, nothing new is scheduled. A step's prompts in pieces and the requests that
        begin a block may take the blocks that were free when the probe was placed.
        """
        preempted = any(r.request_id in prepared.running for r in self._scheduler.waiting)
        late = prepared.probes - self._engine.probes
        no_blocks = self._engine.free_blocks < free_blocks(1 + len(self._agent.tracker.markers.probe), BLOCK) // 2
        assert not late or preempted or no_blocks, f"{sorted(late)} were placed in a step without room for them"

    def _watched_evict(self, block_ids: set[int]) -> Any:
        """Check that one request alone has the blocks that are given up. A probe's blocks are its request's."""
        manager, placed = self._scheduler.kv_cache_manager, self._agent.probing.placed
        owners: dict[int, set[str]] = {b: set() for b in block_ids}
        for name in self._scheduler.requests:
            parent = placed[name].parent.info.request_id if name in placed else name
            for blocks in manager.get_block_ids(name):
                for block in block_ids.intersection(blocks):
                    owners[block].add(parent)
        shared = [block for block, names in owners.items() if len(names) > 1]
        assert not shared, f"blocks {shared} are given up although somebody else has them"
        return self._evict(block_ids)

    def after_step(self) -> None:
        """Check the step that vLLM has made."""
        prepared, self._prepared = self._prepared, None
        agent, scheduler = self._agent, self._scheduler
        for request in [*scheduler.waiting, *(scheduler.running if agent.frozen else ())]:
            assert request.priority == int(request.priority), f"{request.request_id} keeps a rank in its priority"
        if prepared is not None:
            self._check_probes(prepared)
        if prepared is None or agent.is_async:
            return
        scheduled = self._engine.schedule[-1]
        joined = prepared.shared & scheduled.keys()
        assert len(joined) <= prepared.may_join or not prepared.shared, (
            f"{len(joined)} of a phase join a step, {prepared.may_join} may"
        )
        prompts = sum(tokens for name, tokens in scheduled.items() if name not in prepared.decodes)
        assert prepared.prompt_tokens is None or prompts <= prepared.prompt_tokens, (
            f"a step of {prompts} prompt tokens, {prepared.prompt_tokens} allowed"
        )
        if prepared.admitted is not None:
            came = {r for r in scheduled if not is_probe(r)} - prepared.running
            answers = prepared.admitted - prepared.running
            held = came <= answers if prepared.are_first else len(came) <= len(answers)
            assert held, f"{sorted(came)} come in while admission is held"
