"""What a capability does in one engine's stream (`Part`), and what the stream gives it (`Stream`, `Turn`).

The session knows parts, and no capability by name. A part is called once for a report, never once for a request or a
token, and a method that a part leaves out costs nothing. The code does no I/O and reads no clock; each object belongs
to one session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import reason_name
from meridian_control.engine.step_cost import StepCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from meridian_control.common.metric_entry import Entry
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.decision_ledger import Ledger
    from meridian_control.engine.effective_policies import Among, EffectivePolicies
    from meridian_control.engine.totals import Totals
    from meridian_control.policy.model import Policy
    from meridian_control.policy.section import Section
    from meridian_control.table.moments import Seen
    from meridian_control.table.request_table import RequestTable


@dataclass(slots=True)
class Turn:
    """One round of decisions.

    policy: the policy in force. groups: each policy that holds for some request, with a mask of these requests; None
    stands for all. out: the directives to which decisions are added. reported: whether the table has just taken in a
    report. now_ms: time on the table's clock.
    """

    policy: Policy
    groups: list[tuple[Policy, Among]]
    out: agent_pb2.Directives
    reported: bool
    now_ms: float


class Stream:
    """What all parts of one engine's stream share.

    hello: what the engine has said of itself. table: its live requests. policies: the policy that holds for each.
    ledger: the decisions without an outcome. step_cost: the measured duration of a step.
    """

    def __init__(
        self, hello: agent_pb2.Hello, table: RequestTable, policies: EffectivePolicies, ledger: Ledger, totals: Totals
    ) -> None:
        self.hello, self.table, self.policies, self.ledger, self._totals = hello, table, policies, ledger, totals
        self.step_cost = StepCost()

    @property
    def ends_thinking(self) -> bool:
        """Whether the engine can end thinking: no request is known to think if its thinking markers are unknown."""
        return self.hello.capabilities.force_end and not self.hello.unknown_markers

    @property
    def may_probe(self) -> bool:
        """Whether the engine can measure EAT at probes."""
        return self.hello.capabilities.eat_probe and not self.hello.unknown_markers

    def count(self, metric: str, labels: tuple[str, ...] = ()) -> None:
        """Add 1 to a counter of a capability, which the capability lists in `Capability.metrics`."""
        self._totals.counted[metric, labels] += 1

    def end_thinking(
        self,
        turn: Turn,
        reason: agent_pb2.ForceReason.ValueType,
        index: int,
        *,
        shadow: bool,
        seen: Seen | None = None,
        name: str = "",
    ) -> int:
        """Decide to end the thinking of a request, and return its slot.

        seen: the table or moments with the state on which the decision is based, the table if absent. index: the
        request's index in `seen`. shadow: whether the decision is only counted. name: the decision's reason, if
        `reason` has no name of its own for it.
        """
        table = self.table
        seen = table if seen is None else seen
        slot, named = int(seen.slot[index]), name or reason_name(reason)
        table.note_end(slot, reason, shadow)
        if shadow and (request := self.policies.control.by_slot.get(slot)) is not None:
            tokens, gives_up = int(seen.think_tokens[index]), reason == agent_pb2.FORCE_REASON_GIVE_UP
            kind = self.policies.kind_of_rule(slot, named)
            ends = kind is not None and request.ends_by_rule(kind, tokens, gives_up)
            # These rules fire on the newest probe, except if a request passes its floor or a policy changes later.
            by_probe = gives_up or reason == agent_pb2.FORCE_REASON_EAT
            if ends and by_probe and turn.reported and slot in table.history.sampled:
                request.ends_at_newest_probe()
        made = self.ledger.make("force", named, slot, shadow, (seen, index))
        if table.closing[slot]:
            self.ledger.too_late(made)
        else:
            turn.out.forces.add(decision_id=made, slot=slot, reason=reason, shadow=shadow)
        return slot

    def probe(
        self,
        turn: Turn,
        reason: str,
        slots: NDArray[np.intp],
        *,
        seen: tuple[Seen, NDArray[np.intp]] | None = None,
        where: agent_pb2.Placement.ValueType = agent_pb2.PLACEMENT_ANYWHERE,
        hold_ms: int = 0,
    ) -> None:
        """Ask for probes of requests that have the same policy. seen: the table or moments, and the index of each
        request in it; the table if absent. hold_ms: milliseconds for which a request waits for the result."""
        self.table.open_probe(slots)
        numbers = slots.tolist()
        made = self.ledger.make_probes(reason, numbers, *(seen or (self.table, slots)))
        for decision_id, slot in zip(made, numbers, strict=True):
            # Setting the fields takes half of the time of passing them as arguments.
            probe = turn.out.probes.add()
            probe.decision_id, probe.slot, probe.placement, probe.hold_ms = decision_id, slot, where, hold_ms


class Part:
    """A capability's part in one engine's stream; a method that a capability has no use for is left out.

    `ends` and `decide` return None if they are done, or an iterator that does a large piece of work in slices.
    """

    def revise(self) -> None:
        """Revise all earlier decisions in the next turn: another policy is in force, or the engine has thawed."""

    def shortened(self) -> None:
        """Revise caps in the next turn: budgets or pressure shorten some requests more or less than before."""

    def ends(self, turn: Turn) -> Sliced[None] | None:
        """Decide ends of thinking. After a report, the table still has the requests that the report closes."""

    def decide(self, turn: Turn) -> Sliced[None] | None:
        """Make all other decisions. After a report, the table has dropped the requests that the report closes."""

    def reported(self, report: agent_pb2.StepReport) -> None:
        """Learn from a report after `ends` and before `decide`, also while no decisions are made."""


# Makes the part of a capability in a stream; None if the engine cannot do what the capability needs.
PartMaker: TypeAlias = "Callable[[Stream], Part | None]"


class Parts:
    """The parts of one stream in the order in which they decide. A part's method is called only if it has one."""

    def __init__(self, stream: Stream, makers: Iterable[PartMaker]) -> None:
        parts = [part for make in makers if (part := make(stream)) is not None]
        self._revise = _having(parts, "revise")
        self._shortened = _having(parts, "shortened")
        self._ends = _having(parts, "ends")
        self._decide = _having(parts, "decide")
        self._reported = _having(parts, "reported")

    def revise(self) -> None:
        for part in self._revise:
            part.revise()

    def shortened(self) -> None:
        for part in self._shortened:
            part.shortened()

    def ends(self, turn: Turn) -> Sliced[None]:
        for part in self._ends:
            if (work := part.ends(turn)) is not None:
                yield from work

    def decide(self, turn: Turn) -> Sliced[None]:
        for part in self._decide:
            if (work := part.decide(turn)) is not None:
                yield from work

    def reported(self, report: agent_pb2.StepReport) -> None:
        for part in self._reported:
            part.reported(report)


@dataclass(frozen=True)
class Capability:
    """Something that Meridian does.

    stream: makes its part in an engine's stream. section: the schema of `extension.NAME` in a policy, for a capability
    that has no section of its own in the policy's schema. metrics: the counters that its parts count with
    `Stream.count`. shown: returns rows of the status page, each a name and a text, from the fleet's counters.
    """

    name: str
    stream: PartMaker | None = None
    section: type[Section] | None = None
    metrics: Sequence[Entry] = ()
    shown: Callable[[Totals], Sequence[tuple[str, str]]] | None = None


def _having(parts: list[Part], method: str) -> list[Part]:
    return [part for part in parts if getattr(type(part), method) is not getattr(Part, method)]
