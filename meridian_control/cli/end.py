"""Implements `meridianctl end`, which ends the thinking of one request now.

The module uses the control plane only through its gRPC API, on one thread with blocking calls.
"""

from typing import Annotated

import typer
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.cli.completion import engine_ids
from meridian_control.cli.console import (
    FAILED,
    LONGEST_REQUEST_ID,
    Output,
    OutputOption,
    change,
    connect,
    fail,
    finite,
    not_empty,
    say,
    show_value,
)
from meridian_control.common.decision_words import outcome_text
from meridian_control.common.look import counted
from meridian_control.common.plain_data import plain

State = fleet_pb2.EndThinkingState
# For each state in which the call makes no decision: the reason, after the request's name.
NOT_ENDED = {
    State.END_THINKING_STATE_NOT_THINKING_YET: "has generated no token yet, and may not think; try again",
    State.END_THINKING_STATE_UNKNOWN_MARKERS: "cannot be ended: its engine does not know the thinking markers, or the "
    "prompt came as embeddings",
    State.END_THINKING_STATE_CANNOT_FORCE: "cannot be ended: its engine cannot force an end of thinking",
    State.END_THINKING_STATE_FROZEN: "cannot be ended: its engine is frozen",
    State.END_THINKING_STATE_AGENT_OFF: "cannot be ended: a fault has switched its engine's agent off",
    State.END_THINKING_STATE_NO_POLICY: "cannot be ended: its engine has not applied a policy yet; try again",
}
# Outcomes after which the request no longer thinks.
ENDED = (
    agent_pb2.OUTCOME_APPLIED,
    agent_pb2.OUTCOME_SUPERSEDED,
    agent_pb2.OUTCOME_ENDED_NATURALLY,
    agent_pb2.OUTCOME_REQUEST_GONE,
)


def end(
    context: typer.Context,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Request id, as the engine, the client or the answer has it.")
    ],
    *,
    reason: Annotated[str, typer.Option(help="Reason, stored in the audit record and in the decision log.")] = "",
    engine: Annotated[
        str,
        typer.Option(help="Look only at the requests of this engine.", autocompletion=engine_ids, callback=not_empty),
    ] = "",
    wait: Annotated[float, typer.Option(min=0, max=5, help="Seconds to wait for the outcome.", callback=finite)] = 2.0,
    output: OutputOption = Output.table,
) -> None:
    """End the thinking of a live request now, so that the engine generates the answer, and print the outcome."""
    asked = fleet_pb2.EndThinkingRequest(
        request_id=request[:LONGEST_REQUEST_ID], engine_id=engine, reason=reason, wait_ms=round(wait * 1000)
    )
    with connect(context) as client:
        answer = change(client.fleet.EndThinking, asked)
    if not output.is_table:
        show_value(plain(answer), output)
    who = f"request {answer.request_id} on {answer.engine_id}"
    if (why := NOT_ENDED.get(answer.state)) is not None:
        fail(FAILED, f"{who} {why}")
    if output.is_table:
        say(_told(who, answer))
    if answer.state != State.END_THINKING_STATE_ANSWERING:
        _check_outcome(answer, wait)


def _told(who: str, answer: fleet_pb2.EndThinkingResponse) -> str:
    decided = f"decision {answer.decision_id} ({answer.reason}) of session {answer.session_id}"
    if answer.state == State.END_THINKING_STATE_ANSWERING:
        # The newest decision may have come too late, or ended earlier thinking of the same answer.
        did = "ended its thinking" if answer.outcome == agent_pb2.OUTCOME_APPLIED else "was made"
        return f"{who} is already answering" + f"; {decided} {did}: {_outcome(answer)}" * bool(answer.decision_id)
    already = "is already being ended" if answer.state == State.END_THINKING_STATE_ALREADY_ENDING else "is being ended"
    return f"{who} {already} by {decided}: {_outcome(answer)}"


def _outcome(answer: fleet_pb2.EndThinkingResponse) -> str:
    if not answer.outcome:
        return f"no outcome yet, {counted(answer.think_tokens, 'thinking token')} so far"
    detail = f" ({answer.detail})" if answer.detail else ""
    return f"{outcome_text('force', answer.outcome)} at {counted(answer.think_tokens, 'thinking token')}{detail}"


def _check_outcome(answer: fleet_pb2.EndThinkingResponse, wait_s: float) -> None:
    """Exit with FAILED if the outcome says that the request still thinks, or did not come within `wait_s`."""
    if answer.outcome and answer.outcome not in ENDED:
        fail(FAILED, f"the thinking was not ended: {outcome_text('force', answer.outcome)}")
    if not answer.outcome and wait_s:
        fail(FAILED, f"no outcome within {wait_s:g} s: `meridianctl explain {answer.request_id}` shows it later")
