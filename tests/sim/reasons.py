"""Checks the values that the decision log shows for each decision: that each comparison holds, and that each limit has
the value of the field, entry or wish that it names. The limits are computed from the policy anew."""

from __future__ import annotations

import operator
import re
from typing import Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.enum_names import ENTROPY_REASONS, stage_name
from meridian_control.common.opened_request import OpenedRequest
from meridian_control.engine.session import Session
from meridian_control.engine.shortening import LOWER_CAP, UNSHORTENED
from meridian_control.journal.messages import decision_message
from meridian_control.journal.records import Decision
from meridian_control.policy.model import Who

OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
FIELD = re.compile(r"(?:override\[(\d+)\]\.)?(scheduler|entropy|loop)\.(\w+)(?:\[(\d+)\]\.max_ranks\[(\d+)\])?( - 1)?")
ENTRY = re.compile(r"(budget|pressure) (\S+) in stage (\w+)")
# Kinds of decision whose comparisons are checked, and reasons of theirs that compare nothing.
KINDS, WITHOUT = ("force", "cap", "probe"), ("operator", "lifted", "harm")
FLOOR, CAP = ("scheduler", "min_think_tokens"), ("scheduler", "max_think_tokens")
DEFAULT_CAP = 32768
# Begins the name of the limit of a probe that follows another; the tokens of the other one are not known here.
PROBE_BEFORE = "probe before + "


def check(session: Session, decision: Decision) -> None:
    """Check the comparisons of a decision, while the session's table is still as it was when it decided."""
    if decision.kind not in KINDS or not hasattr(decision, "life"):
        return
    told = decision_message(decision)
    assert told.comparisons or told.reason in WITHOUT, f"{told.kind} {told.reason} has no reason"
    assert told.revision == session.acked_revision
    is_allowed = told.reason in ENTROPY_REASONS and bool(told.pressure.name)
    assert not (is_allowed and told.shadow), f"{told.reason} is in shadow, and pressure is said to put it in force"
    limits = _Limits(session, decision, told)
    for row in told.comparisons:
        where = f"{told.kind} {told.reason}: {row.signal} {row.value} {row.operator} {row.limit} ({row.limit_name})"
        assert OPERATORS[row.operator](row.value, row.limit), f"{where} is false"
        wanted = limits.of(row.limit_name)
        assert wanted is None or wanted == row.limit, f"{where}: the limit is {wanted}"


class _Limits:
    """The limits of a request by their names."""

    def __init__(self, session: Session, decision: Decision, told: fleet_pb2.LoggedDecision) -> None:
        assert decision.slot is not None
        info = session.table.info[decision.slot]
        assert info is not None
        self.session, self.slot, self.info, self.kind = session, decision.slot, info, told.kind
        self.sources: dict[tuple[str, str], Any] = {}
        self.values = self._values(info)

    def _values(self, info: OpenedRequest) -> dict[tuple[str, str], Any]:
        """Return the values of the policy with the overrides that match, and note the override that sets each one."""
        policy, hello = self.session.policy, self.session.hello
        assert policy is not None
        sections = ("scheduler", "entropy", "loop")
        values = {(name, field): value for name in sections for field, value in getattr(policy, name)}
        who = Who(info.model, info.tenant, info.slo_class, info.effort, dict(hello.labels), hello.model_fingerprint)
        for index, override in enumerate(policy.override):
            if override.matches(who):
                for name in sections:
                    changes = {(name, field): value for field, value in override.changes(name).items()}
                    values |= changes
                    self.sources |= dict.fromkeys(changes, str(index))
        values[FLOOR] = min(values[FLOOR], values[CAP])
        return values

    def of(self, name: str) -> Any:
        """Return the value of a limit; None if it is one that is not known here."""
        if (base := name.removesuffix(" - warm-up")) != name:
            entropy = {field: value for (section, field), value in self.values.items() if section == "entropy"}
            samples = entropy["eat_warmup_samples"] + entropy["confirm_sentence_ends"] - 1
            return max(0, self._one(base) - samples * entropy["eat_probe_interval_tokens"])
        if name.startswith(("max_think_tokens - ", "pressure ")) and not ENTRY.fullmatch(name):
            return None
        limits = sum(map(self._one, name.removeprefix(PROBE_BEFORE).split(" + ")))
        return None if name.startswith(PROBE_BEFORE) else limits

    def _one(self, name: str) -> Any:
        own = {"own min_think_tokens": self.info.min_think_tokens, "own max_think_tokens": self.info.max_think_tokens}
        if name in own:
            assert own[name] is not None, "a wish is named that the client has not made"
            return own[name]
        if name == "default cap, in the control group":
            assert self.session.table.control[self.slot]
            assert self.values[CAP] < DEFAULT_CAP
            return DEFAULT_CAP
        if (entry := ENTRY.fullmatch(name)) is not None:
            return self._of_entry(*entry.groups())
        field = FIELD.fullmatch(name)
        assert field is not None, f"nobody knows the limit {name}"
        index, section, of_section, condition, rank, less = field.groups()
        assert self.sources.get((section, of_section)) == index, f"{name} is said elsewhere"
        value = self.values[section, of_section]
        return value[int(condition)].max_ranks[int(rank)] if condition else value - bool(less)

    def _of_entry(self, section: str, name: str, stage_named: str) -> Any:
        policy = self.session.policy
        assert policy is not None
        entry = next(entry for entry in getattr(policy, section) if entry.name == name)
        stage = self.session.part(EngineBudgets).stages.get(name, UNSHORTENED)
        if section == "pressure":
            index = policy.pressure.index(entry)
            stage = dict(self.session.part(EnginePressure).stages_of(self.slot))[index]
        assert not entry.shadow
        assert stage_name(stage) == stage_named
        floor, least, cap = entry.min_think_tokens, self.values[FLOOR], self.values[CAP]
        soft, own_soft = entry.soft_think_tokens, self.values["scheduler", "soft_think_tokens"]
        if stage >= LOWER_CAP:
            lowered = entry.max_think_tokens if stage == LOWER_CAP else floor or entry.max_think_tokens
            cap = min(cap, max(lowered, least))
            soft = min(soft, cap // 2)
        soft = max(soft, floor or min(entry.soft_think_tokens, entry.max_think_tokens), least)
        return cap if self.kind == "cap" else min(soft, own_soft or soft)
