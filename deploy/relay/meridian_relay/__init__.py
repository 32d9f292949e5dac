"""Holds the program `meridian-relay`, which stands in front of thinking engines and continues their requests elsewhere.

The package talks to engines and clients over OpenAI's API alone. It does not know policies, agents or gRPC, and imports
no other package of Meridian.
"""

__version__ = "0.3.0"
