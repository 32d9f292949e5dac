"""Decides handovers of requests at the end of their thinking, and finds what became of them. The package knows no
session and no gRPC."""
