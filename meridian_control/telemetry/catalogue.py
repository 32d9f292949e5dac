"""Every metric of the control plane's: name, labels, what it says, and what an operator does about it.

Collectors take names, labels and texts from here, so none is exposed that is not listed. `python -m
meridian_control.telemetry.catalogue` prints the table of the operations guide. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = ("engine",)
GRPC = ("grpc_type", "grpc_service", "grpc_method")


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric under the name it is exposed with. `act`: what an operator does about it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    act: str


def _counter(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "counter", labels, text, act)


def _gauge(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "gauge", labels, text, act)


def _histogram(name: str, labels: tuple[str, ...], text: str, act: str) -> Entry:
    return Entry(name, "histogram", labels, text, act)


REPLICA = (
    _gauge("meridian_build_info", ("version",), "1, with the version of this control plane.", "Compare replicas."),
    _gauge(
        "meridian_replica_leads",
        (),
        "1 on the replica that leads, and drives what is driven once.",
        "The sum is not 1 for longer than 10 s: replicas cannot reach PostgreSQL.",
    ),
    _gauge(
        "meridian_policy_revision",
        (),
        "Policy revision this replica gives to engines that connect.",
        "Replicas that differ for longer than 10 s: look at the store.",
    ),
    _gauge(
        "meridian_engines",
        (),
        "Engines connected to this replica.",
        "Fewer than vLLM pods: `meridianctl engines`, then the log of the pod that is missing.",
    ),
    _gauge(
        "meridian_agents",
        ("state",),
        "Engines by the state their agent is in, those without a stream included.",
        "`off` for more than minutes: those engines serve as stock vLLM; `meridianctl engines` says why.",
    ),
    _gauge(
        "meridian_engines_without_series",
        (),
        "Engines connected beyond the first 500, which have no series of their own.",
        "Not 0: add replicas; what is summed over engines lacks these.",
    ),
)

ROLLOUT = (
    _gauge(
        "meridian_rollout_state",
        ("state",),
        "1 for the state of the newest rollout: running, paused, halted, completed, rolled_back, aborted. As all of "
        "the rollout, from the replica that leads.",
        "`halted`, `rolled_back`: `meridianctl rollout status` says which guardrail; correct the policy, or resume.",
    ),
    _gauge(
        "meridian_rollout_step",
        (),
        "Step that the newest rollout is in, counted from 1.",
        "Stands for longer than its bake time: `meridianctl rollout status` says what is waited for.",
    ),
    _gauge("meridian_rollout_steps", (), "Steps that it has.", "As above."),
    _gauge(
        "meridian_rollout_engines",
        ("policy",),
        "Connected engines that have applied the candidate, and the others, when last looked at while it ran.",
        "No `candidate` in a running rollout: no engine fits the step, or they refuse it.",
    ),
    _gauge(
        "meridian_rollout_guardrail_ratio",
        ("guardrail",),
        "Newest reading of a guardrail over its limit; above 1 it is violated.",
        "Near 1: pause the rollout and look, before it is taken back.",
    ),
)

DECISIONS = (
    _counter(
        "meridian_decisions_total",
        ("kind", "reason"),
        "Decisions made, by kind (cap, force, plan, probe, tier); forces by the rule that asked.",
        "Forces stop or multiply without a policy change: the workload or the model has changed; calibrate anew.",
    ),
    _counter(
        "meridian_outcomes_total",
        ("kind", "reason", "outcome"),
        "Outcomes of decisions: what was asked for against what was applied. `probe`, `applied`: probes measured.",
        "`refused` forces: `meridianctl requests`, then the engine's log; `agent_off`: streams end too often.",
    ),
    _counter(
        "meridian_unknown_outcomes_total",
        (),
        "Outcomes of decisions that were never made on that stream.",
        "Grows: agent and control plane disagree; compare their versions and report it.",
    ),
    _histogram(
        "meridian_decision_staleness_steps",
        (),
        "Engine steps from the report that a force or plan was taken from to the one that says it was applied.",
        "Above a few steps: the link or the control plane is slow; see the round trip.",
    ),
    _counter(
        "meridian_policy_nacks_total",
        (),
        "Policies refused by agents.",
        "`meridianctl engines` shows the agent's error; correct the policy or roll it back.",
    ),
)

THINKING = (
    _histogram(
        "meridian_ttot_seconds",
        (),
        "Time to output token: from the end of thinking to the first answer token.",
        "Rises: answers wait for thinking or for memory; see preemptions, the plan, the step time.",
    ),
    _histogram(
        "meridian_output_itl_seconds",
        (),
        "Inter-token latency of answers, as reports arrive.",
        "Above `output_tpot_budget_ms`: lower `think_batch_multiplier`, or scale out.",
    ),
    _histogram(
        "meridian_request_think_tokens",
        (),
        "Thinking tokens of a finished request that thought.",
        "Shifts without a policy change: the workload or the model has changed; calibrate anew.",
    ),
    _counter(
        "meridian_think_ends_total",
        ("reason",),
        "Ends of thinking, by reason; with _shadowed where one was only decided.",
        "Mostly `hard_cap`: the cap is too low, or the rules are off or not calibrated.",
    ),
    _counter(
        "meridian_tokens_saved_against_cap_total",
        ("reason",),
        "Thinking tokens between a rule's end and the request's cap: the most it can have saved, not an estimate.",
        "Use as an upper bound only; most requests would have ended before their cap.",
    ),
    _counter(
        "meridian_tokens_saved_shadow_estimate_total",
        ("section", "reason"),
        "Thinking tokens after the place where a rule in shadow would have ended it, once it really has ended; `any`: "
        "after the first of the section's.",
        "What enforcing the rule would save. Large, and few harmful stops in calibration: take it out of shadow.",
    ),
    _counter(
        "meridian_shadow_think_tokens_total",
        ("section",),
        "All thinking tokens of the requests that the shadow estimate looked at.",
        "The estimate's `any` over this is the share that would be saved; 0: no section is enabled and in shadow.",
    ),
    _counter(
        "meridian_answers_total",
        ("kind",),
        "What came after an end of thinking, by how it ended.",
        "`empty_after_forced` or `long_after_forced` above those after natural ends: stops come too early.",
    ),
)

STREAMS = (
    _counter(
        "meridian_reports_total",
        (),
        "Step reports received.",
        "0 while engines serve: the agents are in DEGRADED; see stream ends.",
    ),
    _counter("meridian_token_events_total", (), "Token rows received.", "For capacity: rows per second and core."),
    _counter("meridian_requests_total", (), "Requests opened on engines.", "For capacity; compare with the gateway's."),
    _counter(
        "meridian_stream_ends_total",
        ("reason",),
        "Agent streams ended, by reason.",
        "`overflow`: the link is too slow; `invalid_request`: versions do not fit; `disconnected`: network or pods.",
    ),
    _counter(
        "meridian_client_faults_total",
        ("cause",),
        "Calls and streams refused for what their caller did, by cause; the log has some of them, and who it was.",
        "`invalid_request` grows fast: something that is no engine talks to the port. `host_only`: access is not "
        "configured. `too_many`: a script without a pause.",
    ),
    _counter(
        "meridian_preemptions_total",
        ("phase",),
        "Requests preempted, by the phase they were in.",
        "`output` is not 0: less KV for thinking (`kv_memory`), fewer sequences, or more memory.",
    ),
)

ENGINES = (
    _gauge(
        "meridian_engine_info",
        ("engine", "model", "vllm_version", "agent_version"),
        "1 for every engine connected.",
        "Join for model and versions; find engines an upgrade has left out.",
    ),
    _gauge(
        "meridian_engine_state",
        ("engine", "state"),
        "1 for the state the agent is in: ready, stale, degraded, off; without a stream, what it is in if it lives.",
        "`off`: the fault is in `meridianctl engines`, and when it is over. `stale`, `degraded`: gone, or the network.",
    ),
    _gauge(
        "meridian_engine_revision",
        ENGINE,
        "Policy revision applied.",
        "Behind the wanted one for minutes: see refusals, then the link.",
    ),
    _gauge(
        "meridian_engine_wanted_revision", ENGINE, "Policy revision the control plane wants it to have.", "As above."
    ),
    _gauge(
        "meridian_engine_refused",
        ENGINE,
        "1 while the newest revision it was given is refused.",
        "`meridianctl engines` shows the error; correct the policy or roll it back.",
    ),
    _gauge("meridian_engine_frozen", ENGINE, "1 while a freeze has it run as stock vLLM.", "Thaw it when it may."),
    _gauge("meridian_engine_running_requests", ENGINE, "Requests in vLLM's running queue.", "For capacity."),
    _gauge(
        "meridian_engine_waiting_requests",
        ENGINE,
        "Requests in vLLM's waiting queue: the queue depth.",
        "Grows: scale out; with `hold_admission` in force thinking holds too much KV.",
    ),
    _gauge(
        "meridian_engine_requests",
        ("engine", "phase", "state"),
        "Live requests by phase; state is new (no token yet), generating or preempted.",
        "Preempted `output` is not 0: as for preemptions. Many `new`: scale out.",
    ),
    _gauge("meridian_engine_kv_used_ratio", ENGINE, "KV cache in use.", "Near 1 with preemptions: memory is short."),
    _gauge("meridian_engine_step_seconds", ENGINE, "Duration of the newest step reported.", "Compare engines."),
    _gauge(
        "meridian_engine_open_decisions",
        ENGINE,
        "Decisions whose outcome is still to come.",
        "Grows without end: report it; caps stay open as long as their requests.",
    ),
)

AGENTS = (
    _counter(
        "meridian_agent_preempted_think_total",
        ENGINE,
        "Thinking requests preempted, counted in the engine.",
        "Many: memory is short; thinking is preempted so that answers are not.",
    ),
    _counter(
        "meridian_agent_output_critical_total",
        ENGINE,
        "Answering requests chosen as preemption victims; the target is zero.",
        "Not 0: nothing but answers was left to preempt; fewer sequences or more KV cache.",
    ),
    _counter(
        "meridian_agent_blocks_reclaimed_total",
        ("engine", "tier"),
        "KV blocks put first in line for reuse, by tier.",
        "0 in multi-turn load with thinking: the template keeps thinking, or `kv_memory` is in shadow.",
    ),
    _counter(
        "meridian_agent_think_skips_total",
        ENGINE,
        "Steps a thinking sequence was left out of.",
        "Many and thinking too slow: raise `output_tpot_budget_ms` or lower `think_tpot_budget_ms`.",
    ),
    _counter(
        "meridian_agent_reports_dropped_total",
        ENGINE,
        "Step reports dropped because the ring to the link was full.",
        "Not 0: the network or the control plane is too slow; raise `report_interval_steps`, add replicas.",
    ),
    _counter(
        "meridian_agent_faults_total",
        ("engine", "cause"),
        "Faults of the agent since the engine started, by the hook that failed; `observer` in the workers.",
        "Not 0: `meridianctl engines` shows the newest; report it. After the fourth in an hour the agent stays off.",
    ),
    _counter(
        "meridian_agent_probe_tokens_total",
        ENGINE,
        "Tokens computed for EAT probes: what probing costs.",
        "Above a few per cent of the tokens: raise `eat_probe_interval_tokens`.",
    ),
    _counter(
        "meridian_agent_seconds_total",
        ENGINE,
        "Time the agent spent in the engine-core thread.",
        "Its rate is the share of that core; above 0.1, raise `report_interval_steps` and report it.",
    ),
    _counter(
        "meridian_agent_scheduler_seconds_total",
        ENGINE,
        "Time vLLM spent in its own schedule and update_from_output.",
        "What to compare the agent's time with.",
    ),
    _gauge(
        "meridian_agent_round_trip_seconds",
        ENGINE,
        "Newest time from queueing a step report to the answer to it.",
        "Above a step's duration for minutes: control plane overloaded, or too far away.",
    ),
)

SERVER = (
    _counter("grpc_server_started_total", GRPC, "RPCs started.", "For capacity."),
    _counter(
        "grpc_server_handled_total",
        (*GRPC, "grpc_code"),
        "RPCs ended, by status code.",
        "INTERNAL or UNKNOWN: a bug, see the log. UNAVAILABLE: the store. UNAUTHENTICATED, PERMISSION_DENIED: callers.",
    ),
    _counter("grpc_server_msg_received_total", GRPC, "Messages received.", "For capacity: reports per second."),
    _counter("grpc_server_msg_sent_total", GRPC, "Messages sent.", "For capacity."),
    _histogram(
        "grpc_server_handling_seconds",
        GRPC,
        "Duration of RPCs; of streams, how long they lived.",
        "UpdatePolicy is slow: the store. Connect is short: streams do not live; see stream ends.",
    ),
)

GROUPS = {
    "The replica": REPLICA,
    "Rollouts": ROLLOUT,
    "Decisions": DECISIONS,
    "Thinking": THINKING,
    "Streams": STREAMS,
    "Engines": ENGINES,
    "Agents, through the control plane": AGENTS,
    "gRPC server": SERVER,
}
CATALOGUE = {entry.name: entry for group in GROUPS.values() for entry in group}


def markdown() -> str:
    """The catalogue as tables."""
    parts = []
    for title, entries in GROUPS.items():
        rows = [_row(entry) for entry in entries]
        parts.append("\n".join([f"**{title}**", "", "| metric | says | act on it |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(entry: Entry) -> str:
    labels = f"{{{', '.join(entry.labels)}}}" if entry.labels else ""
    kind = "" if entry.kind == "gauge" else f"{entry.kind}: "
    return f"| `{entry.name}{labels}` | {kind}{entry.text} | {entry.act} |"


if __name__ == "__main__":
    print(markdown(), end="")
