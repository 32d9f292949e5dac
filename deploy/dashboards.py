"""Defines the Grafana dashboards as panels and queries. The module knows the names of the metrics, but not how the
control plane collects them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.enum_names import phase_name
from meridian_control.common.look import ANSWERING_COLOUR, PHASE_WORDS, THINKING_COLOUR
from meridian_control.telemetry.catalogue import catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS_OF_GRID = 24
# Width and height of a panel on Grafana's grid, by its type.
SIZES = {"row": (24, 1), "stat": (4, 4), "timeseries": (8, 8)}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RANGE = "$__rate_interval"
# Time between two scrapes.
SCRAPED = "15s"
TOKENS = "suffix:tokens/s"
KNOWN = catalogue(CAPABILITIES)
# Colour of each phase, by the value of the metrics' label.
PHASE_COLOURS = {"think": THINKING_COLOUR, "output": ANSWERING_COLOUR}


def phases() -> list[dict[str, Any]]:
    """Return the overrides that show the series of a phase in words and, if it has one, in its colour."""
    found = []
    for number, words in PHASE_WORDS.items():
        properties: list[dict[str, Any]] = [{"id": "displayName", "value": words}]
        if (colour := PHASE_COLOURS.get(phase_name(number))) is not None:
            properties.append({"id": "color", "value": {"mode": "fixed", "fixedColor": colour}})
        found.append({"matcher": {"id": "byName", "options": phase_name(number)}, "properties": properties})
    return found


def panel(
    title: str,
    unit: str,
    *queries: tuple[str, str],
    text: str = "",
    stacked: bool = False,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return a time-series panel. queries: pairs of a PromQL query and its legend. limit: value that the panel shows as
    a line."""
    custom: dict[str, Any] = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if stacked else {}
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "custom": custom}
    if limit is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        steps = [{"color": "green", "value": None}, {"color": "red", "value": limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    overrides = phases() if any(legend == "{{phase}}" for _, legend in queries) else []
    return {
        "type": "timeseries",
        "title": title,
        "description": text or described(queries[0][0]),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(queries)
        ],
    }


def stat(title: str, unit: str, query: str, phase: str = "") -> dict[str, Any]:
    """Return a tile with the newest value of a query. phase: the phase whose colour its curve has."""
    defaults: dict[str, Any] = {"unit": unit, "noValue": "not known"}
    if phase:
        defaults["color"] = {"mode": "fixed", "fixedColor": PHASE_COLOURS[phase]}
    return {
        "type": "stat",
        "title": title,
        "description": described(query),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"},
        "targets": [{"refId": "A", "datasource": SOURCE, "expr": query}],
    }


def described(query: str) -> str:
    """Return what the first metric of a query says, and how to act on it."""
    names = (re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\w+", query))
    entry = next(KNOWN[name] for name in names if name in KNOWN)
    return f"{entry.text} {entry.act}"


def total(metric: str, *by: str, where: str = "", over: str = RANGE) -> str:
    """Return a query for the summed rate of a counter. over: the time of which it is the rate.

    A counter of an engine counts on when the engine moves to another replica. The series of one replica would grow by
    what others have shown already if the engine comes back.
    """
    grouped, entry, counted = f" by ({', '.join(by)}) " if by else "", KNOWN[metric], f"{metric}{{{where}}}[{over}]"
    if "engine" in entry.labels:
        counted = f"max by ({', '.join(entry.labels)}) ({metric}{{{where}}})[{over}:{SCRAPED}]"
    return f"sum{grouped}(rate({counted}))".replace("{}", "")


def by(metric: str, *labels: str, where: str = "") -> tuple[str, str]:
    """Return a query for the summed rate of a counter by labels, and a legend with these labels."""
    return total(metric, *labels, where=where), " ".join(f"{{{{{label}}}}}" for label in labels)


def quantiles(metric: str) -> list[tuple[str, str]]:
    rate = f"sum by (le) (rate({metric}_bucket[{RANGE}]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def once(metric: str, *labels: str, where: str = "") -> str:
    """Return a query for an engine's gauge by engine and labels, once for an engine that has just moved, which two
    replicas export for a scrape."""
    return f"max by ({', '.join(('engine', *labels))}) ({metric}{{{where}}})".replace("{}", "")


def states(where: str = "") -> str:
    """Return a query that counts engines by the state of their agent. An engine that has moved to another replica is
    still stale at the replica that it left, so the state ready takes precedence."""
    metric = "max by (engine, state) (meridian_engine_state{%s}) == 1"
    ready, others = (metric % f'{where}state{test}"ready"' for test in ("=", "!="))
    return f"count by (state) ({ready} or ({others} unless on (engine) {ready}))"


def row(title: str) -> dict[str, Any]:
    return {"type": "row", "title": title, "collapsed": False, "panels": []}


def placed(sections: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return rows and panels with their ids and places: a section begins with its row, and stats take one line."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, below in sections.items():
        x, height = COLUMNS_OF_GRID, 0
        for each in (row(title), *below):
            width, tall = SIZES[each["type"]]
            if x + width > COLUMNS_OF_GRID:
                x, y, height = 0, y + height, tall
            panels.append(each | {"id": len(panels) + 1, "gridPos": {"x": x, "y": y, "w": width, "h": tall}})
            x += width
        y += height
    return panels


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable with several values; by default each value matches."""
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def annotation(name: str, color: str, query: str, text: str) -> dict[str, Any]:
    """Return marks on the time axis, wherever the query has a value. text: what a mark says, with labels."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": color,
        "expr": query,
        "step": "30s",
        "titleFormat": name,
        "textFormat": text,
    }


REVISION = 'count_values("revision", max(meridian_policy_revision{}))'
ANNOTATIONS = [
    annotation(
        "Policy", "blue", f"{REVISION.format('')} unless {REVISION.format(' offset 1m')}", "revision {{revision}}"
    ),
    annotation("Freeze", "purple", "max by (engine) (meridian_engine_frozen) == 1", "{{engine}}"),
    annotation(
        "Rollout",
        "orange",
        'max by (state) (meridian_rollout_state{state=~"running|paused|halted"}) == 1',
        "{{state}}",
    ),
]


# The link from each dashboard to the others.
LINK = {
    **{"type": "dashboards", "tags": ["meridian"], "title": "Meridian", "icon": "dashboard", "tooltip": ""},
    **{"asDropdown": False, "includeVars": True, "keepTime": True, "targetBlank": False},
}


def dashboard(
    uid: str, title: str, sections: Mapping[str, Sequence[dict[str, Any]]], *variables: dict[str, Any]
) -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["meridian"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": ANNOTATIONS},
        "links": [LINK],
        "panels": placed(sections),
    }


CHOSEN = 'tenant=~"$tenant",model=~"$model"'
FORCES, PROBES = 'kind="force"', 'kind="probe"'
SHADOWED = total("meridian_tokens_saved_shadow_estimate_total", "section", where='reason="any"')
MEASURED = total("meridian_outcomes_total", where=PROBES + ',outcome="applied"')


def per(metric: str, of: str, where: str = "") -> str:
    """Return a query for one counter divided by another, by arm; the control group is too small for short ranges."""
    parts = (f"sum by (arm) (increase({name}[6h]))" for name in (f"{metric}{{{where}}}" if where else metric, of))
    return " / ".join(parts)


ARM_REQUESTS, EVENTS = "meridian_arm_requests_total", "meridian_arm_events_total"
ANSWERS = f'sum by (arm) (increase({EVENTS}{{event="answered"}}[6h]))'
# A request of the control group counts for each kind that would have ended its thinking.
COMPARED_ENDS = 'sum by (kind, name, end) (increase(meridian_compared_ends_total{{event="{}"}}[6h]))'
CONTROL_GROUP = [
    panel(
        "Thinking saved, against the control group",
        "percentunit",
        ("max by (bound) (meridian_saved_ratio)", "{{bound}}"),
        text="Share of the thinking that the policy in force saves, with its 95 % interval.",
    ),
    panel(
        "Harm by kind of shortening, in the control group",
        "percentunit",
        ('max by (kind, name) (meridian_harm_ratio{bound="value"})', "{{kind}} {{name}}"),
        ('max by (kind, name) (meridian_harm_ratio{bound="high"})', "{{kind}} {{name}}, at most"),
        ("max by (kind, name) (meridian_harm_evidence_ratio)", "{{kind}} {{name}}, evidence of more than max_loss"),
        ("max(meridian_drift_evidence_ratio)", "evidence of drift"),
        text="Share of the control group whose trial answer at the place of the end was not the answer that stayed. If "
        "the evidence of a kind's harm reaches 100 %, the control plane withdraws the kind, unless it is a cap; if "
        "that of drift does, it withdraws the entropy rules.",
        limit=1,
    ),
    panel(
        "Treated requests and the control group",
        "short",
        (per("meridian_arm_think_tokens_total", ARM_REQUESTS), "{{arm}} thinking tokens"),
        (f"sum by (arm) (increase(meridian_arm_answer_tokens_total[6h])) / {ANSWERS}", "{{arm}} answer tokens"),
        text="Mean tokens per request over 6 hours.",
    ),
    panel(
        "Events of treated requests and of the control group",
        "percentunit",
        *(
            (per(EVENTS, ARM_REQUESTS, f'event="{event}"'), f"{{{{arm}}}} {event}")
            for event in ("stopped", "reentry", "abort", "length")
        ),
        text="Share of the requests over 6 hours.",
    ),
    panel(
        "After forced and natural ends of thinking",
        "percentunit",
        *(
            (
                f"{COMPARED_ENDS.format(event)} / {COMPARED_ENDS.format('ended')}",
                f"{{{{kind}}}} {{{{name}}}} {{{{end}}}}: {event}",
            )
            for event in ("reentry", "empty", "abort")
        ),
        text="Share of the requests over 6 hours, by kind of shortening.",
    ),
]


def running(phase: str) -> str:
    """Return a query for the live requests in a phase that are not preempted, as `meridianctl status` counts them."""
    where = f'phase="{phase}",state!="preempted"'
    return f"sum({once('meridian_engine_requests', 'state', where=where)}) or vector(0)"


GLANCE = [
    # Engines without series of their own, which only very large replicas have, are in meridian_engines.
    stat(
        "Engines connected",
        "none",
        f"(count({once('meridian_engine_info')}) + sum(meridian_engines_without_series)) or sum(meridian_engines)",
    ),
    stat("Thinking now", "none", running("think"), "think"),
    stat("Answering now", "none", running("output"), "output"),
    stat("Thinking saved", "percentunit", 'max(meridian_saved_ratio{bound="value"})'),
    stat("Harm, at most", "percentunit", 'max(meridian_harm_ratio{bound="high"})'),
    stat("First answer token, P99", "s", quantiles("meridian_ttot_seconds")[-1][0]),
    stat("Answer's gaps, P99", "s", quantiles("meridian_output_itl_seconds")[-1][0]),
    stat("Engines frozen", "none", f"sum({once('meridian_engine_frozen')}) or vector(0)"),
    stat("Engines that refuse", "none", f"sum({once('meridian_engine_refused')}) or vector(0)"),
    stat("Agent, share of a core", "percentunit", f"avg({total('meridian_agent_seconds_total', 'engine', over='5m')})"),
]

TENANTS = panel(
    "Thinking by tenant",
    TOKENS,
    (
        f"topk(10, {total('meridian_tenant_think_tokens_total', 'tenant', where=CHOSEN)})",
        "{{tenant}}",
    ),
    text="Thinking tokens of the ten tenants that think most, of those that the variables choose.",
    stacked=True,
)

FLEET = {
    "At a glance": GLANCE,
    "Latency": [
        panel(
            "Time to output token",
            "s",
            *quantiles("meridian_ttot_seconds"),
            text="Time from the end of thinking to the first answer token.",
        ),
        panel("Inter-token latency of answers", "s", *quantiles("meridian_output_itl_seconds")),
        panel("Queueing time", "s", *quantiles("meridian_queueing_seconds")),
    ],
    "Load": [
        panel("Engines by state", "short", (states(), "{{state}}"), stacked=True),
        panel(
            "Requests",
            "short",
            (f"sum({once('meridian_engine_running_requests')})", "running"),
            (f"sum({once('meridian_engine_waiting_requests')})", "waiting"),
        ),
        panel(
            "Requests by phase",
            "short",
            (f"sum by (phase) ({once('meridian_engine_requests', 'phase', 'state')})", "{{phase}}"),
            stacked=True,
        ),
        panel(
            "KV cache in use",
            "percentunit",
            ("max(meridian_engine_kv_used_ratio)", "highest"),
            (f"avg({once('meridian_engine_kv_used_ratio')})", "mean"),
        ),
        panel("Preemptions", "reqps", by("meridian_preemptions_total", "phase")),
        panel("Thinking tokens per request", "short", *quantiles("meridian_request_think_tokens")),
    ],
    "Tenants, budgets and pressure": [
        TENANTS,
        panel("Thinking by budget", TOKENS, by("meridian_budget_think_tokens_total", "budget")),
        panel("Budgets, left", "percentunit", ("min by (budget) (meridian_budget_left_ratio)", "{{budget}}")),
        panel("Pressure, highest level", "short", ("max by (pressure) (meridian_pressure_level)", "{{pressure}}")),
    ],
    "How thinking ends": [
        panel(
            "Ends of thinking",
            "reqps",
            by("meridian_think_ends_total", "reason"),
            text="The suffix _shadowed marks ends that a rule in shadow decided but that were not applied.",
            stacked=True,
        ),
        panel(
            "Self-calibration",
            "short",
            ("max by (state) (meridian_self_calibrations)", "{{state}}"),
            text="Models and SLO classes for which the control plane looks for a rule by itself.",
        ),
        panel("After the end of thinking", "reqps", by("meridian_answers_total", "kind")),
        panel(
            "Forced ends, decided and applied",
            "reqps",
            (total("meridian_decisions_total", "reason", where=FORCES), "{{reason}} decided"),
            *(
                (
                    total("meridian_outcomes_total", "reason", where=f'{FORCES},outcome="{outcome}"'),
                    f"{{{{reason}}}} {outcome}",
                )
                for outcome in ("applied", "shadowed")
            ),
        ),
        panel(
            "Tokens saved, against the cap",
            TOKENS,
            by("meridian_tokens_saved_against_cap_total", "reason"),
            text="Thinking tokens between the end that a rule forced and the cap: an upper bound of the saving.",
        ),
        panel(
            "Tokens that rules in shadow would save",
            TOKENS,
            by("meridian_tokens_saved_shadow_estimate_total", "section", "reason"),
            text="Thinking tokens that enforcing the rules would save. The reason any counts each request once, from "
            "the first rule of the section that fired.",
        ),
        panel(
            "Share of thinking that rules in shadow would save",
            "percentunit",
            (f"{SHADOWED} / {total('meridian_shadow_think_tokens_total', 'section')}", "{{section}}"),
        ),
    ],
    "Control group": CONTROL_GROUP,
    "Decisions and probes": [
        panel("Decisions", "ops", by("meridian_decisions_total", "kind")),
        panel("Outcomes of decisions", "ops", by("meridian_outcomes_total", "outcome")),
        panel(
            "Age of decisions when applied",
            "short",
            *quantiles("meridian_decision_staleness_steps"),
            text="Engine steps between the report that a decision was taken from and the report that it was applied.",
        ),
        panel("Probes", "ops", by("meridian_outcomes_total", "outcome", where=PROBES)),
        panel("Tokens per probe", "short", (f"{total('meridian_agent_probe_tokens_total')} / {MEASURED}", "computed")),
    ],
    "The control plane": [
        panel(
            "Reports and tokens",
            "ops",
            (total("meridian_reports_total"), "reports"),
            (total("meridian_token_events_total"), "tokens"),
            (total("meridian_requests_total"), "requests"),
        ),
        panel("Ends of streams", "ops", by("meridian_stream_ends_total", "reason")),
        panel("Calls", "reqps", by("grpc_server_handled_total", "grpc_method", "grpc_code")),
        panel(
            "Messages",
            "ops",
            (total("grpc_server_msg_received_total"), "received"),
            (total("grpc_server_msg_sent_total"), "sent"),
        ),
    ],
}

ONE = 'engine=~"$engine"'
PER = "{{engine}}"


def gauge(metric: str) -> tuple[str, str]:
    return once(metric, where=ONE), PER


def rate(metric: str) -> tuple[str, str]:
    return by(metric, "engine", where=ONE)


FAULTS = f"sum by (engine) (max by (engine, cause) (meridian_agent_faults_total{{{ONE}}}))"
NO_FAULTS = f"sum by (engine) (0 * meridian_engine_info{{{ONE}}})"

ENGINE = {
    "State": [
        panel("Engines by state", "short", (states(ONE + ","), "{{state}}"), stacked=True),
        panel(
            "Policy revision",
            "none",
            (gauge("meridian_engine_revision")[0], "{{engine}} applied"),
            (gauge("meridian_engine_wanted_revision")[0], "{{engine}} wanted"),
        ),
        panel(
            "Engines that refuse the newest policy or are frozen",
            "short",
            (gauge("meridian_engine_refused")[0], "{{engine}} refuses"),
            (gauge("meridian_engine_frozen")[0], "{{engine}} frozen"),
        ),
        panel(
            "Faults of the agent",
            "short",
            (f"{FAULTS} or {NO_FAULTS}", PER),
            text="Number of faults since the engine started.",
        ),
        panel("Open decisions", "short", gauge("meridian_engine_open_decisions")),
        panel("Reports dropped", "ops", rate("meridian_agent_reports_dropped_total")),
    ],
    "Load": [
        panel("Running", "short", gauge("meridian_engine_running_requests")),
        panel("Waiting", "short", gauge("meridian_engine_waiting_requests")),
        panel(
            "Requests by phase",
            "short",
            (
                f"sum by (engine, phase) ({once('meridian_engine_requests', 'phase', 'state', where=ONE)})",
                "{{engine}} {{phase}}",
            ),
        ),
        panel("KV cache in use", "percentunit", gauge("meridian_engine_kv_used_ratio")),
        panel("Step", "s", gauge("meridian_engine_step_seconds")),
        panel("Round trip of a report", "s", gauge("meridian_agent_round_trip_seconds")),
    ],
    "Order and cache": [
        panel("Thinking preempted", "ops", rate("meridian_agent_preempted_think_total")),
        panel(
            "Answers preempted",
            "ops",
            rate("meridian_agent_output_critical_total"),
            text="The target is zero preempted answers.",
        ),
        panel("Thinking left out of steps", "ops", rate("meridian_agent_think_skips_total")),
        panel(
            "Blocks reclaimed, by tier",
            "ops",
            by("meridian_agent_blocks_reclaimed_total", "engine", "tier", where=ONE),
        ),
    ],
    "Cost of the agent": [
        panel(
            "Agent, share of a core, by part",
            "percentunit",
            by("meridian_agent_seconds_total", "engine", "part", where=ONE),
        ),
        panel("vLLM's scheduler, share of that thread", "percentunit", rate("meridian_agent_scheduler_seconds_total")),
        panel(
            "Steps without a look of the agent",
            "percentunit",
            (
                f"{total('meridian_agent_calm_steps_total', 'engine', where=ONE)} / "
                f"({total('meridian_agent_calm_steps_total', 'engine', where=ONE)} + "
                f"{total('meridian_agent_full_steps_total', 'engine', where=ONE)})",
                PER,
            ),
        ),
        panel("Tokens computed for probes", TOKENS, rate("meridian_agent_probe_tokens_total")),
    ],
}

STAGED = "max by (state) (meridian_rollout_state) > 0"

ROLLOUT = {
    "Rollout": [
        panel("State of the newest rollout", "none", (STAGED, "{{state}}"), stacked=True),
        panel("Step", "none", ("max(meridian_rollout_step)", "in"), ("max(meridian_rollout_steps)", "of")),
        panel(
            "Guardrails, over their limits",
            "percentunit",
            ("max by (guardrail) (meridian_rollout_guardrail_ratio)", "{{guardrail}}"),
            text="If a guardrail is above 100 % of its limit, the rollout is halted or rolled back.",
            limit=1,
        ),
        panel(
            "Engines with the candidate",
            "short",
            ("max by (policy) (meridian_rollout_engines)", "{{policy}}"),
            stacked=True,
        ),
    ],
    "Revisions": [
        panel(
            "Engines by revision applied",
            "short",
            (f'count_values("revision", {once("meridian_engine_revision")})', "{{revision}}"),
            stacked=True,
        ),
        panel(
            "Engines by revision wanted",
            "short",
            (f'count_values("revision", {once("meridian_engine_wanted_revision")})', "{{revision}}"),
            stacked=True,
        ),
        panel(
            "Engines that are behind",
            "short",
            (
                f"count({once('meridian_engine_wanted_revision')} != {once('meridian_engine_revision')}) or vector(0)",
                "behind",
            ),
            (f"sum({once('meridian_engine_refused')})", "refuse the policy"),
        ),
        panel("Policies refused", "ops", (total("meridian_policy_nacks_total"), "refused")),
        panel("Revision in force, by replica", "none", ("meridian_policy_revision", "{{instance}}")),
        panel(
            "Engines by version",
            "short",
            (
                "count by (vllm_version, agent_version) "
                f"({once('meridian_engine_info', 'vllm_version', 'agent_version')})",
                "vLLM {{vllm_version}}, agent {{agent_version}}",
            ),
            stacked=True,
        ),
    ],
    "Effects": [
        panel("Time to output token", "s", *quantiles("meridian_ttot_seconds")),
        panel("Inter-token latency of answers", "s", *quantiles("meridian_output_itl_seconds")),
        panel("Thinking tokens per request", "short", *quantiles("meridian_request_think_tokens")),
        panel("Ends of thinking", "reqps", by("meridian_think_ends_total", "reason"), stacked=True),
        panel("After the end of thinking", "reqps", by("meridian_answers_total", "kind")),
        panel("Preemptions", "reqps", by("meridian_preemptions_total", "phase")),
    ],
}

MODEL = variable("model", "Model", "label_values(meridian_engine_info, model)")
TENANT = variable("tenant", "Tenant", "label_values(meridian_tenant_think_tokens_total, tenant)")
ENGINES = variable("engine", "Engine", 'label_values(meridian_engine_info{model=~"$model"}, engine)')

DASHBOARDS = {
    "fleet": dashboard("meridian-fleet", "Meridian: fleet", FLEET, TENANT, MODEL),
    "engine": dashboard("meridian-engine", "Meridian: engines", ENGINE, MODEL, ENGINES),
    "rollout": dashboard("meridian-rollout", "Meridian: rollout", ROLLOUT),
}
