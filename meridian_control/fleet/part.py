"""What a capability does over the engines of one replica (`FleetPart`), and what it finds beside the fleet for it.

The fleet, the gRPC services, the status page and the metrics know parts, and no capability by name. A part does its
work in `tick`, once a second, or when an engine comes or goes; no method is called for a report. All code runs on the
server's event loop.

Messages, rows of the page and points of its time axis have the fields that the contract and the page know. A capability
of one's own shows what it has by `Shown.attention`, by metrics, and by `Capability.shown`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from meridian_control.common.complaints import Complaints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from meridian.v1 import fleet_pb2

    from meridian_control.engine.part import Part, Stream
    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.peers import Peers
    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.driver import Rollouts
    from meridian_control.storage.database import Database

    # Rows of a metric: the values of its labels, and the value.
    Rows: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
    # A metric's name with its rows.
    Metric: TypeAlias = tuple[str, Rows]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Attention(NamedTuple):
    """A sentence about something that an operator should look at: bad, warn or empty; and the view that shows more."""

    level: str
    text: str
    view: str


class Shown(NamedTuple):
    """What the status page shows of a capability: entries for every viewer, the rows of tables by name, how many
    troubles there are, and what an operator should look at."""

    entries: dict[str, Any]
    tables: Mapping[str, list[dict[str, Any]]] = MappingProxyType({})
    troubles: int = 0
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class Beside:
    """What a control plane has beside its fleet.

    peers: asks the other replicas, None if the store allows only one replica. leads: returns whether this replica
    leads. clock: gives the time of day, for the times that records show.
    """

    replica_id: str
    peers: Peers | None
    leads: Callable[[], bool]
    rollouts: Rollouts
    database: Database
    clock: Callable[[], datetime]


class FleetPart:
    """A capability's part over the engines of one replica; a method that a capability has no use for is left out.

    The fleet makes each part once, before any engine connects, and gives itself to it. Unless a method says otherwise,
    the fleet calls it, and it returns nothing. An error of a method is logged and ends nothing else, but `begin` and
    `end` raise theirs, and one of `stream` or `joined` ends the stream of that engine.
    """

    # What the log says while `tick` fails; the error follows.
    failure = "a capability's work fails"
    # Seconds from the end of a call of `tick` to the next call.
    tick_s = 1.0
    # The newest call of `tick`, which goes on if the job that awaits it is cancelled.
    ticking: asyncio.Task[None] | None = None

    @cached_property
    def complaints(self) -> Complaints:
        """Logs each error of the methods other than `tick` once, because the page calls them each second."""
        return Complaints(logger, f"{type(self).__name__}: %s")

    # ----------------------------------------------------------------------------------------------------- the replica

    def attach(self, beside: Beside) -> None:
        """Take what is beside the fleet. The assembly calls it once, before `begin`; a fleet of its own, as in tests,
        does not call it."""

    async def begin(self) -> None:
        """Read from the store what the part needs before engines connect. The assembly calls it once. Raises
        StoreUnavailable, StoredPolicyUnreadable."""

    async def tick(self) -> None:
        """Do the work that is due. A job beside the server calls it again `tick_s` seconds after its end. A call is not
        cancelled with the job."""

    async def end(self) -> None:
        """Store what would be lost. The program calls it once, after all streams have ended."""

    # ----------------------------------------------------------------------------------------------------- the engines

    def stream(self, stream: Stream) -> Part | None:
        """Make the capability's part in an engine's stream, with what it shares with other streams. A session calls it
        when an engine connects; without this method, it calls `Capability.stream`."""
        return None

    def joined(self, connection: Connection) -> None:
        """Set up the session of an engine that connects, before the engine is sent its first message."""

    def left(self, connection: Connection, replaced: bool) -> None:
        """Keep what is needed of a session whose stream has ended, before the session closes. replaced: whether a newer
        stream of the same process had replaced it."""

    def forgot(self, engine_ids: list[str]) -> None:
        """Drop what is kept of engines that have not come back."""

    def policy_came(self, stored: StoredRevision) -> None:
        """Note that a revision is in force from now on; engines have not got it yet."""

    def froze(self) -> None:
        """Note that other freezes are in force, which all engines have been sent."""

    # -------------------------------------------------------------------------------------------------------- messages

    def calls(self) -> Mapping[str, Callable[[Any], Awaitable[Any]]]:
        """Return the methods of FleetService that the capability answers, by name. FleetService calls it once."""
        return {}

    def show_engine(self, view: fleet_pb2.Engine, session: Session) -> None:
        """Fill in the capability's fields of an engine's message, for FleetService, the page and other replicas."""

    def answer_replica(self, answer: fleet_pb2.ListEnginesResponse, most_bytes: int) -> None:
        """Fill in what other replicas need beside the engines, with at most so many bytes. FleetService calls it for
        the first page of an answer to one."""

    # ------------------------------------------------------------------------------------------------ page and metrics

    async def before_metrics(self) -> None:
        """Bring the metrics up to date, if that takes so long that other work must come in between. A scrape calls it
        first."""

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        """Yield the values of metrics that `Capability.metrics` lists; a name that it does not list is an error. A
        scrape calls it after `before_metrics`.
        totals: the counters summed over all sessions."""
        yield from ()

    async def show(self) -> Shown:
        """Return what the status page shows of the capability. The page calls it for looks at the fleet, at most once a
        second."""
        return Shown({})

    async def point(self) -> dict[str, float]:
        """Return the capability's values on the page's time axis, without those that are not known. The page calls it
        every 15 s."""
        return {}

    def show_row(self, engine: fleet_pb2.Engine) -> dict[str, Any]:
        """Return the capability's entries of an engine's row on the page. The page calls it for each engine."""
        return {}

    def cause(self, engine: fleet_pb2.Engine) -> str:
        """Return in a sentence what the capability does to the engine that an operator should know; empty for nothing.
        The page calls it for each engine."""
        return ""


async def keep_ticking(part: FleetPart) -> None:
    """Call a part's `tick` again and again until cancelled."""
    complaints = Complaints(logger, f"{part.failure}: %s")
    while True:
        part.ticking = asyncio.create_task(part.tick())
        try:
            await asyncio.shield(part.ticking)
            complaints.over()
        except Exception as error:
            # What other replicas answer must not end this one, whatever is wrong with it.
            complaints.log(error)
        await asyncio.sleep(part.tick_s)


def each(parts: Iterable[FleetPart], ask: Callable[[FleetPart], T]) -> list[T]:
    """Return what each part answers. An error of one is logged, and only its answer is missing."""
    answers = []
    for part in parts:
        try:
            answers.append(ask(part))
        except Exception as error:
            part.complaints.log(error)
    return answers


async def answer_of(part: FleetPart, answer: Awaitable[T], default: T) -> T:
    """Return an answer of a part, or the default after an error, which is logged."""
    try:
        return await answer
    except Exception as error:
        part.complaints.log(error)
        return default
