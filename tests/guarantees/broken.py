"""Every guarantee of the README, the patches that break it, and the test that fails under each patch.

Pure data. A guarantee is named by the beginning of its text; a `Mutant` is the same as in the simulator.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sim.mutants import MUTANTS, Mutant

GUARD, STATE, LEASE = (
    "meridian_agent/core/guard.py",
    "meridian_agent/link/settings_file.py",
    "meridian_agent/link/lease.py",
)
PROBING, RING, RECLAIM = (
    "meridian_agent/engine/probe_runner.py",
    "meridian_agent/link/record_queue.py",
    "meridian_agent/engine/kv_blocks.py",
)
QUEUES, PLUGIN, VERSION = (
    "meridian_agent/engine/queue_order.py",
    "meridian_agent/plugin.py",
    "meridian_agent/vllm_adapter/version.py",
)
OUTBOX, DIRECTIVES = "meridian_agent/link/outbox.py", "meridian_agent/core/directives.py"
ONE_PASS, NUMPY, STORE, OBSERVER, ATTACH = (
    "kernels/meridian_kernels/one_pass.py",
    "kernels/meridian_kernels/cpu.py",
    "meridian_control/policy/store.py",
    "meridian_agent/worker/observer.py",
    "meridian_agent/worker/attach.py",
)

STOCK = "With the agent off, in shadow"
EXACT = "Thinking ends after exactly the cap's number"
MEASURED = "Entropy and EAT equal an offline computation"
ANSWERS = "An answering request is not preempted"
HELD = "An EAT decision takes effect"
KEPT = "A live request's KV is never dropped"
OUTCOMES = "Every decision ends in exactly one"
DURABLE = "An acknowledged policy update survives"
RECOVERS = "`kill -9` of the control plane costs no request"
NO_WAIT = "No request fails and no step waits"
FREEZE = "A freeze"
SETTINGS = "An engine that starts while the control plane is down"
UNSET = "Without `MERIDIAN_CONTROL` the plugin imports nothing"
PRIVATE = "Neither prompts nor output"

_KNOWN = {mutant.name: mutant for mutant in MUTANTS}


class Broken(NamedTuple):
    """A mutation of a guarantee. test: a pytest node that passes without the mutation and fails under it."""

    guarantee: str
    mutant: Mutant
    test: str

    @property
    def has_engine(self) -> bool:
        """Return whether the test starts a vLLM engine."""
        return self.test.startswith(("tests/engine", "tests/chaos")) and "nothing_is_imported" not in self.test


def _known(guarantee: str, name: str, test: str) -> Broken:
    """Return one of the simulator's mutations."""
    return Broken(guarantee, _KNOWN[name], test)


def _new(guarantee: str, name: str, path: str, old: str, new: str, test: str) -> Broken:  # noqa: PLR0917
    return Broken(guarantee, Mutant(name, path, old, new), test)


BROKEN: tuple[Broken, ...] = (
    _known(STOCK, "a shadowed force is applied", "tests/unit/agent/core/test_directives.py::test_a_shadowed_force"),
    _known(
        STOCK,
        "a shadowed plan is obeyed",
        "tests/unit/agent/core/test_directives.py::test_shadowed_and_stock_plans_are_not_obeyed",
    ),
    _new(
        STOCK,
        "a shadowed cap is applied on an engine",
        DIRECTIVES,
        "        live.set_cap(Cap(cap.decision_id, cap.max_think_tokens, cap.shadow, cap.answer_reserve_tokens))\n",
        "        live.set_cap(Cap(cap.decision_id, cap.max_think_tokens, False, cap.answer_reserve_tokens))\n",
        "tests/engine/test_equality.py::test_shadow",
    ),
    _known(EXACT, "cap one token late", "tests/unit/agent/core/test_directives_caps.py::test_caps_are_exact"),
    _new(
        EXACT,
        "cap one token late on an engine",
        "meridian_agent/core/think_limit.py",
        "state.phase is Phase.THINK and state.think_tokens >= limit.tokens:\n            return row",
        "state.phase is Phase.THINK and state.think_tokens > limit.tokens:\n            return row",
        "tests/engine/test_decisions.py::test_cap_is_exact",
    ),
    _known(
        EXACT,
        "a second token of an ending forgotten",
        "tests/unit/agent/core/test_directives_caps.py::test_two_token_endings_over_draft_rows",
    ),
    _new(
        MEASURED,
        "entropy 1e-4 nats too high",
        ONE_PASS,
        "        columns[to[0], place] = log_total - weighted / total\n",
        "        columns[to[0], place] = log_total - weighted / total + 1e-4\n",
        "tests/engine/test_signals.py::test_token_signals",
    ),
    _new(
        MEASURED,
        "entropy 1e-4 nats too high, against the reference",
        NUMPY,
        "    floats[0] = log_total - np.add.reduce(shifted, axis=1) / total\n",
        "    floats[0] = log_total - np.add.reduce(shifted, axis=1) / total + 1e-4\n",
        "tests/unit/kernels/test_kernels.py",
    ),
    _new(
        MEASURED,
        "Model Runner V2 measured after its masks",
        ATTACH,
        "        if logits is not None:\n            observer.guard.run(observer.on_logits, logits)\n",
        "        if logits is not None:\n            observer.guard.run(observer.on_logits, logits * 1.01)\n",
        "tests/engine/test_matrix.py::test_feature[v2-async: greedy: tokens as stock's; phases, entropy and rank of "
        "each]",
    ),
    _new(
        MEASURED,
        "one probe's row taken for another's",
        "meridian_agent/worker/probe_rows.py",
        "            indices[place] = indices[row]\n",
        "            indices[place] = indices[rows[own - 1 - place]]\n",
        "tests/engine/test_matrix.py::test_feature[example: ExampleConnector hears of no probe; their value and cost]",
    ),
    _new(
        STOCK,
        "a token sampled from a probe's row",
        "meridian_agent/worker/probe_rows.py",
        "            indices[row] -= count\n",
        "            indices[row] -= 0\n",
        "tests/engine/test_signals.py::test_probes_stay_invisible[rows]",
    ),
    _new(
        STOCK,
        "a token sampled from a probe's row on Model Runner V2",
        "meridian_agent/worker/probe_rows.py",
        "        own[of] = first\n",
        "        own[of] = last\n",
        "tests/engine/test_matrix.py::test_feature[v2: EAT probes: their value and cost]",
    ),
    _new(
        STOCK,
        "a probe's tokens counted as computed on Model Runner V2",
        "meridian_agent/worker/probe_rows.py",
        "            return output, sampled, rejected + appended\n",
        "            return output, sampled, rejected\n",
        "tests/engine/test_matrix.py::test_feature[v2: EAT probes: their value and cost]",
    ),
    _new(
        MEASURED,
        "drafts' rows taken for the first ones",
        OBSERVER,
        "            self._measure(state.logits, req_ids, first_rows(req_ids, drafts))\n",
        "            self._measure(state.logits, req_ids, None)\n",
        "tests/engine/test_matrix.py::test_feature[ngram: greedy: tokens as stock's; phases, entropy and rank of each]",
    ),
    _new(
        ANSWERS,
        "running order by arrival",
        QUEUES,
        "            (live.effective_rank if (live := by_id.get(request.request_id)) is not None else unknown)\n",
        "            unknown\n",
        "tests/engine/test_pressure.py::test_answers_are_never_preempted_before_thinking",
    ),
    _new(
        ANSWERS,
        "no rank within a priority",
        QUEUES,
        "request.priority = own + min(live.effective_rank, MAX_RANK) / RANK_SCALE",
        "request.priority = own",
        "tests/engine/test_matrix.py::test_feature[priority: priority policy: answers first between requests of equal "
        "priority]",
    ),
    _new(
        HELD,
        "held three times as long",
        PROBING,
        "time.monotonic() + hold_ms / 1e3)",
        "time.monotonic() + 3 * hold_ms / 1e3)",
        "tests/sim/test_holds.py::test_by_default_a_request_waits_50_ms_at_most",
    ),
    _new(
        HELD,
        "slow steps end the wait",
        PROBING,
        "            waits = scheduler.current_step < last_step or 0 <= live",
        "            waits = 0 <= live",
        "tests/sim/test_holds.py::test_slow_steps_do_not_end_the_wait",
    ),
    _new(
        HELD,
        "held until the step of the probe only",
        PROBING,
        "            answered = live.asked_in and live.asked_in <= answered_step\n",
        "            answered = live.asked_in\n",
        "tests/sim/test_holds.py::test_a_request_waits_for_exactly_its_hold",
    ),
    _new(
        HELD,
        "two tokens go by under asynchronous scheduling",
        PROBING,
        "            answered = live.asked_in and live.asked_in <= answered_step\n",
        "            answered = live.asked_in\n",
        "tests/engine/test_matrix.py::test_feature[async: entropy rules end thinking]",
    ),
    _new(
        HELD,
        "the engine sleeps 200 ms as it wakes the link",
        RING,
        "            self._wanted = 0\n            self._bell.put(None)\n\n    def qsize",
        "            self._wanted = 0\n            self._bell.put(None)\n"
        '            __import__("time").sleep(0.2)\n\n    def qsize',
        "tests/engine/test_never_waits.py::test_no_hook_waits[served]",
    ),
    _new(
        KEPT,
        "shared blocks given up",
        RECLAIM,
        "    return {b for b in block_ids[kept:] if reference_count(b) == 1}\n",
        "    return set(block_ids[kept:])\n",
        "tests/engine/test_shared_blocks.py::test_what_a_live_request_shares_is_left_alone",
    ),
    _new(
        KEPT,
        "shared blocks given up, as arithmetic",
        RECLAIM,
        "    return {b for b in block_ids[kept:] if reference_count(b) == 1}\n",
        "    return set(block_ids[kept:])\n",
        "tests/unit/agent/engine/test_reclaim.py",
    ),
    _new(
        KEPT,
        "the prompt's blocks given up",
        RECLAIM,
        "    kept = reachable_tokens // block_size\n",
        "    kept = 0\n",
        "tests/unit/agent/engine/test_reclaim.py",
    ),
    _known(
        OUTCOMES,
        "no outcome for a replaced probe",
        "tests/unit/agent/core/test_directives.py::test_of_a_requests_probes_only_the_newest_waits",
    ),
    _known(
        OUTCOMES,
        "two outcomes for a superseded force",
        "tests/unit/agent/core/test_directives.py::test_a_second_force_is_superseded_by_the_one_under_way",
    ),
    _known(OUTCOMES, "no outcome for a replaced plan", "tests/sim/test_sim.py::test_seeds[0]"),
    _new(
        DURABLE,
        "a repeated request id stores again",
        STORE,
        "            if (stored := await self.answered(request_id, policy)) is not None:\n",
        "            if (stored := await self.answered(request_id, policy)) is None and False:\n",
        "tests/contract/control/storage/test_store.py::test_a_request_id_stores_once",
    ),
    _new(
        DURABLE,
        "SQLite does not wait for the disk",
        "meridian_control/storage/database.py",
        "synchronous=FULL",
        "synchronous=OFF",
        "tests/contract/control/storage/test_store.py::test_durability_settings",
    ),
    _new(
        DURABLE,
        "an update is acknowledged and not committed",
        STORE,
        "                await insert_revision(connection, stored, request_id)\n",
        "                await insert_revision(connection, stored, request_id)\n"
        "                await connection.rollback()\n",
        "tests/contract/control/storage/test_store.py::test_kill_loses_nothing_acknowledged",
    ),
    _new(
        RECOVERS,
        "an exception of ours reaches vLLM",
        GUARD,
        "            self.trip(hook, error)\n            return None\n",
        "            self.trip(hook, error)\n            raise\n",
        "tests/unit/agent/core/test_guard.py::test_the_first_failure_switches_off",
    ),
    _new(
        RECOVERS,
        "no way back from a fault",
        GUARD,
        "        if self.fault and self.rest_s() == 0:\n",
        "        if False:\n",
        "tests/unit/agent/core/test_guard.py::test_it_comes_back_after_its_rest_and_in_the_end_no_more",
    ),
    _new(
        RECOVERS,
        "a fourth return within the hour",
        GUARD,
        "        returns = not self.starting and recent <= len(RESTS_S)\n",
        "        returns, recent = not self.starting, min(recent, len(RESTS_S))\n",
        "tests/unit/agent/core/test_guard.py::test_it_comes_back_after_its_rest_and_in_the_end_no_more",
    ),
    _new(
        RECOVERS,
        "no snapshot on the next stream",
        OUTBOX,
        "        if self.snapshot_due or not self._streaming:\n",
        "        if False:\n",
        "tests/contract/agent/link/test_stream.py::test_the_snapshot_comes_first",
    ),
    _new(
        NO_WAIT,
        "the engine waits for the link with each report",
        OUTBOX,
        "        self.ring.lay(record, record.presses)\n",
        '        self.ring.lay(record, record.presses)\n        __import__("threading").Event().wait(0.2)\n',
        "tests/engine/test_never_waits.py::test_no_hook_waits",
    ),
    _known(FREEZE, "forced while frozen", "tests/engine/test_fail_static.py::test_frozen_output_is_stocks"),
    _new(
        FREEZE,
        "a freeze that does not end by itself",
        LEASE,
        "        return self._frozen_until > 0 and self.clock() < self._frozen_until\n",
        "        return self._frozen_until > 0\n",
        "tests/contract/agent/link/test_stream_leases.py::test_the_agent_thaws_by_itself",
    ),
    _new(
        SETTINGS,
        "nothing is read at the start",
        STATE,
        "        if settings.scheduler_lease_ms:\n",
        "        return None\n        if settings.scheduler_lease_ms:\n",
        "tests/unit/agent/link/test_state.py::test_what_is_kept_comes_back",
    ),
    _known(
        SETTINGS,
        "acknowledged before it holds",
        "tests/contract/agent/link/test_stream_settings.py::test_an_ack_waits_for_the_step_that_applies",
    ),
    _known(
        SETTINGS,
        "a refused revision sent again",
        "tests/contract/agent/link/test_stream_settings.py::test_a_refused_revision_is_not_sent_again_on_a_new_stream",
    ),
    _new(
        UNSET,
        "hooks are imported whatever the environment says",
        PLUGIN,
        '    if not os.environ.get("MERIDIAN_CONTROL", "").strip(", \\t\\r\\n"):\n        return\n',
        "    import meridian_agent.install\n",
        "tests/engine/test_faults.py::test_unset_means_nothing_is_imported",
    ),
    _new(
        UNSET,
        "a vLLM that does not fit is governed",
        VERSION,
        "    if not low <= minor() <= high:\n",
        "    if False:\n",
        "tests/engine/test_faults.py::test_a_vllm_that_does_not_fit_stays_stock_and_says_so",
    ),
    _new(
        PRIVATE,
        "a fault is told with its text",
        GUARD,
        'clean(f"{name}: {type_and_place(error)}", MAX_FAULT)',
        'clean(f"{name}: {type(error).__name__}: {error}", MAX_FAULT)',
        "tests/engine/test_private.py::test_neither_prompts_nor_output_leave_the_engine",
    ),
    _new(
        PRIVATE,
        "a fault is told with its text, in the simulator",
        GUARD,
        'clean(f"{name}: {type_and_place(error)}", MAX_FAULT)',
        'clean(f"{name}: {type(error).__name__}: {error}", MAX_FAULT)',
        "tests/sim/test_private.py::test_other_words_are_the_same_bytes[a fault that quotes every request]",
    ),
    _new(
        PRIVATE,
        "the last token travels with a probe's result",
        PROBING,
        "        measured = (placed.decision_id, live.slot, placed.think_tokens, eat_nats, placed.cost_tokens)\n",
        "        measured = (\n            placed.decision_id, live.slot, placed.think_tokens, eat_nats,"
        " live.ref.all_token_ids[-1]\n        )\n",
        "tests/sim/test_private.py::test_other_words_are_the_same_bytes[no fault]",
    ),
)


def item_of(guarantee: str, items: list[str]) -> str:
    """Return the promise of the README's table that begins with this text. Raises ValueError unless exactly one
    does."""
    found = [item for item in items if item.startswith(guarantee)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} guarantees begin with {guarantee!r}")
    return found[0]
