"""`meridianctl`: reads and changes policy, shows the fleet, records traces and calibrates on them.

Owns the command line, its output and its exit codes. Knows the control plane only through its gRPC API, and shares with
it the policy schema and, offline, the rules. One thread, blocking calls.
"""

import json
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from meridian.v1 import agent_pb2, fleet_pb2
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from meridian_control import policy as schema
from meridian_control.console import (
    FAILED,
    Client,
    Output,
    Target,
    add,
    connect,
    console,
    fail,
    new_table,
    pages,
    reported,
    show,
    warn_unreachable,
)
from meridian_control.credentials import Credentials
from meridian_control.ctl_audit import audit
from meridian_control.ctl_freeze import freeze, freezes, thaw
from meridian_control.ctl_policy import current, policy_app
from meridian_control.ctl_rollout import rollout_app
from meridian_control.recorder import Limits, Recorder
from meridian_control.trace import TraceWriter

if TYPE_CHECKING:
    from meridian_control.replay import Replay

POLL_INTERVAL_S = 0.3

HELP = """Read and change Meridian's policy, and look at the fleet.

Exit codes:

0  ok

1  not converged, not completed, nothing to recommend, or a precondition failed

2  usage error, invalid policy, unusable trace or labels

3  server, or its policy store, unreachable

4  not allowed: no credentials, or none that suffice
"""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(policy_app, name="policy")
app.add_typer(rollout_app, name="rollout")
for command in (audit, freeze, thaw, freezes):
    app.command()(command)


FleetOutput = Annotated[Output, typer.Option("-o", "--output")]


@app.callback()
def options(
    call: typer.Context,
    *,
    server: Annotated[str, typer.Option(help="host:port of the control plane; else MERIDIAN_SERVER.")] = "",
    context: Annotated[str, typer.Option(help="Its name in the context file; else MERIDIAN_CONTEXT.")] = "",
    ca: Annotated[str, typer.Option(help="PEM file of the CA of its certificate; else MERIDIAN_TLS_CA.")] = "",
    cert: Annotated[str, typer.Option(help="PEM file of a client certificate; else MERIDIAN_TLS_CERT.")] = "",
    key: Annotated[str, typer.Option(help="PEM file of its key; else MERIDIAN_TLS_KEY.")] = "",
    token_file: Annotated[str, typer.Option(help="File of a bearer token; else MERIDIAN_TOKEN_FILE.")] = "",
) -> None:
    call.obj = Target(server, context, Credentials(ca, cert, key, token_file))


# ------------------------------------------------------------------------------------------------------------- fleet


@app.command()
def engines(context: typer.Context, output: FleetOutput = Output.table) -> None:
    """List the engines."""
    with connect(context) as client:
        found, unreachable = _engines(client)
    show(found, output, _engine_table(found))
    warn_unreachable(unreachable)
    if output is Output.table:
        for refused in (engine for engine in found if engine.nack_error):
            typer.echo(f"{refused.engine_id} refused revision {refused.revision}: {refused.nack_error}")


@app.command()
def requests(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help="Only this engine's.")] = "",
    output: FleetOutput = Output.table,
) -> None:
    """List the live requests."""
    with connect(context) as client:
        request = fleet_pb2.ListRequestsRequest(engine_id=engine)
        answers = list(pages(client.fleet.ListRequests, request))
    found = [live for page in answers for live in page.requests]
    show(found, output, _request_table(found))
    warn_unreachable(name for page in answers for name in page.unreachable_replicas)


@app.command()
def watch(
    context: typer.Context, interval_ms: Annotated[int, typer.Option(min=1, help="Time between two updates.")] = 1000
) -> None:
    """Show engines and live requests until Ctrl-C."""
    request = fleet_pb2.WatchFleetRequest(interval_ms=interval_ms)
    with connect(context) as client, Live(console=console()) as live:
        try:
            for state in client.fleet.WatchFleet(request):
                live.update(Group(_engine_table(state.engines), _request_table(state.requests)), refresh=True)
        except KeyboardInterrupt:
            return


@app.command()
def wait(
    context: typer.Context,
    revision: Annotated[int | None, typer.Option(min=1, help="Default: the one in force now.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds.")] = 60.0,
) -> None:
    """Wait until every connected engine has applied a policy revision."""
    deadline = time.monotonic() + timeout
    with connect(context) as client:
        wanted = revision or current(client).revision
        connected, unreachable = _connected(client)
        while (behind := [engine for engine in connected if engine.acked_revision < wanted]) or unreachable:
            if refused := [engine for engine in behind if _refused(engine, wanted)]:
                fail(FAILED, *(f"{engine.engine_id} refused: {engine.nack_error}" for engine in refused))
            if time.monotonic() >= deadline:
                warn_unreachable(unreachable)
                fail(FAILED, *(f"{engine.engine_id} is at revision {engine.acked_revision}" for engine in behind))
            time.sleep(POLL_INTERVAL_S)
            connected, unreachable = _connected(client)
    typer.echo(f"revision {wanted} is applied on all {len(connected)} connected engines")


def _connected(client: Client) -> tuple[list[fleet_pb2.Engine], list[str]]:
    found, unreachable = _engines(client)
    return [engine for engine in found if engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED], unreachable


def _refused(engine: fleet_pb2.Engine, revision: int) -> bool:
    """The error belongs to the revision the engine was last asked to take."""
    return bool(engine.nack_error) and engine.revision >= revision


def _engines(client: Client) -> tuple[list[fleet_pb2.Engine], list[str]]:
    """All engines, and the replicas that were not heard."""
    found = list(pages(client.fleet.ListEngines, fleet_pb2.ListEnginesRequest()))
    unreachable = [name for page in found for name in page.unreachable_replicas]
    return [engine for page in found for engine in page.engines], unreachable


# ------------------------------------------------------------------------------------------------------- calibration


@app.command()
def record(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Trace file to write; must not exist.")],
    engine: Annotated[str, typer.Option(help="Only this engine.")] = "",
    duration: Annotated[float, typer.Option(min=0, help="Seconds; 0 for until Ctrl-C.")] = 0.0,
    requests: Annotated[int, typer.Option(min=0, help="Finished requests to record; 0 for no limit.")] = 0,
) -> None:
    """Keep what passes between engines and control plane: signals and decisions, no text."""
    progress = Console(stderr=True)
    with connect(context) as client, TraceWriter(out) as writer, progress.status("waiting") as status:
        recorder = Recorder(client.fleet, writer, Limits(duration, requests), lambda w: status.update(_recorded(w)))
        try:
            recorder.run(engine)
        finally:
            status.stop()
            if writer.records:
                breaks = f", {recorder.breaks} interruptions" if recorder.breaks else ""
                typer.echo(f"{out}: {_recorded(writer)}{breaks}")
            else:
                out.unlink()
            warn_unreachable(recorder.unreachable)


def _recorded(writer: TraceWriter) -> str:
    return f"{writer.requests} requests, {writer.steps} steps, {writer.size_bytes} bytes"


@app.command()
def calibrate(
    traces: Annotated[list[Path], typer.Argument(help="Trace files of `record`.")],
    *,
    labels: Annotated[
        Path | None, typer.Option(help='JSON lines {"request_id", "think_tokens", "correct"}; see the README.')
    ] = None,
    max_loss: Annotated[float, typer.Option(min=0, max=1, help="Accuracy that may be lost, a fraction.")] = 0.01,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of intervals and bounds.")] = 0.95,
    delay_tokens: Annotated[
        int, typer.Option(min=1, help="From a sentence end to the end forced there, unless its probe is held.")
    ] = 2,
    model: Annotated[str, typer.Option(help="Only this model's requests.")] = "",
    base: Annotated[Path | None, typer.Option(help="Policy for all other fields; default: the trace's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the policy, TOML.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier, PNG, SVG or PDF.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write all figures, JSON.")] = None,
) -> None:
    """Replay traces, find the rule that saves most thinking within a loss of accuracy, and write its policy."""
    try:
        from meridian_control import calibration, frontier

        if plot is not None:
            import_module("matplotlib")
    except ImportError as error:
        fail(FAILED, f"calibrate needs {error.name}: pip install 'meridian-llm[calibrate]'")
    with reported():
        replay = _replay(traces, labels, base, model, delay_tokens)
    goal = calibration.Goal(max_loss, confidence)
    try:
        found = calibration.calibrate(replay, goal)
    except calibration.TooFewRequests as error:
        left_out = [f"{count} {reason}" for reason, count in replay.episodes.left_out.items()]
        fail(FAILED, str(error), *left_out)
    terminal = console()
    terminal.print(frontier.table(found, goal))
    for sentence in frontier.sentences(found, replay, goal):
        terminal.print("\n" + escape(sentence), highlight=False)
    figures = json.dumps(frontier.report(found, replay, goal), indent=2) + "\n"
    _write(out, lambda path: path.write_text(schema.to_toml(found.policy), encoding="utf-8"))
    _write(report, lambda path: path.write_text(figures, encoding="utf-8"))
    _write(plot, lambda path: frontier.plot(found, replay, path))
    if not found.confirmed:
        raise typer.Exit(FAILED)


def _replay(traces: list[Path], labels: Path | None, base: Path | None, model: str, delay_tokens: int) -> "Replay":
    """Raises FileError or PolicyError."""
    from meridian_control.episodes import collect
    from meridian_control.labels import from_labels, from_probes
    from meridian_control.replay import Replay

    episodes = collect(traces, model)
    judge = from_labels(labels, episodes) if labels is not None else from_probes(episodes)
    recorded = schema.from_proto(episodes.policy) if episodes.policy is not None else schema.Policy()
    return Replay(episodes, judge, schema.load(base) if base is not None else recorded, delay_tokens)


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is not None:
        try:
            write(path)
        except (OSError, ValueError) as error:
            fail(FAILED, f"{path}: cannot be written: {error}")


# ------------------------------------------------------------------------------------------------------------ output


def _engine_table(rows: Iterable[fleet_pb2.Engine]) -> Table:
    shown = new_table("engine", "state", "model", "revision", "step ms", "KV", "running", "waiting", "think", "answer")
    for e in rows:
        revision = f"{e.acked_revision}/{e.revision}{' refused' if e.nack_error else ''}"
        load = (f"{e.step_time_ms:.1f}", f"{e.kv_used:.0%}", e.running, e.waiting, e.thinking, e.answering)
        add(shown, e.engine_id, _engine_state(e), e.model, revision, *load)
    return shown


def _engine_state(engine: fleet_pb2.Engine) -> str:
    if engine.fault:
        return f"fault: {engine.fault}"
    state = fleet_pb2.ConnectionState.Name(engine.state).removeprefix("CONNECTION_STATE_").lower()
    if engine.state != fleet_pb2.CONNECTION_STATE_CONNECTED:
        return f"{state}, {agent_pb2.AgentState.Name(engine.agent_state).removeprefix('AGENT_STATE_').lower()}"
    if not engine.HasField("freeze"):
        return state
    if not engine.freeze.confirmed:
        return "to be frozen" if engine.freeze.freeze_ids else "to be thawed"
    if not engine.freeze.HasField("end_time"):
        return "frozen by MERIDIAN_FREEZE"
    return f"frozen until {engine.freeze.end_time.ToDatetime():%H:%M:%S} UTC"


def _request_table(rows: Iterable[fleet_pb2.LiveRequest]) -> Table:
    shown = new_table(
        "engine", "request", "phase", "think", "output", "entropy", "EAT", "RPDI", "rank", "last decision"
    )
    for r in rows:
        phase = agent_pb2.Phase.Name(r.phase).removeprefix("PHASE_").lower() + (" preempted" if r.preempted else "")
        signals = (f"{value:.3g}" for value in (r.entropy_nats, r.eat_ema_nats, r.rpdi))
        outcome = agent_pb2.Outcome.Name(r.last_decision.outcome).removeprefix("OUTCOME_").lower()
        last = f"{r.last_decision.kind} {r.last_decision.reason} {outcome}" if r.last_decision.kind else ""
        add(shown, r.engine_id, r.request_id, phase, r.think_tokens, r.output_tokens, *signals, r.rank, last)
    return shown


def main() -> None:
    app()
