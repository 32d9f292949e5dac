"""Runs `meridian-control` with the capability in its list."""

import sys

from meridian_control.app.main import main
from meridian_control.capabilities import listed
from tests.primes.capability import PRIMES

listed.CAPABILITIES += (PRIMES,)
sys.exit(main())
