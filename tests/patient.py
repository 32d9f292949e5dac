"""A `meridian-control` that waits longer than the product for other processes, and looks more often for an imbalance.

On a busy machine other processes may be silent for seconds, and a test must not take them for dead.
"""

from __future__ import annotations

import sys

from meridian_control.app import main as app
from meridian_control.fleet import balance, decision_queries, peers, thinking_ends, whole_fleet

# Seconds in place of the product's own limits.
LONG_S = 120.0
# Modules with the limit of a call to another replica.
ASKING = (whole_fleet, decision_queries, peers, thinking_ends)

if __name__ == "__main__":
    for module in ASKING:
        vars(module)["CALL_TIMEOUT_S"] = LONG_S
    vars(balance)["LOOK_S"] = 0.1
    vars(app)["LEAVE_S"] = LONG_S
    sys.exit(app.main())
