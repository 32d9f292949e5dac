"""Sets up the relay's log, as lines of text or as JSON objects, one a line.

Clients choose text that the log shows, and can cause a line for each request. Control characters in a line are escaped,
so that no client can forge a line or reach the terminal that shows the log, and the rate of lines of one kind is
limited. The control plane and the agent treat their logs in the same way.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from types import TracebackType

FORMATS = ("text", "json")
VARIABLE = "MERIDIAN_LOG_FORMAT"
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
LEVELS = ("debug", "info", "warning", "error")
# Lines of one kind that may come at once, and the seconds after which one more may come.
BURST, INTERVAL_S = 10, 10.0
# Largest number of kinds that are remembered; a further kind replaces the oldest.
KINDS = 256
# Largest number of characters that a line shows of bytes that are no HTTP request.
MAX_STRANGER_CHARS = 100


def printable(text: str) -> str:
    """Return the text in one line, with Python's escape for each character that is not printable."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _time(record: logging.LogRecord) -> str:
    """Return a record's time as the control plane's log writes it, such as 2026-01-31T12:00:00.250Z."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """Writes a record as one line, and a traceback below it in indented lines."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(  # noqa: N802
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        text = "".join(traceback.format_exception(ei[1]))
        return "\n".join(f"  {printable(line)}" for line in text.split("\n") if line)


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object with time, level, logger, message and, if it has one, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class LineLimit(logging.Filter):
    """Lets BURST lines of a kind through, then one every INTERVAL_S seconds, which gives the number of lines that were
    left out before it.

    Lines are of one kind if they have one template, before its arguments are filled in. clock: returns monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By template: lines that may come now, the time of that number, and the lines left out since the last one.
        self._kinds: dict[str, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        free, at, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        free = min(float(BURST), free + (now - at) / INTERVAL_S)
        if free < 1:
            self._kinds[kind] = free, now, left_out + 1
            return False
        self._kinds[kind] = free - 1, now, 0
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} lines like this one were left out before it)"
            record.args = None
        elif free < 2:
            record.msg = f"{record.getMessage()} (from now on one such line every {INTERVAL_S:g} s)"
            record.args = None
        return True


def without_strangers_traceback(record: logging.LogRecord) -> bool:
    """Turn the traceback that aiohttp logs for bytes that are no HTTP request into one line, and stop the record of a
    client that hangs up during its own request."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError):
        return False
    if type(error).__module__.startswith("aiohttp."):
        text = " ".join(str(error).split())[:MAX_STRANGER_CHARS]
        record.msg, record.args, record.exc_info = "a client does not speak HTTP: %s", (text,), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def add_flags(parser: argparse.ArgumentParser, log_format: str) -> None:
    """Add the flags of the log. log_format: the default form."""
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    parser.add_argument(
        "--log-format",
        default=log_format,
        choices=FORMATS,
        help=f"form of the log: lines of text, or a JSON object a line; default: {VARIABLE}, else text",
    )


def begin(args: argparse.Namespace) -> None:
    """Write the log to standard error in the form and from the level that the flags name; other packages' records only
    from WARNING on."""
    handler = logging.StreamHandler()
    handler.addFilter(without_strangers_traceback)
    handler.addFilter(LineLimit())
    handler.setFormatter(JsonFormatter() if args.log_format == "json" else TextFormatter(TEXT))
    logging.basicConfig(level="WARNING", handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("meridian_relay").setLevel(args.log_level.upper())
