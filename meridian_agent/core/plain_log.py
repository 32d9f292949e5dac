"""Makes text that a client or a control plane chose harmless: `printable` for text that the agent takes in or sends,
and a filter for all lines that the agent logs.

Control characters move a terminal's cursor, set the clipboard or begin a line, and bidirectional controls show a text
in another order than it has. `printable` replaces each by the escape that Python's `repr` writes for it, and changes
nothing in text that was escaped before. `meridian_control.common.plain_text` does the same in the control plane. The
module runs on whatever thread logs.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# C0 and C1 controls with DEL; the Arabic letter mark, the other bidirectional controls, and their deprecated
# companions; line and paragraph separators; interlinear annotations; lone surrogates; tag characters.
UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# Lines of one kind that may come at once, and the seconds after which one more may come.
BURST, INTERVAL_S = 10, 10.0
# Largest number of kinds that are remembered; a further kind replaces the oldest.
KINDS = 256


def printable(text: str) -> str:
    """Return the text in one line, with an escape for each character that a terminal or a log would obey."""
    return UNPRINTABLE.sub(_escape, text) if UNPRINTABLE.search(text) else text


def _escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def install() -> None:
    """Let the agent's lines in this process pass through the filter, whatever handlers vLLM has."""
    logger = logging.getLogger("vllm.meridian")
    if not any(isinstance(one, PlainLog) for one in logger.filters):
        logger.addFilter(PlainLog())


class PlainLog(logging.Filter):
    """Makes each line one printable line, with the lines of a traceback indented below it. Lets BURST lines of one
    template through at once, then one every INTERVAL_S seconds, which gives the number of lines left out before it.

    clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By template: lines that may come now, the time of that number, and the lines left out since the last one.
        self._kinds: dict[str, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            return self._made_plain(record)
        except Exception as error:
            # A filter's error would reach whoever logs, and with it vLLM. Such a line may not be printable, so it is
            # replaced.
            record.msg = f"meridian: a line of the log was lost: {error!a}"
            record.args = record.exc_info = record.exc_text = None
            return True

    def _made_plain(self, record: logging.LogRecord) -> bool:
        """Make the line printable; return whether it may come."""
        kind, now = str(record.msg), self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        free, at, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        free = min(float(BURST), free + (now - at) / INTERVAL_S)
        if free < 1:
            self._kinds[kind] = free, now, left_out + 1
            return False
        self._kinds[kind] = free - 1, now, 0
        text = printable(record.getMessage())
        if left_out:
            text += f" ({left_out} lines like this one were left out before it)"
        elif free < 2:
            text += f" (from now on one such line every {INTERVAL_S:g} s)"
        record.msg, record.args = text, None
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1])).split("\n")
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines if line)
        return True
