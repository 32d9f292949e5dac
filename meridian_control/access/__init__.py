"""Decides which callers may call which methods and how often, and records calls. The package imports no service."""
