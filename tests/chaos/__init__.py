"""Faults of the control plane and of the network between it and a real engine."""
