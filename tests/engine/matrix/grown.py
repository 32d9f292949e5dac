"""The maze model with one of the real vocabularies: its words have the ids of the vocabulary's own tokens, and the rows
of all other ids are random.

Such a model thinks, ends its thinking, repeats itself and answers, as the maze model does. After the first token of an
end marker of several tokens it writes the others, which extra places of its hidden state tell it. The module owns the
ids of the words, and the prompts, which have the form of the vocabulary's own family.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.data.maze import NODES
from tests.processes import MODEL

# Names the environment variable with the folder of the model that the engines of a build load.
FOLDER = "MERIDIAN_TEST_GROWN_MODEL"
# The tokens of gpt-oss's end marker.
HARMONY = ("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>")
ANALYSIS = ("<|channel|>", "analysis", "<|message|>")
# The words of the maze model that are other tokens in gpt-oss's vocabulary.
RENAMED = {"<|im_start|>": "<|start|>", "<|im_end|>": "<|return|>", "<think>": "analysis", "</think>": "<|end|>"}
# Places of the hidden state for the tokens of the end marker; vLLM's kernels want a multiple of 32.
EXTRA = 32
# The logit of the next token of a marker, before the scale of the final norm; far above the other tokens' logits after
# any text.
SURE = 1000.0
# How much less likely the ids of no word are than the words that the maze model never says, and how they differ.
UNSAID, NOISE = 2.0, 0.02


class Words:
    """The ids of the maze model's words in a real vocabulary."""

    def __init__(self, vocabulary: Path) -> None:
        known: dict[str, Any] = json.loads((vocabulary / "tokenizer.json").read_text())
        ids: dict[str, int] = dict(known["model"]["vocab"])
        ids |= {token["content"]: token["id"] for token in known["added_tokens"]}
        self.harmony = HARMONY[0] in ids
        maze: dict[str, int] = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        spelled = {"\n": "Ċ", "\n\n": "ĊĊ"} | _names(ids)
        ordinary = sorted(set(ids.values()) - {token["id"] for token in known["added_tokens"]})
        free = iter(random.Random("edges").sample(ordinary, 2000))
        self.ids = dict[str, int]()
        taken = set[int]()
        for word in sorted(maze, key=maze.__getitem__):
            name = RENAMED.get(word, word) if self.harmony else word
            name = spelled.get(name, name)
            self.ids[word] = ids[name] if name in ids else next(i for i in free if i not in taken)
            taken.add(self.ids[word])
        self.marker = [ids[token] for token in HARMONY] if self.harmony else []
        self.opening = [ids[token] for token in ANALYSIS] if self.harmony else [ids["<think>"]]
        self.closed = [self.ids[w] for w in ("<think>", "\n\n", "</think>", "\n\n")]
        # The rows of the maze model by id; those that have no word of it are random.
        self.maze = maze
        self.rows = {self.ids[word]: at for word, at in maze.items()}

    def prompt(self, words: Sequence[str]) -> list[int]:
        """Return a prompt of the maze model's template in the form of the vocabulary's family."""
        ids = [self.ids[word] for word in words]
        closes = list(words[-2:]) == ["<think>", "</think>"]
        if not self.harmony:
            return [*ids[:-2], *self.closed] if closes else ids
        end, start, _, channel, final, message = self.marker
        opens = words[-1] == "<think>"
        found, at = list[int](), 0
        body = list(words[: -2 if closes else -1 if opens else len(words)])
        while at < len(body):
            if body[at] == "<|im_start|>":
                found += [start, self.ids[body[at + 1]]]
                # The generation prompt ends with the role.
                found += [message] if at + 3 < len(body) else []
                at += 3
            elif body[at] == "<|im_end|>":
                found.append(end)
                at += 2
            else:
                found.append(self.ids[body[at]])
                at += 1
        return found + (self.opening if opens else [channel, final, message] if closes else [])


def _names(ids: dict[str, int]) -> dict[str, str]:
    """Return for each node the vocabulary's first word, with a space before it, that begins with the node's letter, so
    that the model's sentences are sentences of words."""
    words = sorted(
        (t for t in ids if len(t) > 4 and t[0] == "Ġ" and t[2:].islower()), key=ids.__getitem__, reverse=True
    )
    first = {word[1]: word for word in words}
    return {node: first[node] for node in NODES}


@functools.cache
def words_of(vocabulary: Path) -> Words:
    return Words(vocabulary)


def write(folder: Path, vocabulary: Path, size: int) -> None:
    """Write a model that vLLM and Transformers can load. size: rows of the vocabulary, of which the last have no
    token."""
    import torch
    from safetensors.torch import load_file, save_file

    words = words_of(vocabulary)
    weights = load_file(MODEL / "model.safetensors")
    width = weights["model.norm.weight"].shape[0]
    at, rows = (torch.tensor(list(part)) for part in (words.rows.keys(), words.rows.values()))
    drawn = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        small = weights[name]
        scale = small.std()
        if name == "lm_head.weight":
            edges = small[44:]
            large = UNSAID * edges.mean(0) + NOISE * scale * torch.randn(size, width, generator=drawn)
        else:
            large = scale * torch.randn(size, width, generator=drawn)
        large[at] = small[rows]
        weights[name] = large
    extra = EXTRA if words.marker else 0
    if extra:
        weights = {name: _wider(name, weight, width, extra) for name, weight in weights.items()}
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        # The end of a message is not yet the end of thinking, which the name of the channel tells.
        maze = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
        end, *_, final, message = words.marker
        for token, as_word in ((end, "<|im_end|>"), (final, "</think>"), (message, "<think>")):
            embedding[token, :width] = maze[words.maze[as_word]]
        typical = embedding[:, :width].std()
        for place, (this, following) in enumerate(zip(words.marker, words.marker[1:], strict=False), start=width):
            embedding[this, place] = typical
            head[following, place] = SURE
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"vocab_size": size, "hidden_size": width + extra, "eos_token_id": words.ids["<|im_end|>"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def _wider(name: str, weight: Any, width: int, extra: int) -> Any:
    """Return a weight for a hidden state with more places, which no layer reads or writes."""
    import torch

    if weight.dim() == 1:
        if weight.shape[0] != width or "q_norm" in name or "k_norm" in name:
            return weight
        # A norm divides by the mean over all places.
        scaled = weight * (width / (width + extra)) ** 0.5
        return torch.cat([scaled, torch.ones(extra)])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.cat([weight, torch.zeros(extra, weight.shape[1])])
    return torch.cat([weight, torch.zeros(weight.shape[0], extra)], dim=1)
