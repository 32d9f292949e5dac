"""The order in which requests join a step, and their share of it."""
