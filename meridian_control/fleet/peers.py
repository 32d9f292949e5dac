"""Calls the other replicas over gRPC, so that each replica can answer questions about the whole fleet.

The module owns the channels between replicas. Replicas ask each other on demand instead of publishing their state, so
that data that changes in every step stays out of the database and answers are as fresh as on the engine's own replica.
An answer leaves out, and names, each replica that does not answer within CALL_TIMEOUT_S, however many calls the
question takes; a replica that has not answered once has a tenth of that time until it answers again, but the whole time
every PATIENT_S, because it may be slow for good. A replica whose answer cannot be read or used counts as one that does
not answer. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, policy_pb2, policy_pb2_grpc

from meridian_control.common import tls_look
from meridian_control.common.channels import KEEPALIVE, NO_PROXY
from meridian_control.common.errors import NotFound, PermissionDenied, ReplicaUnavailable
from meridian_control.common.reloading_file import Reloaded
from meridian_control.fleet.peer_answers import reading
from meridian_control.fleet.turns import Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meridian_control.common.client_credentials import ClientCredentials
    from meridian_control.fleet.membership import Replica
    from meridian_control.fleet.recording import Recording

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Asked = TypeVar(
    "Asked", fleet_pb2.ExplainRequestRequest, fleet_pb2.ListDecisionsRequest, policy_pb2.ExplainPolicyRequest
)

CALL_TIMEOUT_S = 2.0
# Share of CALL_TIMEOUT_S for which a replica is waited for that has not answered the question before.
SILENT_SHARE = 0.1
# Seconds between two questions for which such a replica has the whole CALL_TIMEOUT_S.
PATIENT_S = 10.0
# Seconds between two attempts to record from replicas that do not send records yet.
LOOK_S = 1.0
# Least time between two requests for a recording that a replica refuses, in seconds: each is an audit record there.
REFUSED_S = 60.0
NAMES = tls_look.Names("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY")
REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
OPTIONS = [
    NO_PROXY,
    *KEEPALIVE,
    # Largest response; a response carries all engines or all requests of a replica.
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(frozen=True)
class Peer:
    """Another replica, and the channel to it."""

    replica: Replica
    channel: grpc.aio.Channel

    @property
    def fleet(self) -> fleet_pb2_grpc.FleetServiceAsyncStub:
        return fleet_pb2_grpc.FleetServiceStub(reading(self.channel))

    @property
    def policy(self) -> policy_pb2_grpc.PolicyServiceAsyncStub:
        return policy_pb2_grpc.PolicyServiceStub(reading(self.channel))


class Peers:
    """Clients of the other live replicas, which `others` returns. `silent` returns the ids of replicas that no longer
    live but may still have engines. `credentials` authenticate this replica, and changed files are read again. Raises
    OSError or ValueError if a file of the credentials cannot be used."""

    def __init__(
        self,
        others: Callable[[], Sequence[Replica]],
        credentials: ClientCredentials,
        silent: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._others, self._dead = others, silent
        self._credentials = credentials
        self._tls = Reloaded(credentials.files(), credentials.channel)
        self._shown = self._tls.get()
        self._known: dict[str, Peer] = {}
        # Replicas whose answer is missing, which was logged, by id and the part of the replica's data that was asked
        # for, empty for any; each with the newest time at which it had the whole CALL_TIMEOUT_S.
        self._silent: dict[tuple[str, str], float] = {}
        # Ids of replicas for which a missing recording has already been logged.
        self._not_recording: set[str] = set()
        # Times on the event loop until which replicas that have refused to record are not asked again, by their ids.
        self._refused_until: dict[str, float] = {}
        # Close channels, and find out why a replica does not answer; nobody waits for them before `close`.
        self._tasks = Tasks()

    def _peers(self) -> list[Peer]:
        """Return the clients of the replicas that live now, and close the channels to replicas that no longer live."""
        live = {replica.replica_id: replica for replica in self._others()}
        renewed = (tls := self._tls.get()) is not self._shown
        self._shown = tls
        if renewed:
            # With other files a call may fail for another reason, which the log is to name.
            self._silent.clear()
            self._not_recording.clear()
        for replica_id in set(self._known) if renewed else self._known.keys() - live.keys():
            self._tasks.start(self._known.pop(replica_id).channel.close(CALL_TIMEOUT_S))
            self._refused_until.pop(replica_id, None)
        for replica_id in live.keys() - self._known.keys():
            self._known[replica_id] = Peer(live[replica_id], _channel(live[replica_id].address, tls))
        return [self._known[replica_id] for replica_id in sorted(live)]

    async def ask(
        self, call: Callable[[Peer], Awaitable[Answer]], part: str = ""
    ) -> tuple[dict[str, Answer], list[str]]:
        """Return the answers by replica id, and the ids of the replicas without an answer, also of those that no longer
        live but may still have engines. `call` may raise any exception for an answer that it cannot use.

        part: name of data with which a replica may be late although it answers other questions in time.
        """
        answers, missing = await self.ask_live(call, part)
        return answers, sorted({*missing, *self._dead()})

    async def ask_live(
        self, call: Callable[[Peer], Awaitable[Answer]], part: str = ""
    ) -> tuple[dict[str, Answer], list[str]]:
        """Do what `ask` does, but leave out replicas that no longer live."""
        peers = self._peers()
        answers = await asyncio.gather(*(self._asked(peer, call, part) for peer in peers))
        by_replica = {peer.replica.replica_id: answer[0] for peer, answer in zip(peers, answers, strict=True) if answer}
        return by_replica, [peer.replica.replica_id for peer in peers if peer.replica.replica_id not in by_replica]

    async def ask_who_knows(self, call: Callable[[Peer], Awaitable[Answer]]) -> tuple[list[Answer], list[str]]:
        """Return all answers except NOT_FOUND, and the ids of the replicas without an answer."""

        async def asked(peer: Peer) -> list[Answer]:
            try:
                return [await call(peer)]
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return []
                raise

        by_replica, unreachable = await self.ask(asked)
        return [answer for answers in by_replica.values() for answer in answers], unreachable

    async def ask_one(self, replica_id: str, call: Callable[[Peer], Awaitable[Answer]]) -> Answer:
        """Return the answer of one replica. `call` must have a time limit.

        Raises NotFound or PermissionDenied if the replica answers so, and ReplicaUnavailable if it gives no answer.
        """
        for peer in self._peers():
            if peer.replica.replica_id == replica_id:
                try:
                    return await _answered(peer, call)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        raise NotFound(error.details() or "") from None
                    if error.code() in REFUSED:
                        why = f"replica {replica_id}, which the call needs, refuses calls of this replica"
                        raise PermissionDenied(f"{why}: {error.details()}") from None
                    raise ReplicaUnavailable([replica_id], f"{error.code().name}: {error.details()}") from None
        raise ReplicaUnavailable([replica_id], "it is not among the live replicas")

    async def _asked(self, peer: Peer, call: Callable[[Peer], Awaitable[Answer]], part: str) -> list[Answer]:
        replica_id, now_s = peer.replica.replica_id, asyncio.get_running_loop().time()
        about = {(replica_id, ""), (replica_id, part)}
        waited_s = [self._silent[each] for each in about & self._silent.keys()]
        # Every question would otherwise wait for the time limit while a replica hangs.
        hurries = bool(waited_s) and now_s - max(waited_s) < PATIENT_S
        if waited_s and not hurries:
            self._silent[replica_id, part] = now_s
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S * (SILENT_SHARE if hurries else 1)):
                answer = await _answered(peer, call)
        except (grpc.aio.AioRpcError, ReplicaUnavailable, TimeoutError) as error:
            # A replica that is only slow may have answered another question since, in its whole time.
            if not (hurries or about & self._silent.keys()):
                self._silent[replica_id, part] = now_s
                # The question does not wait for the look, which may take seconds.
                self._tasks.start(self._complain(peer, error))
            return []
        for each in about:
            self._silent.pop(each, None)
        return [answer]

    async def _complain(self, peer: Peer, error: grpc.aio.AioRpcError | ReplicaUnavailable | TimeoutError) -> None:
        logger.warning("replica %s did not answer: %s", peer.replica.replica_id, await self._why(peer, error))

    async def _why(self, peer: Peer, error: grpc.aio.AioRpcError | ReplicaUnavailable | TimeoutError) -> str:
        """Return why a replica did not answer, also if it is a cause in TLS that gRPC does not name."""
        if isinstance(error, ReplicaUnavailable):
            return str(error)
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        failure, cause = f"{code}: no answer within {CALL_TIMEOUT_S:g} s", ""
        if isinstance(error, grpc.aio.AioRpcError):
            code = error.code()
            failure = f"{code}: {error.details()}"
        if code in tls_look.MAY_BE_TLS:
            cause = await asyncio.to_thread(tls_look.trouble, peer.replica.address, self._credentials, NAMES)
        return f"{cause} ({failure})" if cause else failure

    async def relay(self, recording: Recording, began: asyncio.Event) -> None:
        """Add the records of all other replicas to a recording until cancelled, also of replicas that start later.

        `began` is set once every replica that lives now either records or cannot be reached.
        """
        streams: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                peers = self._peers()
                waiting = [self._begin(peer, recording, streams) for peer in peers]
                await asyncio.gather(*(begun.wait() for begun in waiting if begun is not None))
                recording.unreachable = [p.replica.replica_id for p in peers if streams[p.replica.replica_id].done()]
                recording.unreachable += self._dead()
                began.set()
                await asyncio.sleep(LOOK_S)
        finally:
            for stream in streams.values():
                stream.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)

    def _begin(self, peer: Peer, recording: Recording, streams: dict[str, asyncio.Task[None]]) -> asyncio.Event | None:
        """Start to record from a replica unless such a recording already runs.

        The returned event is set once the replica records or its stream has ended.
        """
        replica_id = peer.replica.replica_id
        running, refused_until = streams.get(replica_id), self._refused_until.get(replica_id, 0.0)
        if running is not None and not (running.done() and asyncio.get_running_loop().time() >= refused_until):
            return None
        begun = asyncio.Event()
        streams[replica_id] = asyncio.create_task(self._relay_one(peer, recording, begun))
        return begun

    async def _relay_one(self, peer: Peer, recording: Recording, begun: asyncio.Event) -> None:
        request = fleet_pb2.RecordTraceRequest(engine_id=recording.engine_id, local_only=True)
        # A replica also ends a long recording with a refusal, once the token with which it began has expired.
        ask_again_at = asyncio.get_running_loop().time() + REFUSED_S
        call: Any = peer.fleet.RecordTrace(request)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call.initial_metadata()
            begun.set()
            async for response in call:
                self._not_recording.discard(peer.replica.replica_id)
                recording.add(response.record.SerializeToString())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                recording.overflow()
            replica_id = peer.replica.replica_id
            if error.code() in REFUSED:
                self._refused_until[replica_id] = ask_again_at
            if replica_id not in self._not_recording:
                self._not_recording.add(replica_id)
                logger.warning("replica %s does not record: %s: %s", replica_id, error.code(), error.details())
        except TimeoutError:
            pass
        finally:
            # Records of the replica are missing from here on; by its next round `relay` may no longer list the replica.
            recording.unreachable = [*{*recording.unreachable, peer.replica.replica_id}]
            begun.set()
            call.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(peer.channel.close() for peer in self._known.values()), self._tasks.settle())
        self._known.clear()


async def _answered(peer: Peer, call: Callable[[Peer], Awaitable[Answer]]) -> Answer:
    """Return the answer to a call. Raises AioRpcError, and ReplicaUnavailable if the answer cannot be used, or if the
    channel is closed meanwhile: the replica has ended, or the credentials have changed. gRPC cancels the calls of a
    closed channel."""
    try:
        return await call(peer)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
    except grpc.aio.UsageError:
        pass
    except (grpc.aio.AioRpcError, TimeoutError):
        raise
    except Exception as error:
        # What another replica sends must not end this one, whatever is wrong with it.
        why = f"its answer cannot be used: {type(error).__name__}: {error}"
        raise ReplicaUnavailable([peer.replica.replica_id], why) from error
    raise ReplicaUnavailable([peer.replica.replica_id], "the connection to it was closed") from None


def local(request: Asked) -> Asked:
    """Return the request as another replica is asked it, for what that replica has itself."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.local_only = True
    return asked


async def pages(call: Callable[..., Awaitable[Answer]], request: Any, field: str) -> Answer:
    """Return the first page of an answer with what all pages have in `field`. Raises ValueError for a replica that
    sends pages without end."""
    answer: Any = await call(request, timeout=CALL_TIMEOUT_S)
    entries, page = getattr(answer, field), answer
    while page.next_page_token:
        if not getattr(page, field):
            raise ValueError("an empty page has a next one")
        request.page_token = page.next_page_token
        page = await call(request, timeout=CALL_TIMEOUT_S)
        entries.extend(getattr(page, field))
    return answer  # type: ignore[no-any-return]


def _channel(address: str, tls: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, tls, OPTIONS) if tls else grpc.aio.insecure_channel(address, OPTIONS)
