"""The traces of a soak: `meridianctl record`, begun anew whenever it has ended, and in the end given time to read all.

Owns the trace files. Runs on the soak's event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.processes import MERIDIANCTL, Process, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes import Control

READ_S = 30.0


class Recording:
    """`paths` are the trace files, oldest first; one that nothing was written to is not there."""

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
        """Begin anew if it has ended."""
        if self.process.popen.poll() is not None:
            self.process = self._begin()

    def follows(self) -> bool:
        """Whether the control plane that runs now is being recorded."""
        said = self._control.process.output().rpartition("listening on")[2]
        return said.count("recording begins") > said.count("recording ended")

    async def finish(self) -> None:
        """End control plane and recording, with all in the files that the control plane had to say.

        The control plane ends a recording after what waits for it. The recorder, once it has read that, calls again:
        whoever does is heard in the control plane's place, so nothing else may call there. Raises TimeoutError.
        """
        called = asyncio.Event()

        def hear(_: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
            caller.close()
            called.set()

        await asyncio.to_thread(self._control.process.stop)
        async with await asyncio.start_server(hear, "127.0.0.1", self._control.port):
            ended = self.process.popen.poll
            await asyncio.to_thread(
                wait_for, lambda: called.is_set() or ended() is not None, READ_S, "the recorder to have read all"
            )
        await asyncio.to_thread(self.process.stop)
