"""Finds the policy with which a control plane starts."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from meridian_control.common.errors import EtagMismatch, PolicyError
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy
from meridian_control.policy.store import EMPTY_ETAG

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from meridian_control.policy.store import PolicyStore, StoredRevision

logger = logging.getLogger("meridian_control")


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
            await store.append(wanted, etag=EMPTY_ETAG, author="meridian-control", reason=source, now=now)
        current = await store.current()
    try:
        if file is None or current.policy == forms.load_config(file):
            return current
        why = f" {file}: apply the file with meridianctl"
    except PolicyError as error:
        why = f": {'; '.join(str(error).splitlines())}"
    logger.warning("revision %d of the store stays in force, not the policy file%s", current.revision, why)
    return current
