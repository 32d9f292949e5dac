"""Record the traces of a soak with `meridianctl record`, which is started again whenever it has ended.

At the end the recording gets time to read everything. The module owns the trace files and runs on the soak's event
loop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.processes import MERIDIANCTL, Control, Process, wait_for

READ_S = 30.0


class Recording:
    """The recording. `paths` are the trace files, oldest first, without files to which nothing was written."""

    def __init__(self, out: Path, control: Control) -> None:
        self._out, self._control = out, control
        self._files: list[Path] = []
        self.process = self._begin()

    @property
    def paths(self) -> list[Path]:
        return [path for path in self._files if path.exists()]

    def _begin(self) -> Process:
        self._files.append(self._out / f"{len(self._files)}.trace")
        command = [*MERIDIANCTL, "--server", self._control.target, "record", str(self._files[-1])]
        return Process(command, self._out / "record.log")

    def keep(self) -> None:
        """Start a new recording if the current one has ended."""
        if self.process.popen.poll() is not None:
            self.process = self._begin()

    def follows(self) -> bool:
        """Return whether the running control plane is being recorded."""
        said = self._control.process.output().rpartition("listening on")[2]
        return said.count("recording begins") > said.count("recording ends")

    async def finish(self) -> None:
        """End the control plane and the recording, after the recording has written everything that the control plane
        sent.

        The control plane ends a recording after its queued messages. The recorder reads them and then connects again.
        This method listens on the control plane's port to notice that connection, so no other client may connect there.
        Raises TimeoutError.
        """
        called = asyncio.Event()

        def hear(_: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
            caller.close()
            called.set()

        await asyncio.to_thread(self._control.process.stop)
        async with await asyncio.start_server(hear, "127.0.0.1", self._control.port):
            ended = self.process.popen.poll
            await asyncio.to_thread(
                wait_for, lambda: called.is_set() or ended() is not None, READ_S, "the recorder to read everything"
            )
        await asyncio.to_thread(self.process.stop)
