"""Finds the tokens that begin and end thinking on this engine: the module asks vLLM's reasoning parser, its
--reasoning-config and the tokenizer, unless the policy names the tokens.

The module knows nothing about requests or decisions. Its functions run when the engine starts and on the link's thread,
never in a step.
"""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.phases import Markers, no_markers
from meridian_agent.vllm_adapter.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian.v1 import agent_pb2

logger = logging.getLogger("vllm.meridian")

Tokens = tuple[int, ...]

# The agent asks a parser on behalf of a request that thinks, once for each effort: some parsers name no markers unless
# the request's chat_template_kwargs switch thinking on, and some name only the markers of the request's effort.
THINKING = {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}
EFFORTS = ("high", "medium", "low", "minimal", "xhigh", "max")

# Start and end markers of the parsers that name none themselves, and what begins a call of a tool. A forced end writes
# the first of the end markers.
#
# openai_gptoss: vLLM's parser names no marker, and from vLLM 0.27 on it reports thinking as ended in every text.
# vllm/parser/harmony.py distinguishes thinking (analysis) from the answer (final, commentary) by channel. Messages to
# tools do not count as thinking, in the analysis channel neither.
_NEXT = "<|end|><|start|>assistant"
_ANSWERS = ("final<|message|>", "final json<|message|>", "final <|constrain|>json<|message|>", "commentary")
HARMONY = (
    [f"{before}<|channel|>analysis<|message|>" for before in (_NEXT, "")],
    [f"{before}<|channel|>{answer}" for answer in _ANSWERS for before in (_NEXT, "")] + [f"{_NEXT} to"],
    [f"{before}<|channel|>analysis to" for before in (_NEXT, "")],
)
# inkling: the parser names <|end_message|> as the end of thinking, but this token ends blocks of every kind. For vLLM
# thinking is over once a block of another kind begins (vllm/parser/inkling.py), and a text block begins with the role
# and the kind.
_BLOCK = "<|end_message|><|message_model|>"
_KINDS = ("text", "invoke_tool_json", "invoke_tool_text", "tool_error", "model_end_sampling")
INKLING = (
    [f"{before}<|content_thinking|>" for before in (_BLOCK, "")],
    [f"{before}<|content_{kind}|>" for kind in _KINDS for before in (_BLOCK, "")],
    list[str](),
)
# muse_glimmer, and from vLLM 0.33 on muse with its alias: the parser names no marker and works on text. Thinking is a
# message to `self`, followed by a message to `user` or by a tool call in the ATEM format, which
# vllm/tool_parsers/muse_glimmer_tool_parser.py shows.
_MESSAGE = "<|eom|><|start|>assistant"
MUSE = (
    [f"{before} to=self<|message|>" for before in (_MESSAGE, "<|start|>assistant", "")],
    [f"{_MESSAGE} to=user<|message|>", " to=user<|message|>", "<atem:function_calls>", "<atem:invoke"],
    list[str](),
)
WRITTEN = {"openai_gptoss": HARMONY, "inkling": INKLING, "muse_glimmer": MUSE, "muse": MUSE, "musespark1x": MUSE}


# Tokens that end a turn in order to call a tool: gpt-oss's, which calls some tools within its analysis, and Llama's.
CALL_ENDS = ("<|call|>", "<|eom_id|>")


class MarkersNotFound(BadSettings):
    """A parser names no markers, or this tokenizer cannot encode them; the message says which of these and why."""


@dataclass(frozen=True, slots=True)
class NamedMarkers:
    """The start and end markers that a parser names for one effort, and what begins a call of a tool; a forced end
    writes the first end marker."""

    starts: tuple[Tokens, ...]
    ends: tuple[Tokens, ...]
    calls: tuple[Tokens, ...] = ()


def resolve(vllm_config: Any, settings: agent_pb2.Settings) -> Markers:
    """Return the thinking markers from the policy or, if it names none, from vLLM's --reasoning-config, its reasoning
    parser and the tokenizer. If none of these names markers, the result is marked as unknown and contains the reason.

    Raises BadSettings with the field and its value if the policy names something that this engine cannot use: a token
    id outside the vocabulary, a parser that is unknown or does not fit the tokenizer, or a text when the engine has no
    tokenizer to encode it.
    """
    starts, ends = (_named(vllm_config, settings, f"think_{which}_token_ids") for which in ("start", "end"))
    closing, prefix = (_encoded(vllm_config, settings, name) for name in ("closing_text", "eat_answer_prefix"))
    if starts and ends:
        return _with_turn_ends(Markers(starts, ends, closing, prefix), vllm_config)
    try:
        by_effort, transition = _markers_of_vllm(vllm_config, settings.reasoning_parser)
    except MarkersNotFound as error:
        if settings.reasoning_parser:
            raise BadSettings(f"reasoning_parser {settings.reasoning_parser!r}: {error}") from error
        return no_markers(_how_to_name(vllm_config, str(error)))
    if starts or ends:
        by_effort = [NamedMarkers(starts or one.starts, ends or one.ends) for one in by_effort[:1]]
    merged = NamedMarkers(
        *(tuple(dict.fromkeys(m for one in by_effort for m in getattr(one, w))) for w in ("starts", "ends", "calls"))
    )
    own = {start: one.ends[0] for one in reversed(by_effort) for start in one.starts} if len(by_effort) > 1 else {}
    texts = closing or transition, prefix
    markers = Markers(merged.starts, merged.ends, *texts, tuple(own.items()), calls=merged.calls)
    return _with_turn_ends(markers, vllm_config)


def _with_turn_ends(markers: Markers, vllm_config: Any) -> Markers:
    """Return the markers with their texts, and with the tokens with which the model ends its turns, by its
    configuration, its generation configuration and its tokenizer. A request's own stop tokens are none of them, because
    they may be any tokens."""
    config = vllm_config.model_config
    try:
        generation = config.try_get_generation_config()
    except Exception as error:
        logger.info("meridian: the model's generation configuration is not known: %s", error)
        generation = {}
    named = [getattr(config.hf_config, "eos_token_id", None), generation.get("eos_token_id")]
    tokenizer = tokenizer_of(vllm_config)
    named.append(getattr(tokenizer, "eos_token_id", None))
    ids = [token for tokens in named for token in (tokens if isinstance(tokens, (list, tuple)) else [tokens])]
    turn_ends = frozenset(token for token in ids if token is not None)
    if tokenizer is None:
        return replace(markers, turn_ends=turn_ends)
    added = tokenizer.get_added_vocab()
    call_ends = turn_ends & {added.get(text, -1) for text in CALL_ENDS}
    texts = {_text(tokenizer, marker) for marker in markers.starts + markers.ends}
    return replace(markers, turn_ends=turn_ends, call_ends=call_ends, texts=frozenset(texts) - {""})


def _text(tokenizer: Any, marker: Tokens) -> str:
    try:
        return str(tokenizer.decode([*marker])).strip()
    except Exception as error:
        logger.info("meridian: the text of the marker %s is not known: %s", list(marker), error)
        return ""


def _named(vllm_config: Any, settings: agent_pb2.Settings, name: str) -> tuple[Tokens, ...]:
    """Return the one marker that the policy gives as token ids in the field `name`; empty if the field is empty. Raises
    BadSettings."""
    tokens, vocabulary = tuple(getattr(settings, name)), vllm_config.model_config.get_vocab_size()
    if outside := [token for token in tokens if token >= vocabulary]:
        raise BadSettings(f"{name} must be below {vocabulary}, the size of the vocabulary; got {outside[0]}")
    return (tokens,) if tokens else ()


def _encoded(vllm_config: Any, settings: agent_pb2.Settings, name: str) -> Tokens:
    """Encode the text in one field of the settings as tokens. Raises BadSettings."""
    if not (text := getattr(settings, name)):
        return ()
    if (tokenizer := tokenizer_of(vllm_config)) is None:
        raise BadSettings(f"{name} cannot be encoded: the engine has no tokenizer")
    return _ids(tokenizer, text)


def parser_of(vllm_config: Any) -> str:
    """Return the name of the reasoning parser that vLLM was started with; empty if there is none."""
    configured = getattr(vllm_config, "reasoning_config", None)
    return vllm_config.structured_outputs_config.reasoning_parser or getattr(configured, "reasoning_parser", None) or ""


def _how_to_name(vllm_config: Any, why: str) -> str:
    """Return a message that says why no markers are known and how an operator can name them."""
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


def _markers_of_vllm(vllm_config: Any, parser_name: str) -> tuple[list[NamedMarkers], Tokens]:
    """Return the markers that vLLM names, once for each effort that has its own markers, and the tokens that vLLM's
    --reasoning-config would write before a forced end. parser_name: the parser to ask instead of the one that vLLM was
    started with; may be empty. Raises MarkersNotFound."""
    tokenizer, name = tokenizer_of(vllm_config), parser_name or parser_of(vllm_config)
    if tokenizer is None:
        raise MarkersNotFound("and the engine has no tokenizer to find markers with")
    start, end = ("", "") if parser_name else _configured(vllm_config)
    try:
        by_effort = of_parser(name, tokenizer) if name else [_usual(tokenizer)]
    except MarkersNotFound:
        if not (start and end):
            raise
        by_effort = []
    if not start and not end:
        return by_effort, ()
    transition: Tokens = ()
    natural = [tokenizer.decode(list(one.ends[0])) for one in by_effort]
    if end and natural and natural[0] in end:
        # The configured text after the parser's own end marker would already belong to the answer.
        transition = _ids(tokenizer, end[: end.rindex(natural[0])])
        end = natural[0]
    first = by_effort[0] if by_effort else NamedMarkers((), ())
    starts, ends = (_spelled(tokenizer, [text]) if text else () for text in (start, end))
    return [NamedMarkers((*starts, *first.starts), (*ends, *first.ends), first.calls), *by_effort[1:]], transition


def _configured(vllm_config: Any) -> tuple[str, str]:
    """Return the start and end texts of vLLM's --reasoning-config; a text that it does not name is empty."""
    configured = getattr(vllm_config, "reasoning_config", None)
    start, end = (getattr(configured, f"reasoning_{which}_str", None) or "" for which in ("start", "end"))
    return start, end


def _usual(tokenizer: Any) -> NamedMarkers:
    """Return the markers of an engine without a reasoning parser: <think> and </think>, each as a single token. Raises
    MarkersNotFound."""
    vocabulary = tokenizer.get_vocab()
    tokens = [vocabulary.get(text) for text in ("<think>", "</think>")]
    if None in tokens:
        raise MarkersNotFound("and its tokenizer has no tokens <think> and </think>")
    return NamedMarkers(*(((token,),) for token in tokens))


def of_parser(name: str, tokenizer: Any) -> list[NamedMarkers]:
    """Return the markers that one of vLLM's reasoning parsers names, once for each effort that has its own markers.
    Raises MarkersNotFound."""
    return list(dict.fromkeys(named for _, named in asked(name, tokenizer)))


def asked(name: str, tokenizer: Any) -> list[tuple[Any, NamedMarkers]]:
    """Return the parsers that vLLM builds for requests of each effort, each with the markers that it names. Raises
    MarkersNotFound."""
    return [(parser, _asked(name, parser, tokenizer)) for parser in _built(name, tokenizer)]


def _built(name: str, tokenizer: Any) -> list[Any]:
    """Build the parser in the way vLLM does, once for each effort of a request that thinks. Raises MarkersNotFound."""
    from vllm.reasoning import ReasoningParserManager

    try:
        parser_class = ReasoningParserManager.get_reasoning_parser(name)
    except Exception as error:
        raise MarkersNotFound(f"which this vLLM does not have: {_one_line(error)}") from error
    built, problem = [], None
    for effort in EFFORTS:
        try:
            # Each parser gets its own dictionary, because some parsers change it.
            built.append(parser_class(tokenizer, chat_template_kwargs={**THINKING, "reasoning_effort": effort}))
        except Exception as error:
            problem = problem or error
    if not built:
        raise MarkersNotFound(f"which does not fit this tokenizer: {_one_line(problem)}") from problem
    return built


def _asked(name: str, parser: Any, tokenizer: Any) -> NamedMarkers:
    """Return the markers that one parser names, and the other tokens that end thinking for it. Raises
    MarkersNotFound."""
    named = _of_ids(parser, tokenizer)
    if named is None:
        named = NamedMarkers(*(_spelled(tokenizer, texts) for texts in WRITTEN.get(name) or _texts(parser)))
    if not named.ends:
        raise MarkersNotFound("which names no end of thinking that this tokenizer can write")
    other = () if name in WRITTEN else _other_ends(parser, tokenizer, named)
    return NamedMarkers(named.starts, (*named.ends, *other), named.calls)


def _texts(parser: Any) -> tuple[list[str], list[str]]:
    """Return the texts that open thinking for a parser and the texts that close it; either list may be empty. The first
    closing text is the one that a forced end writes."""
    if hasattr(parser, "valid_response_starts"):
        # This parser's markers are sentences, and the last sentence of its list is the usual end marker.
        return list(parser.valid_think_starts), list(parser.valid_response_starts)[::-1]
    if (template := getattr(parser, "response_template", None)) is not None:
        thinking = template.fields.get("thinking")
        return (
            ([], []) if thinking is None else (list(thinking.open_literals or ()), list(thinking.close_literals or ()))
        )
    starts, ends = (_text_of(parser, which) for which in ("start", "end"))
    return starts, ends


def _text_of(parser: Any, which: str) -> list[str]:
    """Return the text that a parser names as its start or end, or the text of the token id that it names; an empty list
    if it names neither."""
    text, token = (getattr(parser, name, None) for name in (f"reasoning_{which}_str", f"{which}_token_id"))
    return [text] if text else [known for known, id_ in parser.vocab.items() if id_ == token]


def _of_ids(parser: Any, tokenizer: Any) -> NamedMarkers | None:
    """Return the markers of a parser that has fixed token ids; None for any other parser. Raises MarkersNotFound if
    these ids are other texts in this tokenizer."""
    if not hasattr(parser, "response_start_ids"):
        return None
    for ids, text in (
        (parser.think_start_ids, parser.think_start_expr),
        (parser.response_start_ids, parser.response_start_expr),
    ):
        if not re.fullmatch(text, tokenizer.decode(ids)):
            raise MarkersNotFound(f"which reads {text} as tokens {ids}, and those are other texts in this tokenizer")
    return NamedMarkers(
        (tuple(parser.think_start_ids), tuple(parser.think_start_ids_fast)),
        (tuple(parser.response_start_ids), tuple(parser.response_start_ids_fast)),
    )


def _other_ends(parser: Any, tokenizer: Any, named: NamedMarkers) -> Iterable[Tokens]:
    """Yield the added tokens that also end thinking for a parser, for example a token that begins a tool call."""
    thinking = [*(named.starts[0] if named.starts else ()), *_ids(tokenizer, "so")]
    if _ended(parser, thinking):
        return
    own = {token for marker in (*named.starts, *named.ends) for token in marker}
    for token in sorted(set(tokenizer.get_added_vocab().values()) - own):
        if _ended(parser, [*thinking, token]):
            yield (token,)


def _ended(parser: Any, tokens: list[int]) -> bool:
    """Whether a parser says that thinking has ended in these tokens; False if the parser raises an exception."""
    try:
        return parser.is_reasoning_end(tokens) is True
    except Exception:
        logger.debug("meridian: %s.is_reasoning_end failed", type(parser).__name__, exc_info=True)
        return False


def _spelled(tokenizer: Any, texts: Sequence[str]) -> tuple[Tokens, ...]:
    """Return all ways to encode these texts as tokens, without those that contain the unknown token."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    ways = (way for text in texts for way in _ways(tokenizer, text))
    return tuple(dict.fromkeys(way for way in ways if way and (unknown is None or unknown not in way)))


def _ways(tokenizer: Any, text: str) -> list[Tokens]:
    """Return the ways to encode a text as tokens, the text without context first. A tokenizer may merge a blank before
    the text into the first token, or line feeds after the text into the last token."""
    alone = _ids(tokenizer, text)
    if set(alone) <= set(tokenizer.get_added_vocab().values()):
        return [alone]
    ways = [alone]
    for before, after in itertools.product(("", " ", "\n"), ("", "\n", "\n\n")):
        tokens = _ids(tokenizer, before + text + after)
        first = max((i for i in range(len(tokens)) if text in tokenizer.decode(tokens[i:])), default=0)
        last = next(
            (i for i in range(first, len(tokens) + 1) if text in tokenizer.decode(tokens[first:i])), len(tokens)
        )
        ways.append(tokens[first:last])
    return ways


def _ids(tokenizer: Any, text: str) -> Tokens:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _one_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
