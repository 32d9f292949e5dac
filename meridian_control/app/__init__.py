"""Holds the program `meridian-control`: it reads the flags, makes every part once, and runs the parts.

No other package imports this package.
"""

import os

# gRPC's C library writes a line for every malformed header that it gets, so callers could fill the log. The library
# reads the variable when grpc is imported; a value that is already set takes precedence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
