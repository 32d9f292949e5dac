"""Sets up the log of the control plane's programs, as lines of text or as JSON objects, one a line.

Text in a log line may come from callers, so control characters are escaped: no caller can forge a line, or reach the
terminal that shows the log.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from meridian_control.common.look import time_text
from meridian_control.common.plain_text import PlainFormatter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

FORMATS = ("text", "json")
VARIABLE = "MERIDIAN_LOG_FORMAT"
# Largest number of lines a minute about callers that do not speak HTTP, and of characters that each shows of them.
STRANGERS_A_MINUTE, MAX_STRANGER_CHARS = 10, 100
LEVELS = ("debug", "info", "warning", "error")


def _time(record: logging.LogRecord) -> str:
    return time_text(datetime.fromtimestamp(record.created, UTC))


class TextFormatter(PlainFormatter):
    """Writes a record as one line with time, level, logger and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)


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


class StrangerFilter(logging.Filter):
    """Turns the traceback that aiohttp logs for bytes that are no HTTP request into one line, and lets through few such
    lines, because every caller can cause them. A caller that hangs up during its own request causes no line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Start of the minute that is being counted, and the number of its lines.
        self._since, self._lines = clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if not type(error).__module__.startswith("aiohttp."):
            return True
        if self._clock() - self._since >= 60:
            self._since, self._lines = self._clock(), 0
        self._lines += 1
        text = " ".join(str(error).split())[:MAX_STRANGER_CHARS]
        record.msg, record.args, record.exc_info = f"{record.getMessage()}, which is no HTTP: %s", (text,), None
        record.levelno, record.levelname = logging.INFO, "INFO"
        return self._lines <= STRANGERS_A_MINUTE


def add_flags(parser: argparse.ArgumentParser, log_format: str) -> None:
    """Add the flags of the log to a program's parser. log_format: the default form."""
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    parser.add_argument(
        "--log-format",
        default=log_format,
        choices=FORMATS,
        help=f"form of the log: lines of text, or a JSON object a line; default: {VARIABLE}, else text",
    )


def begin(args: argparse.Namespace, *filters: logging.Filter) -> None:
    """Write the log to standard error in the form and from the level that the flags name, but for lines that a filter
    stops; other packages' records only from WARNING on."""
    handler = logging.StreamHandler()
    for log_filter in filters:
        handler.addFilter(log_filter)
    handler.setFormatter(JsonFormatter() if args.log_format == "json" else TextFormatter())
    logging.basicConfig(level="WARNING", handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("aiohttp.server").addFilter(StrangerFilter())
    # grpcio logs a traceback for every metadata value that is not UTF-8, however many callers send.
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    of_grpc.addFilter(lambda record: not str(record.msg).startswith("Invalid encoding on"))
    logging.getLogger("meridian_control").setLevel(args.log_level.upper())
