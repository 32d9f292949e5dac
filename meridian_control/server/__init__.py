"""Holds the gRPC services, and the gate that decides which callers may call which methods and how often, and records
calls. Each service turns a call into calls of the fleet and of the stores.

The package knows no rule and no session.
"""
