"""Keeps every decision about a request, with the values that its rule saw. The package knows no session."""
