"""`meridian-control`, but each report is answered, also when nothing was decided: by itself it says so once a second.

What it decides, and from what, is the same. So whoever reports can wait until everything decided has come.
"""

from meridian_control.app.main import main
from meridian_control.session import session

if __name__ == "__main__":
    session.ACK_INTERVAL_S = 0.0
    main()
