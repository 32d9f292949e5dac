"""Brings a policy to the fleet in steps: the plan, the state machine, its samples and its store.

The package reaches the fleet only through the calls of `driver.Governed`.
"""
