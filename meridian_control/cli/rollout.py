"""Implements `meridianctl rollout`, which starts rollouts, shows them, and pauses, resumes or aborts them.

The module uses the control plane only through its gRPC API, and shares with it the schemas of the policy and of the
rollout plan. The module uses one thread and blocking calls.
"""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from meridian.v1 import rollout_pb2
from rich.console import Group
from rich.table import Table

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
    new_table,
    one_id,
    patient,
    say,
    show,
    show_value,
    stamp_text,
)
from meridian_control.cli.policy import Author, Diff, DryRun, File, RequestId, print_changes, print_warnings
from meridian_control.common.decision_words import apart, with_limit
from meridian_control.common.look import counted
from meridian_control.common.plain_data import plain
from meridian_control.policy import formats as forms
from meridian_control.rollout.plan import Plan

POLL_INTERVAL_S = 1.0
ACTIVE = (
    rollout_pb2.ROLLOUT_STATE_RUNNING,
    rollout_pb2.ROLLOUT_STATE_PAUSED,
    rollout_pb2.ROLLOUT_STATE_HALTED,
)

rollout_app = typer.Typer(
    help="Bring a policy to the fleet in steps, and check guardrails in each step.", no_args_is_help=True
)

Rollout = Annotated[
    int,
    typer.Argument(
        parser=one_id,
        metavar="ROLLOUT",
        help="Number of the rollout.",
        show_default="the active one, or else the newest",
    ),
]
Active = Annotated[
    int,
    typer.Argument(parser=one_id, metavar="ROLLOUT", help="Number of the rollout.", show_default="the active one"),
]
Reason = Annotated[str, typer.Option(help="Reason, stored with the rollout.")]
Etag = Annotated[str, typer.Option(help="Etag that the rollout must have.", show_default="any")]


@rollout_app.command("start")
def rollout_start(
    context: typer.Context,
    file: File,
    *,
    steps: Annotated[Path, typer.Option(help="Steps and guardrails in TOML; - for standard input.")],
    dry_run: DryRun = False,
    diff: Diff = False,
    etag: Annotated[str, typer.Option(help="Etag that the policy in force must have.", show_default="any")] = "",
    author: Author = "",
    reason: Reason = "",
    request_id: RequestId = "",
    output: OutputOption = Output.table,
) -> None:
    """Start a rollout, which brings the policy in FILE to the engines step by step, and print the rollout."""
    if file == steps == forms.STANDARD_INPUT:
        fail(INVALID, "--file and --steps must not both be standard input")
    with connect(context) as client:
        plan = forms.load_as(Plan, steps)
        request = rollout_pb2.StartRolloutRequest(
            policy=forms.to_proto(forms.load_to_apply(file)),
            plan=json_format.ParseDict(plan.model_dump(mode="json", exclude_none=True), rollout_pb2.RolloutPlan()),
            etag=etag,
            validate_only=dry_run,
            author=author,
            reason=reason,
            request_id=request_id,
        )
        answer = change(client.rollout.StartRollout, request)
    if diff:
        print_changes(answer.changes)
    print_warnings(answer.warnings)
    if dry_run:
        say(f"{file} and {steps}: valid, nothing started")
    else:
        _print(answer.rollout, output)


@rollout_app.command("status")
def rollout_status(
    context: typer.Context,
    rollout: Rollout = 0,
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the rollout has ended or halted; fail unless it has completed.")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Print a rollout: its state and steps, what it waits for, the values of its guardrails, and its events."""
    with connect(context) as client:
        stored = _rollout(client, rollout)
        while wait and stored.state in (rollout_pb2.ROLLOUT_STATE_RUNNING, rollout_pb2.ROLLOUT_STATE_PAUSED):
            time.sleep(POLL_INTERVAL_S)
            stored = patient(partial(_rollout, client, stored.rollout_id))
    _print(stored, output)
    if wait and stored.state != rollout_pb2.ROLLOUT_STATE_COMPLETED:
        fail(FAILED, f"rollout {stored.rollout_id} is {_word(stored)}")


@rollout_app.command("list")
def rollout_list(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many rollouts.")] = 20,
    output: OutputOption = Output.table,
) -> None:
    """List the rollouts, newest first."""
    with connect(context) as client:
        rollouts = first(limit, client.rollout.ListRollouts, rollout_pb2.ListRolloutsRequest(), "rollouts")
    shown = new_table("rollout", "state", "step", "candidate", "started", "author", "reason")
    for r in rollouts:
        started = stamp_text(r.create_time)
        add(shown, r.rollout_id, _word(r), _step(r), r.candidate_revision, started, r.author, r.reason)
    show(rollouts, output, shown, "no rollout has been started")


def _steering(request: type[Message], text: str) -> None:
    """Add a command that changes a rollout by one call, and prints the rollout."""
    method = request.DESCRIPTOR.name.removesuffix("Request")

    @rollout_app.command(method.removesuffix("Rollout").lower(), help=text)
    def steer(
        context: typer.Context,
        rollout: Active = 0,
        *,
        etag: Etag = "",
        author: Author = "",
        reason: Reason = "",
        request_id: RequestId = "",
        output: OutputOption = Output.table,
    ) -> None:
        asked = request(rollout_id=rollout, etag=etag, author=author, reason=reason, request_id=request_id)
        with connect(context) as client:
            answer = change(getattr(client.rollout, method), asked)
        _print(answer.rollout, output)


_steering(
    rollout_pb2.PauseRolloutRequest,
    "Stop the clock of the rollout's current step, and print the rollout.\n\nThe engines of the step keep the "
    "candidate policy, and the guardrails stay in force.",
)
_steering(
    rollout_pb2.ResumeRolloutRequest,
    "Continue a paused or halted rollout, and print the rollout. After a halt the current step begins again.",
)
_steering(
    rollout_pb2.AbortRolloutRequest,
    "End a rollout, put the policy from before the rollout in force as a new revision, and print the rollout.",
)


def _rollout(client: Client, rollout_id: int, timeout_s: float = CALL_TIMEOUT_S) -> rollout_pb2.Rollout:
    request = rollout_pb2.GetRolloutRequest(rollout_id=rollout_id)
    return client.rollout.GetRollout(request, timeout=timeout_s).rollout


# ------------------------------------------------------------------------------------------------------------ output


def _print(rollout: rollout_pb2.Rollout, output: Output) -> None:
    if not output.is_table:
        show_value(plain(rollout), output)
        return
    parts: list[Table | str] = [_facts(rollout), "", _steps(rollout)]
    if rollout.guardrails:
        parts += ["", _readings(rollout)]
    console().print(Group(*parts, "", _events(rollout)))


def _facts(rollout: rollout_pb2.Rollout) -> Table:
    shown = new_table("rollout", str(rollout.rollout_id))
    back = f", taken back as {rollout.rollback_revision}" if rollout.rollback_revision else ""
    add(shown, "state", _word(rollout))
    add(shown, "revisions", f"{rollout.stable_revision} → {rollout.candidate_revision}{back}")
    add(shown, "engines", f"{rollout.candidate_engines} with the candidate, {counted(rollout.other_engines, 'other')}")
    if rollout.waiting_for:
        add(shown, "waits for", rollout.waiting_for)
    if rollout.HasField("violation"):
        v = rollout.violation
        add(shown, "violation", f"{v.guardrail} {with_limit(v.value, v.limit)}")
    add(shown, "etag", rollout.etag)
    return shown


def _steps(rollout: rollout_pb2.Rollout) -> Table:
    shown = new_table("step", "engines", "bake, s", "")
    done = rollout.state == rollout_pb2.ROLLOUT_STATE_COMPLETED
    for index, step in enumerate(rollout.plan.step, 1):
        labels = " ".join(f"{name}={glob}" for name, glob in sorted(step.engine_labels.items()))
        whom = " of ".join(part for part in (f"{step.percent:g} %", labels) if part)
        here = f"{rollout.baked_s:.0f} s" if index == rollout.step and rollout.state in ACTIVE else ""
        add(shown, index, whom, f"{step.bake_s:g}", "done" if done or index < rollout.step else here)
    return shown


def _readings(rollout: rollout_pb2.Rollout) -> Table:
    shown = new_table("guardrail", "value", "limit", "observed", "others", "")
    for r in rollout.guardrails:
        value, limit = apart(r.value, r.limit, 4)
        value = value if r.HasField("value") else ""
        verdict = "violated" if r.violated else "waiting" if r.waiting else "" if value else "not measured"
        add(shown, r.guardrail, value, limit, r.observations, r.stable_observations or "", verdict)
    return shown


def _events(rollout: rollout_pb2.Rollout) -> Table:
    shown = new_table("time", "event", "step", "author", "reason")
    for event in rollout.events:
        add(shown, stamp_text(event.time), event.event, event.step, event.author, event.reason)
    return shown


def _word(rollout: rollout_pb2.Rollout) -> str:
    return rollout_pb2.RolloutState.Name(rollout.state).removeprefix("ROLLOUT_STATE_").lower()


def short_text(rollout: rollout_pb2.Rollout) -> str:
    """Return a rollout's state in a line."""
    waits = f", waits for {rollout.waiting_for}" if rollout.waiting_for else ""
    violated = f", violates {rollout.violation.guardrail}" if rollout.HasField("violation") else ""
    where = f"step {_step(rollout)} with revision {rollout.candidate_revision}"
    return f"{rollout.rollout_id} {_word(rollout)}, {where}{waits}{violated}"


def _step(rollout: rollout_pb2.Rollout) -> str:
    return f"{rollout.step} of {len(rollout.plan.step)}"
