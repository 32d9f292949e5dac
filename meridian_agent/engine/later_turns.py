"""Knows whether later turns of a conversation repeat the thinking of a request, so that its KV blocks may be needed
again.

Three things tell it. The first is how the request was rendered: with the model's own chat template, under settings with
which this template strips thinking from earlier turns. If a request was rendered in any other way, or not from a chat,
nothing is known, and its blocks are kept. The second is the conversation: if its earlier turns have come back without
their thinking, the next turn will come without it, too, whatever the template keeps. The third is experience: if a
prompt arrives that begins with blocks which this engine has given up, later turns do repeat the thinking of such
requests, and their blocks are kept from then on.

The object belongs to the engine and outlives an agent's faults. The engine-core thread asks it; a thread of its own
renders templates with settings that have not been seen before.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.request_info import RequestInfo
    from meridian_agent.vllm_adapter.tokenizer import Template

logger = logging.getLogger("vllm.meridian")

# Most settings of the template that are known, since clients may write them. Others stay unknown until one of these has
# been in no request for UNUSED_S seconds: settings may name the day, and an engine runs for months.
MAX_SETTINGS, UNUSED_S = 64, 600.0
# Most kinds of requests whose blocks are kept from experience; with one more, all requests' blocks are.
MAX_KINDS = 16
# Requests whose blocks were given up last, each with its first such block.
MAX_GIVEN_UP = 4096


class Kind(NamedTuple):
    """Requests that are rendered and sent alike."""

    model: str
    tenant: str
    chat_template: str
    thinking_absent: bool


class LaterTurns:
    """What is known of the later turns of one engine's requests. read: finds out how the model's own template treats
    thinking under some settings. note_changed: called when `note` has changed. clock: returns monotonic seconds."""

    def __init__(
        self,
        read: Callable[[str], Template],
        note_changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._note_changed, self._clock = read, note_changed, clock
        # Whether the model has a chat template of its own.
        self.has_template = False
        # By the template's settings as JSON text; and the settings that wait to be rendered, or are, each with the time
        # of its newest request, oldest first.
        self._templates: dict[str, Template] = {}
        self._asked: dict[str, float] = {}
        self._waiting = queue.SimpleQueue[str]()
        self._thread: threading.Thread | None = None
        # The first given-up block of each of the newest requests, oldest first, by its hash.
        self._given_up: dict[Any, Kind] = {}
        # Kinds of requests whose thinking has come back.
        self._repeating: dict[Kind, None] = {}

    @property
    def note(self) -> str:
        """Why blocks of requests are kept although the template strips their thinking; empty if none are."""
        if not self._repeating:
            return ""
        which = "; ".join(_text(kind) for kind in self._repeating)
        every = "all requests" if len(self._repeating) > MAX_KINDS else f"such requests ({which})"
        return f"later prompts have repeated thinking whose KV blocks were given up; the blocks of {every} are kept now"

    def read_anew(self) -> None:
        """Render the template anew, because other thinking markers are in force."""
        known = list(self._templates) or ["{}"]
        self._templates = {settings: self._read(settings) for settings in known}
        self._asked = dict.fromkeys(known, self._clock())

    def arrived(self, info: RequestInfo, block_hashes: Sequence[Any]) -> None:
        """Look at a request that was added to the engine: render its template, and learn from its prompt. block_hashes:
        hashes of the prompt's full blocks."""
        if info.chat_template:
            self._ask(info.chat_template)
        # A relay may bring thinking back that another engine was to answer.
        if self._given_up and not info.handed_over_ref and not self._given_up.keys().isdisjoint(block_hashes):
            self._learn(next(self._given_up[known] for known in block_hashes if known in self._given_up), info)

    def _ask(self, settings: str) -> None:
        """Let settings be rendered that are not known, if there is room for them."""
        now_s = self._clock()
        if self._asked.pop(settings, None) is not None:
            self._asked[settings] = now_s
            return
        if len(self._asked) >= MAX_SETTINGS:
            oldest = next(iter(self._asked))
            if now_s - self._asked[oldest] < UNUSED_S:
                return
            del self._asked[oldest]
            self._templates.pop(oldest, None)
        self._asked[settings] = now_s
        self._waiting.put(settings)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_waiting, name="meridian-template", daemon=True)
            self._thread.start()

    def _learn(self, kind: Kind, info: RequestInfo) -> None:
        if kind in self._repeating or len(self._repeating) > MAX_KINDS:
            return
        self._repeating[kind] = None
        name = info.request_id
        logger.warning("meridian: the prompt of request %r shows that %s", name, self.note)
        self._note_changed()

    def _read_waiting(self) -> None:
        while True:
            # A template may raise anything; its settings stay unknown then.
            with contextlib.suppress(Exception):
                settings = self._waiting.get()
                template = self._read(settings)
                if settings in self._asked:
                    self._templates[settings] = template

    def refusal(self, live: LiveRequest, output: Any, *, structured: bool = False) -> str:
        """Return why the blocks of a finished request are kept; empty if no later turn repeats its thinking, as far as
        is known. output: the tokens that it has generated. structured: a grammar has constrained the answer."""
        if not live.info.chat_template:
            return "it is not known whether a later turn repeats the thinking"
        if _kind(live.info) in self._repeating or len(self._repeating) > MAX_KINDS:
            return "a later turn has repeated the thinking of such a request"
        if live.info.thinking_absent:
            return ""
        template = self._templates.get(live.info.chat_template)
        if template is None or not template.strips_think:
            keeps = "the chat template keeps the thinking"
            return keeps if template else "it is not known yet whether the chat template strips the thinking"
        # With the tool choice `required`, or a named tool, the call is JSON text without the template's token.
        if template.tool_call is not None and (structured or template.tool_call in output):
            return f"{'perhaps ' * structured}a tool call: the next turn repeats its thinking"
        return ""

    def gave_up(self, live: LiveRequest, first: Any) -> None:
        """Note that the blocks of a request are given up. first: the hash of the first of them."""
        self._given_up[first] = _kind(live.info)
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]


def _kind(info: RequestInfo) -> Kind:
    return Kind(info.model, info.tenant, info.chat_template, info.thinking_absent)


def _text(kind: Kind) -> str:
    tenant = f" of tenant {kind.tenant!r}" if kind.tenant else ""
    absent = ", earlier turns without thinking" if kind.thinking_absent else ""
    return f"of model {kind.model!r}{tenant}, template settings {kind.chat_template!r}{absent}"
