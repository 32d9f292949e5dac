"""Prometheus metrics and OpenTelemetry traces, made from what the fleet counts. Decides nothing."""
