"""Makes text that a client or an agent chose harmless where it meets a terminal or a log.

Control characters move a terminal's cursor, set the clipboard or begin a line, and bidirectional controls show a text
in another order than it has. Each is replaced by the escape that Python's `repr` writes for it, for example `\\n`,
`\\x1b` or `\\u202e`, and all other characters stay. Text that was escaped once is not changed again, so that
what is shown can be typed to search for it. The functions are pure and run on any thread; the agent has a copy of
`printable`.
"""

from __future__ import annotations

import codecs
import logging
import re
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

# C0 and C1 controls with DEL; the Arabic letter mark, the other bidirectional controls, and their deprecated
# companions; line and paragraph separators; interlinear annotations; lone surrogates; tag characters.
UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return the text in one line, with an escape for each character that a terminal or a log would obey."""
    # Almost all texts have no such character.
    return UNPRINTABLE.sub(_escape, text) if UNPRINTABLE.search(text) else text


def printable_document(text: str, encoding: str = "utf-8") -> str:
    """Return a JSON or TOML document with JSON's and TOML's own escapes, also for what the encoding lacks. Its line
    breaks and tabs stay, because these formats allow no control character inside a text."""
    text = UNPRINTABLE.sub(lambda found: found[0] if found[0] in "\n\t" else _document_escape(found[0]), text)
    return text.encode(encoding, _DOCUMENT_ESCAPES).decode(encoding)


def _escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def _document_escape(character: str) -> str:
    code = ord(character)
    if code < 1 << 16:
        return f"\\u{code:04x}"
    # JSON writes such a character as two surrogates, and TOML as eight digits. Only TOML documents get here with one,
    # because JSON documents are written in ASCII.
    return f"\\U{code:08x}"


def _escape_missing(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_document_escape, error.object[error.start : error.end])), error.end


_DOCUMENT_ESCAPES = "meridian_document_escapes"
codecs.register_error(_DOCUMENT_ESCAPES, _escape_missing)


def printable_tree(value: Any) -> Any:
    """Return plain data, as JSON holds it, with every text in it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_tree(part) for key, part in value.items()}
    return [printable_tree(part) for part in value] if isinstance(value, (list, tuple)) else value


class PlainFormatter(logging.Formatter):
    """Formats each record as one line, and a traceback below it in indented lines, so that no text can forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(  # noqa: N802
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return indented("".join(traceback.format_exception(ei[1])))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return indented(stack_info)


def indented(text: str) -> str:
    """Return lines of text, such as a traceback, each printable and indented by two blanks."""
    return "\n".join(f"  {printable(line)}" for line in text.split("\n") if line)
