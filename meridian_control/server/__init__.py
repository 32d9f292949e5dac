"""The gRPC services: each turns a call into calls of the fleet and of the stores.

Knows no rule and no session.
"""
