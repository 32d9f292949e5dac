"""Fixtures of the tests of meridianctl."""

from tests.contract.ctl import control, file

__all__ = ["control", "file"]
