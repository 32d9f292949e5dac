"""Adds up the thinking tokens of each tenant and model that this replica has counted since it started.

Clients choose the names, so their number is bounded. All code runs on the control plane's event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meridian_control.capabilities.budgets.charges import Account, Charges

# Largest number of accounts; the tokens of all further ones are counted together, under OTHER.
MAX_ACCOUNTS = 1000
OTHER: Account = ("(other)", "(other)")


class TenantUsage:
    """`counted` has the thinking tokens of each account."""

    def __init__(self) -> None:
        self.counted: Counter[Account] = Counter()

    def take_charges(self, charges: Charges) -> None:
        """Add what a session has counted since the last call."""
        for account, tokens in charges.take_by_tenant().items():
            known = account in self.counted or len(self.counted) < MAX_ACCOUNTS
            self.counted[account if known else OTHER] += tokens
