"""Every metric of the control plane: its name, its labels, its help text, and advice to the operator.

Collectors take names, labels and texts from this list, so every exposed metric is listed. The metrics of a capability
stand in its own folder. `python -m deploy.generate` writes the tables of the operations guide from all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.metric_entry import counter, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian_control.common.metric_entry import Entry
    from meridian_control.engine.part import Capability

ENGINE = ("engine",)
GRPC = ("grpc_type", "grpc_service", "grpc_method")

REPLICA = (
    gauge("meridian_build_info", ("version",), "Always 1; the label has this replica's version.", "Compare replicas."),
    gauge(
        "meridian_replica_leads",
        (),
        "1 on the replica that leads, which alone drives rollouts.",
        "The sum over replicas is not 1: see the alert MeridianNotOneLeader.",
    ),
    gauge(
        "meridian_policy_revision",
        (),
        "Policy revision that this replica gives to engines that connect.",
        "Replicas differ: see the alert MeridianReplicasDisagree.",
    ),
    gauge(
        "meridian_engines",
        (),
        "Engines connected to this replica.",
        "Fewer than the vLLM pods: see the alert MeridianFewerEngines.",
    ),
    gauge(
        "meridian_engine_memory_bytes",
        (),
        "About the memory that this replica uses for the requests of its engines.",
        "Near `--max-engines-mib`: streams will be refused; add replicas, or find the engine by `meridianctl engines`.",
    ),
    histogram(
        "meridian_event_loop_delay_seconds",
        (),
        "How late the event loop does what is due. Answers to engines are as late.",
        "Above 0.05 for minutes: see the alert MeridianLoopLate.",
    ),
    gauge(
        "meridian_agents",
        ("state",),
        "Engines by their agent's state, including engines whose stream to this replica has ended within 10 minutes.",
        "`off` for minutes: see the alert MeridianAgentOff.",
    ),
    gauge(
        "meridian_engines_sharing_name",
        (),
        "Engines connected to this replica under the name of another. `meridian_engines` counts a name once, and its "
        "series are those of the newest stream.",
        "Not 0 for longer than a minute: give each engine a `MERIDIAN_ENGINE_ID` of its own.",
    ),
    gauge(
        "meridian_engines_without_series",
        (),
        "Connected engines beyond the first 500, which have no series of their own.",
        "Not 0: add replicas.",
    ),
)

ROLLOUT = (
    gauge(
        "meridian_rollout_state",
        ("state",),
        "1 for the newest rollout's state: running, paused, halted, completed, rolled_back, aborted. Like all metrics "
        "of rollouts, it comes from the replica that leads.",
        "`halted`, `rolled_back`: `meridianctl rollout status` names the violated guardrail.",
    ),
    gauge(
        "meridian_rollout_age_seconds",
        (),
        "Seconds since the newest rollout's last event.",
        "Below 3600 in the state `rolled_back`: as for that state.",
    ),
    gauge(
        "meridian_rollout_step",
        (),
        "Step that the newest rollout is in, counted from 1.",
        "Unchanged for longer than the bake time: `meridianctl rollout status` says what it waits for.",
    ),
    gauge("meridian_rollout_steps", (), "Steps in the newest rollout.", "Compare with `meridian_rollout_step`."),
    gauge(
        "meridian_rollout_engines",
        ("policy",),
        "Connected engines that have applied the candidate, and the others.",
        "No `candidate` in a running rollout: no engine fits the step, or the engines refuse the candidate.",
    ),
    gauge(
        "meridian_rollout_guardrail_ratio",
        ("guardrail",),
        "Newest reading of a guardrail, divided by its limit; above 1 the guardrail is violated.",
        "Near 1: pause the rollout and look into the cause.",
    ),
)

DECISIONS = (
    counter(
        "meridian_decisions_total",
        ("kind", "reason"),
        "Decisions made, by kind (cap, force, hand_over, plan, preempt, probe, tier); forces also by the rule that "
        "fired, handovers and preemptions by their reason.",
        "Forces stop or multiply without a policy change: the workload or the model has changed; calibrate again.",
    ),
    counter(
        "meridian_outcomes_total",
        ("kind", "reason", "outcome"),
        "Outcomes of decisions. Kind `probe` with outcome `applied` counts the probes that were measured.",
        "`refused` forces: see the alert MeridianForcesRefused; `agent_off`: streams end too often.",
    ),
    counter(
        "meridian_unknown_outcomes_total",
        (),
        "Outcomes that agents reported for decisions that were never made on their stream.",
        "Grows: agent and control plane disagree; compare their versions and report the bug.",
    ),
    histogram(
        "meridian_decision_staleness_steps",
        (),
        "Engine steps from the report that a force or plan was decided from to the report that it was applied.",
        "Above a few steps: see `meridian_agent_round_trip_seconds`.",
    ),
    counter(
        "meridian_policy_nacks_total",
        (),
        "Policies refused by agents.",
        "See the alert MeridianPolicyRefused.",
    ),
)

THINKING = (
    histogram(
        "meridian_ttot_seconds",
        (),
        "Time to output token: from the end of thinking to the first answer token.",
        "Rises: answers wait for thinking or for memory; look at preemptions and the step time.",
    ),
    histogram(
        "meridian_output_itl_seconds",
        (),
        "Inter-token latency of answers, measured by when reports arrive.",
        "Above `output_tpot_budget_ms`: lower `think_batch_multiplier`, or scale out.",
    ),
    histogram(
        "meridian_queueing_seconds",
        (),
        "Queueing time: from when vLLM adds a request to its queue until it schedules the request's first step.",
        "Rises: requests wait for others to end; add engines, or set `queueing_p99_ms`.",
    ),
    histogram(
        "meridian_request_think_tokens",
        (),
        "Thinking tokens of a finished request that thought.",
        "Shifts without a policy change: calibrate again.",
    ),
    counter(
        "meridian_think_ends_total",
        ("reason",),
        "Ends of thinking, by reason; with _shadowed those that a rule in shadow decided for a measured request.",
        "Mostly `hard_cap`: the cap is too low, or the rules are not calibrated. Mostly `answer_reserve`: `max_tokens` "
        "is too low, or the reserve too large. Many `premature_stop`: look at the model's chat template, sampling "
        "parameters and quantization.",
    ),
    counter(
        "meridian_tokens_saved_against_cap_total",
        ("reason",),
        "Thinking tokens between a rule's end and the request's cap: an upper bound of the saving.",
        "No estimate: most requests would have ended before their cap.",
    ),
    counter(
        "meridian_tokens_saved_shadow_estimate_total",
        ("section", "reason"),
        "Thinking tokens after the place where a rule in shadow would have ended thinking: an estimate of its saving. "
        "Reason `any` counts from the first rule of the section.",
        "Large, and calibration found few harmful stops: take the rule out of shadow.",
    ),
    counter(
        "meridian_shadow_think_tokens_total",
        ("section",),
        "All thinking tokens of the requests that the shadow estimate covers.",
        "Divide the estimate's `any` by this value for the share that would be saved.",
    ),
    counter(
        "meridian_answers_total",
        ("kind",),
        "Ends of thinking by what followed: answered, empty, long or reentry, after natural or forced ends; unended.",
        "`empty_after_forced` or `long_after_forced` above the same after natural ends: rules stop thinking too early.",
    ),
)

STREAMS = (
    counter(
        "meridian_reports_total",
        (),
        "Step reports received.",
        "0 while engines serve: the agents are DEGRADED; see `meridian_stream_ends_total`.",
    ),
    counter("meridian_token_events_total", (), "Token rows received.", "Plan capacity: rows per second and core."),
    counter(
        "meridian_requests_total",
        (),
        "Requests opened on engines, without those that were opened while their engine had no stream.",
        "Compare with the gateway's count.",
    ),
    counter(
        "meridian_unknown_efforts_total",
        (),
        "Requests with an effort that no override names and that is no level of the APIs: as without an effort.",
        "Grows: `meridianctl explain` shows a request's effort; add an override for it, or correct the client.",
    ),
    counter(
        "meridian_unread_prompts_total",
        (),
        "Requests whose prompts came as embeddings: their thinking is unknown until the model writes a marker.",
        "Grows, and such requests think too long: let the clients send text or token ids.",
    ),
    counter(
        "meridian_stream_ends_total",
        ("reason",),
        "Agent streams that ended, by reason.",
        "See the alert MeridianStreamsBreak. `disconnected`: the network or a pod failed.",
    ),
    counter(
        "meridian_client_faults_total",
        ("cause",),
        "Calls and streams refused because of their caller, by cause.",
        "`invalid_request`: a client that is not an engine uses the port. `host_only`: access is not configured. "
        "`too_many`: a script calls without pauses.",
    ),
    counter(
        "meridian_preemptions_total",
        ("phase",),
        "Requests preempted, by their phase at that time.",
        "`output` is not 0: see the alert MeridianAnswersPreempted.",
    ),
)

ENGINES = (
    gauge(
        "meridian_engine_info",
        ("engine", "model", "vllm_version", "agent_version"),
        "Always 1, for every connected engine.",
        "Join on it for model and versions; find engines that an upgrade left out.",
    ),
    gauge(
        "meridian_engine_state",
        ("engine", "state"),
        "1 for the agent's state: ready, stale, degraded or off; without a stream, the state it has if it still runs.",
        "`off`: see the alert MeridianAgentOff. `stale`, `degraded`: the engine is gone, the network failed, or the "
        "engine has moved to another replica, which has it as `ready`.",
    ),
    gauge(
        "meridian_engine_revision",
        ENGINE,
        "Policy revision that the agent has applied.",
        "Behind the wanted revision for minutes: see the alert MeridianRevisionBehind.",
    ),
    gauge(
        "meridian_engine_wanted_revision",
        ENGINE,
        "Policy revision that the control plane wants the engine to have.",
        "Compare with `meridian_engine_revision`.",
    ),
    gauge(
        "meridian_engine_refused",
        ENGINE,
        "1 while the engine refuses the newest revision that it was given.",
        "1: see the alert MeridianPolicyRefused.",
    ),
    gauge(
        "meridian_engine_frozen",
        ENGINE,
        "1 while the engine is frozen, until its agent confirms the thaw.",
        "`meridianctl thaw` once the reason is gone.",
    ),
    gauge("meridian_engine_limit", ("engine", "limit"), "Engine limit in force.", "See `meridianctl engines`."),
    gauge("meridian_engine_running_requests", ENGINE, "Requests in vLLM's running queue.", "Plan capacity with it."),
    gauge(
        "meridian_engine_waiting_requests",
        ENGINE,
        "Requests in vLLM's waiting queue: the queue depth.",
        "Grows: scale out. If `hold_admission` is in force, thinking holds too much of the KV cache.",
    ),
    gauge(
        "meridian_engine_requests",
        ("engine", "phase", "state"),
        "Live requests by phase; state is new (no token yet), generating or preempted.",
        "Preempted `output` is not 0: do as for `meridian_preemptions_total`. Many `new`: scale out.",
    ),
    gauge(
        "meridian_engine_kv_used_ratio",
        ENGINE,
        "Share of the KV cache in use, 0 to 1.",
        "Near 1 with preemptions: memory is short.",
    ),
    gauge("meridian_engine_step_seconds", ENGINE, "Duration of the newest reported step.", "Compare engines."),
    gauge(
        "meridian_engine_open_decisions",
        ENGINE,
        "Decisions whose outcome is not yet known.",
        "Grows without end: report the bug.",
    ),
)

AGENTS = (
    counter(
        "meridian_agent_preempted_think_total",
        ENGINE,
        "Thinking requests preempted, counted in the engine.",
        "Many: memory is short.",
    ),
    counter(
        "meridian_agent_output_critical_total",
        ENGINE,
        "Answering requests chosen as preemption victims; the target is zero.",
        "Not 0: see the alert MeridianAnswersPreempted.",
    ),
    counter(
        "meridian_agent_blocks_reclaimed_total",
        ("engine", "tier"),
        "KV blocks put first in line for reuse, by tier: `unreachable`, or `kept_too_long` after "
        "`kv_memory.keep_thinking_s`.",
        "0 in multi-turn load with thinking: `meridianctl explain` shows why blocks are kept.",
    ),
    counter(
        "meridian_agent_think_skips_total",
        ENGINE,
        "Times that a thinking sequence was left out of a step.",
        "Many, and thinking is too slow: raise `output_tpot_budget_ms` or lower `think_tpot_budget_ms`.",
    ),
    counter(
        "meridian_agent_recomputed_tokens_total",
        ENGINE,
        "Tokens that requests computed again after the agent had preempted them for waiting ones.",
        "A large share of all tokens: lower `recomputed_tokens_per_s`, or add KV cache.",
    ),
    counter(
        "meridian_agent_reports_dropped_total",
        ENGINE,
        "Step reports dropped because the agent's queue was full.",
        "Not 0: see the alert MeridianReportsDropped.",
    ),
    counter(
        "meridian_agent_faults_total",
        ("engine", "cause"),
        "Faults of the agent since the engine started, by the hook that failed; `observer` is the hook in workers.",
        "Not 0: see the alert MeridianAgentFaults.",
    ),
    counter(
        "meridian_agent_probe_tokens_total",
        ENGINE,
        "Tokens that the engine computed for EAT probes: the cost of probing.",
        "Above a few per cent of all tokens: raise `eat_probe_interval_tokens`.",
    ),
    counter(
        "meridian_agent_seconds_total",
        ("engine", "part"),
        "Seconds that the agent spent, by part: its `hooks` on the engine-core thread, in the `worker`, and processor "
        "time of its `threads`.",
        "The sum's rate is the share of a core; above 0.1, see the alert MeridianAgentExpensive.",
    ),
    counter(
        "meridian_agent_scheduler_seconds_total",
        ENGINE,
        "Seconds that vLLM spent in its own schedule and update_from_output.",
        "Compare with the agent's `hooks`.",
    ),
    counter(
        "meridian_agent_calm_steps_total",
        ENGINE,
        "Steps before which the agent did not look at the engine.",
        "A small share with long requests: probes or plans with shares keep the engine from calm.",
    ),
    counter(
        "meridian_agent_full_steps_total",
        ENGINE,
        "Steps before which the agent looked at the engine.",
        "Compare with the calm steps.",
    ),
    gauge(
        "meridian_agent_round_trip_seconds",
        ENGINE,
        "Seconds from queueing a step report to receiving its answer, for the newest answered report.",
        "Above a step's duration for minutes: see the alert MeridianRoundTripSlow.",
    ),
)

SERVER = (
    counter("grpc_server_started_total", GRPC, "RPCs started.", "Plan capacity with it."),
    counter(
        "grpc_server_handled_total",
        (*GRPC, "grpc_code"),
        "RPCs ended, by status code.",
        "INTERNAL, UNKNOWN, UNAVAILABLE: see the alert MeridianCallsFail. UNAUTHENTICATED, PERMISSION_DENIED: the "
        "caller's access is wrong.",
    ),
    counter("grpc_server_msg_received_total", GRPC, "Messages received.", "Plan capacity: reports per second."),
    counter("grpc_server_msg_sent_total", GRPC, "Messages sent.", "Plan capacity with it."),
    histogram(
        "grpc_server_handling_seconds",
        GRPC,
        "Duration of RPCs in seconds; for a stream, from its opening to its end.",
        "UpdatePolicy is slow: look at the store. Connect is short: see `meridian_stream_ends_total`.",
    ),
)


def groups(capabilities: Iterable[Capability]) -> dict[str, Sequence[Entry]]:
    """Return all metrics of a control plane with these capabilities, by title."""
    own = {
        capability.name.replace("_", " ").capitalize(): capability.metrics
        for capability in capabilities
        if capability.metrics
    }
    return {
        "The replica": REPLICA,
        "Rollouts": ROLLOUT,
        "Decisions": DECISIONS,
        "Thinking": THINKING,
        **own,
        "Streams": STREAMS,
        "Engines": ENGINES,
        "Agents, through the control plane": AGENTS,
        "gRPC server": SERVER,
    }


def catalogue(capabilities: Iterable[Capability]) -> dict[str, Entry]:
    """Return the same metrics by name."""
    return {entry.name: entry for entries in groups(capabilities).values() for entry in entries}
