"""Implements `meridianctl explain`, `decisions`, `shadow` and `savings`, which show the decisions about requests, their
reasons and their effects.

The module uses the control plane only through its gRPC API, on one thread with blocking calls.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import Annotated

import grpc
import typer
from meridian.v1 import fleet_pb2
from rich.table import Table

from meridian_control.cli.completion import OnlyEngine, OnlyOfEngine
from meridian_control.cli.console import (
    CALL_TIMEOUT_S,
    INVALID,
    LONGEST_REQUEST_ID,
    Client,
    Output,
    OutputOption,
    SinceOption,
    add,
    connect,
    console,
    fail,
    new_table,
    not_empty,
    pages,
    say,
    show,
    show_value,
    stamp_text,
    warn_unreachable,
)
from meridian_control.cli.expected import all_engines, check_known, of_engine
from meridian_control.cli.tables import (
    ends_table,
    handover_table,
    harm_table,
    savings_lines,
    savings_table,
    self_calibration_lines,
    self_calibration_table,
)
from meridian_control.common.decision_words import (
    KINDS,
    decision_text,
    event_text,
    life_state,
    outcome_text,
    spelled,
    why,
)
from meridian_control.common.harm_words import withdrew_text
from meridian_control.common.look import counted, percent, phase_text
from meridian_control.common.plain_data import plain


def explain(
    context: typer.Context,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Request id, as the engine, the client or the answer has it.")
    ],
    engine: OnlyOfEngine = "",
    output: OutputOption = Output.table,
) -> None:
    """Print the life of a request: its events, the decisions about it, the values each rule saw, and the outcomes."""
    asked = fleet_pb2.ExplainRequestRequest(request_id=request[:LONGEST_REQUEST_ID], engine_id=engine)
    with connect(context) as client:
        answer = client.fleet.ExplainRequest(asked, timeout=CALL_TIMEOUT_S)
    warn_unreachable(answer.unreachable_replicas)
    if not output.is_table:
        show_value(plain(answer), output)
        return
    terminal = console()
    for line in _heading(answer):
        terminal.say(line)
    terminal.print(_life_table(answer.life))
    if answer.life.events_left_out:
        terminal.say(f"no longer in the decision log: {counted(answer.life.events_left_out, 'older event')}")
    for life in answer.siblings:
        terminal.say()
        for line in _heading(fleet_pb2.ExplainRequestResponse(life=life)):
            terminal.say(line)
        terminal.print(_life_table(life))
    if answer.siblings_left_out:
        terminal.say(f"with this id, but not shown: {counted(answer.siblings_left_out, 'request')}")
    for life in answer.related:
        terminal.say(_related(life, answer.life))
        terminal.print(_life_table(life))


# `shadow` says one of these texts of a comparison: COMPARED, or the other one if the comparison is empty.
COMPARED = "the counts of an engine begin when the rules change, and when it connects to another replica"
NOTHING_COMPARED = (
    "nothing is compared yet: no rule is in shadow, or no thinking has ended since the rules changed or the engines "
    "connected to another replica"
)


def decisions(
    context: typer.Context,
    *,
    engine: OnlyOfEngine = "",
    request: Annotated[str, typer.Option(help="Show only decisions about this request.", callback=not_empty)] = "",
    kind: Annotated[str, typer.Option(help=f"Show only this kind: {', '.join(KINDS)}.", callback=not_empty)] = "",
    reason: Annotated[str, typer.Option(help="Show only this reason, for example eat.", callback=not_empty)] = "",
    since: SinceOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many decisions.")] = 50,
    output: OutputOption = Output.table,
) -> None:
    """List the decisions about requests, newest first, with the values that each rule compared.

    A wide table has the kind and the reason that --kind and --reason take.
    """
    if kind and kind not in KINDS:
        fail(INVALID, f"--kind must be one of {', '.join(KINDS)}; got {kind!r}")
    asked = fleet_pb2.ListDecisionsRequest(engine_id=engine, request_id=request, kind=kind, reason=reason)
    logged: list[fleet_pb2.LoggedDecision] = []
    unreachable: set[str] = set()
    with connect(context) as client:
        for page in pages(client.fleet.ListDecisions, asked, limit):
            logged += page.decisions
            unreachable |= set(page.unreachable_replicas)
            if len(logged) >= limit or (since and logged and logged[-1].time.ToDatetime(UTC) < since):
                break
        if engine and not logged:
            check_known(client, engine)
    logged = [d for d in logged if since is None or d.time.ToDatetime(UTC) >= since][:limit]
    wide = output is Output.wide
    more = ("kind", "reason") if wide else ()
    rows = new_table("time", "engine", "request", "revision", "thinking", "decision", "why", "outcome", *more)
    for d in logged:
        about = (d.engine_id, d.request_id, d.revision, d.signals.think_tokens)
        rest = (d.kind, d.reason) if wide else ()
        add(rows, stamp_text(d.time), *about, *_cells(d), *rest)
    is_filtered = engine or request or kind or reason or since
    show(logged, output, rows, "no decision matches" if is_filtered else "no decision is logged")
    warn_unreachable(unreachable)


def shadow(
    context: typer.Context,
    engine: OnlyEngine = "",
    output: OutputOption = Output.table,
) -> None:
    """Compare what rules and handovers in shadow would have done on each engine with what happened, since the rules
    changed or the engine connected to another replica."""
    with connect(context) as client:
        listed, unreachable = all_engines(client)
    warn_unreachable(unreachable)
    engines = of_engine(listed, engine)
    if not output.is_table:
        shadow_rows = [{"engine_id": e.engine_id, **plain(row)} for e in engines for row in e.shadow]
        moved = [e for e in engines if e.HasField("shadow_handovers")]
        shadow_rows += [{"engine_id": e.engine_id, "section": "disagg", **plain(e.shadow_handovers)} for e in moved]
        show_value(shadow_rows, output, "shadow")
        return
    columns = "since revision", "thinking ended", "would end", "at, mean", "tokens saved", "of thinking"
    rows = new_table("engine", "section", "rule", *columns)
    for e in engines:
        for row in e.shadow:
            mean = f"{row.would_end_think_tokens / row.would_end:.0f}" if row.would_end else ""
            share = percent(row.saved_tokens / row.think_tokens) if row.think_tokens else ""
            counts = row.since_revision, row.requests, row.would_end, mean, row.saved_tokens, share
            add(rows, e.engine_id, row.section, row.reason or "first rule to fire", *counts)
    moved = [e for e in engines if e.HasField("shadow_handovers")]
    if rows.row_count or not moved:
        show([row for e in engines for row in e.shadow], output, rows, NOTHING_COMPARED)
    if moved:
        console().print(handover_table(moved))
    if rows.row_count:
        say(COMPARED)


def savings(context: typer.Context, output: OutputOption = Output.table) -> None:
    """Compare treated requests with the control group: tokens saved and harm, with intervals; and show
    what self-calibration has found."""
    with connect(context) as client:
        answer = client.fleet.GetSavings(fleet_pb2.GetSavingsRequest(), timeout=CALL_TIMEOUT_S)
        found = _self_calibrations(client)
    warn_unreachable(answer.unreachable_replicas)
    if not output.is_table:
        listed = {"self_calibrations": [plain(each) for each in found]} if found else {}
        show_value(plain(answer) | listed, output)
        return
    terminal = console()
    if found:
        terminal.print(self_calibration_table(found))
        for line in self_calibration_lines(found):
            terminal.say(line)
    if answer.withdrawn_revision:
        did = withdrew_text(answer.withdrawn_cause)
        terminal.say(f"revision {answer.withdrawn_revision} {did}: {answer.withdrawn_reason}")
    arms = [arm for row in answer.savings for arm in (row.treated, row.control)]
    if not any(arm.requests or arm.waiting_requests for arm in arms):
        terminal.say(
            "no request counts: nothing in force shortens thinking, entropy.holdout_share is 0, or none has ended"
        )
        return
    for row in answer.savings:
        which = "current" if row.in_force else "earlier"
        terminal.say(f"{which} rules, since revision {row.since_revision}")
        terminal.print(savings_table(row))
        terminal.print(ends_table(row))
        if row.kinds:
            terminal.print(harm_table(row))
        for line in savings_lines(row):
            terminal.say(line)


def _self_calibrations(client: Client) -> list[fleet_pb2.SelfCalibration]:
    """Return what self-calibration has found; nothing from a control plane of an older version."""
    try:
        answer = client.fleet.ListSelfCalibrations(fleet_pb2.ListSelfCalibrationsRequest(), timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return []
    return list(answer.self_calibrations)


# -------------------------------------------------------------------------------------------------------------- words


def _heading(answer: fleet_pb2.ExplainRequestResponse) -> Iterator[str]:
    life = answer.life
    of = (("model", life.model), ("tenant", life.tenant), ("SLO class", life.slo_class), ("effort", life.effort))
    about = "".join(f", {name} {value}" for name, value in of if value)
    about += f", asked in vain for SLO class {life.refused_slo_class}" * bool(life.refused_slo_class)
    yield f"request {life.request_id} on {life.engine_id} ({life.incarnation}){about}"
    own = [f"at least {life.min_think_tokens}"] if life.HasField("min_think_tokens") else []
    own += [f"at most {life.max_think_tokens}"] if life.HasField("max_think_tokens") else []
    wishes = f"; asked for {' and '.join(own)} thinking tokens" if own else ""
    wishes += "; its stops sleep while it thinks" * life.sleeping_stops
    late = " or earlier, when this replica first received it" if life.joined_late else ""
    limits = f"{life.prompt_tokens} prompt tokens, max_tokens {life.max_tokens}{wishes}"
    yield f"opened {stamp_text(life.open_time)}{late}; {limits}"
    counts, state = f"{life.think_tokens} thinking and {life.output_tokens} answer tokens", life_state(answer)
    if state == "finished":
        ends = [spelled(event.detail) for event in life.events if event.kind == "closed"]
        yield f"closed after {_seconds(life.close_time, life):.3f} s ({', '.join(ends)}): {counts}"
    elif answer.HasField("live"):
        live = answer.live
        counts = f"{live.think_tokens} thinking and {live.output_tokens} answer tokens"
        yield f"live, {phase_text(live.phase)}{', preempted' if live.preempted else ''}: {counts}, rank {live.rank}"
    else:
        text = "live" if state == "live" else "end unknown, because the stream is lost"
        yield f"{text}: {counts} at the newest event"


def _related(related: fleet_pb2.RequestLife, life: fleet_pb2.RequestLife) -> str:
    """Return how a life on another engine relates to the explained one."""
    before = related.open_time.ToNanoseconds() < life.open_time.ToNanoseconds()
    verb = "continues" if before else "is continued as"
    return f"request {life.request_id} {verb} {related.request_id} on {related.engine_id} ({related.incarnation})"


def _life_table(life: fleet_pb2.RequestLife) -> Table:
    rows = new_table("seconds", "thinking", "answer", "event", "why", "outcome")
    for event in life.events:
        cells: Sequence[str] = (_happened(event), "", "")
        if event.kind == "decision":
            cells = _cells(event.decision, life)
        add(rows, f"{_seconds(event.time, life):+.3f}", event.think_tokens, event.output_tokens, *cells)
    return rows


def _happened(event: fleet_pb2.RequestEvent) -> str:
    opened = event.kind in ("opened", "stream_back")
    return event_text(event) + f", {phase_text(event.phase)}" * opened


def _cells(d: fleet_pb2.LoggedDecision, life: fleet_pb2.RequestLife | None = None) -> tuple[str, str, str]:
    """Return what a decision does, why, and what became of it and when."""
    outcome = outcome_text(d.kind, d.outcome, d.shadow)
    if d.outcome_think_tokens:
        outcome += f" at {d.outcome_think_tokens}"
    if d.outcome and life is not None:
        outcome += f" ({_seconds(d.outcome_time, life):+.3f})"
    return decision_text(d.kind, d.reason, d.shadow), "; ".join(why(d, in_full=True)), outcome


def _seconds(time: object, life: fleet_pb2.RequestLife) -> float:
    return (time.ToNanoseconds() - life.open_time.ToNanoseconds()) / 1e9  # type: ignore[attr-defined, no-any-return]
