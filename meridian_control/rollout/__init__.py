"""Rollouts of a policy: the plan, the state machine, its samples and its store.

Knows the fleet through a few calls only.
"""
