"""Holds the gRPC services. Each service turns a call into calls of the fleet and of the stores.

The package knows no rule and no session.
"""
