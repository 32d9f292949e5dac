"""Run `meridian-control` as `python -m meridian_control`."""

import sys

from meridian_control.app.main import main

if __name__ == "__main__":
    sys.exit(main())
