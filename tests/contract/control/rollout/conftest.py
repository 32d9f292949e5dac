"""Fixtures of the tests of rollouts."""

from tests.contract.rollouts import control

__all__ = ["control"]
