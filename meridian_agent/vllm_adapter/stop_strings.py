"""Lets the stop strings of a request sleep while its model thinks, in vLLM's front end, which looks for them.

The engine core knows the phases and the policy. For each output of a thinking request it notes which of the new tokens
are thinking, in a field that vLLM passes on and reads for traces only, `trace_headers`. A front end without the agent
skips the note, and an output without a note is searched as in stock vLLM. A stop string counts if it begins after the
newest token of thinking.

`note` runs on the engine-core thread, everything else on the front end's event loop.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import required_api

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("vllm.meridian")

# Name of the note, and its characters, one for each new token.
NOTE, ASLEEP, AWAKE = "meridian-stop-strings", "1", "0"
# The note of most outputs: one new token, which is thinking.
ONE_ASLEEP = {NOTE: ASLEEP}


def note(output: Any, asleep: Sequence[bool]) -> None:
    """Note for the front end at which new tokens of an output, vLLM's EngineCoreOutput, stop strings sleep; without an
    entry they do not."""
    if any(asleep) and hasattr(output, "trace_headers"):
        if len(asleep) == 1 and not output.trace_headers:
            output.trace_headers = ONE_ASLEEP
            return
        text = "".join([ASLEEP if token_asleep else AWAKE for token_asleep in asleep])
        output.trace_headers = {**(output.trace_headers or {}), NOTE: text}


def install() -> None:
    """Wrap the method in which vLLM's front end turns tokens into text."""
    if lacks := required_api.missing(required_api.Imported(), required_api.STOP_STRINGS):
        logger.warning("meridian: vLLM lacks %s: stop strings end thinking, too", ", ".join(lacks))
        return
    processor: Any = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    process = processor.process_outputs

    @functools.wraps(process)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.trace_headers and NOTE in output.trace_headers:
                _obey(self.request_states.get(output.request_id), output.trace_headers[NOTE])
        return process(self, engine_core_outputs, *args, **kwargs)

    processor.process_outputs = process_outputs


def _obey(state: Any, text: str) -> None:
    """Let the stop strings of a request sleep at tokens of its next update. state: vLLM's RequestState; None if the
    request has ended."""
    detokenizer: Any = getattr(state, "detokenizer", None)
    if not getattr(detokenizer, "stop", None):
        return
    search = vars(detokenizer).get("update")
    if not isinstance(search, AnswerSearch):
        detokenizer.update = search = AnswerSearch(detokenizer)
    search.asleep = text


class AnswerSearch:
    """Stands in for the `update` method of one detokenizer, until a stop string that it finds must begin in the answer.

    asleep: as in the note, for the tokens of the next update.
    """

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer, self._update = detokenizer, detokenizer.update
        self.asleep = ""
        # Number of characters of the text up to the newest token at which stop strings slept.
        self._begin = 0

    def __call__(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in tokens and return the stop string that ends the request, if there is one, as vLLM's method does."""
        text, self.asleep = self.asleep.ljust(len(new_token_ids), AWAKE), ""
        if text and AWAKE not in text:
            return self._asleep(new_token_ids, stop_terminated)
        at = 0
        for asleep, run in itertools.groupby(text[: len(new_token_ids)]):
            before, at = at, at + sum(1 for _ in run)
            tokens, is_last = new_token_ids[before:at], at == len(new_token_ids)
            take = self._asleep if asleep == ASLEEP else self._awake
            if (found := take(tokens, stop_terminated and is_last)) is not None:
                return found
        detokenizer = self._detokenizer
        if len(detokenizer.output_text) - self._begin >= max(map(len, detokenizer.stop)):
            # vLLM's own search goes back no further than this.
            del detokenizer.update
        return None

    def _asleep(self, tokens: list[int], stop_terminated: bool) -> str | None:
        detokenizer = self._detokenizer
        stop, detokenizer.stop = detokenizer.stop, []
        try:
            self._update(tokens, stop_terminated)
        finally:
            detokenizer.stop = stop
        self._begin = len(detokenizer.output_text)
        return None

    def _awake(self, tokens: list[int], stop_terminated: bool) -> str | None:
        """Search the text after the thinking only."""
        detokenizer = self._detokenizer
        text, begin = detokenizer.output_text, self._begin
        detokenizer.output_text = text[begin:]
        try:
            found: str | None = self._update(tokens, stop_terminated)
        finally:
            detokenizer.output_text = text[:begin] + detokenizer.output_text
        return found
