"""Formats engines, live requests, budgets, pressure and comparisons with the control group as tables for terminals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from meridian.v1 import agent_pb2, fleet_pb2
from rich.table import Table

from meridian_control.capabilities.budgets.shown import row as budget_row
from meridian_control.capabilities.pressure.rule import MAX_LEVEL, Reading, worst
from meridian_control.capabilities.self_calibration.shown import proof_text, requests_text
from meridian_control.cli.console import add, new_table, stamp_text
from meridian_control.common.decision_words import apart, last_text
from meridian_control.common.drift_bins import SIGNALS, drift_bins, where
from meridian_control.common.engine_words import condition, names_text
from meridian_control.common.enum_names import entropy_backend_name, tier_name
from meridian_control.common.harm_words import harm_text, kind_text
from meridian_control.common.look import counted, percent, phase_text


def engine_table(rows: Sequence[fleet_pb2.Engine], *, wide: bool = False) -> Table:
    """Return the engines. Their KV connectors and roles have a column if an engine has a connector; their pools and
    URLs have columns if an engine is in a pool. wide: add versions, labels, replica and the time of the connection."""
    more = ("vLLM", "agent", "replica", "connected since", "labels") if wide else ()
    load_columns = ("step, ms", "KV", "running", "waiting", "thinking", "answering")
    has_connectors = any(e.kv_connector for e in rows)
    has_pools = any(e.pool for e in rows)
    optional = (*(("KV connector",) if has_connectors else ()), *(("pool", "URL") if has_pools else ()))
    columns, now = (*load_columns, "entropy", *optional), datetime.now(UTC)
    shown = new_table("engine", "state", "model", "revision", *columns, *more)
    for e in rows:
        revision = f"{e.acked_revision}/{e.revision}{' refused' if e.nack_error else ''}"
        load = (f"{e.step_time_ms:.1f}", percent(e.kv_used, 0), e.running, e.waiting, e.thinking, e.answering)
        connector = (f"{e.kv_connector} {e.kv_role}".strip(),) if has_connectors else ()
        pool = (e.pool or "none", e.answering_engine.url) if has_pools else ()
        labels = " ".join(f"{name}={value}" for name, value in sorted(e.labels.items()))
        since = stamp_text(e.connect_time) if e.HasField("connect_time") else ""
        rest = (e.vllm_version, e.agent_version, e.replica, since, labels) if wide else ()
        add(shown, e.engine_id, condition(e, now).word, e.model, revision, *load, _entropy(e), *connector, *pool, *rest)
    return shown


def cause_lines(rows: Iterable[fleet_pb2.Engine]) -> Iterator[str]:
    """Yield the causes of the engines' states, each once with all its engines, but not those of regular ends."""
    now, named = datetime.now(UTC), defaultdict[tuple[str, str], list[str]](list)
    for e in rows:
        found = condition(e, now)
        if found.cause and (found.level or e.state == fleet_pb2.CONNECTION_STATE_CONNECTED):
            named[found.word, found.cause].append(e.engine_id)
    for (word, cause), names in named.items():
        yield f"{names_text(names)} ({word}): {cause}"


def thinking_lines(rows: Iterable[fleet_pb2.Engine]) -> Iterator[str]:
    """Yield what the engines do not know of the thinking of their requests, or have learned of it."""
    for e in rows:
        if e.reclaim_note:
            yield f"{e.engine_id}: {e.reclaim_note}"
        if e.unread_prompts:
            few = "1 request" if e.unread_prompts == 1 else f"{e.unread_prompts} requests"
            yield (
                f"{e.engine_id}: the prompt of {few} came as embeddings; what such a request thinks before it writes "
                "a marker of its own is neither known nor capped"
            )


def pool_lines(rows: Iterable[fleet_pb2.Engine]) -> Iterator[str]:
    """Yield the reason why an engine in a handover pool has no part in handovers, and what became of handovers."""
    for e in rows:
        if e.no_hand_over and e.pool in ("thinking", "both"):
            yield f"{e.engine_id} hands no request over: {e.no_hand_over}"
        if e.answering_engine.unfit and e.pool in ("answering", "both"):
            yield f"no request is handed over to {e.engine_id}: {e.answering_engine.unfit}"
        if e.handovers:
            counts = ", ".join(f"{count} {result}" for result, count in sorted(e.handovers.items()))
            yield f"{e.engine_id} was to hand requests over: {counts}"


def limit_lines(rows: Iterable[fleet_pb2.Engine]) -> Iterator[str]:
    """Yield each engine's limits that are not at their start-up values, or not at the values that the policy sets."""
    for e in rows:
        changed = [row for row in e.engine_limits if row.in_force != row.limit.startup or row.wanted]
        if changed:
            yield f"{e.engine_id} runs with {', '.join(_limit(row, e) for row in changed)}"


def _limit(row: fleet_pb2.EngineLimitState, engine: fleet_pb2.Engine) -> str:
    text = f"started with {row.limit.startup}"
    if row.wanted not in (0, row.in_force):
        text += f"; the policy sets {row.wanted}"
        if not row.limit.lowest <= row.wanted <= row.limit.highest:
            text += f", the engine takes {row.limit.lowest} to {row.limit.highest}"
        else:
            text += f", not in force: the engine is {condition(engine, datetime.now(UTC)).word}"
    return f"{row.name} {row.in_force} ({text})"


def handover_table(rows: Iterable[fleet_pb2.Engine]) -> Table:
    """Return what the handovers in shadow would have cost and saved, in mean milliseconds for each of them."""
    shown = new_table("engine", "handovers", "transfer, ms", "recompute, ms", "gain, ms")
    for e in rows:
        if count := e.shadow_handovers.requests:
            sums = e.shadow_handovers.transfer_ms, e.shadow_handovers.recompute_ms, e.shadow_handovers.gain_ms
            add(shown, e.engine_id, count, *(f"{total / count:.0f}" for total in sums))
    return shown


def budget_table(rows: Iterable[fleet_pb2.Budget]) -> Table:
    """Return the budgets. What is left of a limit stands before the most that the limit saves up."""
    shown = new_table("budget", "requests", "stage", "left", "of the minute", "of the day", "used")
    for row in map(budget_row, rows):
        left = percent(row["left_ratio"], 0), row["of_minute"], row["of_day"]
        add(shown, row["name"], row["requests"], row["stage"], *left, row["used_tokens"])
    return shown


def pressure_table(rows: Iterable[fleet_pb2.Engine]) -> Table:
    """Return the pressure entries of each engine, with the newest change of the level, and the value that is nearest to
    its limit or furthest above it; values with too few samples to miss a target come last."""
    shown = new_table("engine", "pressure", "level", "target", "measured", "limit", "samples", "newest change")
    for e in rows:
        for row in e.pressures:
            level = f"{row.level}/{MAX_LEVEL}" + " (shadow)" * row.shadow
            reading = worst([Reading(r.target, r.measured, r.limit, r.samples) for r in row.readings])
            value = ("", "", "", "")
            if reading is not None:
                value = reading.target, *apart(reading.measured, reading.limit, 4), str(reading.samples)
            newest = row.changes[0] if row.changes else None
            changed = f"{newest.level_before} to {newest.level}, {stamp_text(newest.time)}" if newest else ""
            add(shown, e.engine_id, row.name, level, *value, changed)
    return shown


def _entropy(engine: fleet_pb2.Engine) -> str:
    """Return the backend that measures entropy on an engine, empty if an older agent does not report the backend."""
    if engine.entropy_backend == agent_pb2.ENTROPY_BACKEND_TORCH:
        return "torch, slower"
    return entropy_backend_name(engine.entropy_backend) if engine.entropy_backend else ""


def savings_table(row: fleet_pb2.Savings) -> Table:
    """Return the treated requests and the control group side by side."""
    columns = ("requests", "thinking, mean", "stopped", "answer, mean", "re-entries", "aborted", "by length")
    shown = new_table("arm", *columns)
    for name, arm in (("treated", row.treated), ("control", row.control)):
        answer = f"{arm.answer_tokens / arm.answers:.1f}" if arm.answers else ""
        thinking = f"{arm.think_tokens / arm.requests:.1f}" if arm.requests else ""
        shares = (_share(count, arm.requests) for count in (arm.reentries, arm.aborts, arm.lengths))
        add(shown, name, arm.requests, thinking, _share(arm.stopped, arm.requests), answer, *shares)
    return shown


def ends_table(row: fleet_pb2.Savings) -> Table:
    """Return the forced ends of treated requests beside the natural ends of the control group."""
    shown = new_table("end", "requests", "re-entries", "answer empty", "aborted")
    for name, side in (("forced, treated", row.forced_ends), ("natural, control", row.natural_ends)):
        shares = (_share(count, side.ends) for count in (side.reentries, side.empty_answers, side.aborts))
        add(shown, name, side.ends, *shares)
    return shown


def harm_table(row: fleet_pb2.Savings) -> Table:
    """Return the harm of each kind of shortening, and what followed its ends beside natural ends."""
    shown = new_table(
        "shortened by", "judged", "would end", "harmful", "not judged", "harm", "after its ends", "natural"
    )
    for harm in row.kinds:
        counts = harm.judged, harm.judged_stops, harm.harmful, harm.unjudged
        sides = (_followed(side) for side in (harm.forced_ends, harm.natural_ends))
        add(shown, kind_text(harm.kind, harm.name), *counts, harm_text(harm, row), *sides)
    return shown


def _followed(side: fleet_pb2.EndCounts) -> str:
    if not side.ends:
        return ""
    parts = (("empty", side.empty_answers), ("thought again", side.reentries), ("by length", side.lengths))
    return f"{side.ends}: " + ", ".join(f"{_share(count, side.ends)} {name}" for name, count in parts)


def saved_text(row: fleet_pb2.Savings) -> str:
    """Return the thinking tokens that the treated requests saved, as a share and in all."""
    if not row.HasField("saved_tokens"):
        return "not known yet, because an arm has too few requests"
    total = row.treated.requests * row.saved_tokens.value
    low, high = (row.treated.requests * end for end in (row.saved_tokens.low, row.saved_tokens.high))
    ratio = row.saved_ratio
    share = f"{percent(ratio.value)} of the thinking ({percent(ratio.low)} to {percent(ratio.high)})"
    return f"{share}, {total:,.0f} tokens in all ({low:,.0f} to {high:,.0f})"


def whole_harm_text(row: fleet_pb2.Savings) -> str:
    """Return the harm of all kinds of shortening together, with the counts behind it."""
    unjudged = f", {row.unjudged} not judged for want of a probe" if row.unjudged else ""
    return f"{harm_text(row, row)} ({row.harmful} of {row.judged} requests{unjudged})"


def savings_lines(row: fleet_pb2.Savings) -> Iterator[str]:
    """Yield what follows from a comparison: the saving, the shadow's own estimate, and the harm."""
    yield f"saved: {saved_text(row)}"
    if count := row.treated.waiting_requests + row.control.waiting_requests:
        waiting = counted(count, "request")
        yield f"not counted yet: {waiting}, because others that began earlier still run"
    if row.control.think_tokens:
        yield f"shadow's own estimate: {percent(row.shadow_saved_tokens / row.control.think_tokens)} of the thinking"
    yield f"harm: {whole_harm_text(row)}"
    for harms in row.kinds:
        if harms.HasField("evidence_ratio"):
            level = "of the level at which the control plane withdraws it"
            yield f"evidence of more harm by {kind_text(harms.kind, harms.name)}: {harms.evidence_ratio:.3g} {level}"
    yield from _distributions(row)
    if row.HasField("drift_evidence_ratio"):
        yield f"evidence of drift: {row.drift_evidence_ratio:.3g} of the level at which the rules go into shadow"


def _distributions(row: fleet_pb2.Savings) -> Iterator[str]:
    """Yield the distribution of each compared signal on live requests beside that of the calibration."""
    for signal, bins in drift_bins(row).items():
        named, seen, calibrated = SIGNALS[signal], sum(b.seen for b in bins), sum(b.calibrated for b in bins)
        if not seen:
            yield f"{named.value}: no request yet"
            continue
        edges = [b.max_value for b in bins]
        shares = (
            f"{percent(b.seen / seen, 0)} (calibrated {percent(b.calibrated / calibrated, 0)}) {where(edges, index)}"
            for index, b in enumerate(bins)
        )
        unit = f", in {named.unit}" * bool(named.unit)
        yield f"{named.value} of {seen} requests{unit}: {', '.join(shares)}"


def _share(count: int, of: int) -> str:
    return percent(count / of) if of else ""


def request_table(rows: Iterable[fleet_pb2.LiveRequest], *, wide: bool = False) -> Table:
    """Return the live requests. wide: add model, tenant, class, cap and eviction tier."""
    more = ("model", "tenant", "class", "cap", "tier") if wide else ()
    columns = ("phase", "thinking", "answer", "entropy, nats", "EAT, nats", "RPDI", "rank", "last decision")
    shown = new_table("engine", "request", *columns, *more)
    for r in rows:
        phase = phase_text(r.phase) + (", preempted" if r.preempted else "")
        measured = (r.entropy_nats, r.eat_ema_nats, r.rpdi)
        signals = ("" if math.isnan(value) else f"{value:.3g}" for value in measured)
        rest = (r.model, r.tenant, r.slo_class, r.max_think_tokens or "", tier_name(r.tier)) if wide else ()
        counts = r.think_tokens, r.output_tokens
        add(shown, r.engine_id, r.request_id, phase, *counts, *signals, r.rank, last_text(r.last_decision), *rest)
    return shown


def self_calibration_table(found: Sequence[fleet_pb2.SelfCalibration]) -> Table:
    """Return what self-calibration has found for each model and SLO class."""
    shown = new_table("model", "SLO class", "self-calibration", "since", "requests", "rule", "proof")
    for each in found:
        texts = requests_text(each), each.rule or "none", proof_text(each) or "none"
        add(shown, each.model, each.slo_class or "none", each.state, stamp_text(each.since_time), *texts)
    return shown


def self_calibration_lines(found: Iterable[fleet_pb2.SelfCalibration]) -> Iterator[str]:
    """Yield why each traffic is in its state, and what was tried."""
    for each in found:
        name = each.model + f", {each.slo_class}" * bool(each.slo_class)
        if each.why:
            yield f"{name}: {each.state}: {each.why}"
        for tried in each.tried:
            yield f"{name}: tried {stamp_text(tried.time)} on {counted(tried.requests, 'request')}: {tried.outcome}"
