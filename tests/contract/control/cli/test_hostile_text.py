"""Text that a client, an agent or a server may write, in every field of every answer and message: no command prints it
raw, and no log has it raw."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import agent_pb2, agent_pb2_grpc, audit_pb2, fleet_pb2, freeze_pb2, policy_pb2, rollout_pb2
from typer.main import get_command
from typer.testing import CliRunner

from meridian_agent.core.plain_log import PlainLog
from meridian_agent.core.plain_log import printable as agent_printable
from meridian_control.cli.console import Output, show_value
from meridian_control.cli.main import app
from meridian_control.common.plain_text import PlainFormatter, printable, printable_document
from meridian_relay.log import BURST, INTERVAL_S, LineLimit, TextFormatter
from tests.fakes.agent import hello
from tests.processes import Control

# A colour, forged lines of several kinds, the clipboard, lines that are erased, other reading directions, a title.
HOSTILE = (
    "a\x1b[31m\nCRITICAL forged\r\nCRITICAL\x85CRITICAL\u2028CRITICAL\u2029CRITICAL\x0bCRITICAL\x0cCRITICAL"
    "\x1b]52;c;aGk=\x07\x1b[2K\x1b[1A\x9b2J\x7f\x08\u202egnp.exe\u2066\u200f\u061c[bold]\\"
)
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A long cell of a table is folded, and a traceback has several lines; all of them are indented.
FORGED = re.compile("^CRITICAL", re.MULTILINE)
DEPTH = 7


def check(text: str) -> None:
    assert not RAW.search(text), ascii(text)
    assert not FORGED.search(text), ascii(text)


def fill(message: Message, depth: int = DEPTH) -> Message:
    """Write HOSTILE into every text of a message, and something into every other field."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "next_page_token":
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field)
        elif field.message_type is not None:
            if depth:
                owner = getattr(message, field.name)
                part = owner.add() if field.is_repeated else owner
                part.SetInParent()
                if not isinstance(part, (Timestamp, Duration)):
                    fill(part, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field))
        else:
            setattr(message, field.name, _value(field))
    return message


def _fill_map(entries: Any, field: Any) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if value.message_type is not None:
        entries[_value(key)].SetInParent()
    else:
        entries[_value(key)] = _value(value)


def _value(field: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    kinds = {field.CPPTYPE_STRING: HOSTILE, field.CPPTYPE_BOOL: True}
    if field.type == field.TYPE_BYTES:
        return HOSTILE.encode()
    return kinds.get(field.cpp_type, 1)


class Answering(grpc.GenericRpcHandler):
    """Answers every method of every service with its response, filled with hostile text."""

    def __init__(self) -> None:
        services = [
            service
            for module in (audit_pb2, fleet_pb2, freeze_pb2, policy_pb2, rollout_pb2)
            for service in module.DESCRIPTOR.services_by_name.values()
        ]
        self.methods = {f"/{s.full_name}/{method.name}": method for s in services for method in s.methods}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        method: MethodDescriptor = self.methods[details.method]
        answer = fill(message_factory.GetMessageClass(method.output_type)()).SerializeToString()
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda *_: iter([answer]))
        return grpc.unary_unary_rpc_method_handler(lambda *_: answer)


class Refusing(Answering):
    """Answers every call with an error whose text is hostile."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, HOSTILE)

        if self.methods[details.method].server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda *args: iter([refuse(*args)]))
        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    served = grpc.server(futures.ThreadPoolExecutor(4), handlers=[request.param()])
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield f"127.0.0.1:{port}"
    served.stop(None)


# The arguments of every command that calls the server; the others read files only.
COMMANDS: dict[str, list[str]] = {
    "audit": [],
    "budgets": [],
    "decisions": [],
    "end": ["x"],
    "engines": [],
    "explain": ["x"],
    "freeze": ["--for", "1m", "--wait", "0"],
    "freezes": [],
    "policy apply": ["-f", "FILE"],
    "policy diff": ["1", "2"],
    "policy explain": [],
    "policy get": [],
    "policy history": [],
    "policy rollback": ["1"],
    "policy set": ["fallback.lease_ms=600"],
    "pressure": [],
    "record": ["TRACE", "--duration", "0.1"],
    "requests": [],
    "rollout abort": [],
    "rollout pause": [],
    "rollout resume": [],
    "rollout list": [],
    "rollout status": [],
    "rollout start": ["-f", "FILE", "--steps", "STEPS"],
    "savings": [],
    "shadow": [],
    "status": [],
    "thaw": [],
    "top": [],
    "wait": ["--timeout", "0"],
}
OFFLINE = {"calibrate", "context list", "context use", "replay", "policy families", "policy validate"}
FORMS: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads}


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


ALL = dict(_commands(get_command(app)))


def test_every_command_is_tried() -> None:
    online = {name for name in ALL if name not in OFFLINE}
    assert online - COMMANDS.keys() == set()


def _takes_form(name: str) -> bool:
    return any("--output" in option.opts for option in ALL[name].params)


# A refusal is the same in every form.
TRIED = [
    (served, name, output)
    for served, forms in ((Answering, FORMS), (Refusing, ()))
    for name in COMMANDS
    for output in ["table", *(forms if _takes_form(name) else ())]
]


@pytest.mark.parametrize(("server", "name", "output"), TRIED, indirect=["server"])
def test_no_command_prints_it_raw(server: str, name: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[scheduler]\nmax_think_tokens = 100\n")
    (tmp_path / "steps.toml").write_text("[[step]]\npercent = 100\nbake_s = 1\n")
    files = {"FILE": "policy.toml", "STEPS": "steps.toml", "TRACE": f"{output}.trace"}
    words = [str(tmp_path / files[word]) if word in files else word for word in COMMANDS[name]]
    form = ["-o", output] if _takes_form(name) else []
    result = CliRunner().invoke(app, ["--server", server, *name.split(), *words, *form])
    check(result.stdout)
    check(result.stderr)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    # Only a server that is no control plane names fields that are no keys of TOML.
    if output in FORMS and result.exit_code == 0 and (name, output) != ("policy explain", "toml"):
        FORMS[output](result.stdout)


@pytest.mark.parametrize("escape", [printable, agent_printable])
def test_what_is_shown_can_be_typed_to_search_for_it(escape: Callable[[str], str]) -> None:
    shown = escape(HOSTILE + "\ud800\U000e0041")
    check(shown)
    assert escape(shown) == shown
    assert escape("Grüße, 你好 שלום 👍🏽 a\\b") == "Grüße, 你好 שלום 👍🏽 a\\b"
    assert json.loads(printable_document(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {"a": HOSTILE}


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize("form", [*FORMS, "yaml"])
def test_a_document_reads_back_in_every_encoding(form: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, written = {"tenant": "caf\xe9", "x": "\U0001f600"}, io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, "backslashreplace"))
    show_value(value, Output(form))
    sys.stdout.flush()
    assert {**FORMS, "yaml": yaml.safe_load}[form](written.getvalue().decode(encoding)) == value


def _logged(handler: logging.Handler, filters: list[logging.Filter]) -> logging.Logger:
    logger = logging.Logger("hostile")
    logger.addHandler(handler)
    for one in filters:
        logger.addFilter(one)
    return logger


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.text = ""
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.mark.parametrize(
    ("formatter", "filters"),
    [
        (PlainFormatter("%(levelname)s %(message)s"), []),
        (TextFormatter("%(levelname)s %(message)s"), []),
        (logging.Formatter("%(levelname)s %(message)s"), [PlainLog()]),
    ],
    ids=["control", "relay", "agent"],
)
def test_no_log_has_it_raw(formatter: logging.Formatter, filters: list[logging.Filter]) -> None:
    lines = Lines(formatter)
    logger = _logged(lines, filters)
    logger.warning("request %s", HOSTILE)
    logger.warning("request %(id)s", {"id": HOSTILE})
    try:
        raise ValueError(HOSTILE) from KeyError(HOSTILE)
    except ValueError:
        logger.exception("an error about %s", HOSTILE)
    check(lines.text)
    assert len(re.findall("^(WARNING|ERROR)", lines.text, re.MULTILINE)) == 3


@pytest.mark.parametrize("limit", [LineLimit, PlainLog])
def test_lines_of_one_kind_are_limited(limit: type[LineLimit] | type[PlainLog]) -> None:
    now = 0.0
    lines = Lines(logging.Formatter("%(message)s"))
    logger = _logged(lines, [limit(lambda: now)])
    for number in range(1000):
        logger.warning("request %s is bad", number)
    logger.warning("another kind")
    assert len(lines.text.splitlines()) == BURST + 1
    now = INTERVAL_S
    logger.warning("request %s is bad", "next")
    left_out = f"{1000 - BURST} lines like this one were left out before it"
    assert lines.text.splitlines()[-1] == f"request next is bad ({left_out})"


def test_no_error_of_the_agents_log_reaches_vllm() -> None:
    def clock() -> float:
        raise RuntimeError(HOSTILE)

    lines = Lines(logging.Formatter("%(levelname)s %(message)s"))
    logger = _logged(lines, [PlainLog(clock)])
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("request %s", HOSTILE)
    check(lines.text)
    assert "ERROR meridian: a line of the log was lost: RuntimeError(" in lines.text


def test_a_hostile_agent_forges_no_line_of_the_control_planes_log(tmp_path: Path) -> None:
    """The agent sends every message of its contract, each with hostile text in every field."""
    control = Control(tmp_path)
    kinds = [field for field in agent_pb2.ConnectRequest.DESCRIPTOR.fields if field.name != "hello"]
    for kind in [None, *kinds]:
        with control.channel() as channel:
            messages = [agent_pb2.ConnectRequest(hello=hello("engine"))]
            if kind is None:
                fill(messages[0].hello)
            else:
                message = agent_pb2.ConnectRequest()
                fill(getattr(message, kind.name))
                messages.append(message)
            with suppress(grpc.RpcError):
                list(agent_pb2_grpc.AgentServiceStub(channel).Connect(iter(messages), timeout=5))
    control.process.stop()
    check(control.process.output())
