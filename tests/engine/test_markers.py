"""Markers of several tokens, gpt-oss's and Granite's, on a real engine whose every token is scripted: each token's
phase is what the text says, and a forced end goes on where the model has begun one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from meridian_agent.phases import FLAG_END, FLAG_FORCED, FLAG_MARKER, TAKE_BACK_SHIFT, Phase
from tests.data import marked
from tests.processes import ENGINE_ENV, ROOT, Control

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPTS = {
    "openai_gptoss": "<|start|>user<|message|> so we turn<|end|><|start|>assistant",
    "granite": " so we turn.\n\n",
}
BUILDS = ("v1", "async")
# What a token is: of a marker, of thinking, of the answer.
M, T, O = 0, int(Phase.THINK), int(Phase.OUTPUT)  # noqa: E741
Said = tuple[tuple[str, int], ...]

NEXT = "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
THOUGHT = " so the walk goes on"
THOUGHT_TOKENS = 5
ANSWER = (" then we turn", O)
BEGIN, END = (ANALYSIS, M), (NEXT + FINAL, M)
THINKS, RESPONDS = "Here is my thought process:", "Here is my response:"


@dataclass(frozen=True)
class Case:
    """What the model says, what the agent writes then in place of it, and how the model goes on."""

    said: Said
    cap: int | None = None
    written: str = ""
    after: Said = ()
    ends: int = 1


def _begun(pieces: Sequence[str], start: Said) -> dict[str, Case]:
    """A cap that falls behind each beginning of an end marker."""
    return {
        f"cap after {n} of an end": Case(
            (*start, (THOUGHT, T), ("".join(pieces[:n]), M)), THOUGHT_TOKENS + n, "".join(pieces[n:]), (ANSWER,)
        )
        for n in range(1, len(pieces))
    }


HARMONY = {
    "thinks, answers": Case((BEGIN, (THOUGHT, T), END, ANSWER)),
    "thinks anew": Case((BEGIN, (THOUGHT, T), END, ANSWER, (NEXT + ANALYSIS, M), (THOUGHT, T), END, ANSWER), ends=2),
    "thinks on": Case((BEGIN, (THOUGHT, T), (NEXT + ANALYSIS, M), (THOUGHT, T), END, ANSWER)),
    "begins an end": Case((BEGIN, (f"{THOUGHT}<|end|> so<|end|><|start|> so{NEXT}<|channel|> so", T), END, ANSWER)),
    "begins a start": Case((BEGIN, (f"{THOUGHT}<|channel|>analysis so<|channel|>", T), END, ANSWER)),
    "begins a start in its answer": Case((BEGIN, (THOUGHT, T), END, (f" then{NEXT}<|channel|>analysis so", O)), ends=1),
    "a tool": Case((BEGIN, (THOUGHT, T), (f"{NEXT}<|channel|>commentary", M), (" to=user<|message|> so", O))),
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
    **_begun(("<|end|>", "<|start|>", "assistant", "<|channel|>", "fi", "nal", "<|message|>"), (BEGIN,)),
}
PROSE = {
    "thinks, answers": Case(((THINKS, M), (THOUGHT, T), (" " + RESPONDS, M), ANSWER)),
    "line feeds": Case(((f"{THINKS}\n\n", M), (f"{THOUGHT}.\n\n", T), (f"{RESPONDS}\n\n", M), ("so", O), ANSWER)),
    "other words": Case((("Here's my thought process:\n\n", M), (THOUGHT, T), (" Here's my response:\n\n", M), ANSWER)),
    "thinks anew": Case(
        (
            (THINKS, M),
            (THOUGHT, T),
            (f" {RESPONDS}\n\n", M),
            ANSWER,
            (f" {THINKS}", M),
            (THOUGHT, T),
            (f" {RESPONDS}", M),
            ANSWER,
        ),
        ends=2,
    ),
    "begins an end": Case(
        ((THINKS, M), (f"{THOUGHT} Here is my walk Here's my response so", T), (f" {RESPONDS}", M), ANSWER)
    ),
    "thinks nothing": Case(((RESPONDS, M), ANSWER), ends=0),
    "cap in the middle": Case(((THINKS, M), (THOUGHT, T)), THOUGHT_TOKENS, RESPONDS, (ANSWER,)),
    "cap of none": Case(((f"{THINKS}\n\n", M),), 0, RESPONDS, (ANSWER,)),
    **_begun((" Here", " is", " my", " response", ":"), ((f"{THINKS}\n\n", M),)),
}
CASES = {"openai_gptoss": HARMONY, "granite": PROSE}


def cases(build: str, parser: str) -> dict[str, Case]:
    """With asynchronous scheduling a marker that opens thinking past its cap is known a step late: one token of it."""
    late = build == "async"
    return {
        name: replace(case, said=(*case.said, (" so", T))) if late and case.cap == 0 else case
        for name, case in CASES[parser].items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("marked")
    marked.write(made / "model")
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def tokens_of(tokenizer: Any, said: Said) -> tuple[list[int], list[int]]:
    """The tokens of a text, and what each is; one that holds any of a marker is of the marker."""
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
    """The script, what the engine says, and what each token of that is."""
    (said, kinds), (after, more) = tokens_of(tokenizer, case.said), tokens_of(tokenizer, case.after)
    written = list(tokenizer.encode(case.written))
    unsaid = list(tokenizer.encode(" so")) * len(written)
    return said + unsaid + after, said + written + after, kinds + [M] * len(written) + more


@pytest.fixture(scope="module", params=BUILDS)
def heard(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, request: pytest.FixtureRequest
) -> dict[str, Any]:
    asked = {
        parser: [
            {"prompt": tokenizer.encode(PROMPTS[parser]), "script": expected(tokenizer, case)[0], "cap": case.cap}
            for case in cases(request.param, parser).values()
        ]
        for parser in CASES
    }
    control = Control(tmp_path_factory.mktemp(request.param))
    command = [sys.executable, "-m", "tests.engine.scripted", str(folder / "model"), control.target, request.param]
    env = {**os.environ, **ENGINE_ENV}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=env, input=json.dumps(asked), check=False
        )
    finally:
        control.process.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["is_async"], found["fault"]) == (request.param == "async", "")
    return found | {"build": request.param}


def reported(rows: list[list[int]]) -> list[int]:
    """What each token is as the agent reported it, with what markers took back."""
    labels: list[int] = []
    for phase, flags in rows:
        if flags & FLAG_MARKER:
            back = flags >> TAKE_BACK_SHIFT
            labels[len(labels) - back :] = [M] * back
        labels.append(M if flags & FLAG_MARKER else phase)
    return labels


@pytest.mark.parametrize("parser", list(CASES))
def test_every_token_is_what_the_text_says(heard: dict[str, Any], tokenizer: Any, parser: str) -> None:
    """Thinking anew, pieces that come to nothing, caps everywhere in a marker: exact, and nothing else is changed."""
    assert tokenizer.decode(heard[f"{parser} writes"]) == {"openai_gptoss": NEXT + FINAL, "granite": RESPONDS}[parser]
    for (name, case), run in zip(cases(heard["build"], parser).items(), heard[parser], strict=True):
        _, tokens, kinds = expected(tokenizer, case)
        assert run["tokens"] == tokens, (name, tokenizer.decode(run["tokens"]), tokenizer.decode(tokens))
        assert reported(run["rows"]) == kinds, name
        flags = [flags for _, flags in run["rows"]]
        assert sum(f & FLAG_END > 0 for f in flags) == case.ends, name
        assert sum(f & FLAG_FORCED > 0 for f in flags) == bool(case.written), name


def test_the_tokenizer_has_what_makes_markers_hard(tokenizer: Any) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(f"so {RESPONDS}\n\nso")]
    assert pieces == ["so", " Here", " is", " my", " response", ":\n\n", "so"]
    assert len(tokenizer.encode(THOUGHT)) == THOUGHT_TOKENS
