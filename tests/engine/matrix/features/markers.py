"""Markers of several tokens, gpt-oss's and Granite's: each token's phase follows the text.

A forced end continues an end marker that the model has begun. The model's tokens are scripted by position: if the agent
writes a token, the script's token for that position is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import FLAG_END, FLAG_FORCED, FLAG_MARKER, TAKE_BACK_SHIFT, Phase
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.features.scheduling import steps_of
from tests.engine.policies import NEUTRAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tests.engine.matrix.engine import Engine

MARKED = ("marked", "marked-async", "marked-v2", "marked-v2-async", "marked-ngram", "marked-v2-ngram")
PROMPTS = {
    "openai_gptoss": "<|start|>user<|message|> so we turn<|end|><|start|>assistant",
    "granite": " so we turn.\n\n",
}
# Kinds of token: part of a marker, thinking, answer.
M, T, O = 0, int(Phase.THINK), int(Phase.OUTPUT)  # noqa: E741
Said = tuple[tuple[str, int], ...]

NEXT = "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
THOUGHT = " so the walk goes on"
THOUGHT_TOKENS = 5
ANSWER = (" then we turn", O)
BEGIN, END = (ANALYSIS, M), (NEXT + FINAL, M)
# The model thinks, answers and thinks again, in words said before, so that they are drafted. The tokens of the first
# marker count as thinking until the marker is complete, so a cap for the second thinking must be larger than that.
AGAIN = (BEGIN, (THOUGHT, T), END, ANSWER, (NEXT + ANALYSIS, M), (THOUGHT, T))
AGAIN_CAP = 2 * THOUGHT_TOKENS + 3
THINKS, RESPONDS = "Here is my thought process:", "Here is my response:"


@dataclass(frozen=True)
class Case:
    """The model's script, the agent's text in place of it, and the model's continuation.

    prompt: the end of the prompt. ends: number of end markers.
    """

    said: Said
    cap: int | None = None
    written: str = ""
    after: Said = ()
    ends: int = 1
    prompt: str = ""


def _begun(pieces: Sequence[str], ends: int, *start: tuple[str, int]) -> dict[str, Case]:
    """Return cases with a cap after each beginning of the end marker number `ends`; `start` is the text before it."""
    thoughts = sum(text == THOUGHT for text, _ in start) + 1
    return {
        f"cap after {n} of end {ends}": Case(
            (*start, (THOUGHT, T), ("".join(pieces[:n]), M)),
            thoughts * THOUGHT_TOKENS + n,
            "".join(pieces[n:]),
            (ANSWER,),
            ends=ends,
        )
        for n in range(1, len(pieces))
    }


HARMONY_END = ("<|end|>", "<|start|>", "assistant", "<|channel|>", "fi", "nal", "<|message|>")
HARMONY = {
    "thinks, answers": Case((BEGIN, (THOUGHT, T), END, ANSWER)),
    "thinks anew": Case((*AGAIN, END, ANSWER), ends=2),
    "thinks on": Case((BEGIN, (THOUGHT, T), (NEXT + ANALYSIS, M), (THOUGHT, T), END, ANSWER)),
    "begins an end": Case((BEGIN, (f"{THOUGHT}<|end|> so<|end|><|start|> so{NEXT}<|channel|> so", T), END, ANSWER)),
    "begins a start": Case((BEGIN, (f"{THOUGHT}<|channel|>analysis so<|channel|>", T), END, ANSWER)),
    "begins a start in its answer": Case((BEGIN, (THOUGHT, T), END, (f" then{NEXT}<|channel|>analysis so", O)), ends=1),
    "a tool": Case((BEGIN, (THOUGHT, T), (f"{NEXT}<|channel|>commentary", M), (" to=user<|message|> so", O))),
    "a tool in the channel of thinking": Case(
        (BEGIN, (THOUGHT, T), (f"{NEXT}<|channel|>analysis to", M), ("=user<|message|> so", O)), 2 * THOUGHT_TOKENS + 5
    ),
    "a tool at once": Case((("<|channel|>analysis to", M), ("=user<|message|> so", O)), THOUGHT_TOKENS, ends=0),
    "an object": Case((BEGIN, (THOUGHT, T), (f"{NEXT}<|channel|>final <|constrain|>json<|message|>", M), ANSWER)),
    "thinks nothing": Case(((FINAL, M), ANSWER), ends=0),
    "no channel": Case((ANSWER,), ends=0),
    "cap in the middle": Case((BEGIN, (THOUGHT, T)), THOUGHT_TOKENS, NEXT + FINAL, (ANSWER,)),
    "cap of none": Case((BEGIN,), 0, NEXT + FINAL, (ANSWER,)),
    "cap out of reach": Case((BEGIN, (THOUGHT, T), END, ANSWER), 100),
    "cap after what was no end": Case((BEGIN, ("<|end|> so", T)), 2, NEXT + FINAL, (ANSWER,)),
    "cap in a start": Case(
        (BEGIN, (THOUGHT, T), (f"{NEXT}<|channel|>an", M)),
        THOUGHT_TOKENS + 5,
        "alysis<|message|>" + NEXT + FINAL,
        (ANSWER,),
    ),
    "cap in its second thinking": Case((*AGAIN, (" so the walk", T)), AGAIN_CAP, NEXT + FINAL, (ANSWER,), ends=2),
    "a prompt that opens thinking": Case(((THOUGHT, T), END, ANSWER), prompt=ANALYSIS),
    "a prompt that opens thinking, and a cap": Case(
        ((THOUGHT, T),), THOUGHT_TOKENS, NEXT + FINAL, (ANSWER,), prompt=ANALYSIS
    ),
    "a prompt that opens thinking, and a cap of none": Case((), 0, NEXT + FINAL, (ANSWER,), prompt=ANALYSIS),
    "a prompt that begins to open thinking": Case(
        (("<|message|>", M), (THOUGHT, T), END, ANSWER), prompt=ANALYSIS.removesuffix("<|message|>")
    ),
    "a prompt that closes it": Case((ANSWER,), 0, ends=0, prompt=FINAL),
    "a prompt with an earlier turn": Case(
        (BEGIN, (THOUGHT, T), END, ANSWER),
        prompt=f"{ANALYSIS}{THOUGHT}{NEXT}{FINAL} then<|end|>{PROMPTS['openai_gptoss']}",
    ),
    **_begun(HARMONY_END, 1, BEGIN),
    **_begun(HARMONY_END, 2, *AGAIN),
}
PROSE_END = (" Here", " is", " my", " response", ":")
PROSE_AGAIN = ((THINKS, M), (THOUGHT, T), (f" {RESPONDS}", M), ANSWER, (f" {THINKS}", M), (THOUGHT, T))
PROSE = {
    "thinks, answers": Case(((THINKS, M), (THOUGHT, T), (" " + RESPONDS, M), ANSWER)),
    "line feeds": Case(((f"{THINKS}\n\n", M), (f"{THOUGHT}.\n\n", T), (f"{RESPONDS}\n\n", M), ("so", O), ANSWER)),
    "other words": Case((("Here's my thought process:\n\n", M), (THOUGHT, T), (" Here's my response:\n\n", M), ANSWER)),
    "thinks anew": Case((*PROSE_AGAIN, (f" {RESPONDS}", M), ANSWER), ends=2),
    "begins an end": Case(
        ((THINKS, M), (f"{THOUGHT} Here is my walk Here's my response so", T), (f" {RESPONDS}", M), ANSWER)
    ),
    "thinks nothing": Case(((RESPONDS, M), ANSWER), ends=0),
    "cap in the middle": Case(((THINKS, M), (THOUGHT, T)), THOUGHT_TOKENS, RESPONDS, (ANSWER,)),
    "cap of none": Case(((f"{THINKS}\n\n", M),), 0, RESPONDS, (ANSWER,)),
    "cap in its second thinking": Case((*PROSE_AGAIN, (" so the walk", T)), AGAIN_CAP, RESPONDS, (ANSWER,), ends=2),
    "a prompt that opens thinking": Case(((THOUGHT, T), (f" {RESPONDS}", M), ANSWER), prompt=f"{THINKS}\n\n"),
    "a prompt that opens thinking, and a cap": Case(
        ((THOUGHT, T),), THOUGHT_TOKENS, RESPONDS, (ANSWER,), prompt=f"{THINKS}\n\n"
    ),
    "a prompt that closes it": Case((("so", O), ANSWER), 0, ends=0, prompt=f"{THINKS}{THOUGHT} {RESPONDS}\n\n"),
    **_begun(PROSE_END, 1, (f"{THINKS}\n\n", M)),
    **_begun(PROSE_END, 2, *PROSE_AGAIN),
}
CASES = {"openai_gptoss": HARMONY, "granite": PROSE}
WRITES = {"openai_gptoss": NEXT + FINAL, "granite": RESPONDS}
# Logit of a marker's token, which makes it almost certain; a mask's minus infinity stays as it is.
SURE = 1e6


@feature("markers of several tokens, gpt-oss's and Granite's: a forced end goes on where one is begun", *MARKED)
def markers(engine: Engine) -> None:
    """Caps are exact everywhere in a marker, in a second thinking, and after an unfinished marker; nothing else
    changes."""
    tokenizer = engine.llm.get_tokenizer()
    engine.llm.collective_rpc(follow_script)
    crossed = 0
    for parser, chosen in CASES.items():
        engine.control.apply({**NEUTRAL, "model": {"marked": {"reasoning_parser": parser}}})
        for name, case in chosen.items():
            script, tokens, kinds = expected(tokenizer, delayed(engine, case))
            said, rows, steps = scripted(
                engine, list(tokenizer.encode(PROMPTS[parser] + case.prompt)), script, case.cap
            )
            assert said == tokens, (name, tokenizer.decode(said), tokenizer.decode(tokens))
            assert reported(rows) == kinds, name
            flags = [row[1] for row in rows]
            assert sum(f & FLAG_END > 0 for f in flags) == case.ends, (name, flags)
            assert sum(f & FLAG_FORCED > 0 for f in flags) == bool(case.written), (name, flags)
            ends = [at for at, f in enumerate(flags) if f & FLAG_END]
            crossed += any(begin < at < past - 1 for at in ends for begin, past in steps)
        assert tokenizer.decode(engine.agent.tracker.markers.ending) == WRITES[parser]
    assert crossed > 0 or not engine.scheduler.num_spec_tokens


def delayed(engine: Engine, case: Case) -> Case:
    """Return the case as it is with asynchronous scheduling, which may let one token pass after a cap.

    A marker that opens thinking past its cap is then known a step late.
    """
    late = engine.build.asynchronous and case.cap == 0 and not case.prompt
    return replace(case, said=(*case.said, (" so", T))) if late else case


def scripted(
    engine: Engine, prompt: list[int], script: list[int], cap: int | None
) -> tuple[list[int], list[tuple[Any, ...]], list[tuple[int, int]]]:
    """Return the engine's output, the agent's report of each token, and where each step's tokens begin and end."""
    engine.llm.collective_rpc(take_script, args=(len(prompt), script))
    own = {} if cap is None else {"extra_args": {"meridian_max_think_tokens": cap}}
    ask = Ask(prompt, {"temperature": 0.0, "max_tokens": len(script), "ignore_eos": True, **own})
    ((answer,),), (seen,) = engine.observe([ask])
    return answer.tokens, list(seen.rows), steps_of(seen)


def follow_script(worker: Any) -> None:
    """Make each worker's model follow the script: its output depends only on the token's position."""
    model = worker.model_runner.model
    forward, compute_logits = model.forward, model.compute_logits

    def place(*args: Any, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(*args, positions=positions, **kwargs)
        return positions.to(hidden.dtype)[:, None].expand_as(hidden).contiguous()

    def follow(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = compute_logits(hidden, *args, **kwargs)
        begin, script = worker.meridian_script
        for row, position in enumerate(hidden[:, 0].tolist()):
            if 0 <= (at := int(position) + 1 - begin) < len(script):
                logits[row, script[at]] += SURE
        return logits

    worker.meridian_script = 0, []
    model.forward, model.compute_logits = place, follow


def take_script(worker: Any, begin: int, script: list[int]) -> None:
    """Set the script for the next request, which runs alone. begin: the prompt's length."""
    worker.meridian_script = begin, script


def tokens_of(tokenizer: Any, said: Said) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and the kind of each; a token with any part of a marker counts as marker."""
    tokens = list(tokenizer.encode("".join(text for text, _ in said)))
    kinds = [kind for text, kind in said for _ in text]
    at, labels = 0, []
    for token in tokens:
        length = len(tokenizer.decode([token]))
        labels.append(M if M in kinds[at : at + length] else kinds[at])
        at += length
    assert at == len(kinds)
    return tokens, labels


def expected(tokenizer: Any, case: Case) -> tuple[list[int], list[int], list[int]]:
    """Return the script, the engine's expected output, and the kind of each of its tokens."""
    (said, kinds), (after, more) = tokens_of(tokenizer, case.said), tokens_of(tokenizer, case.after)
    written = list(tokenizer.encode(case.written))
    unsaid = list(tokenizer.encode(" so")) * len(written)
    return said + unsaid + after, said + written + after, kinds + [M] * len(written) + more


def reported(rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return the kind of each token as the agent reported it, with the tokens that markers took back."""
    labels: list[int] = []
    for phase, flags, *_ in rows:
        if flags & FLAG_MARKER:
            back = flags >> TAKE_BACK_SHIFT
            labels[len(labels) - back :] = [M] * back
        labels.append(M if flags & FLAG_MARKER else phase)
    return labels
