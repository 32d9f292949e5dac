"""Measure what it costs that stops sleep while the model thinks: `python -m tests.bench.stops`.

The program gives the tokens of a thinking request to vLLM's own detokenizer, and the outputs of requests to the engine
core's part of the agent, in turns as in stock vLLM and with the agent. The last line is JSON: CPU microseconds for a
token of a thinking request on stock vLLM, and what the agent adds, the median over the rounds with the bounds of its
95 % interval. A request without stops has no part of this cost.
"""

from __future__ import annotations

import json
import statistics
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import Markers, Phase, PhaseState
from meridian_agent.engine.answer_only_stops import AnswerOnlyStops
from meridian_agent.vllm_adapter import stop_strings
from meridian_agent.vllm_adapter.stop_tokens import SleepingTokens
from tests.bench.harness import interval
from tests.processes import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

# Tokens of a request, requests in a step, and rounds. The tokens are words of the maze's tokenizer.
TOKENS, REQUESTS, ROUNDS = 2_000, 32, 15
FIRST_WORD, WORDS = 20, 26
STOPS, STOP_TOKENS = ["Observation:", "User:", "###"], [0, 3]


def main() -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    params = SamplingParams(stop=STOPS, stop_token_ids=STOP_TOKENS)
    tokens = [FIRST_WORD + number % WORDS for number in range(TOKENS)]

    def front_end(note: str) -> Callable[[], None]:
        """Return a function that turns the tokens of a request into text. note: of each output; empty for stock."""

        def run() -> None:
            prompt = {"prompt_token_ids": [FIRST_WORD], "prompt_embeds": None}
            request: Any = SimpleNamespace(request_id="r", sampling_params=params, **prompt)
            state = SimpleNamespace(detokenizer=IncrementalDetokenizer.from_new_request(tokenizer, request))
            for token in tokens:
                if note:
                    stop_strings._obey(state, note)
                found = state.detokenizer.update([token], False)
                assert found is None

        return run

    names = [f"r{number}" for number in range(REQUESTS)]
    core = stops_of_thinking(names, params)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def engine_core(is_governed: bool) -> Callable[[], None]:
        """Return a function that makes a step's outputs and gives them to the front end's process."""

        def run() -> None:
            for token in tokens[: TOKENS // REQUESTS]:
                group = EngineCoreOutputs(outputs=[EngineCoreOutput(name, [token]) for name in names])
                if is_governed:
                    core.note_strings([group])
                told = decoder.decode(encoder.encode(group))
                assert (told.outputs[0].trace_headers is not None) == is_governed

        return run

    def scheduler(stops: list[int]) -> Callable[[], None]:
        def run() -> None:
            assert not any(token in stops for token in tokens)

        return run

    sleeping = SleepingTokens(STOP_TOKENS, lambda: True)
    parts = {
        "stop_strings_front_end": (front_end(""), front_end(stop_strings.ASLEEP), TOKENS),
        "stop_strings_engine_core": (engine_core(False), engine_core(True), TOKENS // REQUESTS * REQUESTS),
        "stop_tokens": (scheduler(STOP_TOKENS), scheduler(sleeping), TOKENS),
    }
    print(json.dumps({name: measured(*part) for name, part in parts.items()}))


def stops_of_thinking(names: list[str], params: Any) -> AnswerOnlyStops:
    """Return the engine core's part for chats that think. params: the SamplingParams of each."""
    thinking = SimpleNamespace(
        ref=SimpleNamespace(sampling_params=params),
        info=SimpleNamespace(answer_only_stops=None, chat=True),
        state=PhaseState(Phase.THINK),
    )
    tracker: Any = SimpleNamespace(by_id=dict.fromkeys(names, thinking), markers=Markers(((4,),), ((5,),)))
    core = AnswerOnlyStops(tracker)
    core.requests = "chat"
    core.with_strings = dict.fromkeys(names, (False, "", None))
    return core


def measured(stock: Callable[[], None], governed: Callable[[], None], tokens: int) -> dict[str, Any]:
    """Return the CPU microseconds for a token on stock vLLM, and those that the agent adds."""
    found = [(_us(stock, tokens), _us(governed, tokens)) for _ in range(ROUNDS + 1)][1:]
    more = interval([governed_us - stock_us for stock_us, governed_us in found])
    shown = [round(us, 2) for us in (more.value, more.low, more.high)]
    return {"stock_us": round(statistics.median(us for us, _ in found), 2), "more_us": shown}


def _us(run: Callable[[], None], tokens: int) -> float:
    begin = time.process_time()
    run()
    return (time.process_time() - begin) / tokens * 1e6


if __name__ == "__main__":
    main()
