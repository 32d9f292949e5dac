"""Finds the policy with which a control plane starts, and puts that of a mounted directory, for example of a ConfigMap,
in force whenever its meridian.toml changes.

The module decides when the file is read, and stores its changes as revisions. A file that cannot be used changes
nothing. The module runs on the control plane's event loop; the file watcher has its own thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from watchfiles import awatch

from meridian_control.common.complaints import Complaints
from meridian_control.common.errors import (
    EtagMismatch,
    MeridianError,
    PolicyError,
    RolloutActive,
    StoredPolicyUnreadable,
    Violation,
)
from meridian_control.common.reloading_file import stamp
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_kinds import warnings
from meridian_control.policy.store import EMPTY_ETAG

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

    from meridian_control.policy.store import PolicyStore, StoredRevision

logger = logging.getLogger(__name__)

AUTHOR = "meridian-control"
# Milliseconds after which the file is read even without a change event, because some file systems send no events.
POLL_MS = 5000
# Number of newest revisions among which another replica's revision of the file is looked for.
LOOKED_BACK = 100


class PolicyDirectory:
    """Follows the policy file of a directory.

    `on_change` gets each revision that was stored from the file; `clock` returns aware times.
    """

    def __init__(
        self,
        folder: Path,
        store: PolicyStore,
        on_change: Callable[[StoredRevision], None],
        clock: Callable[[], datetime],
    ) -> None:
        self.file = folder / forms.FILE_NAME
        self._store, self._on_change, self._clock = store, on_change, clock
        # The policy that was last put in force from the file, and the revision in force then.
        self._done: Policy | None = None
        self._done_at = 0
        self._complaints = Complaints(logger, "%s is not put in force: %s", logging.ERROR)
        # The file's stamp when it last could not be put in force.
        self._refused = stamp(self.file)

    async def put_in_force(self) -> StoredRevision:
        """Put the file's policy in force; if the file or an active rollout prevents that, keep the store's policy.

        Raises MeridianError if the store has no policy either, or if the folder does not exist.
        """
        if not self.file.parent.is_dir():
            raise PolicyError([Violation(f"{self.file.parent}:", "is not a directory")])
        try:
            await self.read()
        except (PolicyError, RolloutActive) as error:
            if (current := await self._store.current()) is None:
                raise
            self._complain(error)
            return current
        current = await self._store.current()
        assert current is not None
        return current

    async def read(self) -> None:
        """Put the file's policy in force, unless it is in force or the file has not changed. Raises MeridianError."""
        wanted = forms.load_to_apply(self.file)
        while wanted != self._done:
            try:
                current = await self._store.current()
                etag = current.etag if current is not None else EMPTY_ETAG
            except StoredPolicyUnreadable:
                current, etag = None, ""
            if (current is None or current.policy != wanted) and not await self._is_stored(wanted):
                try:
                    current = stored = await self._store.append(
                        wanted, etag=etag, author=AUTHOR, reason=str(self.file), now=self._clock()
                    )
                except EtagMismatch:
                    # Another replica stored a policy first, usually from the same file.
                    continue
                logger.info("%s is in force as revision %d", self.file, stored.revision)
                for warning in warnings(wanted):
                    logger.warning("%s: %s", self.file, warning)
                self._on_change(stored)
            self._done, self._done_at = wanted, current.revision if current is not None else self._done_at

    async def _is_stored(self, wanted: Policy) -> bool:
        """Whether another replica, whose mount changed earlier, has put the file's policy in force since this one last
        did. What has been changed since then is newer than the file."""
        for header in await self._store.history(LOOKED_BACK) if self._done is not None else ():
            if header.revision > self._done_at and (header.author, header.reason) == (AUTHOR, str(self.file)):
                with suppress(StoredPolicyUnreadable):
                    if (await self._store.get(header.revision)).policy == wanted:
                        return True
        return False

    async def watch(self) -> None:
        """Read the file at every change, until cancelled."""
        folder = self.file.parent
        # A ConfigMap changes when a link beside the file is renamed, so every change in the folder counts.
        async for _ in awatch(
            folder, watch_filter=None, recursive=False, rust_timeout=POLL_MS, yield_on_timeout=True, debounce=200
        ):
            try:
                await self.read()
                self._complaints.over()
            except MeridianError as error:
                self._complain(error)

    def _complain(self, error: MeridianError) -> None:
        """Log an error once for each change of the file, even if the file is read repeatedly."""
        if (refused := stamp(self.file)) != self._refused:
            self._refused = refused
            self._complaints.over()
        self._complaints.log(error, self.file)


async def initial_policy(store: PolicyStore, path: Path | None, now: datetime) -> StoredRevision:
    """Return the policy in force; an empty store gets the policy of the file first, or the defaults without a file.

    Raises PolicyError if `path` is not a file, and with an empty store for any error of the file.
    """
    file = forms.find(path)
    source = str(file) if file is not None else "defaults"
    current = await store.current()
    while current is None:
        wanted = forms.load_config(file) if file is not None else Policy()
        # If several replicas start at once, one of them stores the policy and the others get EtagMismatch.
        with suppress(EtagMismatch):
            await store.append(wanted, etag=EMPTY_ETAG, author=AUTHOR, reason=source, now=now)
        current = await store.current()
    try:
        if file is None or current.policy == forms.load_config(file):
            return current
        why = f" {file}: apply the file with meridianctl"
    except PolicyError as error:
        why = f": {'; '.join(str(error).splitlines())}"
    text = "revision %d of the store stays in force, not the policy file%s"
    logging.getLogger("meridian_control").warning(text, current.revision, why)
    return current
