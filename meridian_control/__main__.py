"""Run `meridian-control` as `python -m meridian_control`."""

import sys

from meridian_control.programs import control

if __name__ == "__main__":
    sys.exit(control())
