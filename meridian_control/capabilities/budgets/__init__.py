"""Keeps thinking budgets over the whole fleet, and shortens thinking by what is left of them. The package knows no
session and no gRPC."""
