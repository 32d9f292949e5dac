"""A `meridian-control` that answers each report, also without a decision; the product's own answers once a second.

The decisions are the product's own, so an agent can wait until every decision has arrived.
"""

from meridian_control.app.main import main
from meridian_control.engine import session

if __name__ == "__main__":
    session.ACK_INTERVAL_S = 0.0
    main()
