"""Finds the tokens that begin and end thinking on this engine: it asks vLLM's reasoning parser, its --reasoning-config
and the tokenizer, unless policy names them.

Knows nothing of requests or decisions. Called at the engine's start and
on the link's thread, never in a step.
"""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import Markers, no_markers
from meridian_agent.vllm_adapter.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian.v1 import agent_pb2

logger = logging.getLogger("vllm.meridian")

Tokens = tuple[int, ...]

# A parser is asked as for a request that thinks: unless a request's chat_template_kwargs switch thinking on, some
# parsers know nothing of it, and some know the markers of the request's effort only.
THINKING = {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}
EFFORTS = ("high", "medium", "low")

# Markers of parsers that cannot be asked. Of starts and ends each, the first of the ends is what a forced one writes.
#
# openai_gptoss: vLLM's parser names no marker, and from 0.27 on finds every text ended; vllm/parser/harmony.py tells
# thinking (analysis) from the answer (final, commentary) by channel. Messages to tools are no thinking.
_NEXT = "<|end|><|start|>assistant"
_ANSWERS = ("final<|message|>", "final json<|message|>", "final <|constrain|>json<|message|>", "commentary")
HARMONY = (
    [f"{before}<|channel|>analysis<|message|>" for before in (_NEXT, "")],
    [f"{before}<|channel|>{answer}" for answer in _ANSWERS for before in (_NEXT, "")] + [f"{_NEXT} to"],
)
# inkling: the end that its parser names, <|end_message|>, ends blocks of every kind; thinking is over for vLLM once a
# block of another kind begins (vllm/parser/inkling.py), and a text block begins with the role and the kind.
_BLOCK = "<|end_message|><|message_model|>"
_KINDS = ("text", "invoke_tool_json", "invoke_tool_text", "tool_error", "model_end_sampling")
INKLING = (
    [f"{before}<|content_thinking|>" for before in (_BLOCK, "")],
    [f"{before}<|content_{kind}|>" for kind in _KINDS for before in (_BLOCK, "")],
)
# muse_glimmer, and from 0.33 on muse with its alias: the parser names no marker and works on text; thinking is a
# message to `self`, followed by one to `user` or by a tool call in ATEM, as
# vllm/tool_parsers/muse_glimmer_tool_parser.py shows them.
_MESSAGE = "<|eom|><|start|>assistant"
MUSE = (
    [f"{before} to=self<|message|>" for before in (_MESSAGE, "<|start|>assistant", "")],
    [f"{_MESSAGE} to=user<|message|>", " to=user<|message|>", "<atem:function_calls>", "<atem:invoke"],
)
WRITTEN = {"openai_gptoss": HARMONY, "inkling": INKLING, "muse_glimmer": MUSE, "muse": MUSE, "musespark1x": MUSE}


class MarkersNotFound(ValueError):  # noqa: N818
    """A parser tells no markers, or this tokenizer cannot write them; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Found:
    """Markers as a parser tells them for one effort, the first end being what a forced one writes."""

    starts: tuple[Tokens, ...]
    ends: tuple[Tokens, ...]


def resolve(vllm_config: Any, settings: agent_pb2.Settings) -> Markers:
    """The thinking markers: what policy says first, then vLLM's --reasoning-config, its reasoning parser and the
    tokenizer. Where those tell none, markers that are not known, with the reason.

    Raises ValueError with the field and its value when policy names what this engine cannot have: a token id outside
    the vocabulary, a parser that is unknown or does not fit the tokenizer, a text without a tokenizer to encode it.
    """
    starts, ends = (_named(vllm_config, settings, f"think_{which}_token_ids") for which in ("start", "end"))
    closing, prefix = (_encoded(vllm_config, settings, name) for name in ("closing_text", "eat_answer_prefix"))
    if starts and ends:
        return Markers(starts, ends, closing, prefix)
    try:
        found, transition = _found(vllm_config, settings.reasoning_parser)
    except MarkersNotFound as error:
        if settings.reasoning_parser:
            raise ValueError(f"reasoning_parser {settings.reasoning_parser!r}: {error}") from error
        return no_markers(_how_to_name(vllm_config, str(error)))
    if starts or ends:
        found = [Found(starts or one.starts, ends or one.ends) for one in found[:1]]
    merged = Found(*(tuple(dict.fromkeys(m for one in found for m in getattr(one, w))) for w in ("starts", "ends")))
    own = {start: one.ends[0] for one in reversed(found) for start in one.starts} if len(found) > 1 else {}
    return Markers(merged.starts, merged.ends, closing or transition, prefix, tuple(own.items()))


def _named(vllm_config: Any, settings: agent_pb2.Settings, name: str) -> tuple[Tokens, ...]:
    """The marker that policy names by token ids, as the only one; none where it names none. Raises ValueError."""
    tokens, vocabulary = tuple(getattr(settings, name)), vllm_config.model_config.get_vocab_size()
    if outside := [token for token in tokens if token >= vocabulary]:
        raise ValueError(f"{name} must be below {vocabulary}, the size of the vocabulary; got {outside[0]}")
    return (tokens,) if tokens else ()


def _encoded(vllm_config: Any, settings: agent_pb2.Settings, name: str) -> Tokens:
    """A text of the settings in tokens. Raises ValueError."""
    if not (text := getattr(settings, name)):
        return ()
    if (tokenizer := tokenizer_of(vllm_config)) is None:
        raise ValueError(f"the engine has no tokenizer: {name} cannot be encoded")
    return _ids(tokenizer, text)


def parser_of(vllm_config: Any) -> str:
    """The reasoning parser that vLLM was started with; empty for none."""
    configured = getattr(vllm_config, "reasoning_config", None)
    return vllm_config.structured_outputs_config.reasoning_parser or getattr(configured, "reasoning_parser", None) or ""


def _how_to_name(vllm_config: Any, why: str) -> str:
    """Why no markers are known, and what to do about it."""
    served = vllm_config.model_config.served_model_name
    model = str(served[0] if isinstance(served, (list, tuple)) else served)
    name = parser_of(vllm_config)
    began = (
        f"vLLM was started with --reasoning-parser {name}" if name else "vLLM was started without --reasoning-parser"
    )
    other = "another one" if name else "one"
    return (
        f"{began}, {why}; name {other} as reasoning_parser, or the tokens as think_start_token_ids and "
        f'think_end_token_ids, in [model."{model}"] of the policy, or start vLLM with {other}'
    )


def _found(vllm_config: Any, parser_name: str) -> tuple[list[Found], Tokens]:
    """The markers that vLLM tells, for each effort that has its own, and the text that its --reasoning-config would
    write before a forced end. parser_name: asked in place of vLLM's own. Raises MarkersNotFound."""
    tokenizer, name = tokenizer_of(vllm_config), parser_name or parser_of(vllm_config)
    if tokenizer is None:
        raise MarkersNotFound("and the engine has no tokenizer to find markers with")
    start, end = ("", "") if parser_name else _configured(vllm_config)
    try:
        found = of_parser(name, tokenizer) if name else [_usual(tokenizer)]
    except MarkersNotFound:
        if not (start and end):
            raise
        found = []
    if not start and not end:
        return found, ()
    transition: Tokens = ()
    natural = [tokenizer.decode(list(one.ends[0])) for one in found]
    if end and natural and natural[0] in end:
        # Tokens after the parser's own end belong to the answer already.
        transition = _ids(tokenizer, end[: end.rindex(natural[0])])
        end = natural[0]
    first = found[0] if found else Found((), ())
    starts, ends = (_spelled(tokenizer, [text]) if text else () for text in (start, end))
    return [Found((*starts, *first.starts), (*ends, *first.ends)), *found[1:]], transition


def _configured(vllm_config: Any) -> tuple[str, str]:
    """The texts of vLLM's --reasoning-config; empty where it names none."""
    configured = getattr(vllm_config, "reasoning_config", None)
    start, end = (getattr(configured, f"reasoning_{which}_str", None) or "" for which in ("start", "end"))
    return start, end


def _usual(tokenizer: Any) -> Found:
    """The markers of an engine without a parser: <think> and </think>, as one token each. Raises MarkersNotFound."""
    vocabulary = tokenizer.get_vocab()
    tokens = [vocabulary.get(text) for text in ("<think>", "</think>")]
    if None in tokens:
        raise MarkersNotFound("and its tokenizer has no tokens <think> and </think>")
    return Found(*(((token,),) for token in tokens))


def of_parser(name: str, tokenizer: Any) -> list[Found]:
    """The markers that a reasoning parser of vLLM's tells, for each effort that has markers of its own. Raises
    MarkersNotFound."""
    return list(dict.fromkeys(found for _, found in asked(name, tokenizer)))


def asked(name: str, tokenizer: Any) -> list[tuple[Any, Found]]:
    """The parsers that vLLM builds for requests of each effort, with what each tells. Raises MarkersNotFound."""
    return [(parser, _asked(name, parser, tokenizer)) for parser in _built(name, tokenizer)]


def _built(name: str, tokenizer: Any) -> list[Any]:
    """The parser as vLLM builds it for requests that think with each effort. Raises MarkersNotFound."""
    from vllm.reasoning import ReasoningParserManager

    try:
        parser_class = ReasoningParserManager.get_reasoning_parser(name)
    except Exception as error:
        raise MarkersNotFound(f"which this vLLM does not have: {_one_line(error)}") from error
    built, problem = [], None
    for effort in EFFORTS:
        try:
            # Parsers change what they are given.
            built.append(parser_class(tokenizer, chat_template_kwargs={**THINKING, "reasoning_effort": effort}))
        except Exception as error:
            problem = problem or error
    if not built:
        raise MarkersNotFound(f"which does not fit this tokenizer: {_one_line(problem)}") from problem
    return built


def _asked(name: str, parser: Any, tokenizer: Any) -> Found:
    """The markers that one parser tells, other ends than its own included. Raises MarkersNotFound."""
    found = _of_ids(parser, tokenizer)
    if found is None:
        starts, ends = (_spelled(tokenizer, texts) for texts in WRITTEN.get(name) or _texts(parser))
        found = Found(starts, ends)
    if not found.ends:
        raise MarkersNotFound("which names no end of thinking that this tokenizer can write")
    other = () if name in WRITTEN else _other_ends(parser, tokenizer, found)
    return Found(found.starts, (*found.ends, *other))


def _texts(parser: Any) -> tuple[list[str], list[str]]:
    """The texts that open and close thinking for a parser, the one to write first; either may be empty."""
    if hasattr(parser, "valid_response_starts"):
        # Sentences; the last one is the usual one.
        return list(parser.valid_think_starts), list(parser.valid_response_starts)[::-1]
    if (template := getattr(parser, "response_template", None)) is not None:
        thinking = template.fields.get("thinking")
        return (
            ([], []) if thinking is None else (list(thinking.open_literals or ()), list(thinking.close_literals or ()))
        )
    starts, ends = (_text_of(parser, which) for which in ("start", "end"))
    return starts, ends


def _text_of(parser: Any, which: str) -> list[str]:
    """The one text that a parser names as its start or end, or that of the token which it knows; none where it knows
    neither."""
    text, token = (getattr(parser, name, None) for name in (f"reasoning_{which}_str", f"{which}_token_id"))
    return [text] if text else [known for known, id_ in parser.vocab.items() if id_ == token]


def _of_ids(parser: Any, tokenizer: Any) -> Found | None:
    """The markers of a parser that compares with token ids of its own; None for any other parser. Raises
    MarkersNotFound where this tokenizer has other texts at those ids."""
    if not hasattr(parser, "response_start_ids"):
        return None
    for ids, text in (
        (parser.think_start_ids, parser.think_start_expr),
        (parser.response_start_ids, parser.response_start_expr),
    ):
        if not re.fullmatch(text, tokenizer.decode(ids)):
            raise MarkersNotFound(f"which reads {text} as tokens {ids}, and those are other texts in this tokenizer")
    return Found(
        (tuple(parser.think_start_ids), tuple(parser.think_start_ids_fast)),
        (tuple(parser.response_start_ids), tuple(parser.response_start_ids_fast)),
    )


def _other_ends(parser: Any, tokenizer: Any, found: Found) -> Iterable[Tokens]:
    """The added tokens that end thinking for a parser, too, those that begin a tool call for one."""
    thinking = [*(found.starts[0] if found.starts else ()), *_ids(tokenizer, "so")]
    if _ended(parser, thinking):
        return
    own = {token for marker in (*found.starts, *found.ends) for token in marker}
    for token in sorted(set(tokenizer.get_added_vocab().values()) - own):
        if _ended(parser, [*thinking, token]):
            yield (token,)


def _ended(parser: Any, tokens: list[int]) -> bool:
    """Whether a parser finds thinking ended in these tokens; one that fails at the question does not."""
    try:
        return parser.is_reasoning_end(tokens) is True
    except Exception:
        logger.debug("meridian: %s does not say whether thinking has ended", type(parser).__name__, exc_info=True)
        return False


def _spelled(tokenizer: Any, texts: Sequence[str]) -> tuple[Tokens, ...]:
    """The ways to write these texts in tokens; none of a text that needs the unknown token."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    ways = (way for text in texts for way in _ways(tokenizer, text))
    return tuple(dict.fromkeys(way for way in ways if way and (unknown is None or unknown not in way)))


def _ways(tokenizer: Any, text: str) -> list[Tokens]:
    """The ways to write a text in tokens, by itself first: a tokenizer may put the blank before it, or the line feeds
    after it, into one token with its first or last."""
    alone = _ids(tokenizer, text)
    if set(alone) <= set(tokenizer.get_added_vocab().values()):
        return [alone]
    found = [alone]
    for before, after in itertools.product(("", " ", "\n"), ("", "\n", "\n\n")):
        tokens = _ids(tokenizer, before + text + after)
        first = max((i for i in range(len(tokens)) if text in tokenizer.decode(tokens[i:])), default=0)
        last = next(
            (i for i in range(first, len(tokens) + 1) if text in tokenizer.decode(tokens[first:i])), len(tokens)
        )
        found.append(tokens[first:last])
    return found


def _ids(tokenizer: Any, text: str) -> Tokens:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _one_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
