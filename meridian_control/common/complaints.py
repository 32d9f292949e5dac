"""Logs the errors of work that is tried again and again, without filling the log while a fault lasts."""

from __future__ import annotations

import logging

from meridian_control.common.errors import MeridianError

# Largest number of errors that are remembered, because a text may name what differs each time.
MAX_KNOWN = 16


class Complaints:
    """Logs each error of some work once, until the work succeeds. An error that is not foreseen has its traceback.

    text: the format of the log's line; its arguments are those of `log`, and the error.
    """

    def __init__(self, logger: logging.Logger, text: str = "%s", level: int = logging.WARNING) -> None:
        self._logger, self._text, self._level = logger, text, level
        # The texts of the errors that the log has; one fault may show in several errors by turns.
        self._known: set[str] = set()

    def log(self, error: Exception, *named: object) -> None:
        if (text := str(error)) in self._known:
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(text)
        cause = None if isinstance(error, MeridianError) else error
        self._logger.log(self._level, self._text, *named, text, exc_info=cause)

    def over(self) -> None:
        """Note that the work has succeeded."""
        self._known.clear()
