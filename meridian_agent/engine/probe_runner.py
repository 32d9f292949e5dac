"""Runs EAT probes in the engine: places probes, collects their results, and holds the requests that wait for a decision
from a result.

A probe is a row of its request's own step where the engine can compute such rows, and else a request of its own. The
module owns the probes under way and the requests that are held for them. `probe_admission` decides which probe
fits, and `directives` has the probes that the control plane asks for. Runs on the engine-core thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from meridian_agent.core import probe_admission
from meridian_agent.core.live_request import OtherAnswers
from meridian_agent.core.phases import FLAG_GOES_ON, FLAG_SENTENCE, Phase
from meridian_agent.core.probe_admission import HOLD_STEPS, MAX_HOLD_MS
from meridian_agent.core.request_info import PROBE_PREFIX
from meridian_agent.core.sentences import CERTAIN, LIKELY
from meridian_agent.core.step_record import MeasuredProbe, Outcome
from meridian_agent.core.step_signals import PROBED
from meridian_agent.engine import prefill_limits, stock_restore
from meridian_agent.engine.queue_order import skip_step
from meridian_agent.vllm_adapter import probe_rows, request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.probe_admission import Asked
    from meridian_agent.core.step_record import StepRecord
    from meridian_agent.core.step_signals import StepSignals
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.vllm_types import EngineCoreOutputs, ModelRunnerOutput, Scheduler, SchedulerOutput


class ProbeRunner:
    """The probes of one engine.

    shares_blocks: probes may begin on a block that is partly filled. never: why every probe is refused; empty if probes
    are possible.
    """

    def __init__(
        self, tracker: Tracker, directives: Directives, block_size: int, shares_blocks: bool, never: str = ""
    ) -> None:
        self._tracker, self._directives, self._never = tracker, directives, never
        self._block_size, self._shares_blocks = block_size, shares_blocks
        # Probes that are requests of their own, by request id; probes that are rows of the coming step, by the id of
        # the probed request; and those whose row the step under way computes, in the order of the worker's results.
        self.placed: dict[str, probe_admission.Placed] = {}
        self.rows: dict[str, probe_admission.Placed] = {}
        self.computed: list[probe_admission.Placed] = []
        # Whether vLLM has ended a probe by itself, whose output may follow.
        self.ended_early = False
        # Whether the engine, workers included, can compute a probe as a row of its request.
        self.rows_possible = False
        # Thinking requests that wait for a decision from their probe, in order of arrival, each with the step up to
        # which it waits even if its hold is over.
        self.held: dict[LiveRequest, int] = {}
        self.tokens = 0
        self._other_answers = OtherAnswers()
        # The step from which on the probes that have reached their places are placed together.
        self._collect_at = 0
        self._number = 0
        self._keep_places_until = 0

    def place(self, scheduler: Scheduler, observes: bool, taken: tuple[int, int] = (0, 0)) -> list[int]:
        """Put the probes whose place in the text has come at the head of the waiting queue; return the tokens that each
        one costs. observes: the workers measure entropy. taken: free running places and KV blocks that are for waiting
        requests."""
        placed, markers, probes = list[int](), self._tracker.markers, self._directives.probes
        if len(probes) and self._would_cut_seeded(scheduler, len(probes)):
            # No place is kept for the probes, so that the prompt is computed soon.
            return placed
        self.keep_places(scheduler)
        wanted: prefill_limits.Wanted | None = None
        collecting = self.collects(scheduler)
        for asked, past in self._asked_here(scheduler):
            decision_id, live, flags, hold_ms = asked
            if observes and self._place_row(scheduler, asked, past):
                continue
            if past == 0 and live.since_end(flags, 0, LIKELY if hold_ms else CERTAIN) is None:
                # Only a row can be given up once the next token shows that the sentence goes on.
                probes.put_back(asked)
                continue
            self._keep_places(scheduler)
            may_wait = past is not None and observes and not self._never and probe_admission.may_wait(asked)
            if may_wait and not collecting:
                self._begin_to_collect(scheduler)
                probes.put_back(asked, past)
                continue
            # If probes cannot share a partly filled block, they compute the tokens since the last full block again.
            known = len(live.ref.all_token_ids) - (past or 0)
            again = 1 if self._shares_blocks else known % self._block_size
            appended = len(markers.probe_of(live.own_state.start))
            cost, left = appended + again, scheduler.max_model_len - known - appended
            room = self._room(scheduler, placed, taken)
            reason = self._never or probe_admission.refusal(live, room, self._block_size, cost, left)
            if placed and may_wait and reason in probe_admission.CROWDED:
                probes.put_back(asked, past)
                continue
            if reason or not observes:
                self._directives.report(decision_id, Outcome.REFUSED, live, reason or "not observing")
                continue
            wanted = wanted or scheduler_api.wanted_tokens(scheduler)
            if not prefill_limits.leave_room(scheduler, wanted, [*placed, cost], self._shares_blocks):
                probes.put_back(asked, past if may_wait else None)
                continue
            placed.append(cost)
            think_tokens = live.think_tokens - (past or 0)
            self._enter(scheduler, probe_admission.Placed(decision_id, live, think_tokens, known - 1), hold_ms)
        return placed

    def reach(self, scheduler: Scheduler, past: Mapping[LiveRequest, int]) -> bool:
        """Let the probes of these requests, which have reached their places, wait for others. past: number of tokens
        after each place. Return False if they must be placed now."""
        if scheduler.num_spec_tokens:
            return False
        self._begin_to_collect(scheduler)
        return self._directives.probes.reach(past)

    def _begin_to_collect(self, scheduler: Scheduler) -> None:
        if not self._directives.probes.reached:
            self._collect_at = scheduler.current_step + probe_admission.COLLECT_STEPS

    def collects(self, scheduler: Scheduler) -> bool:
        """Return whether the probes that have reached their places are to be placed in the coming step."""
        return bool(self._directives.probes.reached) and scheduler.current_step >= self._collect_at

    def _would_cut_seeded(self, scheduler: Scheduler, probes: int) -> bool:
        """Return whether this many probes may take tokens that a prompt needs which must not be cut."""
        markers = self._tracker.markers
        most = self._block_size + markers.longest + len(markers.answer_prefix)
        # Rows have a share of the step's tokens, and so have probes that are requests of their own.
        shares = 2 * scheduler.max_num_scheduled_tokens // probe_admission.STEP_SHARE
        all_decode = self._tracker.run.members == len(scheduler.running)
        return scheduler_api.would_cut_seeded(scheduler, min(shares, probes * most), all_decode=all_decode)

    def place_rows(self, scheduler: Scheduler, parents: Mapping[LiveRequest, int]) -> bool:
        """Place the probes of these requests, which belong behind the newest tokens, as rows of the requests. Return
        False at the first one that cannot be a row; it and those after it go on waiting."""
        if self._would_cut_seeded(scheduler, len(parents)):
            return False
        for live in parents:
            asked = self._directives.probes.take(live)
            if not self._place_row(scheduler, asked, parents[live]):
                self._directives.probes.put_back(asked)
                return False
        return True

    def _asked_here(self, scheduler: Scheduler) -> list[tuple[Asked, int | None]]:
        """Take the probes whose place in the text has come, each with the number of tokens after that place, and those
        of requests that do not think any more; the others go on waiting."""
        here, markers, probes = list[tuple["Asked", int | None]](), self._tracker.markers, self._directives.probes
        # Requests whose probes have reached their places, and wait for others.
        reached = list(probes.reached) if self.collects(scheduler) else ()
        collected = {live: past for live in reached if (past := probes.past(live)) is not None}
        waits = (self.waiting(probes) | probes.reached.keys()) - collected.keys()
        for each in [each for each in probes if each[1] not in waits]:
            _, live, flags, hold_ms = each
            past, misplaced = collected.get(live), False
            if past is None:
                # If a step brings several tokens, the end of a sentence need not be the last of them; and the end may
                # become known with the token after it.
                past = live.since_end(flags, scheduler.num_spec_tokens + 1, self.enough(hold_ms))
                misplaced = past is None or (markers.longest > 1 and live.state.may_be_in_marker(markers))
            if live.phase is not Phase.THINK or live.ending is not None or not misplaced:
                probes.take(live)
                here.append((each, past))
        return here

    def enough(self, hold_ms: int) -> int:
        """Return the flag with which a request's newest token counts as the place of a probe at the end of a sentence.

        A row is placed where the text so far may end a sentence, and its result is dropped if the token of the same
        step shows that the sentence goes on. A held request gets no token that could show it, so its sentence must be
        likely to have ended. Every other probe is placed where an end is known.
        """
        if hold_ms:
            return LIKELY
        return FLAG_SENTENCE if self.rows_possible and not self._never else CERTAIN

    def waiting(self, probes: Iterable[Asked]) -> AbstractSet[LiveRequest]:
        """Return thinking requests whose newest tokens have no end of a sentence for which their probe waits."""
        run = self._tracker.run
        # No member of the run is being ended, and a member's phase is the one that it had when its probe was accepted.
        members = [(live, flags, hold_ms) for _, live, flags, hold_ms in probes if flags and live.run_row >= 0]
        awaited = {live.run_row: (flags, self.enough(hold_ms)) for live, flags, hold_ms in members}
        waiting = {live for live, *_ in members} - run.at_ends(awaited).keys()
        if (most := run.tokens_per_step) == 1:
            return waiting
        near = run.flagged_rows()
        return {live for live in waiting if live.run_row not in near and live.think_tokens - live.passed[0] > most}

    def _place_row(self, scheduler: Scheduler, asked: Asked, past: int | None) -> bool:
        """Compute a probe as a row of its request in the coming step; return False if that cannot be. A request that
        waits for the decision gets no token in the step of its probe, so its probe is a request of its own."""
        decision_id, live, flags, hold_ms = asked
        if not self.rows_possible or self._never or past != 0 or hold_ms:
            return False
        if live.phase is not Phase.THINK or live.ending is not None:
            return False
        tokens, rows = self._tracker.markers.probe_of(live.own_state.start), len(self.rows) + 1
        if rows * len(tokens) > scheduler.max_num_scheduled_tokens // probe_admission.STEP_SHARE:
            return False
        # A row takes a block earlier than its request would, and leaves another one free.
        blocks = rows * probe_admission.free_blocks(len(tokens), self._block_size)
        if blocks > scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            return False
        request = live.ref
        if not probe_rows.fits(scheduler, request, len(tokens)):
            return False
        probe_rows.append(request, tokens)
        live.probed_at = live.think_tokens
        self.rows[request.request_id] = probe_admission.Placed(decision_id, live, live.think_tokens, 0, flags=flags)
        return True

    @property
    def needs_places(self) -> bool:
        """Whether a probe waits that will be a request of its own."""
        probes = self._directives.probes
        return not self.rows_possible or bool(probes.reached) or any(hold_ms for *_, hold_ms in probes)

    def keep_places(self, scheduler: Scheduler) -> None:
        """Keep running places free for the next steps, if a probe waits that will be a request of its own."""
        if self.needs_places:
            self._keep_places(scheduler)

    def _keep_places(self, scheduler: Scheduler) -> None:
        self._keep_places_until = scheduler.current_step + probe_admission.PLACE_STEPS

    def _enter(self, scheduler: Scheduler, placed: probe_admission.Placed, hold_ms: int) -> None:
        self._number += 1
        live, known = placed.parent, placed.shared_tokens + 1
        live.probed_at = placed.think_tokens
        tokens = [*live.ref.all_token_ids[:known], *self._tracker.markers.probe_of(live.own_state.start)]
        probe = request_api.probe_request(live.ref, f"{PROBE_PREFIX}{self._number}", tokens, known)
        self.placed[probe.request_id] = placed
        if hold_ms:
            live.hold_until(time.monotonic() + hold_ms / 1e3)
            self.held[live] = scheduler.current_step + HOLD_STEPS
        scheduler.add_request(probe)
        # Without priorities vLLM appends the probe; with priorities it is the first one by its own.
        if isinstance(scheduler.waiting, deque):
            scheduler.waiting.rotate()

    def _room(self, scheduler: Scheduler, beside: list[int], taken: tuple[int, int]) -> probe_admission.Room:
        """Return the room that is left beside the probes of this step. beside: tokens that each of these probes
        costs. taken: as in `place`."""
        limit = min(getattr(scheduler, scheduler_api.admission_limit_name(scheduler)), scheduler.max_num_running_reqs)
        waiting = sum(not placed.cost_tokens for placed in self.placed.values())
        kept = sum(probe_admission.free_blocks(cost, self._block_size) for cost in beside)
        return probe_admission.Room(
            limit - len(scheduler.running) - waiting - taken[0],
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - kept - taken[1],
            scheduler.max_num_scheduled_tokens,
            scheduler.kv_cache_manager.enable_caching,
            sum(beside),
        )

    def reserved(self, scheduler: Scheduler) -> int:
        """Return the number of running places to leave free in the coming step."""
        if scheduler.current_step >= self._keep_places_until:
            return 0
        return probe_admission.reserve(int(getattr(scheduler, scheduler_api.admission_limit_name(scheduler))))

    def shared_with(self, request_id: str) -> tuple[str, int] | None:
        """Return the request whose blocks a probe shares, and the number of shared tokens; None if it shares none."""
        placed = self.placed.get(request_id)
        if placed is None or placed.parent.ref.num_computed_tokens < placed.shared_tokens:
            return None
        return placed.parent.info.request_id, placed.shared_tokens

    def under_way(self, parent: LiveRequest) -> list[str]:
        """Return the ids of the probes of this request that the current step computes."""
        return [name for name, placed in self.placed.items() if placed.parent is parent and placed.cost_tokens]

    def hold(self, scheduler: Scheduler, answered_step: int) -> None:
        """Leave held requests out of the coming step, until the report with the probe's result is answered or the hold
        and HOLD_STEPS steps are over."""
        now = time.monotonic()
        for live, last_step in list(self.held.items()):
            answered = live.asked_in and live.asked_in <= answered_step
            # If the clock were set back, the request would wait for as long; so a wait above the maximum ends too.
            waits = scheduler.current_step < last_step or 0 <= live.held_until - now <= MAX_HOLD_MS / 1e3
            if answered or not waits or live.phase is not Phase.THINK or live.preempted:
                self.held.pop(live, None)
            else:
                skip_step(scheduler, live)

    def scheduled(self, scheduler: Scheduler, tokens: dict[str, int]) -> None:
        """Note the probes that the step computes, and withdraw placed probes that vLLM left out of it. tokens: the
        step's tokens by request id."""
        for request_id, placed in list(self.placed.items()):
            if request_id in tokens:
                placed.cost_tokens += tokens[request_id]
            elif not placed.cost_tokens:
                self._withdraw(scheduler, request_id, Outcome.REFUSED, "no room in the step")

    def take_rows(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Take the probes that are rows of the scheduled step out of vLLM's books, and tell the worker of them. The
        output of the step before never comes if its rows have no result yet."""
        lost, self.computed = self.computed, []
        for placed in lost:
            self._not_measured(placed)
        rows, self.rows = self.rows, {}
        # The worker's results come in the order in which vLLM has scheduled the requests.
        for request_id, tokens in probe_rows.take_back(scheduler, output).items():
            placed = rows.pop(request_id)
            placed.cost_tokens = len(tokens)
            self.computed.append(placed)
        if rows:
            probe_rows.forget(scheduler)
        for placed in rows.values():
            # The request was left out of the step, so it is still where the probe belongs.
            placed.parent.probed_at = -1
            self._directives.probes.put_back((placed.decision_id, placed.parent, placed.flags, 0))

    def row_tokens(self) -> int:
        """Return the number of tokens that the scheduled step computes for probes that are rows."""
        return sum(placed.cost_tokens for placed in self.computed)

    def collect_rows(self, runner_output: ModelRunnerOutput) -> bool:
        """Collect the results of the probes that were rows of the step. Return whether probes wait again, because the
        sentences go on at whose supposed ends they were computed."""
        computed, self.computed = self.computed, []
        wait_again = False
        probed = getattr(runner_output, PROBED, None)
        for row, placed in enumerate(computed):
            wanted = self._tracker.markers.probe_of(placed.parent.own_state.start)
            if placed.flags and self._is_live(placed.parent) and self._goes_on(placed.parent, runner_output):
                self._wait_again(placed)
                wait_again = True
            elif probed is None or placed.cost_tokens < len(wanted):
                self._not_measured(placed)
            else:
                eat_nats, answer = probed[row]
                self._measured(placed, answer, eat_nats)
        return wait_again

    def _goes_on(self, live: LiveRequest, runner_output: ModelRunnerOutput) -> bool:
        """Return whether the step's token shows that the sentence goes on which the request's token before it seemed to
        end. The tracker has not counted the step yet."""
        row = runner_output.req_id_to_index.get(live.info.request_id)
        tokens = [] if row is None else runner_output.sampled_token_ids[row]
        table = self._tracker.sentences
        return len(tokens) > 0 and bool(table.flags[table.step(live.sentence, tokens[0])] & FLAG_GOES_ON)

    def _wait_again(self, placed: probe_admission.Placed) -> None:
        """Let a probe wait for the next end of a sentence, unless its decision is no longer in force."""
        self.tokens += placed.cost_tokens
        if placed.parent in self._directives.probes:
            self._directives.report(placed.decision_id, Outcome.SUPERSEDED, placed.parent)
        elif placed.decision_id:
            self._directives.probes.put_back((placed.decision_id, placed.parent, placed.flags, 0))

    def collect(self, group: EngineCoreOutputs, signals: StepSignals | None, index: dict[str, int]) -> None:
        """Collect the results of probes, and remove the probes from the output for the clients."""
        for out in group.outputs:
            placed = self.placed.pop(out.request_id, None)
            if placed is None:
                continue
            row = index.get(out.request_id)
            # vLLM may end a probe with an error and without a token.
            if signals is None or row is None or not out.new_token_ids:
                self._not_measured(placed)
                continue
            self._measured(placed, out.new_token_ids[0], float(signals.entropy_nats[signals.row(row)]))
        self.ended_early = False
        stock_restore.hide_probes([group])

    def _not_measured(self, placed: probe_admission.Placed) -> None:
        """Report that a probe has no result, and release its request, because no answer to a result will come."""
        self.held.pop(placed.parent, None)
        self._directives.report(placed.decision_id, Outcome.REFUSED, detail="not measured")

    def _measured(self, placed: probe_admission.Placed, answer: int, eat_nats: float) -> None:
        self.tokens += placed.cost_tokens
        live = placed.parent
        if not self._is_live(live):
            # The request was aborted during the step, or ended in the previous one, which asynchronous scheduling may
            # find out late.
            self._directives.report(placed.decision_id, Outcome.REQUEST_GONE, live)
            return
        if not math.isfinite(eat_nats):
            # The row held NaN or infinity, so its likeliest token is no trial answer either.
            self._not_measured(placed)
            return
        same_answers = live.count_same_answer(answer)
        empty = answer in live.ref.sampling_params.all_stop_token_ids and not self._tracker.markers.answer_prefix
        other = self._other_answers.is_other(live.info.request_id, answer)
        measured = placed.decision_id, live.slot, placed.think_tokens, eat_nats, placed.cost_tokens
        self._tracker.record.probes.append(MeasuredProbe(*measured, same_answers, empty, other))
        self._directives.report(placed.decision_id, Outcome.APPLIED)

    def _is_live(self, parent: LiveRequest) -> bool:
        """Whether a request is live; if not, another one may have its slot by now."""
        return self._tracker.by_slot.get(parent.slot) is parent

    def sent(self, record: StepRecord) -> None:
        """Note which held requests have their probe's result in this record, because they wait for the answer to its
        report."""
        for live in self.held:
            if not live.asked_in and any(probe.slot == live.slot for probe in record.probes):
                live.asked_in = record.step
                record.urgent = True

    def new_stream(self) -> None:
        """Release held requests, and detach the probes under way from the decisions of the old stream."""
        self.held.clear()
        for placed in (*self.placed.values(), *self.rows.values(), *self.computed):
            placed.decision_id = 0

    def end(self, scheduler: Scheduler) -> None:
        """Withdraw all probes and release all held requests."""
        self.held.clear()
        self._keep_places_until = 0
        self.withdraw_all(scheduler, Outcome.AGENT_OFF)

    def withdraw_all(self, scheduler: Scheduler, outcome: Outcome, detail: str = "") -> None:
        """Take all probes that are requests of their own out of the engine."""
        for request_id in list(self.placed):
            self._withdraw(scheduler, request_id, outcome, detail)

    def ended(self, request_id: str) -> None:
        """Forget a probe that vLLM has ended together with all requests, as it does before an engine sleeps."""
        if placed := self.placed.pop(request_id, None):
            self.ended_early = True
            self._directives.report(placed.decision_id, Outcome.REQUEST_GONE)

    def _withdraw(self, scheduler: Scheduler, request_id: str, outcome: Outcome, detail: str) -> None:
        """Take a probe out of the engine and report the outcome of its decision."""
        placed = self.placed.pop(request_id)
        stock_restore.take_out(scheduler, request_id)
        self.held.pop(placed.parent, None)
        self._directives.report(placed.decision_id, outcome, detail=detail)
