"""Defines the command line of `meridianctl`, and its commands `engines`, `requests`, `budgets`, `pressure` and
`wait`.

The module owns the commands' names, the common options and the exit codes. The module uses the control plane only
through its gRPC API, on one thread with blocking calls.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

import typer
from meridian.v1 import fleet_pb2
from typer.main import get_command

from meridian_control import __version__
from meridian_control.cli import contexts
from meridian_control.cli.audit import audit
from meridian_control.cli.completion import OnlyEngine, OnlyOfEngine, context_names, engine_ids, revision
from meridian_control.cli.console import (
    CALL_TIMEOUT_S,
    DEFAULT_SERVER,
    FAILED,
    INVALID,
    Output,
    OutputOption,
    Target,
    WatchOption,
    add,
    call_timeout_s,
    connect,
    console,
    fail,
    finite,
    new_table,
    not_empty,
    pages,
    patient,
    reported,
    say,
    show,
    show_value,
    stamp_text,
    warn_unreachable,
    watched,
)
from meridian_control.cli.end import end
from meridian_control.cli.expected import (
    NO_ENGINE,
    NONE_CONNECTED,
    AllowNone,
    Expected,
    LeastEngines,
    all_engines,
    check_known,
    connected,
    of_engine,
    same_names,
)
from meridian_control.cli.explain import decisions, explain, savings, shadow
from meridian_control.cli.freeze import freeze, freezes, thaw
from meridian_control.cli.policy import current, policy_app
from meridian_control.cli.rollout import rollout_app
from meridian_control.cli.status import status
from meridian_control.cli.tables import (
    budget_table,
    cause_lines,
    engine_table,
    limit_lines,
    pool_lines,
    pressure_table,
    request_table,
    thinking_lines,
)
from meridian_control.cli.top import top
from meridian_control.cli.trace import calibrate, record, replay
from meridian_control.common.client_credentials import VARIABLES, ClientCredentials
from meridian_control.common.enum_names import entropy_backend_name
from meridian_control.common.plain_data import plain
from meridian_control.journal.request_ids import is_called

POLL_INTERVAL_S = 0.3

EngineGlob = Annotated[
    str,
    typer.Option(
        help="Glob of the engine ids to show.", show_default="all", autocompletion=engine_ids, callback=not_empty
    ),
]
ModelGlob = Annotated[str, typer.Option(help="Glob of the models to show.", show_default="all", callback=not_empty)]

HELP = """Read and change Meridian's policy, show engines, requests and decisions, end the thinking of a
request, and record and replay traces.

Exit codes:

0  the command has succeeded

1  an engine, a rollout or a calibration has not reached its goal, or the call has failed otherwise

2  usage error, or an invalid policy, trace, label or context file

3  the control plane or its policy store cannot be reached

4  permission denied: credentials are missing or do not suffice
"""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
context_app = typer.Typer(help="List contexts, which name control planes, and choose one.", no_args_is_help=True)


def _version(is_asked: bool) -> None:
    if is_asked:
        say(f"meridianctl {__version__}")
        raise typer.Exit


def _credential(name: str, help_text: str) -> Any:
    return typer.Option(envvar=VARIABLES[name], help=help_text, callback=not_empty)


@app.callback()
def options(
    call: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
    server: Annotated[
        str,
        typer.Option(
            envvar="MERIDIAN_SERVER",
            help="Address of the control plane, HOST[:PORT].",
            show_default=f"that of the context, else {DEFAULT_SERVER}",
            callback=not_empty,
        ),
    ] = "",
    context: Annotated[
        str,
        typer.Option(
            envvar="MERIDIAN_CONTEXT",
            help="Name of a context in the context file.",
            show_default="the current one",
            autocompletion=context_names,
            callback=not_empty,
        ),
    ] = "",
    ca: Annotated[str, _credential("ca", "PEM file of the control plane's CA.")] = "",
    cert: Annotated[str, _credential("cert", "PEM file of the client certificate.")] = "",
    key: Annotated[str, _credential("key", "PEM file of the client certificate's key.")] = "",
    token_file: Annotated[str, _credential("token_file", "File with a bearer token.")] = "",
) -> None:
    def typed(name: str, value: str) -> str:
        """Return a value of the command line; `Target` itself reads the environment, whose place is behind a context
        of the command line."""
        source = call.get_parameter_source(name)
        return value if source is not None and source.name == "COMMANDLINE" else ""

    credentials = ClientCredentials(
        typed("ca", ca), typed("cert", cert), typed("key", key), typed("token_file", token_file)
    )
    call.obj = Target(typed("server", server), typed("context", context), credentials)


# ------------------------------------------------------------------------------------------------------------- fleet


def matches(name: str, glob: str) -> bool:
    """Whether a name matches a glob; each name matches an empty one."""
    return not glob or fnmatchcase(name, glob)


def engines(
    context: typer.Context,
    *,
    engine: EngineGlob = "",
    model: ModelGlob = "",
    output: OutputOption = Output.table,
    watch: WatchOption = False,
) -> None:
    """List the engines with their state, policy revision and load."""

    def show_engines() -> None:
        with connect(context) as client:
            listed, unreachable = all_engines(client)
        listed = [e for e in listed if matches(e.engine_id, engine) and matches(e.model, model)]
        empty = "no engine matches" if engine or model else NO_ENGINE
        show(listed, output, engine_table(listed, wide=output is Output.wide), empty)
        warn_unreachable(unreachable)
        if output.is_table:
            _say_notes(listed)

    watched(show_engines, watch)


def _say_notes(listed: Sequence[fleet_pb2.Engine]) -> None:
    """Print what is to be known of engines besides the table."""
    for line in cause_lines(listed):
        say(line)
    for reason in dict.fromkeys(engine.withdrawn for engine in listed if engine.withdrawn):
        names = ", ".join(engine.engine_id for engine in listed if engine.withdrawn == reason)
        say(f"{names}: the control plane has withdrawn what did harm: {reason}")
    for noted in (engine for engine in listed if engine.entropy_note):
        backend = entropy_backend_name(noted.entropy_backend)
        say(f"{noted.engine_id} measures entropy with {backend}: {noted.entropy_note}")
    for sources in dict.fromkeys(engine.request_sources for engine in listed if engine.request_sources):
        names = ", ".join(engine.engine_id for engine in listed if engine.request_sources == sources)
        say(f"{names}: a gateway names {sources}")
    for name in same_names(listed):
        say(f"{name}: several engines have this name; give each a MERIDIAN_ENGINE_ID of its own")
    for line in (*thinking_lines(listed), *pool_lines(listed), *limit_lines(listed)):
        say(line)


def requests(
    context: typer.Context,
    *,
    engine: OnlyOfEngine = "",
    request_id: Annotated[
        str,
        typer.Option(
            "--request",
            help="Show only the request with this id, as the engine or the client has it.",
            callback=not_empty,
        ),
    ] = "",
    model: ModelGlob = "",
    tenant: Annotated[
        str, typer.Option(help="Glob of the tenants whose requests to show.", show_default="all", callback=not_empty)
    ] = "",
    output: OutputOption = Output.table,
    watch: WatchOption = False,
) -> None:
    """List the live requests with their signals, ranks and last decisions."""

    def is_meant(live: fleet_pb2.LiveRequest) -> bool:
        named = not request_id or is_called(live.request_id, request_id)
        return named and matches(live.model, model) and matches(live.tenant, tenant)

    def show_requests() -> None:
        with connect(context) as client:
            asked = fleet_pb2.ListRequestsRequest(engine_id=engine)
            answers = list(pages(client.fleet.ListRequests, asked))
            if engine and not any(page.requests for page in answers):
                check_known(client, engine)
        live_requests = [live for page in answers for live in page.requests if is_meant(live)]
        shown = request_table(live_requests, wide=output is Output.wide)
        is_filtered = engine or request_id or model or tenant
        show(live_requests, output, shown, "no live request matches" if is_filtered else "no request is live")
        warn_unreachable(name for page in answers for name in page.unreachable_replicas)

    watched(show_requests, watch)


def budgets(context: typer.Context, output: OutputOption = Output.table) -> None:
    """List the thinking budgets with their usage over the whole fleet, what is left of them, and their stages."""
    with connect(context) as client:
        answer = client.fleet.ListBudgets(fleet_pb2.ListBudgetsRequest(), timeout=CALL_TIMEOUT_S)
    show(list(answer.budgets), output, budget_table(answer.budgets), "the policy in force has no budget")
    if output.is_table and answer.budgets:
        shared_at = stamp_text(answer.share_time) if answer.HasField("share_time") else "never"
        say(f"usage of all replicas as of {shared_at}")


def pressure(
    context: typer.Context,
    engine: OnlyEngine = "",
    output: OutputOption = Output.table,
) -> None:
    """List the pressure entries of each connected engine: level, measured value, target, newest change of the level."""
    with connect(context) as client:
        listed, unreachable = all_engines(client)
    warn_unreachable(unreachable)
    rows = connected(of_engine(listed, engine))
    if output.is_table:
        shown = pressure_table(rows)
        if shown.row_count:
            console().print(shown)
        else:
            say("no pressure entry of the policy in force applies to a connected engine")
        return
    pressure_rows = [{"engine_id": e.engine_id, **plain(row)} for e in rows for row in e.pressures]
    show_value(pressure_rows, output, "pressures")


def wait(
    context: typer.Context,
    revision: Annotated[int | None, revision(typer.Option, "N", "Revision to wait for.", "the one in force")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.", callback=finite)] = 60.0,
    engines: LeastEngines = None,
    allow_none: AllowNone = False,
) -> None:
    """Wait until every engine has applied a policy revision, and print the engines that have not.

    The command fails if no engine is connected, and names each engine whose stream broke off in the last ten minutes.
    """
    expected = Expected(engines, allow_none)
    deadline = time.monotonic() + timeout
    with connect(context) as client:
        # The call fails if the revision was never stored, so that no engine could apply it.
        wanted = current(client, revision or 0, call_timeout_s(timeout)).revision
        while True:
            listed, unreachable = patient(partial(all_engines, client), deadline - time.monotonic())
            live, missing = connected(listed), expected.missing(listed, unreachable)
            behind = [engine for engine in live if engine.acked_revision < wanted]
            if not behind and not missing:
                break
            lines = [_lagging(e) for e in behind if not _refused(e, wanted)]
            if refused := [f"{e.engine_id} refused: {e.nack_error}" for e in behind if _refused(e, wanted)]:
                fail(FAILED, *refused, *lines)
            if time.monotonic() >= deadline:
                fail(FAILED, *lines, *missing)
            time.sleep(POLL_INTERVAL_S)
    say(f"revision {wanted} is applied on all {len(live)} connected engines" if live else NONE_CONNECTED)


def _lagging(engine: fleet_pb2.Engine) -> str:
    off = f"; its agent is off, and gets no policy: {engine.fault}" if engine.fault else ""
    return f"{engine.engine_id} is at revision {engine.acked_revision}{off}"


def _refused(engine: fleet_pb2.Engine, revision: int) -> bool:
    """Return whether the engine has refused the revision or a newer one; `nack_error` is about `engine.revision`."""
    return bool(engine.nack_error) and engine.revision >= revision


# ---------------------------------------------------------------------------------------------------------- contexts


@context_app.command("list")
def context_list() -> None:
    """List the contexts of the context file; a star marks the current one."""
    with reported():
        stored = contexts.load()
    if not stored.contexts:
        say(f"no context is defined in {contexts.path() or 'a context file: there is no home folder'}")
        return
    shown = new_table("context", "current", "server", "credentials")
    for name, context in sorted(stored.contexts.items()):
        given = ", ".join(field for field in ("ca", "cert", "key", "token_file") if getattr(context, field))
        add(shown, name, "*" if name == stored.current else "", context.server, given)
    console().print(shown)


@context_app.command("use")
def context_use(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.", autocompletion=context_names)],
) -> None:
    """Make a context the current one, which holds for commands without --server, --context and their variables."""
    if not name:
        fail(INVALID, "NAME must be the name of a context; got an empty one")
    with reported():
        file = contexts.use(name)
    say(f"{file}: the current context is {name}")


# The commands in the order of the help, by its headings.
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look at the fleet": (status, engines, requests, top, budgets, pressure, savings),
    "Find out why": (explain, decisions, shadow, audit),
    "Act": (end, freeze, freezes, thaw, wait),
    "Calibrate": (record, calibrate, replay),
}
GROUPS = {"policy": (policy_app, "Act"), "rollout": (rollout_app, "Act"), "context": (context_app, "Connect")}
for heading, several in COMMANDS.items():
    for command in several:
        app.command(rich_help_panel=heading)(command)
for name, (group, heading) in GROUPS.items():
    app.add_typer(group, name=name, rich_help_panel=heading)


def _hide_types_of_flags(command: Any) -> None:
    """Let the help show flags without a type, because they take no value."""
    for param in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(param, "is_flag", False):
            param.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _hide_types_of_flags(below)


def main() -> None:
    if sys.stdout is None:
        # Without this look a command would print nothing and succeed.
        say("cannot write the output: standard output is closed", err=True)
        sys.exit(FAILED)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal's encoding has each sign of a table or of a name. A program that has put another file in
        # place of standard output, as one that forks, may find it unchangeable.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Python puts a surrogate in place of a byte that is not UTF-8, and no message of the API can hold one.
        "".join(sys.argv).encode()
    except UnicodeEncodeError:
        say("the arguments must be UTF-8", err=True)
        sys.exit(INVALID)
    try:
        command = get_command(app)
        _hide_types_of_flags(command)
        command(prog_name="meridianctl")
    except OSError as error:
        # For example, the disk to which the output goes is full.
        say(f"cannot write the output: {error.strerror}", err=True)
        # Otherwise the interpreter would write the buffered rest at its end, fail again, and exit with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
