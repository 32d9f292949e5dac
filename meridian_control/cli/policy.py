"""Implements `meridianctl policy`, which reads the policy and its history, changes it, and explains its values.

The module uses the control plane only through its gRPC API, and shares the policy schema with the control plane.
The module uses one thread and blocking calls.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from meridian.v1 import policy_pb2
from rich.table import Table

from meridian_control import __version__
from meridian_control.cli.completion import engine_ids, field_names, revision
from meridian_control.cli.console import (
    CALL_TIMEOUT_S,
    FAILED,
    INVALID,
    Client,
    Output,
    OutputOption,
    add,
    change,
    connect,
    console,
    fail,
    first,
    labels_of,
    new_table,
    not_empty,
    reported,
    say,
    say_document,
    show,
    show_value,
    stamp_text,
)
from meridian_control.common.errors import PolicyError
from meridian_control.common.plain_data import plain
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from meridian_control.policy.diff import diff
from meridian_control.policy.model_families import model_families

policy_app = typer.Typer(help="Read, check, change and explain the policy.", no_args_is_help=True)


File = Annotated[Path, typer.Option("-f", "--file", help="Policy file in TOML; - for standard input.")]
Revision = Annotated[int, revision(typer.Option, "N", "Revision of the policy.", "the one in force")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Let the control plane check the call, but change nothing.")]
Diff = Annotated[bool, typer.Option("--diff", help="Print the fields that change.")]
Etag = Annotated[
    str | None,
    typer.Option(help="Etag that the policy in force must have; '' for any.", show_default="its current etag"),
]
Author = Annotated[
    str,
    typer.Option(envvar=["MERIDIAN_AUTHOR", "USER"], help="Author to store, unless credentials name the caller."),
]
Reason = Annotated[str, typer.Option(help="Reason, stored with the revision.")]
RequestId = Annotated[
    str, typer.Option(help="Id of the call, freely chosen; a second call with the id changes nothing.")
]


@policy_app.command("get")
def policy_get(context: typer.Context, revision: Revision = 0, output: OutputOption = Output.toml) -> None:
    """Print the policy; a table has only the fields that differ from their defaults."""
    with connect(context) as client:
        stored = current(client, revision)
    if output in (Output.json, Output.yaml):
        show_value(plain(stored), output)
        return
    policy = _readable(stored.policy)
    if output.is_table:
        rows = [(change.path, change.after, change.before) for change in diff(schema.Policy(), policy)]
        if rows:
            console().print(_rows(("field", "value", "default"), rows))
        else:
            say("every field has its default")
        return
    note = {key: getattr(stored, key) for key in ("revision", "etag", "author", "reason")}
    say(f"# {json.dumps(note, ensure_ascii=False)}")
    say_document(forms.to_toml(policy))


@policy_app.command("apply")
def policy_apply(
    context: typer.Context,
    file: File,
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep the values in force of the fields that FILE leaves out.")
    ] = False,
    dry_run: DryRun = False,
    diff: Diff = False,
    etag: Etag = None,
    author: Author = "",
    reason: Reason = "",
    request_id: RequestId = "",
) -> None:
    """Replace the policy in force with the policy in FILE, and print the new revision."""
    with connect(context) as client:
        stored = _in_force(client)
        if merge:
            policy = forms.parse_values(forms.merged(_values(stored), forms.load_tables(file)))
        else:
            policy = forms.load_to_apply(file)
        request = policy_pb2.UpdatePolicyRequest(
            validate_only=dry_run, author=author, reason=reason, request_id=request_id
        )
        _update(client, request, policy, stored, etag, changes=diff, if_checked=f"{file}: valid, nothing changed")


@policy_app.command("set")
def policy_set(
    context: typer.Context,
    fields: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE", help="Fields and values, as in TOML.", autocompletion=field_names),
    ],
    *,
    dry_run: DryRun = False,
    diff: Diff = False,
    etag: Etag = None,
    author: Author = "",
    reason: Reason = "",
    request_id: RequestId = "",
) -> None:
    """Change fields of the policy in force, and print the new revision. For example: policy set
    scheduler.max_think_tokens=4000 entropy.shadow=true"""
    with connect(context) as client:
        request = policy_pb2.UpdatePolicyRequest(
            validate_only=dry_run, author=author, reason=reason, request_id=request_id
        )
        stored = _in_force(client)
        policy = forms.parse_values(forms.with_fields(_values(stored), fields))
        _update(client, request, policy, stored, etag, changes=diff, if_checked="valid, nothing changed")


@policy_app.command("rollback")
def policy_rollback(
    context: typer.Context,
    revision: Annotated[int, revision(typer.Argument, "REVISION", "Revision to put in force.")],
    *,
    dry_run: DryRun = False,
    diff: Diff = False,
    etag: Etag = None,
    author: Author = "",
    reason: Reason = "",
    request_id: RequestId = "",
) -> None:
    """Put the policy of an older revision in force again, and print the new revision."""
    with connect(context) as client:
        if etag is None and (stored := _in_force(client)) is not None:
            etag = stored.etag
        request = policy_pb2.RollbackPolicyRequest(
            revision=revision,
            etag=etag or "",
            validate_only=dry_run,
            author=author,
            reason=reason,
            request_id=request_id,
        )
        answer = change(client.policy.RollbackPolicy, request)
    _print_answer(answer, diff, f"revision {revision}: valid, nothing changed")


@policy_app.command("validate")
def policy_validate(file: File) -> None:
    """Check FILE against the policy schema without a control plane, and print each bad field."""
    with reported():
        forms.load_to_apply(file)
    say(f"{file}: valid")


@policy_app.command("families")
def policy_families(
    family: Annotated[
        str, typer.Argument(metavar="FAMILY", help="Family whose settings to print.", show_default="a list of all")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Name under which the engine serves the model.", show_default="FAMILY")
    ] = "",
) -> None:
    """List the model families whose settings ship with Meridian, or print those of FAMILY as a section of a policy."""
    known = model_families()
    if family and family not in known:
        fail(INVALID, f"FAMILY must be one of {', '.join(known)}; got {family}")
    if family:
        say_document(known[family].section(model or family))
        return
    settings = [(name, known[name].settings) for name in known]
    rows = [
        (name, of.reasoning_parser, json.dumps(of.closing_text) if of.closing_text else "") for name, of in settings
    ]
    console().print(_rows(("family", "reasoning parser", "closing text"), rows))


@policy_app.command("history")
def policy_history(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many revisions.")] = 20,
    output: OutputOption = Output.table,
) -> None:
    """List the policy revisions, newest first."""
    with connect(context) as client:
        revisions = first(limit, client.policy.ListRevisions, policy_pb2.ListRevisionsRequest(), "revisions")
    rows = [(r.revision, stamp_text(r.create_time), r.author, r.reason, r.etag) for r in revisions]
    shown = _rows(("revision", "time", "author", "reason", "etag"), rows)
    show(revisions, output, shown, "no policy is stored yet")


@policy_app.command("diff")
def policy_diff(
    context: typer.Context,
    before: Annotated[int, revision(typer.Argument, "BEFORE", "Older revision.", "the one before AFTER")] = 0,
    after: Annotated[int, revision(typer.Argument, "AFTER", "Newer revision.", "the one in force")] = 0,
    output: OutputOption = Output.table,
) -> None:
    """Print the fields that differ between two policy revisions, with both values."""
    with connect(context) as client:
        request = policy_pb2.DiffPoliciesRequest(before=before, after=after)
        answer = client.policy.DiffPolicies(request, timeout=CALL_TIMEOUT_S)
    names = (f"revision {answer.before}" if answer.before else "defaults", f"revision {answer.after}")
    print_changes(answer.changes, names, output)


@policy_app.command("explain")
def policy_explain(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="Model or LoRA adapter of the request.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant of the request.")] = "",
    slo_class: Annotated[str, typer.Option(help="SLO class of the request.")] = "",
    effort: Annotated[str, typer.Option(help="Effort level of the request.")] = "",
    label: Annotated[list[str] | None, typer.Option(help="Label of the engine, NAME=VALUE; may be repeated.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Connected engine that gives the values not given above.",
            autocompletion=engine_ids,
            callback=not_empty,
        ),
    ] = "",
    request: Annotated[
        str, typer.Option(help="Live request that gives the values not given above.", callback=not_empty)
    ] = "",
    revision: Revision = 0,
    output: OutputOption = Output.table,
) -> None:
    """Print the value of every policy field for a request or an engine, and the source of the value."""
    asked = policy_pb2.ExplainPolicyRequest(
        revision=revision,
        model=model,
        tenant=tenant,
        slo_class=slo_class,
        effort=effort,
        engine_labels=labels_of(label),
        engine_id=engine,
        request_id=request,
    )
    with connect(context) as client:
        answer = client.policy.ExplainPolicy(asked, timeout=CALL_TIMEOUT_S)
    if output is Output.toml:
        say(f"# revision {answer.revision}")
        for row in answer.values:
            say(f"{row.path} = {row.value}  # {row.origin}")
    elif output.is_table:
        say(f"revision {answer.revision}")
        console().print(_rows(("field", "value", "from"), [(row.path, row.value, row.origin) for row in answer.values]))
    else:
        show_value([{"revision": answer.revision, **plain(row)} for row in answer.values], output)


def current(client: Client, revision: int = 0, timeout_s: float = CALL_TIMEOUT_S) -> policy_pb2.PolicyRevision:
    """Return a stored policy revision, or for 0 the revision in force."""
    return client.policy.GetPolicy(policy_pb2.GetPolicyRequest(revision=revision), timeout=timeout_s).revision


def _readable(message: policy_pb2.Policy) -> schema.Policy:
    """Return the policy of a message, without fields that this version has removed. If a newer control plane has sent
    fields that are unknown here, exit."""
    try:
        policy, removed = forms.from_older_proto(message)
    except PolicyError as error:
        reason = f"the control plane is newer than this meridianctl ({__version__}), which cannot read its policy:"
        fail(FAILED, reason, *map(str, error.violations()))
    print_warnings(f"not printed: {field}" for field in removed)
    return policy


def _values(stored: policy_pb2.PolicyRevision | None) -> dict[str, Any]:
    """Return the values of the policy in force by section."""
    if stored is None:
        fail(FAILED, "there is no policy in force to change that this meridianctl can read; use `policy apply`")
    return forms.to_values(_readable(stored.policy))


def _update(
    client: Client,
    request: policy_pb2.UpdatePolicyRequest,
    policy: schema.Policy,
    stored: policy_pb2.PolicyRevision | None,
    etag: str | None,
    *,
    changes: bool,
    if_checked: str,
) -> None:
    """Put a policy in force unless it is already, and print what has changed.

    stored: the revision in force. etag: None for that of this revision. The other arguments are those of
    `_print_answer`.
    """
    request.policy.CopyFrom(forms.to_proto(policy))
    request.etag = (stored.etag if stored else "") if etag is None else etag
    # The control plane knows whether a call with this id has been made before.
    if stored and not request.request_id and request.etag in ("", stored.etag) and request.policy == stored.policy:
        say(f"revision {stored.revision} etag {stored.etag}, unchanged")
        return
    _print_answer(change(client.policy.UpdatePolicy, request), changes, if_checked)


def policy_in_force(client: Client, *unless: grpc.StatusCode) -> policy_pb2.PolicyRevision | None:
    """Return the revision in force; None if no policy is stored, or if the call fails with one of the codes."""
    try:
        return current(client)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, *unless):
            return None
        raise


def _in_force(client: Client) -> policy_pb2.PolicyRevision | None:
    """Return the revision in force; None if no policy is stored or the stored policy cannot be read."""
    return policy_in_force(client, grpc.StatusCode.FAILED_PRECONDITION)


def _print_answer(
    answer: policy_pb2.UpdatePolicyResponse | policy_pb2.RollbackPolicyResponse, changes: bool, if_checked: str
) -> None:
    """Print what a call has changed, or would change. changes: print each field that changes."""
    if changes:
        print_changes(answer.changes)
    stored = answer.revision
    say(f"revision {stored.revision} etag {stored.etag}" if stored.revision else if_checked)
    print_warnings(answer.warnings)


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}", err=True)


def print_changes(
    changes: Sequence[policy_pb2.PolicyChange],
    names: tuple[str, str] = ("before", "after"),
    output: Output = Output.table,
) -> None:
    rows = _rows(("field", *names), [(c.path, c.before, c.after) for c in changes])
    show(changes, output, rows, "no field differs")


def _rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    filled = new_table(*columns)
    for row in rows:
        add(filled, *row)
    return filled
