"""The policy from a mounted directory: its meridian.toml is put in force whenever it changes, a ConfigMap for example.

Owns when the file is read and what its changes become; a file that cannot be used changes nothing. Runs on the control
plane's event loop; the watching has a thread of its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from watchfiles import awatch

from meridian_control.common.errors import (
    EtagMismatch,
    MeridianError,
    PolicyError,
    RolloutActive,
    StoredPolicyUnreadable,
    Violation,
)
from meridian_control.policy import formats as forms
from meridian_control.policy.store import EMPTY_ETAG

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import PolicyStore, StoredRevision

logger = logging.getLogger(__name__)

AUTHOR = "meridian-control"
# The file is looked at this often even if nothing is heard: some file systems say nothing.
POLL_MS = 5000


class PolicyDirectory:
    """`on_change` gets each revision that came of the file; `clock` gives aware time."""

    def __init__(
        self,
        folder: Path,
        store: PolicyStore,
        on_change: Callable[[StoredRevision], None],
        clock: Callable[[], datetime],
    ) -> None:
        self.file = folder / forms.FILE_NAME
        self._store, self._on_change, self._clock = store, on_change, clock
        # The file as it was put in force last, and the complaint about it that was logged last.
        self._done: Policy | None = None
        self._complaint = ""

    async def begin(self) -> StoredRevision:
        """Put the file's policy in force, or go on with what the store holds where it cannot be, or not now.

        Raises MeridianError where that is nothing, or the folder is not there.
        """
        if not self.file.parent.is_dir():
            raise PolicyError([Violation(f"{self.file.parent}:", "is not a directory")])
        try:
            await self.read()
        except (PolicyError, RolloutActive) as error:
            if (current := await self._store.current()) is None:
                raise
            self._log(error)
            return current
        current = await self._store.current()
        assert current is not None
        return current

    async def read(self) -> None:
        """Put the file's policy in force, unless it is or that was done before. Raises MeridianError."""
        wanted = forms.load(self.file)
        while wanted != self._done:
            try:
                current = await self._store.current()
                etag = current.etag if current is not None else EMPTY_ETAG
            except StoredPolicyUnreadable:
                current, etag = None, ""
            if current is None or current.policy != wanted:
                try:
                    stored = await self._store.append(
                        wanted, etag=etag, author=AUTHOR, reason=str(self.file), now=self._clock()
                    )
                except EtagMismatch:
                    # Another replica was quicker, with the same file as a rule.
                    continue
                logger.info("%s is in force as revision %d", self.file, stored.revision)
                self._on_change(stored)
            self._done = wanted

    async def watch(self) -> None:
        """Read the file at every change, until cancelled."""
        folder = self.file.parent
        # A ConfigMap changes by the renaming of a link beside the file, so anything in the folder counts.
        async for _ in awatch(
            folder, watch_filter=None, recursive=False, rust_timeout=POLL_MS, yield_on_timeout=True, debounce=200
        ):
            try:
                await self.read()
                self._complaint = ""
            except MeridianError as error:
                self._log(error)

    def _log(self, error: MeridianError) -> None:
        """Once, however often the file is read."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("%s is not put in force: %s", self.file, "; ".join(str(error).splitlines()))
