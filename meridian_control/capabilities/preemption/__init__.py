"""Preemption: waiting requests that may take the places of thinking ones."""
