"""Calibration from recorded traces, and replay of traces under another policy.

The package uses the same code that decides live, but it never uses a live fleet.
"""
