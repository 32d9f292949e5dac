"""Decides which callers may call which methods and how often, and records their calls. The package imports no service.
"""
