"""An exception at any line that the agent's own threads run: the link's thread, gRPC's sending thread, and the thread
that writes the state file.

The link is real and on loopback; the test's thread is the engine's. After one fault at any line, a stream comes back on
which settings are acknowledged and decisions have outcomes. Lines on the engine's thread belong to the simulator
(`python -m tests.sim --lines`). The few lines that only restart what has failed are left out.
"""

from __future__ import annotations

import asyncio
import dis
import linecache
import logging
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

import meridian_agent
from meridian_agent.link import control_stream as link_module
from meridian_agent.link import outbox as outbox_module
from meridian_agent.link.settings_file import StateFile
from tests.contract.streams import serving
from tests.fakes.linked import LinkedEngine, until

HERE = str(Path(meridian_agent.__file__).parent)
# Left out are functions that only begin the next round or try, or only end the stream, and modules of the agent that
# only the fake engine runs.
LEFT_OUT = {"link/control_stream.py": ("_run", "_say_goodbye"), "link/settings_file.py": ("_write_all",)}
ONLY_ENGINES = (
    "core/directives.py",
    "core/tracker.py",
    "core/phases.py",
    "core/live_request.py",
    "core/step_record.py",
)
# The test tries one of every SAMPLED faults; `python -m tests.contract.agent.link.test_thread_faults` tries all.
SAMPLED = 61


class Fault:
    """An exception at `line`, the `nth` time that a thread which began meanwhile reaches the line; `reached` counts all
    lines.

    A thread reaches a `with` statement for the second time when its block ends.
    """

    def __init__(self, line: tuple[str, int] | None = None, nth: int = 1) -> None:
        self.line, self.nth, self.raised = line, nth, False
        self.reached: Counter[tuple[str, int]] = Counter()

    def __enter__(self) -> Fault:
        threading.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(HERE):
            return None
        file = code.co_filename[len(HERE) + 1 :]
        return None if file in ONLY_ENGINES or code.co_name in LEFT_OUT.get(file, ()) else self._line

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and _can_raise(frame):
            line = frame.f_code.co_filename[len(HERE) + 1 :], frame.f_lineno
            self.reached[line] += 1
            if line == self.line and self.reached[line] == self.nth:
                self.raised = True
                raise RuntimeError("injected")
        return self._line


def _can_raise(frame: FrameType) -> bool:
    """Return whether a thread's next instruction can raise: a `try:` does nothing, and the release of a lock cannot
    fail.

    An exception there would leave a lock locked, as the compiler lets no `with` block handle it.
    """
    code, at = frame.f_code, frame.f_lasti
    if code.co_code[at] == dis.opmap["NOP"]:
        return False
    takes_lock = "with self._lock:" in linecache.getline(code.co_filename, frame.f_lineno)
    return not takes_lock or at == min(start for start, _, line in code.co_lines() if line == frame.f_lineno)


class Talkative(agent_pb2_grpc.AgentServiceServicer):
    """A server that sends everything that a control plane may send, on every stream, and remembers what arrived on the
    newest stream."""

    def __init__(self) -> None:
        self.streams, self.decisions = 0, 0
        self.kinds: set[str | None] = set()
        self.acknowledged, self.refused, self.outcomes = False, False, 0

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        await anext(request_iterator)
        self.streams += 1
        self.kinds, self.acknowledged, self.refused, self.outcomes = set(), False, False, 0
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s"))
            yield agent_pb2.ConnectResponse(settings=agent_pb2.Settings(revision=7, nonce=1, lease_ms=30_000))
            yield agent_pb2.ConnectResponse(settings=agent_pb2.Settings(revision=8, nonce=2, lease_ms=1))
            yield agent_pb2.ConnectResponse(freeze=agent_pb2.Freeze(nonce=3))
            while not context.done():
                self.decisions += 1
                force = agent_pb2.ForceEnd(decision_id=self.decisions, slot=99)
                yield agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1, forces=[force]))
                if self.streams == 1 and self.at_rest():
                    yield agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway(reason="a test"))
                await asyncio.sleep(0.01)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        async for request in requests:
            self.kinds.add(request.WhichOneof("message"))
            status = request.settings_status
            # An engine refuses settings that it cannot prepare, with the fault as the reason, and the stream goes on.
            answered = status.nonce == 1 and (not status.error or "injected" in status.error)
            self.acknowledged = self.acknowledged or answered
            self.refused = self.refused or (status.nonce == 2 and bool(status.error))
            self.outcomes += len(request.step.outcomes)

    def at_rest(self) -> bool:
        """Return whether everything that a stream is for has happened on the newest stream."""
        said = self.acknowledged and self.refused and self.outcomes > 1
        return said and {"snapshot", "step", "freeze_status"} <= self.kinds


async def scene(fault: Fault) -> None:
    """Play two streams: with a live request, without one, on a new stream, and with a request again."""
    servicer = Talkative()
    async with serving(servicer) as target:
        with fault, LinkedEngine([target]) as engine:
            engine.open("a")
            await engine.steps_until(lambda: servicer.streams >= 2 and servicer.at_rest())
            engine.engine.finish("a")
            engine.step()
            outcomes = servicer.outcomes
            # The engine makes no more steps: the link answers for the engine, or a new stream makes the server ask
            # again.
            await until(lambda: servicer.outcomes != outcomes)
            engine.open("b")
            await engine.steps_until(lambda: engine.link.lease.connected and servicer.at_rest())
            assert engine.link._thread.is_alive()
            assert engine.link.lease.revision == 7 or "injected" in engine.link.refused[7]


def kept(folder: Path, fault: Fault) -> None:
    """Assert that settings which are kept after a fault can be loaded."""
    file = StateFile(folder, "e", "m")
    with fault:
        for revision in (1, 2):
            file.keep(agent_pb2.Settings(revision=revision, lease_ms=30_000))
            wait_for(file._wanted.empty)
        file.keep(agent_pb2.Settings(revision=3, lease_ms=30_000))
        wait_for(lambda: (found := file.load()) is not None and found.revision == 3)


def wait_for(condition: Callable[[], bool]) -> None:
    asyncio.run(until(condition))


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BACKOFF_S", (0.02, 0.05))
    monkeypatch.setattr(outbox_module, "IDLE_WAIT_S", 0.05)
    # gRPC logs each request that it could not make, which is expected here.
    monkeypatch.setattr(logging.getLogger("grpc._channel"), "disabled", True)


async def failing(every: int) -> tuple[int, list[str]]:
    """Return the number of possible faults, and what each fault that was tried has broken."""
    all_of_them = Fault()
    await scene(all_of_them)
    faults = [(line, n) for line in sorted(all_of_them.reached) for n in (1, 2) if n <= all_of_them.reached[line]]
    found = []
    for line, nth in faults[::every]:
        try:
            await asyncio.wait_for(scene(Fault(line, nth)), 300)
        except (AssertionError, TimeoutError) as error:
            found.append(f"{line[0]}:{line[1]}, time {nth}: {[*str(error).splitlines(), ''][0]}")
    return len(faults), found


@pytest.mark.usefixtures("_at_once")
async def test_a_stream_comes_back_after_a_fault_at_any_line() -> None:
    faults, found = await failing(SAMPLED)
    assert found == []
    assert faults > 400, "the scene reaches fewer lines than before"


def test_settings_are_kept_after_a_fault_at_any_line(tmp_path: Path) -> None:
    all_of_them = Fault()
    kept(tmp_path, all_of_them)
    lines = [line for line in sorted(all_of_them.reached) if line[0] == "link/settings_file.py"]
    faults = [Fault(line) for line in lines]
    for number, fault in enumerate(faults):
        kept(tmp_path / str(number), fault)
    # One line is reached only if settings arrive while older ones are about to be written.
    assert sum(fault.raised for fault in faults) > 10


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_module, "BACKOFF_S", (0.02, 0.05))
        patch.setattr(outbox_module, "IDLE_WAIT_S", 0.05)
        logging.disable()
        count, broken = asyncio.run(failing(1))
    print(*broken, sep="\n", end="\n" if broken else "")
    print(f"{count} faults, {len(broken)} broke something")
    sys.exit(1 if broken else 0)
