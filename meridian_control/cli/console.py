"""Provides the parts that all commands of `meridianctl` share: the connection, the forms of output, and error messages.

The module knows no command, and uses one thread and blocking calls. All text that a command prints passes through
`say`, `say_document` or `console`, which escape what a client or an agent may have put in.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import tomli_w
import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import audit_pb2_grpc, fleet_pb2_grpc, freeze_pb2_grpc, policy_pb2_grpc, rollout_pb2_grpc
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from meridian_control.cli import contexts
from meridian_control.common import tls_look
from meridian_control.common.addresses import is_target
from meridian_control.common.channels import proxy_option
from meridian_control.common.client_credentials import VARIABLES, ClientCredentials
from meridian_control.common.environment import BadVariable, read
from meridian_control.common.errors import PolicyError
from meridian_control.common.plain_text import UNPRINTABLE, printable, printable_document
from meridian_control.offline.trace_file import FileError

CALL_TIMEOUT_S = 10.0
# Largest message that the client accepts; one WatchFleet response carries the whole fleet.
MAX_MESSAGE_BYTES = 64 << 20
PIPED_WIDTH = 200
# Columns of the terminal that the name of a row takes at most.
NAME_WIDTH = 80
# Largest number of a revision, a freeze or a rollout.
LARGEST_ID = 2**63 - 1
# Largest number of characters of a request's id in a call. The control plane knows the beginning of a longer id.
LONGEST_REQUEST_ID = 1000

FAILED = 1
INVALID = 2
UNREACHABLE = 3
REFUSED = 4


DEFAULT_SERVER = "127.0.0.1:50051"


class Output(StrEnum):
    table = "table"
    json = "json"
    toml = "toml"


# Option `-o` of every command that prints a table.
OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Print the result in this form.")]


@dataclass(frozen=True)
class Target:
    """The server and the credentials that the command line names; the environment or the context file completes them.

    Credentials that the command line does not give come from the same source as the address, so that no credential is
    sent to another server.
    """

    server: str
    context: str
    credentials: ClientCredentials

    def resolve(self) -> tuple[str, ClientCredentials]:
        """Return the address of the server and the credentials for it. Raises FileError, BadVariable."""
        server, context = self.server, self.context
        if not server and not context:
            server, context = read("MERIDIAN_SERVER"), read("MERIDIAN_CONTEXT")
            if server:
                _check("MERIDIAN_SERVER", server)
        elif server:
            _check("--server", server)
        stored_context = None if server else contexts.find(context)
        if stored_context is not None:
            _check("the server of the context", stored_context.server)
            return stored_context.server, self.credentials.filled_from(stored_context.credentials())
        return server or DEFAULT_SERVER, self.credentials.filled_from(ClientCredentials.from_environment())

    def channel(self) -> grpc.Channel:
        """Return a channel to the server. Raises FileError or BadVariable, also if a file cannot be read."""
        server, credentials = self.resolve()
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), proxy_option()]
        try:
            tls = credentials.channel()
        except OSError as error:
            named = {path: name for name, path in vars(credentials).items()}.get(error.filename, "")
            where = f"; named by --{named.replace('_', '-')}, {VARIABLES[named]} or the context" if named else ""
            raise FileError(Path(error.filename), "", f"cannot be read: {error.strerror}{where}") from error
        except ValueError as error:
            fail(INVALID, str(error))
        return grpc.secure_channel(server, tls, options) if tls else grpc.insecure_channel(server, options)


def _check(name: str, server: str) -> None:
    """Exit if an address of the control plane cannot be used. name: what gives the address."""
    if not is_target(server):
        raise BadVariable(name, server, "an address host:port")


@dataclass(frozen=True)
class Client:
    policy: policy_pb2_grpc.PolicyServiceStub
    fleet: fleet_pb2_grpc.FleetServiceStub
    audit: audit_pb2_grpc.AuditServiceStub
    freeze: freeze_pb2_grpc.FreezeServiceStub
    rollout: rollout_pb2_grpc.RolloutServiceStub


def new_table(*columns: str) -> Table:
    """Return an empty table. The first column, which names the row, keeps its width in a narrow terminal up to
    NAME_WIDTH; a longer name is folded, so that it takes no other column's place."""
    empty = Table(box=None)
    for column in columns:
        empty.add_column(column, overflow="fold")
    return empty


def add(to: Table, *cells: object) -> None:
    """Add a row; a cell's lines are joined, so that each row of a table is one line unless its name is folded."""
    shown = [printable(" ".join(str(cell).splitlines())) for cell in cells]
    name = to.columns[0]
    name.min_width = max(name.min_width or 0, min(cell_len(shown[0]), NAME_WIDTH))
    name.max_width = NAME_WIDTH
    to.add_row(*map(escape, shown))


def show(messages: Sequence[Message], output: Output, rows: Table) -> None:
    """Print a list of messages; TOML has an array of tables that is named after the type of the messages."""
    if output is Output.table:
        console().print(rows)
        return
    entries = [as_dict(message) for message in messages]
    if output is Output.json:
        show_value(entries, output)
    elif entries:
        name = re.sub("(?<=.)(?=[A-Z])", "_", messages[0].DESCRIPTOR.name).lower()
        show_value({name: entries}, output)


def show_value(value: Any, output: Output) -> None:
    """Print a value as JSON, or a dictionary as TOML."""
    if output is Output.json:
        say_document(json.dumps(value, indent=2) + "\n")
    else:
        say_document(tomli_w.dumps(value))


def as_dict(message: Message) -> dict[str, Any]:
    """Return a message in protobuf's JSON form, in which a 64-bit integer is a string and not-a-number is "NaN"."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


class PlainConsole(Console):
    """A console that shows each string in one line, and no control character of any text. Only Rich's own control
    codes, such as those that move the cursor in `top`, reach the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not UNPRINTABLE.search(segment.text):
                yield segment
            else:
                lines = (printable(line) for line in segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style)

    def say(self, text: str = "") -> None:
        """Print a line of plain text."""
        self.print(escape(text), highlight=False)


def console() -> PlainConsole:
    plain = PlainConsole()
    return plain if plain.is_terminal else PlainConsole(width=PIPED_WIDTH)


def say(*lines: str, err: bool = False) -> None:
    """Print each string as one line."""
    for line in lines:
        typer.echo(printable(line), err=err)


def say_document(text: str) -> None:
    """Print a JSON or TOML document, whose last line has its line break."""
    typer.echo(printable_document(text), nl=False)


def warn_unreachable(replicas: Iterable[str]) -> None:
    """Name on standard error the replicas whose data is missing from an answer about the fleet."""
    for line in unreachable_lines(replicas):
        say(line, err=True)


def unreachable_lines(replicas: Iterable[str]) -> list[str]:
    """Return the line that names the replicas whose data is missing; no line if there are none."""
    names = ", ".join(sorted(set(replicas)))
    return [f"replicas that did not answer, so that their data is missing: {names}"] if names else []


def pages(call: Any, request: Any) -> Iterator[Any]:
    while True:
        page = call(request, timeout=CALL_TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def first(limit: int, call: Any, request: Any, field: str) -> list[Any]:
    """Return at most `limit` entries of a list method, read page by page from the field `field` of its responses."""
    entries: list[Any] = []
    for page in pages(call, request):
        entries += getattr(page, field)
        if len(entries) >= limit:
            break
    return entries[:limit]


# ------------------------------------------------------------------------------------------------------------ errors


@contextmanager
def connect(context: typer.Context) -> Iterator[Client]:
    with reported(context.obj), context.obj.channel() as channel:
        yield Client(
            policy_pb2_grpc.PolicyServiceStub(channel),
            fleet_pb2_grpc.FleetServiceStub(channel),
            audit_pb2_grpc.AuditServiceStub(channel),
            freeze_pb2_grpc.FreezeServiceStub(channel),
            rollout_pb2_grpc.RolloutServiceStub(channel),
        )


@contextmanager
def reported(target: Target | None = None) -> Iterator[None]:
    """Print an error on standard error, one line for each bad field, and exit with the code for the error. target: the
    server of the calls, to look for a cause that gRPC does not name."""
    try:
        yield
    except PolicyError as error:
        fail(INVALID, *map(str, error.violations()))
    except (FileError, BadVariable) as error:
        fail(INVALID, str(error))
    except grpc.RpcError as error:
        cause = tls_look.trouble(*target.resolve()) if target and error.code() in MAY_BE_TLS else ""
        fail(_EXIT_CODES.get(error.code(), FAILED), *error_lines(error), *([cause] if cause else []))


# Status codes with which gRPC reports a TLS handshake that fails, or one that a call waits for in vain.
MAY_BE_TLS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: INVALID,
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNREACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
}


def error_lines(error: Any) -> list[str]:
    """Return one line for each bad field that the server names, or one line with the status and the time of a retry."""
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    again = ""
    for detail in status.details if status else ():
        if detail.Unpack(bad):
            return [f"{violation.field} {violation.description}".strip() for violation in bad.field_violations]
        if detail.Unpack(retry):
            again = f"; try again in {retry.retry_delay.ToMilliseconds() / 1000:g} s"
    return [f"{error.code().name}: {' '.join((error.details() or '').split())}{again}"]


def fail(code: int, *lines: str) -> NoReturn:
    say(*lines, err=True)
    raise typer.Exit(code)
