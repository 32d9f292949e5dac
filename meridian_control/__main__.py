"""`python -m meridian_control` is `meridian-control`."""

import sys

from meridian_control.app.main import main

if __name__ == "__main__":
    sys.exit(main())
