"""A FakeEngine on the agent's real link, with its thread, real gRPC, and records as the engine-core thread makes
them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.directives import STEP_DECISIONS
from meridian_agent.link.control_stream import GOODBYE_S, ControlStream
from meridian_agent.link.credentials import AgentCredentials
from meridian_agent.link.outbox import RecordRing
from meridian_agent.vllm_adapter.scheduler_limits import Bounds, SchedulerLimits
from tests.fakes.agent import hello
from tests.fakes.engine import TEXT, FakeEngine
from tests.processes import BUSY


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Return the condition's first true value; other threads and the server run meanwhile."""
    deadline = time.monotonic() + timeout_s * BUSY
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)
    return value


class LinkedEngine:
    """An engine that the test's thread steps in place of an engine core. Its link reconnects at once, to the first
    target first."""

    def __init__(
        self,
        targets: Sequence[str],
        engine_id: str = "engine",
        clock: Callable[[], float] = time.monotonic,
        shuffle: Callable[[list[str]], None] = lambda _: None,
        credentials: AgentCredentials | None = None,
        **said: Any,
    ) -> None:
        # Further fields of its Hello.
        self.said = said
        self.engine = FakeEngine()
        self.engine_id = engine_id
        self.refusal = ""
        self.settings: list[agent_pb2.Settings] = []
        self.taken: list[agent_pb2.Directives] = []
        self.streams = 0
        self.lapsed, self.frozen = 0, False
        self.kept: list[int] = []
        # The part of vLLM's scheduler whose limit the policy may change.
        self.scheduler = SimpleNamespace(max_num_active_reqs=8)
        bounds = Bounds(self.scheduler, "max_num_active_reqs", startup=8, lowest=1, highest=16)
        self.limits = SchedulerLimits({"max_num_active_seqs": bounds})
        self.link = ControlStream(
            list(targets),
            self.hello,
            self._prepare,
            self._keep,
            clock=clock,
            jitter=lambda: -0.45,
            shuffle=shuffle,
            credentials=credentials,
            limits=self.limits.bounded,
        )
        # Set while no stream has anything to send.
        self._has_sent, self._messages = threading.Event(), self.link.outbox.messages
        self._has_sent.set()
        self.link.outbox.messages = self._sent  # type: ignore[method-assign]
        unreported = self.link.outbox.unreported
        unreported.live, self.engine.ending = self.engine.live, unreported.close

    def hello(self) -> agent_pb2.Hello:
        link = self.link
        said = {"state": link.lease.state, "freeze": link.lease.freeze_status(), "refused": link.refused}
        own = {"engine_limits": self.limits.message(), **said, **self.said}
        return hello(self.engine_id, revision=link.lease.revision, **own)

    def _prepare(self, settings: agent_pb2.Settings) -> None:
        self.settings.append(settings)
        if self.refusal:
            raise BadSettings(self.refusal)

    def _keep(self, settings: agent_pb2.Settings) -> None:
        self.kept.append(settings.revision)
        self.engine.tracker.merge_openings = settings.merge_openings
        self.engine.tracker.merge_answers = settings.merge_answers

    def _sent(self, ring: RecordRing, hello: Callable[[], agent_pb2.Hello]) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield the messages of a stream, and note their end."""
        self._has_sent.clear()
        try:
            yield from self._messages(ring, hello)
        finally:
            self._has_sent.set()

    def __enter__(self) -> LinkedEngine:
        self.link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()
        if asyncio._get_running_loop() is not None:
            # The server may run on this thread's event loop, and answers no goodbye before this method returns. So the
            # stream ends as soon as the goodbye is sent.
            if self.link.lease.connected:
                self._has_sent.wait(GOODBYE_S)
            self.link.restart("the engine stops")
        self.link._thread.join(10 * BUSY)
        assert not self.link._thread.is_alive()

    def open(self, name: str, **fields: Any) -> None:
        if self.link.lease.idle:
            self.link.mailbox.begin()
        self.engine.open(name, **fields)

    def take_inbox(self) -> None:
        """Take the inbox as `Agent.take_arrived` and `Agent._take_inbox` do."""
        link, directives = self.link, self.engine.directives
        taken = link.mailbox.take()
        lapsed, frozen = link.lapsed(), link.lease.frozen()
        if ended := lapsed & ~self.lapsed:
            directives.drop(ended)
        if frozen and not self.frozen:
            directives.freeze()
        if self.frozen and not frozen:
            link.outbox.resync()
        self.lapsed, self.frozen = lapsed, frozen
        for arrived in taken:
            link.mailbox.confirm(arrived)
        decisions = 0
        while self.link.inbox.messages and decisions < STEP_DECISIONS:
            message, size = self.link.inbox.take()
            decisions += size
            if message is None:
                self.streams += 1
                self.engine.directives.new_stream()
            else:
                self.taken.append(message)
                self.engine.accept(message)
                if self.frozen:
                    self.engine.directives.freeze()

    def step(self) -> None:
        """Run one engine step: every live request outside of the queue gets a text token, unless a decision forces
        another token."""
        self.take_inbox()
        running = [name for name, live in self.engine.live.items() if live.queued_s is None]
        self.send(self.engine.run(dict.fromkeys(running, TEXT)))

    def send(self, record: Any) -> None:
        if not self.engine.live:
            self.link.mailbox.fall_idle(self.take_inbox)
        self.link.outbox.send(record, self.engine.tracker.snapshot)
        self.link.outbox.ring.wake()

    async def steps_until(self, condition: Callable[[], Any]) -> Any:
        def step_and_check() -> Any:
            self.step()
            return condition()

        return await until(step_and_check)

    async def hears(self, condition: Callable[[], Any]) -> Any:
        """Take in messages until the condition holds, without a step: a busy machine makes any number of steps
        meanwhile."""

        def take_and_check() -> Any:
            self.take_inbox()
            return condition()

        return await until(take_and_check)

    def caps(self) -> list[tuple[int, int]]:
        return [(c.slot, c.max_think_tokens) for d in self.taken for c in d.caps]
