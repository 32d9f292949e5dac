"""Provides the parts that all commands of `meridianctl` share: the connection, the forms of output, and error messages.

The module knows no command, and uses one thread and blocking calls. All text that a command prints passes through
`say`, `say_document` or `console`, which escape what a client or an agent may have put in.
"""

import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import grpc
import tomli_w
import typer
import yaml
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import audit_pb2_grpc, fleet_pb2_grpc, freeze_pb2_grpc, policy_pb2_grpc, rollout_pb2_grpc
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from meridian_control.cli import contexts
from meridian_control.common import tls_look
from meridian_control.common.addresses import is_target
from meridian_control.common.channels import KEEPALIVE, proxy_option
from meridian_control.common.client_credentials import VARIABLES, ClientCredentials
from meridian_control.common.environment import BadVariable, read
from meridian_control.common.errors import PolicyError
from meridian_control.common.look import time_text
from meridian_control.common.paging import MAX_PAGE_SIZE
from meridian_control.common.plain_data import plain
from meridian_control.common.plain_text import UNPRINTABLE, printable, printable_document
from meridian_control.offline.trace_file import FileError

# More than the control plane waits for its database, so that the answer names a database that hangs.
CALL_TIMEOUT_S = 15.0
# Seconds that a call of a command that waits may take, however soon the command is to end.
LEAST_CALL_S = 1.0
# Seconds for which a command that waits goes on while the control plane cannot be reached, because servers close
# streams and restart, and seconds between two tries.
RECONNECT_S, RETRY_S = 30.0, 0.5
# Seconds between two outputs of a command that watches.
WATCH_S = 2.0
# Largest message that the client accepts; one WatchFleet response carries the whole fleet.
MAX_MESSAGE_BYTES = 64 << 20
PIPED_WIDTH = 200
T = TypeVar("T")
# Columns of the terminal that the name of a row takes at most.
NAME_WIDTH = 80
# Largest number of a revision, a freeze or a rollout.
LARGEST_ID = 2**63 - 1
# Largest number of characters of a request's id in a call. The control plane knows the beginning of a longer id.
LONGEST_REQUEST_ID = 1000
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# The largest duration that a message of the API can hold, 10,000 years.
MOST_S = 315_576_000_000

# A command prints NO_ANSWER if the control plane may have received a change and has not answered. _NOT_SENT finds the
# errors that gRPC gives for a call that it has not sent.
NO_ANSWER = (
    "no answer has come: the change may have been made, or may still be made; look before you repeat the command"
)
_NOT_SENT = re.compile("failed to connect|DNS resolution failed|metadata from plugin")

FAILED = 1
INVALID = 2
UNREACHABLE = 3
REFUSED = 4


DEFAULT_PORT = 50051
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"


class Output(StrEnum):
    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"
    toml = "toml"

    @property
    def is_table(self) -> bool:
        return self in (Output.table, Output.wide)


# Option `-o` of every command that prints a table.
OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="Print the result in this form; a wide table has more columns.")
]
WatchOption = Annotated[
    bool, typer.Option("-w", "--watch", help=f"Print the result again every {WATCH_S:g} seconds until Ctrl-C.")
]


@dataclass(frozen=True)
class Target:
    """The server and the credentials that the command line names; the environment or the context file completes them.

    Credentials that the command line does not give come from the context if one gives the address, so that no context's
    credential is sent to another server, and else from the environment.
    """

    server: str
    context: str
    credentials: ClientCredentials

    def resolve(self) -> tuple[str, ClientCredentials, str]:
        """Return the address of the server, the credentials for it, and what gives the address. Raises FileError,
        BadVariable."""
        named, server, context = "--server", self.server, self.context
        if not server and not context:
            named, server, context = "MERIDIAN_SERVER", read("MERIDIAN_SERVER"), read("MERIDIAN_CONTEXT")
        stored_context = None if server else contexts.find(context)
        if stored_context is not None:
            server = _address("the server of the context", stored_context.server)
            return server, self.credentials.filled_from(stored_context.credentials()), "from the context"
        server, source = (_address(named, server), f"from {named}") if server else (DEFAULT_SERVER, "the default")
        return server, self.credentials.filled_from(ClientCredentials.from_environment()), source

    def channel(self) -> grpc.Channel:
        """Return a channel to the server. Raises FileError or BadVariable, also if a file cannot be read."""
        server, credentials, _ = self.resolve()
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), proxy_option(), *KEEPALIVE]
        try:
            tls = credentials.channel()
        except OSError as error:
            named = {path: name for name, path in vars(credentials).items()}.get(error.filename, "")
            where = f"; named by --{named.replace('_', '-')}, {VARIABLES[named]} or the context" if named else ""
            raise FileError(Path(error.filename), "", f"cannot be read: {error.strerror}{where}") from error
        except ValueError as error:
            fail(INVALID, str(error))
        return grpc.secure_channel(server, tls, options) if tls else grpc.insecure_channel(server, options)


def _address(name: str, server: str) -> str:
    """Return an address of the control plane, with the default port if it has none. Raises BadVariable. name: what
    gives the address."""
    if is_target(server):
        return server
    if is_target(f"{server}:{DEFAULT_PORT}"):
        return f"{server}:{DEFAULT_PORT}"
    scheme, separator, rest = server.partition("://")
    plain = rest.rstrip("/")
    write = f"; write {plain}" if separator and is_target(plain) else ""
    tls = ", and --ca for TLS" if write and scheme == "https" else ""
    raise BadVariable(name, server, f"an address host:port{write}{tls}")


class Client:
    """The services of a control plane, over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.policy = policy_pb2_grpc.PolicyServiceStub(channel)
        self.fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        self.audit = audit_pb2_grpc.AuditServiceStub(channel)
        self.freeze = freeze_pb2_grpc.FreezeServiceStub(channel)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(channel)


class NamedRows(Table):
    """A table whose first column names the row, in one line if all names fit in a third of the terminal and NAME_WIDTH.

    Cells that do not fit are folded, so that none takes another column's place.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = self.columns[0]
        longest = max((cell_len(str(name)) for name in names.cells), default=0)
        names.no_wrap = longest <= min(options.max_width // 3, NAME_WIDTH)
        return super().__rich_console__(console, options)


def new_table(*columns: str) -> Table:
    """Return an empty table."""
    empty = NamedRows(box=None)
    for column in columns:
        empty.add_column(column, overflow="fold")
    empty.columns[0].max_width = NAME_WIDTH
    return empty


def add(to: Table, *cells: object) -> None:
    """Add a row; a cell's lines are joined, so that each row of a table is one line where its cells fit."""
    to.add_row(*(escape(printable(" ".join(str(cell).splitlines()))) for cell in cells))


def show(messages: Sequence[Message], output: Output, rows: Table, empty: str) -> None:
    """Print a list of messages; TOML has an array of tables that is named after the type of the messages. empty: what
    to say in place of a table without rows."""
    if output.is_table:
        if messages:
            console().print(rows)
        else:
            say(empty)
        return
    name = re.sub("(?<=.)(?=[A-Z])", "_", messages[0].DESCRIPTOR.name).lower() if messages else ""
    show_value([plain(message) for message in messages], output, name)


def show_value(value: Any, output: Output, name: str = "") -> None:
    """Print a dictionary or a list as JSON, YAML or TOML. name: key of a list in TOML, which leaves out values that are
    None."""
    if output is Output.json:
        say_document(json.dumps(value, indent=2) + "\n")
    elif output is Output.yaml:
        # YAML has escapes in quotes only, where it writes them itself.
        is_unicode = _encoding().lower().startswith("utf")
        say_document(yaml.safe_dump(value, sort_keys=False, allow_unicode=is_unicode))
    elif value:
        say_document(tomli_w.dumps(_without_none({name: value} if name else value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value if entry is not None] if isinstance(value, list) else value


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
    typer.echo(printable_document(text, _encoding()), nl=False)


def _encoding() -> str:
    return sys.stdout.encoding or "utf-8"


def warn_unreachable(replicas: Iterable[str]) -> None:
    """Name on standard error the replicas whose data is missing from an answer about the fleet."""
    for line in unreachable_lines(replicas):
        say(line, err=True)


def unreachable_lines(replicas: Iterable[str]) -> list[str]:
    """Return the line that names the replicas whose data is missing; no line if there are none."""
    names = ", ".join(sorted(set(replicas)))
    return [f"replicas that did not answer, so that their data is missing: {names}"] if names else []


def pages(call: Any, request: Any, limit: int = MAX_PAGE_SIZE, timeout_s: float = CALL_TIMEOUT_S) -> Iterator[Any]:
    """Yield the pages of a list method, as large as possible: of most lists the server looks at all for each page.

    limit: number of entries that are wanted. timeout_s: seconds that each page may take.
    """
    request.page_size = min(limit, MAX_PAGE_SIZE)
    while True:
        page = call(request, timeout=timeout_s)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def change(call: Any, request: Any) -> Any:
    """Return the answer of a method that changes something. If no answer comes, the error notes that the change may
    have been made. Raises grpc.RpcError."""
    try:
        return call(request, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        # An answer of the control plane itself has details.
        is_lost = _EXIT_CODES.get(error.code()) == UNREACHABLE and rpc_status.from_call(error) is None
        if is_lost and not _NOT_SENT.search(error.details() or "") and not getattr(request, "validate_only", False):
            error.add_note(NO_ANSWER)
        raise


def first(limit: int, call: Any, request: Any, field: str) -> list[Any]:
    """Return at most `limit` entries of a list method, read page by page from the field `field` of its responses."""
    entries: list[Any] = []
    for page in pages(call, request, limit):
        entries += getattr(page, field)
        if len(entries) >= limit:
            break
    return entries[:limit]


# ------------------------------------------------------------------------------------------------------------ errors


@contextmanager
def connect(context: typer.Context) -> Iterator[Client]:
    with reported(context.obj), context.obj.channel() as channel:
        yield Client(channel)


def watched(show: Callable[[], object], is_repeated: bool) -> None:
    """Print what `show` prints, and again every WATCH_S seconds until Ctrl-C if that is wanted, however long the
    control plane then cannot be reached."""
    with suppress(KeyboardInterrupt) if is_repeated else nullcontext():
        show()
        while is_repeated:
            time.sleep(WATCH_S)
            say("")
            try:
                show()
            except typer.Exit as error:
                if error.exit_code != UNREACHABLE:
                    raise


@contextmanager
def ended_by_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call a handler, for a command that has something to put in order before it ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)


def call_timeout_s(left_s: float) -> float:
    """Return the seconds that a call may take if the command is to end in `left_s` seconds."""
    return min(CALL_TIMEOUT_S, max(LEAST_CALL_S, left_s))


def patient(ask: Callable[[float], T], most_s: float = math.inf) -> T:
    """Return an answer for a command that waits. While the control plane cannot be reached, ask again for RECONNECT_S,
    or for `most_s` if that is less. Raises grpc.RpcError.

    ask: takes the seconds that the call may take.
    """
    began = time.monotonic()
    deadline = began + min(most_s, RECONNECT_S)
    while True:
        try:
            return ask(call_timeout_s(began + most_s - time.monotonic()))
        except grpc.RpcError as error:
            if _EXIT_CODES.get(error.code()) != UNREACHABLE or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


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
        code = _EXIT_CODES.get(error.code(), FAILED)
        cause = where = ""
        if target is not None and (code == UNREACHABLE or error.code() in tls_look.MAY_BE_TLS):
            server, credentials, source = target.resolve()
            cause = tls_look.trouble(server, credentials) if error.code() in tls_look.MAY_BE_TLS else ""
            where = f"; the called address is {server}, {source}" if code == UNREACHABLE else ""
        notes = getattr(error, "__notes__", [])
        fail(code, *(f"{line}{where}" for line in error_lines(error)), *notes, *([cause] if cause else []))


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


def id_number(text: str | int) -> int:
    """Return the number of a revision, a freeze or a rollout, or 0; an option's default is a number already. Raises
    typer.BadParameter."""
    if isinstance(text, int):
        return text
    # Python refuses to convert numbers with thousands of digits.
    digits = len(str(LARGEST_ID))
    if not (text.isdecimal() and len(text) <= digits and int(text) <= LARGEST_ID):
        raise typer.BadParameter(f"must be a whole number; got {text!r}")
    return int(text)


def one_id(text: str | int) -> int:
    """Return the number of one freeze or rollout. A 0 is refused, which in a call stands for all, or for the newest.
    Raises typer.BadParameter."""
    number = id_number(text)
    if isinstance(text, str) and not number:
        raise typer.BadParameter(f"must be at least 1; got {text!r}")
    return number


def labels_of(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return the labels that `--label` names."""
    labels: dict[str, str] = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not (name and separator):
            fail(INVALID, f"--label must be NAME=VALUE; got {pair}")
        if labels.setdefault(name, value) != value:
            fail(INVALID, f"--label must give a name one value; got {name}={labels[name]} and {pair}")
    return labels


def not_empty(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    """Refuse an empty text on the command line, as of a variable that is not set, for an option whose absence stands
    for everything, or for what the environment or the context says. Raises typer.BadParameter."""
    source = context.get_parameter_source(option.name or "")
    if value == "" and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("must not be empty; leave the option out instead")
    return value


def finite(value: float) -> float:
    """Refuse infinity, and NaN, which is in every range, because it compares with no end. Raises typer.BadParameter."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number; got {value}")
    return value


def duration_s(text: str) -> int:
    """Return the seconds of a duration such as `30s`, `10m`, `2h` or `1d`. Raises typer.BadParameter."""
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in UNITS_S:
        raise typer.BadParameter(f"must be a number and one of s, m, h, d, for example 10m; got {text!r}")
    # Python refuses to convert numbers with thousands of digits.
    if len(number) > len(str(MOST_S)) or (seconds := int(number) * UNITS_S[unit]) > MOST_S:
        raise typer.BadParameter(f"must be at most {MOST_S // UNITS_S['d']}d; got {text!r}")
    return seconds


def moment(text: str) -> datetime:
    """Return a time of the command line: ISO 8601, in UTC unless it says otherwise, or a duration before the present.
    Raises typer.BadParameter."""
    try:
        if text[-1:] in UNITS_S and text[:-1].isdecimal():
            return datetime.now(UTC) - timedelta(seconds=duration_s(text))
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        wanted = "a time such as 2026-01-31T12:00, in UTC, or a duration before the present such as 10m"
        raise typer.BadParameter(f"must be {wanted}; got {text!r}") from None


# Option of the commands that list what has happened.
SinceOption = Annotated[
    datetime | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Show only what happened from this time on, such as 2026-01-31T12:00 in UTC, or 10m for the last minutes.",
    ),
]


def stamp_text(stamp: Timestamp) -> str:
    """Return a time of the API as all tables show it."""
    return time_text(stamp.ToDatetime(UTC))


def fail(code: int, *lines: str) -> NoReturn:
    say(*lines, err=True)
    raise typer.Exit(code)
