"""The table of vLLM's reasoning parsers: the markers that the agent finds for each, and whether vLLM agrees.

`python -m tests.parsers` reads the installed vLLM; `--save` writes the table to tests/data/parsers and updates the
summary in the agent's thinking_markers.md. The parsers' own tokenizers are not available here, so the module makes one
for each parser with the tokens that it asks for.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DATA = Path(__file__).parent / "data" / "parsers"
PAGE = Path(__file__).parent.parent / "meridian_agent" / "vllm_adapter" / "thinking_markers.md"
BEGIN, END = "<!-- parsers: made by `python -m tests.parsers --save` -->\n", "<!-- /parsers -->\n"
EOS = "<|endoftext|>"

# The same split as cl100k's: a word takes the character before it, punctuation takes the blank before it and the line
# feeds after it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
# Pieces that belong together, in the order in which they join. Hunyuan's parser needs "<th" joined before "think".
MERGES = (
    "t h",
    *("i n", "in k", "< th", "th ink"),
    *("a n", "s w", "an sw", "answ e", "answe r"),
    *("< /", "Ġ </", "> Ċ", ">Ċ Ċ", "Ċ Ċ"),
    *("Ġ s", "Ġs o", "Ġ w", "Ġw e"),
)
# Hunyuan's parser compares with these ids of its own vocabulary (vllm/reasoning/hunyuan_a13b_reasoning_parser.py).
HUNYUAN = {
    "Ċ": 198,
    "</": 524,
    "think": 27963,
    ">Ċ": 397,
    "<": 27,
    "answer": 9399,
    "<th": 14023,
    "ink": 771,
    ">ĊĊ": 1363,
    ">": 29,
}
# A checkpoint's own description of its output, which the parser `hf` reads. The description has two closers, because a
# checkpoint may name several.
TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"thinking": {"open": "<think>", "close": ["</think>", "<|end_think|>"]}, "content": {}},
}
CHANNEL_TOKEN = r"<\|\w*\|>"
THOUGHT, ANSWER = "so we so we", " so we so"


def tokenizer_with(added: Sequence[str], template: dict[str, Any] | None = None) -> Any:
    """Return a byte-level BPE tokenizer in which these texts are tokens of their own."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(first, second) for first, second in (merge.split(" ") for merge in MERGES)]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    vocabulary, free = dict(HUNYUAN), iter(range(30_000, 40_000))
    for piece in pieces:
        vocabulary.setdefault(piece, next(free))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *added)])
    own = {} if template is None else {"response_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False, **own)


class Asked(dict[str, int]):
    """A vocabulary that notes the missing texts that are looked up in it."""

    def __init__(self, known: dict[str, int]) -> None:
        super().__init__(known)
        self.missed: dict[str, None] = {}

    def get(self, text: str, default: Any = None) -> Any:
        # The same result as dict.get, but a missing text is noted.
        return super().get(text, default) if text in self else default

    def __contains__(self, text: object) -> bool:
        found = super().__contains__(text)
        if not found:
            self.missed[str(text)] = None
        return found

    def __missing__(self, text: str) -> int:
        self.missed[text] = None
        raise KeyError(text)


def asked_for(name: str) -> list[str]:
    """Return the tokens that a parser looks for, by adding the tokens that it missed until it misses none."""
    from meridian_agent.vllm_adapter.reasoning_markers import WRITTEN, MarkersNotFound, of_parser

    # The agent knows some parsers' texts beforehand, so it does not look them up; their channel tokens are added here.
    written = "".join(text for texts in WRITTEN.get(name, ()) for text in texts)
    added: dict[str, None] = dict.fromkeys(re.findall(CHANNEL_TOKEN, written))
    while True:
        tokenizer = made_for(name, list(added))
        vocabulary = Asked(tokenizer.get_vocab())
        tokenizer.get_vocab = lambda vocabulary=vocabulary: vocabulary
        to_id = tokenizer.convert_tokens_to_ids
        tokenizer.convert_tokens_to_ids = lambda text, to_id=to_id, vocabulary=vocabulary: (
            vocabulary.get(text) if isinstance(text, str) else to_id(text)
        )
        with contextlib.suppress(MarkersNotFound):
            told = (tokenizer.decode(end) for found in of_parser(name, tokenizer) for end in found.starts + found.ends)
            vocabulary.missed.update(dict.fromkeys(re.findall(CHANNEL_TOKEN, "".join(told))))
        new = [text for text in vocabulary.missed if text not in added and re.fullmatch(r"\W.*\W", text)]
        if not new:
            return list(added)
        added.update(dict.fromkeys(new))


def made_for(name: str, added: list[str]) -> Any:
    return tokenizer_with(added, TEMPLATE if name in ("hf", "beam") else None)


def config_of(tokenizer: Any, folder: Path, parser: str = "", model: str = "m") -> Any:
    """Return the part of vLLM's configuration that finding markers reads, for a tokenizer saved in a folder."""
    tokenizer.save_pretrained(folder)
    # vLLM looks for this file, and retries after a while if it is missing.
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    model_config = SimpleNamespace(
        model=str(folder),
        tokenizer=str(folder),
        tokenizer_mode="hf",
        tokenizer_revision=None,
        runner_type="generate",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        served_model_name=model,
        hf_config=None,
        get_vocab_size=lambda: 40_000,
    )
    outputs = SimpleNamespace(reasoning_parser=parser)
    return SimpleNamespace(model_config=model_config, structured_outputs_config=outputs, reasoning_config=None)


# ------------------------------------------------------------------------------------------------- vLLM's own answers


def agreement(name: str, tokenizer: Any) -> str:
    """Return by which ways vLLM sees thinking ended by the text of a forced end; empty if it does not for some
    start."""
    from meridian_agent.vllm_adapter.reasoning_markers import asked

    ways: dict[str, None] = {}
    fresh = [parser for parser, _ in asked(name, tokenizer)]
    for (parser, found), streaming in zip(asked(name, tokenizer), fresh, strict=True):
        for start in found.starts[:1]:
            agree = list(_agrees(parser, streaming, tokenizer, start, found.ends[0]))
            if not agree:
                return ""
            ways.update(dict.fromkeys(agree))
    return ", ".join(ways)


def _agrees(parser: Any, streaming: Any, tokenizer: Any, start: tuple[int, ...], end: tuple[int, ...]) -> Iterator[str]:
    """Yield the ways in which vLLM sees that thinking has ended."""
    thought, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (THOUGHT, ANSWER))
    thinking = [*start, *thought]
    if (said := _streamed(streaming, tokenizer, [*thinking, *end, *answer])) is not None:
        reasoning, content = said
        if ANSWER.strip() in content and THOUGHT in reasoning and THOUGHT not in content:
            yield "streaming"
    if _says_ended(parser, thinking) is False and _says_ended(parser, [*thinking, *end]) is True:
        yield "is_reasoning_end"
    if _by_channel(type(parser).__name__, tokenizer.decode(start), tokenizer.decode(end)):
        yield "channels"


def _says_ended(parser: Any, tokens: list[int]) -> Any:
    with contextlib.suppress(Exception):
        return parser.is_reasoning_end(tokens)
    return None


def _streamed(parser: Any, tokenizer: Any, tokens: list[int]) -> tuple[str, str] | None:
    """Return the reasoning and the content that clients get of these tokens, one by one; None if the parser cannot
    stream."""
    said = {"reasoning": "", "content": ""}
    for at, token in enumerate(tokens):
        before, now = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens[: at + 1])
        delta = now.removeprefix(before)
        try:
            message = parser.extract_reasoning_streaming(before, now, delta, tokens[:at], tokens[: at + 1], [token])
        except NotImplementedError:
            return None
        for kind in said:
            said[kind] += getattr(message, kind, None) or ""
    return said["reasoning"], said["content"]


def _by_channel(parser: str, start: str, end: str) -> bool:
    """Return whether vLLM's Harmony parser, which reads only channels, sees reasoning before the end and content after
    it."""
    if parser != "GptOssReasoningParser":
        return False
    from vllm.parser.harmony import _SegmentType

    opened, closed = (text.rpartition("<|channel|>")[2].partition("<|message|>")[0] for text in (start, end))
    kind = _SegmentType.from_channel_and_recipient
    return kind(opened, None) is _SegmentType.REASONING and kind(closed, None) is _SegmentType.CONTENT


# ---------------------------------------------------------------------------------------------------------- the table


def row(name: str, folder: Path) -> dict[str, Any]:
    """Return a parser's row, made by the agent's own code: its markers as text, or the reason why it has none."""
    from meridian.v1 import agent_pb2

    from meridian_agent.vllm_adapter.reasoning_markers import MarkersNotFound, of_parser, resolve

    tokenizer = made_for(name, asked_for(name))
    markers = resolve(config_of(tokenizer, folder / name, name), agent_pb2.Settings())
    if not markers.known:
        try:
            of_parser(name, tokenizer)
        except MarkersNotFound as error:
            return {"reason": str(error).removeprefix("which ")}
        return {"reason": markers.unknown}
    if not (agrees := agreement(name, tokenizer)):
        return {"reason": f"vLLM does not find thinking ended by {tokenizer.decode(markers.end)!r}"}
    found = {which: [tokenizer.decode(m) for m in getattr(markers, which)] for which in ("starts", "ends")}
    own = {tokenizer.decode(start): tokenizer.decode(end) for start, end in markers.own_ends}
    texts = {which: list(dict.fromkeys(texts)) for which, texts in found.items()}
    return {
        **texts,
        "forced": tokenizer.decode(markers.end),
        **({"own_ends": own} if own else {}),
        "vllm_agrees_by": agrees,
    }


def table() -> dict[str, Any]:
    """Return the installed vLLM's table."""
    import vllm
    from vllm.reasoning import ReasoningParserManager

    with tempfile.TemporaryDirectory() as folder:
        rows = {name: row(name, Path(folder)) for name in ReasoningParserManager.list_registered()}
    return {"vllm": vllm.__version__.split("+")[0], "parsers": rows}


def summary(made: dict[str, Any]) -> dict[str, Any]:
    """Return how many parsers are registered and resolved, and the reason for each that is not resolved."""
    named = {name: told["reason"] for name, told in made["parsers"].items() if "reason" in told}
    count = len(made["parsers"])
    return {"vllm": made["vllm"], "registered": count, "resolved": count - len(named), "named": named}


def saved() -> list[dict[str, Any]]:
    """Return the saved tables, oldest vLLM first."""
    made = [json.loads(path.read_text(encoding="utf-8")) for path in DATA.glob("*.json")]
    return sorted(made, key=lambda one: [int(part) for part in one["vllm"].split(".")])


def section(tables: list[dict[str, Any]]) -> str:
    """Return the summary for the agent's page: the newest vLLM's results, and the differences of other versions."""
    newest = tables[-1]
    lines = [
        "| parser | thinking begins | a forced end writes | also an end |",
        "|---|---|---|---|",
    ]
    resolved = {name: told for name, told in newest["parsers"].items() if "reason" not in told}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, told in resolved.items():
        forced = [told["forced"], *(end for end in told.get("own_ends", {}).values() if end != told["forced"])]
        other = [end for end in told["ends"] if end.strip() not in {text.strip() for text in forced}]
        cells = (_shown([told["starts"][-1], *told.get("own_ends", ())]), _shown(forced), _shown(other))
        rows.setdefault(cells, []).append(name)
    lines += [f"| {_shown(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    counts = [f"| {made['vllm']} | {len(made['parsers'])} | {_missing(made, newest)} |" for made in tables]
    heading = ["", "| vLLM | registered | not resolved, or otherwise than on the newest |", "|---|---|---|"]
    return "\n".join([*lines, *heading, *counts]) + "\n"


def _shown(texts: Sequence[str]) -> str:
    written = dict.fromkeys(text.strip(" ").replace("\n", "\\n").replace("|", "\\|") for text in texts)
    return ", ".join(f"`{text}`" for text in written)


def _missing(made: dict[str, Any], newest: dict[str, Any]) -> str:
    names: dict[str, list[str]] = {}
    for name, row in made["parsers"].items():
        if "reason" in row:
            names.setdefault(f": {row['reason']}", []).append(name)
        elif (other := newest["parsers"].get(name)) is None:
            names.setdefault(" not there later", []).append(name)
        elif any(row.get(key) != other.get(key) for key in ("starts", "ends", "forced", "own_ends")):
            names.setdefault(f" from {_shown(row['starts'])} to {_shown(row['ends'])}", []).append(name)
    return "; ".join(_shown(those) + told for told, those in names.items()) or "none"


def written() -> str:
    """Return the page's text between its two marks."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    made = table()
    for name, told in made["parsers"].items():
        print(
            f"{name:26}",
            told.get("reason") or f"{told['starts'][0]!r} to {told['forced']!r} ({told['vllm_agrees_by']})",
        )
    if "--save" in sys.argv[1:]:
        DATA.mkdir(exist_ok=True)
        (DATA / f"{made['vllm']}.json").write_text(
            json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(BEGIN + written(), BEGIN + section(saved())), encoding="utf-8")
    print(json.dumps(summary(made)))


if __name__ == "__main__":
    main()
