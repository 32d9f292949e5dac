"""What a capability does in one engine's stream (`Part`), and what the stream gives it (`Stream`, `Turn`).

The session knows parts, and no capability by name. A part is called once for a report, or once for some rows of it, and
never once for a token; a method that a part leaves out costs nothing. The code does no I/O and reads no clock; each
object belongs to one session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar
from weakref import proxy

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import REASONS, reason_name
from meridian_control.engine.step_cost import StepCost
from meridian_control.policy.effects import extends_empty_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    import numpy as np
    from meridian.v1 import fleet_pb2
    from numpy.typing import NDArray

    from meridian_control.common.metric_entry import Entry
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.decision_ledger import Ledger
    from meridian_control.engine.effective_policies import Among, EffectivePolicies
    from meridian_control.engine.freeze_state import FreezeState
    from meridian_control.engine.moments import Seen
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.engine.totals import Totals
    from meridian_control.journal.journal import Journal
    from meridian_control.journal.records import Detail
    from meridian_control.policy.model import Policy
    from meridian_control.policy.section import Section

T = TypeVar("T")
P = ParamSpec("P")
# Bits of the table's column `shadow_decided` that no ForceReason has.
FIRST_OWN_BIT, LAST_BIT = max(REASONS) + 1, 31
# Reason of a probe whose result no rule reads: the result only judges what an earlier end would have changed.
UNREAD_PROBE = "harm"


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


class ProbeResult(NamedTuple):
    """A measured probe of a request. think_tokens: thinking tokens at the probe. is_empty: whether the answer would
    have been empty there. same_answer: number of newest probes in a row with the same trial answer, 0 if unknown.
    cost_tokens: tokens that the engine computed for it. is_other: whether the request that was probed before has
    another trial answer, None if unknown."""

    reason: str
    slot: int
    think_tokens: int
    eat_nats: float
    is_empty: bool
    same_answer: int
    cost_tokens: int
    is_other: bool | None


class Stream:
    """What all parts of one engine's stream share.

    session_id, now: id of the session, and the time at which the stream began. hello: the engine's first
    message, about itself. table: its live requests. policies: the policy that holds for each request; a part that
    shortens requests or holds some out adds itself there. ledger: the decisions without an outcome. freezing: the
    engine's freezes. journal: writes the session's decisions, None if nobody reads them. step_cost: the measured
    duration of a step. parts: the parts of all capabilities.
    """

    def __init__(
        self,
        session_id: str,
        now: datetime,
        hello: agent_pb2.Hello,
        *,
        table: RequestTable,
        policies: EffectivePolicies,
        ledger: Ledger,
        totals: Totals,
        freezing: FreezeState,
        journal: Journal | None,
        makers: Iterable[PartMaker],
    ) -> None:
        self.session_id, self.now, self.hello = session_id, now, hello
        self.table, self.policies, self.ledger = table, policies, ledger
        self.freezing, self.journal, self._totals = freezing, journal, totals
        self.step_cost = StepCost()
        # Bit of each capability of one's own in the table's column `shadow_decided`.
        self._own_bits: dict[str, int] = {}
        self.parts = Parts(self, makers)

    @property
    def identity(self) -> tuple[str, str]:
        """The engine's id and its incarnation, which together name one start of the engine process."""
        return self.hello.engine_id, self.hello.incarnation

    @property
    def ends_thinking(self) -> bool:
        """Whether the engine can end thinking: no request is known to think if its thinking markers are unknown."""
        return self.hello.capabilities.force_end and not self.hello.unknown_markers

    @property
    def may_probe(self) -> bool:
        """Whether the engine can measure EAT at probes."""
        return self.hello.capabilities.eat_probe and not self.hello.unknown_markers

    def clock_ms(self, now: datetime) -> float:
        """Return the milliseconds since the stream began, which is the time on the table's clock."""
        return (now - self.now).total_seconds() * 1e3

    def count(self, metric: str, labels: tuple[str, ...] = ()) -> None:
        """Add 1 to a counter of a capability."""
        self._totals.counted[metric, labels] += 1

    def add_ttot(self, milliseconds: float) -> None:
        """Count a time from an end of thinking to the answer's first token that the table does not see."""
        self._totals.ttot.add_one(milliseconds / 1e3)

    def shorten_again(self, slots: list[int]) -> Sliced[None]:
        """Find the policy of live requests anew, because a shortener has put entries of theirs into other stages; the
        next turn revises their caps. The shortener calls it when no other event is under way, or from
        `Part.report_begins`."""
        yield from self.policies.shorten_again(slots)
        self.parts.shortened()

    def end_thinking(
        self,
        turn: Turn,
        reason: agent_pb2.ForceReason.ValueType,
        index: int,
        *,
        shadow: bool,
        seen: Seen | None = None,
        name: str = "",
        detail: Detail | None = None,
    ) -> bool:
        """Decide to end the thinking of a request; return whether that is decided.

        seen: the table or moments with the state on which the decision is based, the table if absent. index: the
        request's index in `seen`. shadow: whether the decision is only counted. name: the decision's reason, if
        `reason` has no name of its own for it. detail: what the decision log shows of the decision.

        A capability of one's own gives FORCE_REASON_EXTENSION and its name. Then nothing is decided if another end is,
        if this rule has fired in shadow before, below the request's own floor, and while the request's answer would be
        empty and that extends its cap; and for a request of the control group the decision is in shadow. The other
        rules see to all this themselves.
        """
        table, bit = self.table, int(reason)
        seen = table if seen is None else seen
        slot, named = int(seen.slot[index]), name or reason_name(reason)
        would_end = shadow and bool(table.control[slot])
        if reason == agent_pb2.FORCE_REASON_EXTENSION:
            bit = self._own_bits.setdefault(named, min(FIRST_OWN_BIT + len(self._own_bits), LAST_BIT))
            is_over = table.end_decided[slot] or int(table.shadow_decided[slot]) >> bit & 1
            is_early = seen.think_tokens[index] < table.own_min_think_tokens[slot]
            is_empty = seen.empty_answer[index] and extends_empty_answers(self.policies.of(slot))
            if is_over or is_early or is_empty:
                return False
            would_end = not shadow and bool(table.control[slot])
            shadow |= would_end
        table.note_end(slot, bit if shadow else reason, shadow)
        if would_end and self.policies.holdout is not None:
            self.policies.holdout.would_end(slot, named, int(seen.think_tokens[index]), reported=turn.reported)
        decision_id = self.ledger.make("force", named, slot, shadow, (seen, index))
        self.ledger.open[decision_id].own_detail = detail
        if table.closing[slot]:
            self.ledger.too_late(decision_id)
        else:
            turn.out.forces.add(decision_id=decision_id, slot=slot, reason=reason, shadow=shadow)
        return True

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
        request in it; the table if absent. hold_ms: milliseconds for which a request waits for the result. Rules read
        the results unless `reason` is UNREAD_PROBE. A request has at most one probe, see the column `probe_open`."""
        self.table.put(slots, probe_open=True)
        numbers = slots.tolist()
        decision_ids = self.ledger.make_probes(reason, numbers, *(seen or (self.table, slots)))
        for decision_id, slot in zip(decision_ids, numbers, strict=True):
            # Setting the fields takes half of the time of passing them as arguments.
            probe = turn.out.probes.add()
            probe.decision_id, probe.slot, probe.placement, probe.hold_ms = decision_id, slot, where, hold_ms


class Part:
    """A capability's part in one engine's stream; a method that a capability has no use for is left out.

    The session calls all methods but the last two, which recordings and replays call. Unless a method says otherwise,
    it returns nothing. Those that return `Sliced` work return None if they are done, or an iterator that does a large
    piece of work in slices; the table may be read between two slices. An error of a method ends the stream.

    A report is taken in like this: `rest`, `report_begins`, `opened`, `probed`, `reported`, `ends`, `thinking_ended`,
    `closed`, `decide`. While no decisions are made, `ends` and `decide` are not called.
    """

    # ------------------------------------------------------------------------------------------------ policies, clock

    def reads_signals(self, policy: Policy) -> bool:
        """Return whether the part reads the entropy, the end marker's rank or probes of requests under a policy, so
        that the engine measures each token of each request. The session calls it before it sends the policy."""
        return False

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        """Take in a policy that the agent has just put in force. The earlier policy still holds for all requests; each
        live request is given its policy anew afterwards."""

    def policy_changed(self, now: datetime) -> None:
        """Note that every live request has its policy under the new policy."""

    def revise(self) -> None:
        """Revise all earlier decisions in the next turn: another policy is in force, or the engine has thawed."""

    def shortened(self) -> None:
        """Revise caps in the next turn: a shortener shortens some requests more or less than before."""

    def rest(self, now: datetime) -> None:
        """Take in the time, before each message of the agent and about once a second without messages."""

    # ------------------------------------------------------------------------------------------------------- snapshots

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> Sliced[None] | None:
        """Take in a snapshot whose requests replace those of the table, which still has the earlier ones. The new ones
        come by `opened`."""

    def snapshot_ends(self, now: datetime) -> Sliced[None] | None:
        """Note that the table has all requests of the snapshot, each with its policy."""

    # --------------------------------------------------------------------------------------------------------- reports

    def report_begins(self, now: datetime, decides: bool) -> Sliced[None] | None:
        """Look back at the reports before this one, which the table has not taken in. decides: whether decisions are
        made."""

    def opened(self, slots: Sequence[int]) -> None:
        """Take in requests that begin, or that a snapshot lists; the table has their rows, and they have no policy
        yet."""

    def probed(self, results: Sequence[ProbeResult]) -> None:
        """Take in the probes that a report has measured, before the table has them."""

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> Sliced[None] | None:
        """Learn from a report that the table has taken in; the table still has the requests that it closes. Raises
        BadReport if the report breaks the contract."""

    def ends(self, turn: Turn) -> Sliced[None] | None:
        """Decide ends of thinking. After a report, the table still has the requests that the report closes."""

    def thinking_ended(self, ends: Sequence[tuple[int, str]]) -> None:
        """Take in the ends of thinking that a report has brought, each with its slot and reason; the table still has
        the requests that the report closes."""

    def closed(self, rows: Sequence[agent_pb2.RequestClosed], governed: bool) -> None:
        """Drop what is kept of requests that a report closes; the table still has them. governed: whether decisions are
        made."""

    def decide(self, turn: Turn) -> Sliced[None] | None:
        """Make all other decisions. After a report, the table has dropped the requests that the report closes."""

    def stream_ended(self, now: datetime, followed: bool) -> None:
        """Note that the stream has ended. followed: whether a newer stream of the same engine process is open."""

    # ----------------------------------------------------------------------------------------- recordings and replays

    def records(self) -> Iterable[fleet_pb2.TraceRecord]:
        """Return what has reached the part from outside of the stream and is still in force, for a recording that
        begins now. The caller fills in time and ids. Only what TraceRecord has a field for can be recorded."""
        return ()

    def recorded(self, record: fleet_pb2.TraceRecord) -> None:
        """Take in, from a record of a recording, what reached the part from outside of the stream. A part ignores the
        records of other parts."""


def having(parts: Iterable[T], method: Callable[..., Any]) -> list[T]:
    """Return the parts that have a method of their own in place of that of the base class, so that the others are not
    called."""
    return [part for part in parts if getattr(type(part), method.__name__) is not method]


# Makes the part of a capability in a stream; None if the engine cannot do what the capability needs.
PartMaker: TypeAlias = "Callable[[Stream], Part | None]"

AnyPart = TypeVar("AnyPart", bound=Part)


class Parts:
    """The parts of one stream in the order in which they decide. A part's method is called only if it has one.

    The stream keeps its parts alive, and each part has a weak reference to the stream. Without such a circle of
    references the table of a stream that ends is freed at once, and not only by the next full look for garbage.
    """

    def __init__(self, stream: Stream, makers: Iterable[PartMaker]) -> None:
        weak: Stream = proxy(stream)
        self.all = [part for make in makers if (part := make(weak)) is not None]
        self.policy_begins = self._calls(Part.policy_begins)
        self.policy_changed = self._calls(Part.policy_changed)
        self.revise = self._calls(Part.revise)
        self.shortened = self._calls(Part.shortened)
        self.rest = self._calls(Part.rest)
        self.snapshot_begins = self._work(Part.snapshot_begins)
        self.snapshot_ends = self._work(Part.snapshot_ends)
        self.report_begins = self._work(Part.report_begins)
        self.opened = self._calls(Part.opened)
        self.probed = self._calls(Part.probed)
        self.reported = self._work(Part.reported)
        self.ends = self._work(Part.ends)
        self.thinking_ended = self._calls(Part.thinking_ended)
        self.closed = self._calls(Part.closed)
        self.decide = self._work(Part.decide)
        self.stream_ended = self._calls(Part.stream_ended)
        self._reading = having(self.all, Part.reads_signals)

    def reads_signals(self, policy: Policy) -> bool:
        return any(part.reads_signals(policy) for part in self._reading)

    def _calls(self, method: Callable[Concatenate[Part, P], None]) -> Callable[P, None]:
        """Return a function that calls this method of each part that has it."""
        parts, name = having(self.all, method), method.__name__

        def call(*args: P.args, **named: P.kwargs) -> None:
            for part in parts:
                getattr(part, name)(*args, **named)

        return call

    def _work(self, method: Callable[Concatenate[Part, P], Sliced[None] | None]) -> Callable[P, Sliced[None]]:
        """Return a function that does the work of this method of each part that has it."""
        parts, name = having(self.all, method), method.__name__

        def work(*args: P.args, **named: P.kwargs) -> Sliced[None]:
            for part in parts:
                if (sliced := getattr(part, name)(*args, **named)) is not None:
                    yield from sliced

        return work

    def of(self, kind: type[AnyPart]) -> AnyPart:
        """Return the part of this class. Raises LookupError if the stream has none."""
        for part in self.all:
            if isinstance(part, kind):
                return part
        raise LookupError(f"the stream has no {kind.__name__}")


@dataclass(frozen=True)
class Capability:
    """Something that Meridian does.

    stream: makes its part in an engine's stream, with nothing that other streams share. fleet: makes its part over all
    engines of a replica (`fleet/part.py`), whose own method `stream`, if it has one, makes the parts in their streams.
    section: the schema of `extension.NAME` in a policy, for a capability that has no section of its own in the policy's
    schema. A policy without the section switches the capability off. The schema's fields `enabled` and `shadow`, if it
    has them, must have no defaults, because the rest of the control plane only knows what a section says. metrics: the
    counters that its parts count with `Stream.count`. shown: returns rows of the status page, each a name and a text,
    from this replica's counters. An error of `shown` is logged and hides these rows alone.

    While its section is on and not in shadow, the capability counts as a kind of shortening: there is a control group,
    the harm of its ends is measured and limits rollouts, and if it is too large, the section goes into shadow, or goes
    altogether if it does not say `shadow`.
    """

    name: str
    stream: PartMaker | None = None
    fleet: Callable[..., Any] | None = None
    section: type[Section] | None = None
    metrics: Sequence[Entry] = ()
    shown: Callable[[Totals], Sequence[tuple[str, str]]] | None = None

    def __post_init__(self) -> None:
        fields = self.section.model_fields if self.section is not None else {}
        if bad := [name for name in ("enabled", "shadow") if name in fields and not fields[name].is_required()]:
            raise ValueError(f"the section of {self.name} must have no default for {' and '.join(bad)}")
