"""Completes names that a shell asks for: contexts, policy fields, and what the control plane knows.

A completion that fails offers nothing, because a shell shows no errors while the user types.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import grpc
import typer
from meridian.v1 import fleet_pb2, policy_pb2
from pydantic import BaseModel

from meridian_control.cli import contexts
from meridian_control.cli.console import Client, Target, id_number, not_empty
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.environment import BadVariable
from meridian_control.offline.trace_file import FileError
from meridian_control.policy.model import Policy

# Seconds that a shell waits at most.
PATIENCE_S = 2.0


def context_names(incomplete: str) -> list[str]:
    try:
        return _starting(incomplete, contexts.load().contexts)
    except FileError:
        return []


def field_names(incomplete: str) -> list[str]:
    """Return the policy fields that `policy set` may change, with the equals sign behind them."""
    return _starting(incomplete, _fields(Policy()))


def _fields(section: BaseModel, before: str = "") -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{before}{name}.")
        elif before:
            yield f"{before}{name}="


def engine_ids(incomplete: str) -> list[str]:
    def listed(client: Client) -> Iterable[str]:
        answer = client.fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=PATIENCE_S)
        return {engine.engine_id for engine in answer.engines}

    return _starting(incomplete, _asked(listed))


def revisions(incomplete: str) -> list[str]:
    def listed(client: Client) -> Iterable[str]:
        answer = client.policy.ListRevisions(policy_pb2.ListRevisionsRequest(page_size=50), timeout=PATIENCE_S)
        return [str(stored.revision) for stored in answer.revisions]

    return _starting(incomplete, _asked(listed))


def revision(of: Callable[..., Any], metavar: str, text: str, default: str | bool = True) -> Any:
    """Return what an argument or an option needs that takes the number of a revision."""
    return of(parser=id_number, metavar=metavar, help=text, show_default=default, autocompletion=revisions)


# Options of the commands that show one engine, or the requests of one.
OnlyEngine = Annotated[str, typer.Option(help="Show only this engine.", autocompletion=engine_ids, callback=not_empty)]
OnlyOfEngine = Annotated[
    str, typer.Option(help="Show only requests of this engine.", autocompletion=engine_ids, callback=not_empty)
]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _asked(question: Callable[[Client], Iterable[str]]) -> Iterable[str]:
    """Return the control plane's answer. The environment or the current context names it, because the shell passes no
    option of the command line on."""
    target = Target("", "", ClientCredentials())
    try:
        with target.channel() as channel:
            return question(Client(channel))
    except (grpc.RpcError, FileError, BadVariable, typer.Exit):
        return ()
