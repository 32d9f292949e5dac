"""Implements `meridianctl freeze`, `thaw` and `freezes`, which put engines back to stock vLLM for a limited time.

The module uses the control plane only through its gRPC API, on one thread with blocking calls.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import fleet_pb2, freeze_pb2
from rich.table import Table

from meridian_control.cli.console import (
    FAILED,
    Client,
    Output,
    OutputOption,
    add,
    change,
    connect,
    duration_s,
    fail,
    finite,
    labels_of,
    new_table,
    not_empty,
    one_id,
    pages,
    patient,
    say,
    show,
    stamp_text,
)
from meridian_control.cli.expected import AllowNone, Expected, LeastEngines, all_engines, connected
from meridian_control.cli.policy import Author
from meridian_control.engine.freeze_state import Match

POLL_INTERVAL_S = 0.1
# Seconds within which other replicas learn of a freeze.
HEARD_S = 1.0


def freeze(
    context: typer.Context,
    duration: Annotated[
        int,
        typer.Option(
            "--for", parser=duration_s, metavar="DURATION", help="Duration of the freeze, for example 30s, 10m or 2h."
        ),
    ],
    *,
    reason: Annotated[str, typer.Option(help="Reason, stored with the freeze and written to the engines' logs.")],
    engine: Annotated[list[str] | None, typer.Option(help="Glob of engine ids to freeze; may be repeated.")] = None,
    model: Annotated[str, typer.Option(help="Glob of models whose engines to freeze.", callback=not_empty)] = "",
    label: Annotated[
        list[str] | None, typer.Option(help="Label of engines to freeze, NAME=VALUE; may be repeated.")
    ] = None,
    author: Author = "",
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until the engines confirm the freeze.", callback=finite)
    ] = 10.0,
    engines: LeastEngines = None,
    allow_none: AllowNone = False,
) -> None:
    """Put all engines, or those that match, back to stock vLLM for a limited time, and print how many confirmed.

    The command fails unless every matching engine has confirmed, and at least one. The freeze stays in force also then.
    """
    match = freeze_pb2.FreezeMatch(engine_ids=engine or (), model=model, engine_labels=labels_of(label))
    request = freeze_pb2.FreezeRequest(match=match, author=author, reason=reason)
    request.duration.FromSeconds(duration)
    with connect(context) as client:
        stored = change(client.freeze.Freeze, request).freeze
        say(f"freeze {stored.freeze_id} until {stamp_text(stored.end_time)}")
        _wait_for_confirmations(client, stored, wait, Expected(engines, allow_none))


def _wait_for_confirmations(client: Client, stored: freeze_pb2.StoredFreeze, wait_s: float, expected: Expected) -> None:
    """Print how many engines have confirmed a freeze; exit with FAILED unless all that are expected have."""
    began = time.monotonic()
    # An engine that has confirmed counts also once the freeze is over, which may be before another one has.
    confirmed: set[tuple[str, str]] = set()
    sent: set[tuple[str, str]] = set()
    while True:
        known, unreachable = patient(partial(all_engines, client), began + wait_s - time.monotonic())
        meant = [engine for engine in known if _is_meant(engine, stored)]
        wanted = connected(meant)
        confirmed |= {_process(engine) for engine in wanted if _is_frozen(engine, stored)}
        sent |= {_process(engine) for engine in wanted if stored.freeze_id in engine.freeze.freeze_ids}
        missing = [
            f"{engine.engine_id} has not confirmed: {_awaited(engine, stored, was_sent=_process(engine) in sent)}"
            for engine in wanted
            if _process(engine) not in confirmed
        ]
        missing += expected.missing(meant, unreachable)
        waited_s = time.monotonic() - began
        # Only an engine's own replica can match the engine's labels, and that replica learns of the freeze within
        # HEARD_S.
        is_known = not stored.match.engine_labels or waited_s >= min(HEARD_S, wait_s)
        if (is_known and not missing) or waited_s >= wait_s:
            break
        time.sleep(POLL_INTERVAL_S)
    if not wanted:
        say("no connected engine matches; engines that match are frozen as soon as they connect")
    else:
        say(f"{sum(_process(engine) in confirmed for engine in wanted)} of {len(wanted)} connected engines confirmed")
    for engine in wanted:
        if engine.freeze.paused and _is_frozen(engine, stored):
            say(f"vLLM is paused on {engine.engine_id}: the freeze is in force from its first step on")
    if missing:
        fail(FAILED, *missing)


def _process(engine: fleet_pb2.Engine) -> tuple[str, str]:
    return engine.engine_id, engine.incarnation


def _awaited(engine: fleet_pb2.Engine, stored: freeze_pb2.StoredFreeze, *, was_sent: bool) -> str:
    """Return what an engine's confirmation waits for, or that the freeze, which `was_sent` to it, has ended."""
    if stored.freeze_id not in engine.freeze.freeze_ids:
        if was_sent:
            return "the freeze was over or taken back before"
        return "its replica of the control plane has not sent the freeze to it yet"
    report_text = f"came at {_clock(engine.report_time)}" if engine.HasField("report_time") else "is still to come"
    return f"none of its steps has begun since; its last report {report_text}"


def _clock(time: Timestamp) -> str:
    return time.ToDatetime().strftime("%H:%M:%S UTC")


def _is_meant(engine: fleet_pb2.Engine, stored: freeze_pb2.StoredFreeze) -> bool:
    if stored.freeze_id in engine.freeze.freeze_ids:
        return True
    return _match(stored).matches(engine.engine_id, engine.model, engine.labels)


def _match(stored: freeze_pb2.StoredFreeze) -> Match:
    labels = tuple(sorted(stored.match.engine_labels.items()))
    return Match(tuple(stored.match.engine_ids), stored.match.model, labels)


def _is_frozen(engine: fleet_pb2.Engine, stored: freeze_pb2.StoredFreeze) -> bool:
    return engine.freeze.confirmed and stored.freeze_id in engine.freeze.freeze_ids


def thaw(
    context: typer.Context,
    freeze_id: Annotated[
        int,
        typer.Argument(parser=one_id, metavar="FREEZE", help="Number of the freeze.", show_default="all freezes"),
    ] = 0,
) -> None:
    """End one freeze, or all freezes, before the time limit, and print the ended freezes."""
    with connect(context) as client:
        answer = change(client.freeze.Thaw, freeze_pb2.ThawRequest(freeze_id=freeze_id))
    for ended in answer.freezes:
        say(f"freeze {ended.freeze_id} has ended")
    if not answer.freezes:
        say("no freeze is in force")


def freezes(context: typer.Context, output: OutputOption = Output.table) -> None:
    """List the freezes in force, newest first."""
    with connect(context) as client:
        entries = in_force(client)
    show(entries, output, _table(entries), "no freeze is in force")


def in_force(client: Client) -> list[freeze_pb2.StoredFreeze]:
    request = freeze_pb2.ListFreezesRequest()
    return [entry for page in pages(client.freeze.ListFreezes, request) for entry in page.freezes]


def _table(rows: Sequence[freeze_pb2.StoredFreeze]) -> Table:
    shown = new_table("freeze", "until", "engines", "author", "reason")
    for row in rows:
        add(shown, row.freeze_id, stamp_text(row.end_time), _match(row), row.author, row.reason)
    return shown
