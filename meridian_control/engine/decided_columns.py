"""The part of the request table that the control plane's decisions write: ranks, tiers, caps, ends and probes.

`RequestTable` inherits this part; no other class does. The module does no I/O and knows neither a clock nor a policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.table_columns import UNTOLD, Columns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DecidedColumns(Columns):
    """The methods that note decisions about the requests of a table. has_new: whether a request was opened since the
    caps of all requests were decided."""

    has_new: bool

    def set_ranks(self, ranks: NDArray[np.int64]) -> None:
        """Note the ranks of all requests, which are in force on the agent once it has the plan. ranks: [slots]."""
        self.rank[:], self.ranked_phase[:] = ranks, self.phase

    def ranks_by_slot(self) -> dict[int, int]:
        """Return the ranks of the live requests that have one, also those that plans leave out."""
        slots = (self.live & (self.rank != UNTOLD)).nonzero()[0]
        return dict(zip(slots.tolist(), self.rank[slots].tolist(), strict=True))

    def forget_ranks(self) -> None:
        """Forget the ranks that are in force on the agent, so that all ranks are sent again."""
        self.rank[:], self.ranked_phase[:] = UNTOLD, self.phase

    def set_tier(self, slots: NDArray[np.intp], tier: agent_pb2.EvictionTier.ValueType) -> None:
        """Note the eviction tier that is sent to the agent for these slots."""
        self.tier[slots] = tier

    def forget_tiers(self) -> None:
        """Forget the tiers that were sent, so that all tiers are sent again."""
        self.tier[:] = agent_pb2.EVICTION_TIER_UNSPECIFIED

    def caps_decided(self) -> None:
        """Note that the caps of all live requests are decided."""
        self.has_new = False

    def note_cap(self, slot: int, cap: int, shadow: bool, reserve: int) -> None:
        """Note the cap that holds for a request, NO_CAP for none, and the answer reserve, 0 for none. shadow: whether
        the agent only counts both."""
        self.max_think_tokens[slot], self.cap_shadow[slot] = cap, shadow
        self.answer_reserve_tokens[slot] = reserve

    def extend_caps(self, requests: NDArray[np.bool_]) -> None:
        """Note the requests whose cap was extended because the answer would be empty. requests: mask, [slots]."""
        self.extended[requests] = True

    def note_end(self, slot: int, reason: agent_pb2.ForceReason.ValueType, shadow: bool) -> None:
        """Note the rule that ends a request's thinking. shadow: the rule is in shadow, and only its firing is noted."""
        if shadow:
            self.shadow_decided[slot] |= 1 << reason
        else:
            self.end_decided[slot] = reason

    def restore_end(self, slot: int, reason: int) -> None:
        """Note an end of thinking that the engine still carries out, unless the request has a newer one."""
        self.end_decided[slot] = self.end_decided[slot] or reason

    def forget_ends(self) -> None:
        """Forget the rules that ended thinking or fired in shadow, so that all rules are asked again."""
        self.end_decided[:] = self.shadow_decided[:] = 0

    def ask_again(self, slot: int) -> None:
        """Forget the rules that fired in shadow for a request, so that they are asked again."""
        self.shadow_decided[slot] = 0

    def schedule_probe(self, slots: NDArray[np.intp], think_tokens: NDArray[np.int64]) -> None:
        """Note the number of thinking tokens at which each request's next EAT probe is due, [slots]."""
        self.next_probe_tokens[slots] = think_tokens

    def open_probe(self, slots: NDArray[np.intp]) -> None:
        """Note that these requests have a probe without an outcome."""
        self.probe_open[slots] = True

    def close_probes(self, slots: list[int]) -> None:
        """Note that the outcomes of these requests' probes are known, so that the requests may be probed again."""
        self.probe_open[slots] = False

    def note_cap_probe(self, slots: NDArray[np.intp]) -> None:
        """Note that these requests are probed near their cap, which happens once per request."""
        self.cap_probed[slots] = True
