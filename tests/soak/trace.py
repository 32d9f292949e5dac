"""Check every decision of the recorded traces: exactly one outcome, and all invariants.

The checks are the simulator's (`tests.sim.invariants`), on sessions replayed from the records (`tests.sim.recorded`). A
session that a recording joined late is not replayed; only its outcomes are matched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import Phase
from meridian_agent.core.step_record import Outcome
from meridian_agent.link.messages import DECISION_KINDS
from meridian_control.offline.trace_file import FileError, read
from meridian_control.policy import formats as forms
from tests.sim.given import Given
from tests.sim.invariants import Invariants
from tests.sim.recorded import Replayed

# Text of the faults that the soak makes (harm/sitecustomize.py), as the engine's log and its Hello contain it.
INJECTED, INJECTED_AT = "injected by the soak", " at sitecustomize:"


@dataclass
class Audit:
    """The findings in the traces. unheard: decisions whose stream ended before their outcome came, which closes
    them."""

    decisions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    unheard: int = 0
    sessions: int = 0
    joined_late: int = 0
    reports: int = 0
    preempted_answers: int = 0
    violations: list[str] = field(default_factory=list)


class _Late:
    """A session whose beginning is not known: each decision that was seen has at most one outcome.

    given: the policies of its engine over all its streams.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._open: set[int] = set()
        self._settled: set[int] = set()

    def take(self, record: fleet_pb2.TraceRecord) -> None:
        if record.HasField("policy"):
            policy = forms.from_proto(record.policy.policy)
            self._given.unanswered(record.session_id, record.policy.revision, policy)
        self._open |= _ids(record.down.directives)
        for outcome in record.up.step.outcomes:
            assert outcome.decision_id not in self._settled, f"a second outcome of decision {outcome.decision_id}"
            self._settled.add(outcome.decision_id)

    def end(self, cut_off: bool = False) -> int:
        return len(self._open - self._settled)


class _File:
    """The sessions of one trace file, each checked up to its first violation. invariants: those of the whole run."""

    def __init__(self, audit: Audit, invariants: Invariants) -> None:
        self._audit, self._invariants = audit, invariants
        self._sessions: dict[str, Replayed | _Late] = {}
        self._broken: set[str] = set()
        # All decisions sent, by session and id, and the decisions without an outcome so far.
        self._made: set[tuple[str, int]] = set()
        self._open: set[tuple[str, int]] = set()
        self.newest = ""

    def take(self, record: fleet_pb2.TraceRecord) -> None:
        audit, name = self._audit, record.session_id
        self.newest = name
        made = {(name, number) for number in _ids(record.down.directives)}
        self._made |= made
        self._open |= made
        audit.decisions += len(made)
        audit.reports += record.up.HasField("step")
        for outcome in record.up.step.outcomes:
            if (name, outcome.decision_id) in self._made:
                audit.outcomes[Outcome(outcome.outcome).name.lower()] += 1
                self._open.discard((name, outcome.decision_id))
            elif isinstance(self._sessions.get(name), Replayed):
                # Only a session that the recording joined late has outcomes of decisions that it does not show.
                audit.violations.append(f"session {name[:8]}: an outcome of decision {outcome.decision_id}, not made")
        if record.up.HasField("hello"):
            self._begin(record)
        elif name in self._sessions and name not in self._broken:
            with_table = self._sessions[name]
            if isinstance(with_table, Replayed):
                audit.preempted_answers += _answers(with_table, record.up.step.preempted)
            self._guarded(name, lambda: with_table.take(record))

    def _begin(self, record: fleet_pb2.TraceRecord) -> None:
        audit, name = self._audit, record.session_id
        if record.up.hello.fault and INJECTED_AT not in record.up.hello.fault:
            audit.violations.append(f"the agent is off: {record.up.hello.fault}")
        if name in self._sessions:
            # The recording broke off and began anew, so the records in between are missing.
            self._close(name)
        audit.sessions += 1
        audit.joined_late += record.joined_late
        given = self._invariants.given[record.up.hello.engine_id]
        self._sessions[name] = _Late(given) if record.joined_late else Replayed(record, self._invariants)

    def end(self, at_rest: bool) -> None:
        """End all sessions. at_rest: everything has ended, so the newest session owes no outcome."""
        for name in list(self._sessions):
            is_last = at_rest and name == self.newest
            unheard = self._close(name, cut_off=not is_last)
            if is_last and unheard:
                self._audit.violations.append(f"{unheard} decisions have no outcome in the end")

    def _close(self, name: str, cut_off: bool = True) -> int:
        session = self._sessions.pop(name)
        if name not in self._broken:
            self._guarded(name, lambda: session.end(cut_off))
        unheard = {decision for decision in self._open if decision[0] == name}
        self._open -= unheard
        self._audit.unheard += len(unheard)
        return len(unheard)

    def _guarded(self, name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception as error:
            self._broken.add(name)
            self._audit.violations.append(f"session {name[:8]}: {type(error).__name__}: {error}"[:600])


def audit(paths: Iterable[Path]) -> Audit:
    """Audit the traces of one run, in order; the run is at rest at the end of the last one."""
    found, invariants, listed = Audit(), Invariants(), list(paths)
    for path in listed:
        file = _File(found, invariants)
        try:
            for record in read(path):
                file.take(record)
        except FileError as error:
            found.violations.append(str(error))
        file.end(at_rest=path == listed[-1])
    return found


def _ids(directives: agent_pb2.Directives) -> set[int]:
    lists = [getattr(directives, kind) for kind in DECISION_KINDS]
    ids = {decision.decision_id for decisions in lists for decision in decisions}
    return ids | {directives.plan.decision_id} if directives.HasField("plan") else ids


def _answers(session: Replayed, preempted: Iterable[int]) -> int:
    table = session.session.table
    return sum(table.holds(slot) and bool(table.phase[slot] == Phase.OUTPUT) for slot in preempted)
