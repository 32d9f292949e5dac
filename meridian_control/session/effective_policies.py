"""Finds the policy that holds for each live request of one engine: the policy in force with the matching overrides.

The table's column `group` holds indices into this module's list of policies. The module does not know how a policy
reaches the engine. The code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from meridian_control.policy.model import Policy, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

    from meridian_control.decisions.request_table import RequestTable

# Number of policies above which policies that no live request uses are dropped.
ROOM = 64

Among: TypeAlias = "NDArray[np.bool_] | None"


class Groups:
    """The policies of one engine's requests. `policy` is None and `revision` 0 until a policy is in force."""

    def __init__(self, table: RequestTable, hello: agent_pb2.Hello) -> None:
        self._table, self._labels = table, dict(hello.labels)
        self.policy: Policy | None = None
        self.revision = 0
        self._policies: list[Policy] = []
        self._room = ROOM

    def apply(self, revision: int, policy: Policy) -> None:
        """Put a policy in force and find the policy of each live request under it."""
        self.policy, self.revision, self._policies = policy, revision, [policy]
        self._table.set_window(policy.entropy.rpdi_window_tokens)
        self._table.set_groups(0)
        for slot, opened in self._table.requests():
            self.assign(slot, opened)

    def assign(self, slot: int, opened: agent_pb2.RequestOpened) -> None:
        """Find the policy that holds for a request, which the table has already opened."""
        if self.policy is None or not self.policy.override:
            return
        own = self.policy.of(Who(opened.model, opened.tenant, opened.slo_class, opened.effort, self._labels))
        if own not in self._policies:
            if len(self._policies) >= self._room:
                self._forget_unused()
            self._policies.append(own)
        self._table.set_group(slot, self._policies.index(own))

    def _forget_unused(self) -> None:
        """Drop policies that no live request uses. Clients choose which overrides match, so the list could grow."""
        table = self._table
        used = sorted({0, *table.group[table.live].tolist()})
        table.set_groups(np.where(table.live, np.searchsorted(used, table.group), 0))
        self._policies = [self._policies[index] for index in used]
        self._room = max(ROOM, 2 * len(used))

    def of(self, slot: int) -> Policy:
        """Return the policy that holds for the request in a slot; a policy must be in force."""
        return self._policies[int(self._table.group[slot])]

    def in_use(self) -> Iterator[tuple[Policy, Among]]:
        """Yield each policy in use with a mask of the requests for which it holds, [slots]; None stands for all."""
        if len(self._policies) == 1:
            yield self._policies[0], None
            return
        for index, policy in enumerate(self._policies):
            among = self._table.live & (self._table.group == index)
            if among.any():
                yield policy, among
