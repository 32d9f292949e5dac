"""Works on recorded traces: calibration, replay under other rules, comparison.

Uses the code that decides live, and never a live fleet.
"""
