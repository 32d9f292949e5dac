"""The thinking tokens of tenants, whose number clients choose."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from meridian_control.capabilities.budgets import charges as module
from meridian_control.capabilities.budgets.charges import OTHER, TenantUsage


def session(**tokens: int) -> Any:
    taken = [Counter({(tenant, "m"): count for tenant, count in tokens.items()}), Counter()]
    return SimpleNamespace(take_by_tenant=lambda: taken.pop(0))


def test_sessions_add_up() -> None:
    usage, sessions = TenantUsage(), [session(acme=3), session(acme=4, beta=1)]
    for charges in sessions * 2:
        usage.take_charges(charges)
    assert usage.counted == {("acme", "m"): 7, ("beta", "m"): 1}


def test_further_tenants_are_counted_together(monkeypatch: Any) -> None:
    """No token is lost, and a tenant that is known goes on with a count of its own."""
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 2)
    usage = TenantUsage()
    usage.take_charges(session(a=1, b=2, c=3, d=4))
    usage.take_charges(session(b=10))
    assert usage.counted == {("a", "m"): 1, ("b", "m"): 12, OTHER: 7}
