"""Logs the errors of work that is tried again and again, without filling the log while a fault lasts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from meridian_control.common.errors import MeridianError

if TYPE_CHECKING:
    from collections.abc import Callable

# Largest number of errors that are remembered, because a text may name what differs each time.
MAX_KNOWN = 16
# Seconds without an error after which it is logged again, because some work never says that it has succeeded.
FORGOTTEN_S = 3600.0


class Complaints:
    """Logs each error of some work once, until the work succeeds or an hour has passed without the error. An error that
    is not foreseen has its traceback.

    text: the format of the log's line; its arguments are those of `log`, and the error on one line. foreseen: the
    classes of errors that need no traceback. clock: returns monotonic seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        text: str = "%s",
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
        foreseen: type[Exception] | tuple[type[Exception], ...] = MeridianError,
    ) -> None:
        self._logger, self._text, self._level, self._clock, self._foreseen = logger, text, level, clock, foreseen
        # The texts of the errors that the log has, each with its newest time; one fault may show in several errors by
        # turns.
        self._known: dict[str, float] = {}

    def log(self, error: Exception, *named: object) -> None:
        text, now_s = "; ".join(str(error).splitlines()), self._clock()
        known_s = self._known.pop(text, None)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[text] = now_s
        if known_s is not None and now_s - known_s < FORGOTTEN_S:
            return
        cause = None if isinstance(error, self._foreseen) else error
        self._logger.log(self._level, self._text, *named, text, exc_info=cause)

    def over(self) -> None:
        """Note that the work has succeeded."""
        self._known.clear()
