"""Implements `meridianctl audit`, which lists the audit records. The module uses one thread and blocking calls."""

from datetime import datetime
from typing import Annotated, Any

import typer
from meridian.v1 import audit_pb2

from meridian_control.cli.console import (
    Output,
    OutputOption,
    SinceOption,
    add,
    connect,
    first,
    moment,
    new_table,
    not_empty,
    show,
    stamp_text,
)

Until = Annotated[
    datetime | None, typer.Option(parser=moment, metavar="TIME", help="Show only calls before this time.")
]


def audit(
    context: typer.Context,
    *,
    principal: Annotated[str, typer.Option(help="Show only calls of this principal.", callback=not_empty)] = "",
    method: Annotated[
        str, typer.Option(help="Show only calls of a method, as in PolicyService/UpdatePolicy.", callback=not_empty)
    ] = "",
    outcome: Annotated[
        str, typer.Option(help="Show only calls with a status, as in PERMISSION_DENIED.", callback=not_empty)
    ] = "",
    request_id: Annotated[str, typer.Option(help="Show only calls with this request id.", callback=not_empty)] = "",
    since: SinceOption = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many calls.")] = 50,
    output: OutputOption = Output.table,
) -> None:
    """List the calls that changed something and the calls that were refused, newest first."""
    times: dict[str, Any] = {"since": since, "until": until}
    request = audit_pb2.ListAuditRequest(
        principal=principal, method=method, outcome=outcome, request_id=request_id, **times
    )
    with connect(context) as client:
        records = first(limit, client.audit.ListAudit, request, "records")
    table = new_table("time", "principal", "role", "peer", "method", "outcome", "before", "after", "what", "why")
    for r in records:
        method = r.method.removeprefix("meridian.v1.")
        what = " ".join(f"{name}={r.details[name]}" for name in sorted(r.details))
        who = (stamp_text(r.time), r.principal, r.role, r.peer)
        add(table, *who, method, r.outcome, r.before_etag, r.after_etag, what, r.error or r.reason)
    show(records, output, table, "no recorded call matches")
