"""Prometheus metrics and OpenTelemetry traces, made from the fleet's counters and the decision log.

The package makes no decisions.
"""
