"""Decides which engines a command expects, so that nothing counts as done by all engines while an engine is missing.

The module knows the engines as FleetService lists them: connected ones, and those that left within the last minutes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer
from meridian.v1 import fleet_pb2

from meridian_control.cli.console import CALL_TIMEOUT_S, FAILED, Client, fail, pages, unreachable_lines

# Number of engines that an error names at most.
MAX_NAMED = 20
NONE_CONNECTED = "no engine is connected"
NO_ENGINE = f"{NONE_CONNECTED}; an engine connects with MERIDIAN_CONTROL=HOST:PORT in its environment"

# Options of the commands that wait for engines.
LeastEngines = Annotated[
    int | None,
    typer.Option(
        "--engines",
        min=1,
        help="Smallest number of engines that must be connected; engines that are lost are then not waited for.",
    ),
]
AllowNone = Annotated[
    bool, typer.Option("--allow-none", help="Succeed also if no engine is connected, and wait for no lost one.")
]


@dataclass(frozen=True)
class Expected:
    """The engines that must be there. By default these are all that are connected, at least one, and those whose stream
    broke off lately; `least`: so many connected ones; `allow_none`: all that are connected, if any."""

    least: int | None = None
    allow_none: bool = False

    def missing(self, engines: Iterable[fleet_pb2.Engine], unreachable: Iterable[str]) -> list[str]:
        """Return the reasons why expected engines are not there, one a line. unreachable: ids of the replicas whose
        engines are not known."""
        listed = list(engines)
        lines = unreachable_lines(unreachable)
        live, least = connected(listed), self.least or (0 if self.allow_none else 1)
        if len(live) < least:
            number = f"{len(live)} engines are" if live else "no engine is"
            more = f", of at least {self.least}" if self.least else "; --allow-none accepts that"
            lines.append(f"{number} connected{more}")
        gone = [engine for engine in listed if engine.state != fleet_pb2.CONNECTION_STATE_CONNECTED]
        lost = [engine for engine in gone if engine.lost and not self.least and not self.allow_none]
        lines += [f"{engine.engine_id} is lost: its stream broke off, and it has not come back" for engine in lost]
        if len(live) < least:
            lines += [f"{engine.engine_id} has left" for engine in gone if engine not in lost]
        return lines


def connected(engines: Iterable[fleet_pb2.Engine]) -> list[fleet_pb2.Engine]:
    return [engine for engine in engines if engine.state == fleet_pb2.CONNECTION_STATE_CONNECTED]


def check_known(client: Client, engine_id: str) -> None:
    """Exit if no engine with this id is known."""
    engines, unreachable = all_engines(client)
    of_engine(engines, engine_id, unreachable)


def of_engine(
    engines: Iterable[fleet_pb2.Engine], engine_id: str, unreachable: Iterable[str] = ()
) -> list[fleet_pb2.Engine]:
    """Return the engines with this id, or all for an empty id. Exit if no engine is known by it, as one is for ten
    minutes after its stream has ended. unreachable: ids of the replicas whose engines are not known."""
    listed = list(engines)
    found = [engine for engine in listed if engine_id in ("", engine.engine_id)]
    if engine_id and not found:
        ids = sorted({engine.engine_id for engine in listed})
        more = f", and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
        known = f"known engines are {', '.join(ids[:MAX_NAMED])}{more}" if ids else "none is"
        fail(FAILED, f'--engine: no engine "{engine_id}" is known; {known}', *unreachable_lines(unreachable))
    return found


def same_names(engines: Iterable[fleet_pb2.Engine]) -> list[str]:
    """Return the names that several connected engines have."""
    names = Counter(engine.engine_id for engine in connected(engines))
    return sorted(name for name, count in names.items() if count > 1)


def all_engines(client: Client, timeout_s: float = CALL_TIMEOUT_S) -> tuple[list[fleet_pb2.Engine], list[str]]:
    """Return the engines of all replicas, and the ids of the replicas that did not answer."""
    answers = list(pages(client.fleet.ListEngines, fleet_pb2.ListEnginesRequest(), timeout_s=timeout_s))
    unreachable = [name for page in answers for name in page.unreachable_replicas]
    return [engine for page in answers for engine in page.engines], unreachable
