"""Cuts the text of a continued request as one engine would: at the end of thinking and at stop strings. Pure.

Lengths are in characters.
"""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class MarkerSplit:
    """Splits text at the first end marker, which may be cut anywhere."""

    def __init__(self, marker: str) -> None:
        self._marker, self._held, self.over = marker, "", False

    def feed(self, text: str) -> tuple[str, str]:
        """Return the text before the marker and the text after it, so far as both are known."""
        if self.over:
            return "", text
        before, mark, after = (self._held + text).partition(self._marker)
        if mark:
            self._held, self.over = "", True
            return before, after
        self._held = before[len(before) - overlap(before, self._marker) :]
        return before.removesuffix(self._held), ""

    def flush(self) -> str:
        """Return the text that is held back because a marker could have begun in it."""
        held, self._held = self._held, ""
        return held


class StopMatch:
    """Finds stop strings, and holds back the text in which one may have begun, as vLLM does.

    `before` is text that the client has already, in which a stop string may have begun.
    """

    def __init__(self, stops: Sequence[str], include: bool, before: str = "") -> None:
        self._stops, self._include = stops, include
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._joined = before[len(before) - min(len(before), self._longest) :]
        self._sent = len(self._joined)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text to send, and the stop string that ends the text; None if the text goes on."""
        self._joined += text
        found = [(at + len(stop), stop) for stop in self._stops if (at := self._joined.find(stop)) >= 0]
        if found:
            end, stop = min(found, key=lambda each: each[0])
            return self._until(end if self._include else end - len(stop)), stop
        return self._until(len(self._joined) - (0 if self._include else self._longest)), None

    def flush(self) -> str:
        """Return the text that is held back."""
        return self._until(len(self._joined))

    def _until(self, end: int) -> str:
        end = max(end, self._sent)
        text = self._joined[self._sent : end]
        kept = max(0, end - self._longest)
        self._joined, self._sent = self._joined[kept:], end - kept
        return text


class ReceivedText:
    """The text of a request, received from engines and sent to the client.

    It is kept without the end marker, in buffers, because to add to a text takes longer the longer it is. An engine's
    chat parser separates reasoning and content itself (`note`); the text of a completion that continues a broken stream
    is separated here (`feed`). Stop strings are searched here in the content only: whether they end thinking, too, the
    engine decides.
    """

    def __init__(self, marker: str, stops: Sequence[str], include: bool) -> None:
        self._reasoning, self._content = StringIO(), StringIO()
        self.marker, self._stops, self._include = marker, stops, include
        self._split: MarkerSplit | None = None
        self._match: StopMatch | None = None

    @property
    def begun(self) -> bool:
        """Whether there is any text."""
        return self.answers or self._reasoning.tell() > 0

    @property
    def answers(self) -> bool:
        """Whether there is any content."""
        return self._content.tell() > 0

    def note(self, reasoning: str, content: str) -> None:
        """Count text that the client gets as the engine separated it."""
        self._reasoning.write(reasoning)
        self._content.write(content)

    def feed(self, text: str, thinking: bool) -> tuple[str, str, str | None]:
        """Return the reasoning and the content to send, and the stop string that ends the text, None if there is none.

        `thinking`: whether the text so far is all reasoning; only the first call reads it.
        """
        if self._match is None:
            self._match = StopMatch(self._stops, self._include, self._content.getvalue())
            self._split = MarkerSplit(self.marker) if thinking else None
        reasoning, content = self._split.feed(text) if self._split else ("", text)
        self.note(reasoning, content)
        answer, stop = self._match.feed(content)
        return reasoning, answer, stop

    def flush(self) -> tuple[str, str]:
        """Return the reasoning and the content that are held back."""
        if self._match is None:
            return "", ""
        held = self._split.flush() if self._split else ""
        self.note(held, "")
        return held, self._match.flush()

    def missing(self, full: str) -> str | None:
        """Return the text that the engine had and did not send, with the end marker if it is part of that text.

        `full` is the text of all generated tokens. The result is None if the received text is not a part of `full`, as
        with a parser that changes the text. Otherwise it begins with the text before the marker that `feed` holds back,
        which it forgets.
        """
        thought, mark, answer = full.removeprefix(start_marker(self.marker)).partition(self.marker)
        if not self.answers:
            if self._split and self._split.over:
                return answer if mark else None
            rest = _rest(thought, self._reasoning.getvalue())
            if rest is not None and self._split:
                self._split.flush()
            return None if rest is None else rest + mark + answer
        content = self._content.getvalue()
        rest = _rest(answer, content) if mark else None
        return _rest(full, content) if rest is None else rest


def start_marker(end_marker: str) -> str:
    """Return `<think>` for `</think>`; the end marker itself if it has no such form."""
    return end_marker.replace("/", "", 1)


def overlap(text: str, following: str) -> int:
    """Return the length of the longest end of `text` with which `following` begins, but for the whole of it."""
    longest = min(len(text), len(following) - 1)
    return next((n for n in range(longest, 0, -1) if following.startswith(text[-n:])), 0)


def touches(stop: str, marker: str) -> bool:
    """Whether a stop string can match a part of the marker, so that its match depends on text which parsers remove."""
    return stop in marker or marker in stop or bool(overlap(stop, marker) or overlap(marker, stop))


def _rest(text: str, received: str) -> str | None:
    if text.startswith(received):
        return text[len(received) :]
    text, received = text.lstrip(), received.lstrip()
    return text[len(received) :] if text.startswith(received) else None
