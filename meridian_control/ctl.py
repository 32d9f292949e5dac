"""`meridianctl`: reads and changes policy, shows the fleet, records traces and calibrates on them.

Owns the command line, its output and its exit codes. Knows the control plane only through its gRPC API, and shares with
it the policy schema and, offline, the rules. One thread, blocking calls.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc, policy_pb2, policy_pb2_grpc
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from meridian_control import policy as schema
from meridian_control.errors import PolicyError
from meridian_control.recorder import Limits, Recorder
from meridian_control.trace import FileError, TraceWriter

if TYPE_CHECKING:
    from meridian_control.replay import Replay

CALL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.3
# One WatchFleet message carries the whole fleet.
MAX_MESSAGE_BYTES = 64 << 20
PIPED_WIDTH = 200

FAILED = 1
INVALID = 2
UNREACHABLE = 3

HELP = """Read and change Meridian's policy, and look at the fleet.

Exit codes:

0  ok

1  not converged, nothing to recommend, or a precondition failed

2  usage error, invalid policy, unusable trace or labels

3  server, or its policy store, unreachable
"""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
policy_app = typer.Typer(help="Read, check and change the policy.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


class PolicyFormat(StrEnum):
    toml = "toml"
    json = "json"


class FleetFormat(StrEnum):
    table = "table"
    json = "json"


@dataclass(frozen=True)
class Client:
    policy: policy_pb2_grpc.PolicyServiceStub
    fleet: fleet_pb2_grpc.FleetServiceStub


PolicyFile = Annotated[Path, typer.Option("-f", "--file", help="Policy file, TOML.")]
FleetOutput = Annotated[FleetFormat, typer.Option("-o", "--output")]


@app.callback()
def options(
    context: typer.Context,
    server: Annotated[str, typer.Option(envvar="MERIDIAN_SERVER", help="host:port of the control plane.")] = (
        "127.0.0.1:50051"
    ),
) -> None:
    context.obj = server


# ------------------------------------------------------------------------------------------------------------ policy


@policy_app.command("get")
def policy_get(
    context: typer.Context, output: Annotated[PolicyFormat, typer.Option("-o", "--output")] = PolicyFormat.toml
) -> None:
    """Print the policy in force."""
    with _client(context) as client:
        revision = _current(client)
        if output is PolicyFormat.json:
            typer.echo(json.dumps(_as_dict(revision), indent=2))
            return
        note = {key: getattr(revision, key) for key in ("revision", "etag", "author", "reason")}
        typer.echo(f"# {json.dumps(note, ensure_ascii=False)}")
        typer.echo(schema.to_toml(schema.from_proto(revision.policy)), nl=False)


@policy_app.command("apply")
def policy_apply(
    context: typer.Context,
    file: PolicyFile,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the server check everything, change nothing.")
    ] = False,
    etag: Annotated[
        str | None, typer.Option(help="Etag the policy in force must have; default: the one it has now; '' for any.")
    ] = None,
    author: Annotated[str, typer.Option(envvar=["MERIDIAN_AUTHOR", "USER"])] = "",
    reason: Annotated[str, typer.Option(help="Why, kept with the revision.")] = "",
) -> None:
    """Replace the policy in force by the one in FILE."""
    with _client(context) as client:
        request = policy_pb2.UpdatePolicyRequest(
            policy=schema.to_proto(schema.load(file)),
            etag=_current_etag(client) if etag is None else etag,
            validate_only=dry_run,
            author=author,
            reason=reason,
        )
        revision = client.policy.UpdatePolicy(request, timeout=CALL_TIMEOUT_S).revision
    typer.echo(f"{file}: valid, nothing changed" if dry_run else f"revision {revision.revision} etag {revision.etag}")


@policy_app.command("validate")
def policy_validate(file: PolicyFile) -> None:
    """Check FILE against the schema, without a server."""
    with _reported():
        schema.load(file)
    typer.echo(f"{file}: valid")


def _current(client: Client) -> policy_pb2.PolicyRevision:
    return client.policy.GetPolicy(policy_pb2.GetPolicyRequest(), timeout=CALL_TIMEOUT_S).revision


def _current_etag(client: Client) -> str:
    """Empty where nothing is stored, or where what is stored can only be replaced."""
    try:
        return _current(client).etag
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
            return ""
        raise


# ------------------------------------------------------------------------------------------------------------- fleet


@app.command()
def engines(context: typer.Context, output: FleetOutput = FleetFormat.table) -> None:
    """List the engines."""
    with _client(context) as client:
        found = _engines(client)
    _print(found, output, _engine_table(found))


@app.command()
def requests(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help="Only this engine's.")] = "",
    output: FleetOutput = FleetFormat.table,
) -> None:
    """List the live requests."""
    with _client(context) as client:
        request = fleet_pb2.ListRequestsRequest(engine_id=engine)
        found = [live for page in _pages(client.fleet.ListRequests, request) for live in page.requests]
    _print(found, output, _request_table(found))


@app.command()
def watch(
    context: typer.Context, interval_ms: Annotated[int, typer.Option(min=1, help="Time between two updates.")] = 1000
) -> None:
    """Show engines and live requests until Ctrl-C."""
    request = fleet_pb2.WatchFleetRequest(interval_ms=interval_ms)
    with _client(context) as client, Live(console=_console()) as live:
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
    with _client(context) as client:
        wanted = revision or _current(client).revision
        connected = _connected(client)
        while behind := [engine for engine in connected if engine.acked_revision < wanted]:
            if refused := [engine for engine in behind if _refused(engine, wanted)]:
                _fail(FAILED, *(f"{engine.engine_id} refused: {engine.nack_error}" for engine in refused))
            if time.monotonic() >= deadline:
                _fail(FAILED, *(f"{engine.engine_id} is at revision {engine.acked_revision}" for engine in behind))
            time.sleep(POLL_INTERVAL_S)
            connected = _connected(client)
    typer.echo(f"revision {wanted} is applied on all {len(connected)} connected engines")


def _connected(client: Client) -> list[fleet_pb2.Engine]:
    return [engine for engine in _engines(client) if engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED]


def _refused(engine: fleet_pb2.Engine, revision: int) -> bool:
    """The error belongs to the revision the engine was last asked to take."""
    return bool(engine.nack_error) and engine.revision >= revision


def _engines(client: Client) -> list[fleet_pb2.Engine]:
    request = fleet_pb2.ListEnginesRequest()
    return [engine for page in _pages(client.fleet.ListEngines, request) for engine in page.engines]


def _pages(call: Any, request: Any) -> Iterator[Any]:
    while True:
        page = call(request, timeout=CALL_TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


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
    console = Console(stderr=True)
    with _client(context) as client, TraceWriter(out) as writer, console.status("waiting") as status:
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
        _fail(FAILED, f"calibrate needs {error.name}: pip install 'meridian-llm[calibrate]'")
    with _reported():
        replay = _replay(traces, labels, base, model, delay_tokens)
    goal = calibration.Goal(max_loss, confidence)
    try:
        found = calibration.calibrate(replay, goal)
    except calibration.TooFewRequests as error:
        left_out = [f"{count} {reason}" for reason, count in replay.episodes.left_out.items()]
        _fail(FAILED, str(error), *left_out)
    console = _console()
    console.print(frontier.table(found, goal))
    for sentence in frontier.sentences(found, replay, goal):
        console.print("\n" + escape(sentence), highlight=False)
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
            _fail(FAILED, f"{path}: cannot be written: {error}")


# ------------------------------------------------------------------------------------------------------------ output


def _engine_table(rows: Iterable[fleet_pb2.Engine]) -> Table:
    table = _table("engine", "state", "model", "revision", "step ms", "KV", "running", "waiting", "think", "answer")
    for e in rows:
        state = fleet_pb2.ConnectionState.Name(e.state).removeprefix("CONNECTION_STATE_").lower()
        revision = f"{e.acked_revision}/{e.revision}{' refused' if e.nack_error else ''}"
        load = (f"{e.step_time_ms:.1f}", f"{e.kv_used:.0%}", e.running, e.waiting, e.thinking, e.answering)
        _add(table, e.engine_id, f"fault: {e.fault}" if e.fault else state, e.model, revision, *load)
    return table


def _request_table(rows: Iterable[fleet_pb2.LiveRequest]) -> Table:
    table = _table("engine", "request", "phase", "think", "output", "entropy", "EAT", "RPDI", "rank", "last decision")
    for r in rows:
        phase = agent_pb2.Phase.Name(r.phase).removeprefix("PHASE_").lower() + (" preempted" if r.preempted else "")
        signals = (f"{value:.3g}" for value in (r.entropy_nats, r.eat_ema_nats, r.rpdi))
        outcome = agent_pb2.Outcome.Name(r.last_decision.outcome).removeprefix("OUTCOME_").lower()
        last = f"{r.last_decision.kind} {r.last_decision.reason} {outcome}" if r.last_decision.kind else ""
        _add(table, r.engine_id, r.request_id, phase, r.think_tokens, r.output_tokens, *signals, r.rank, last)
    return table


def _table(*columns: str) -> Table:
    """The first column names the row: it keeps its width when the terminal is narrow."""
    table = Table(box=None)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(escape(str(cell)) for cell in cells))


def _print(messages: Iterable[Message], output: FleetFormat, table: Table) -> None:
    if output is FleetFormat.json:
        typer.echo(json.dumps([_as_dict(message) for message in messages], indent=2))
    else:
        _console().print(table)


def _as_dict(message: Message) -> dict[str, Any]:
    """Protobuf's JSON form: 64-bit integers are strings, not-a-number is "NaN"."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


# ------------------------------------------------------------------------------------------------------------ errors


@contextmanager
def _client(context: typer.Context) -> Iterator[Client]:
    channel_options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    with _reported(), grpc.insecure_channel(context.obj, channel_options) as channel:
        yield Client(policy_pb2_grpc.PolicyServiceStub(channel), fleet_pb2_grpc.FleetServiceStub(channel))


@contextmanager
def _reported() -> Iterator[None]:
    """Print what goes wrong, one line each, and leave with the exit code for it."""
    try:
        yield
    except PolicyError as error:
        _fail(INVALID, *map(str, error.violations()))
    except FileError as error:
        _fail(INVALID, str(error))
    except grpc.RpcError as error:
        _fail(_EXIT_CODES.get(error.code(), FAILED), *error_lines(error))


_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: INVALID,
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNREACHABLE,
}


def error_lines(error: Any) -> list[str]:
    """One line per bad field where the server names fields, else one line."""
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Unpack(bad):
            return [f"{violation.field} {violation.description}".strip() for violation in bad.field_violations]
    return [f"{error.code().name}: {' '.join((error.details() or '').split())}"]


def _fail(code: int, *lines: str) -> NoReturn:
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(code)


def main() -> None:
    app()
