"""The policy in force on one engine and, with overrides, what it comes to for each of its live requests.

Owns the table's column `group`, which points here. Knows nothing of how a policy gets to the engine. Pure; one session
at a time.
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

# Policies in use, before those that are not are looked for.
ROOM = 64

Among: TypeAlias = "NDArray[np.bool_] | None"


class Groups:
    """`policy` is None, and `revision` 0, until one is in force."""

    def __init__(self, table: RequestTable, hello: agent_pb2.Hello) -> None:
        self._table, self._labels = table, dict(hello.labels)
        self.policy: Policy | None = None
        self.revision = 0
        self._policies: list[Policy] = []
        self._room = ROOM

    def apply(self, revision: int, policy: Policy) -> None:
        """A policy comes into force."""
        self.policy, self.revision, self._policies = policy, revision, [policy]
        self._table.set_window(policy.entropy.rpdi_window_tokens)
        self._table.set_groups(0)
        for slot, opened in self._table.requests():
            self.assign(slot, opened)

    def assign(self, slot: int, opened: agent_pb2.RequestOpened) -> None:
        """Find the policy that holds for a request that the table has opened."""
        if self.policy is None or not self.policy.override:
            return
        own = self.policy.of(Who(opened.model, opened.tenant, opened.slo_class, opened.effort, self._labels))
        if own not in self._policies:
            if len(self._policies) >= self._room:
                self._forget_unused()
            self._policies.append(own)
        self._table.set_group(slot, self._policies.index(own))

    def _forget_unused(self) -> None:
        """Combinations of overrides that no live request has any more: clients choose what overrides match."""
        table = self._table
        used = sorted({0, *table.group[table.live].tolist()})
        table.set_groups(np.where(table.live, np.searchsorted(used, table.group), 0))
        self._policies = [self._policies[index] for index in used]
        self._room = max(ROOM, 2 * len(used))

    def of(self, slot: int) -> Policy:
        """The policy that holds for a request, once a policy is in force."""
        return self._policies[int(self._table.group[slot])]

    def in_use(self) -> Iterator[tuple[Policy, Among]]:
        """Each policy in use with the requests it holds for, [slots]; None for all."""
        if len(self._policies) == 1:
            yield self._policies[0], None
            return
        for index, policy in enumerate(self._policies):
            among = self._table.live & (self._table.group == index)
            if among.any():
                yield policy, among
