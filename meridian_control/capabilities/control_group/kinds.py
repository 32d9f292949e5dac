"""Finds the kind of shortening that ends a treated request's thinking. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.policy import effects
from meridian_control.policy.shortening_kinds import CAP, DEFAULT_CAP, ENTROPY, LOOP, SOFT_CLOSE

if TYPE_CHECKING:
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.shortening import Held
    from meridian_control.policy.shortening_kinds import Kind


def kind_of_cap(held: Held, opened: OpenedRequest, *, extended: bool) -> tuple[int, Kind | None]:
    """Return the cap of a treated request, and the kind of shortening that sets it; None if it is the client's own cap,
    or one of the policy that is no lower than the default."""
    scheduler, own, by = held.treated.scheduler, held.own.scheduler, held.by
    cap = effects.cap(scheduler, opened, extended, own if by is not None else None)
    if by is not None and cap < effects.cap(own, opened, extended):
        return cap, by.cap.kind
    if own.max_think_tokens >= DEFAULT_CAP or (opened.max_think_tokens is not None and cap == opened.max_think_tokens):
        return cap, None
    return cap, CAP


def kind_of_rule(held: Held, reason: str) -> Kind | None:
    """Return the kind of shortening to which a rule belongs that is in force for treated requests; None if the rule is
    in shadow for them, or is not part of the policy."""
    policy, by = held.treated, held.by
    if reason in ENTROPY_REASONS:
        shadow = policy.entropy.shadow or (reason == "give_up" and policy.entropy.give_up_shadow)
        return None if shadow else ENTROPY
    if reason == "soft_close" and not policy.scheduler.shadow:
        own = held.own.scheduler.soft_think_tokens
        by_entry = by is not None and (not own or policy.scheduler.soft_think_tokens < own)
        return by.soft.kind if by is not None and by_entry else SOFT_CLOSE
    if reason == "loop" and not policy.loop.shadow:
        return LOOP
    return None
