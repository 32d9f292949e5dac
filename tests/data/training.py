"""Train a tiny reasoning model from random weights on a CPU and write it as a directory that vLLM loads.

The module owns the tokenizer, the chat template, the model's shape and the training loop. A task's Recipe has its
words, texts and stages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.data.maze import END_THINK, NEWLINE, PARAGRAPH, STOP, THINK, WAIT

HERE = Path(__file__).resolve().parent
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
MARKS = (PAD, START, END, UNKNOWN, THINK, END_THINK, NEWLINE, PARAGRAPH, STOP, WAIT, "system", "user", "assistant")
IGNORE = -100
TYPICAL_TARGETS = 128

TEMPLATE = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set turn = namespace(text='') -%}
    {%- if message.content is string -%}
        {%- set turn.text = message.content -%}
    {%- elif message.content -%}
        {%- for part in message.content if part.type == 'text' -%}
            {%- set turn.text = turn.text + part.text -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- if loop.index0 < ns.last_user -%}
            {%- set turn.text = turn.text.split('</think>')[-1].lstrip() -%}
        {%- elif message.reasoning_content is string and message.reasoning_content -%}
            {%- set turn.text = '<think>' + message.reasoning_content + '</think>' + turn.text -%}
        {%- endif -%}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' + turn.text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think></think>' -}}
    {%- elif open_think is defined and open_think is true -%}
        {{- '<think>' -}}
    {%- endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Stage:
    """One stage of training: its samples and its length."""

    steps: int
    rate: float
    repeats: int = 0
    """Largest number of passes after the first one."""
    cut: float = 0.0
    """Share of traces cut at a random place and continued with the true answer."""
    empty: float = 0.0
    """Share of samples without any thinking."""
    context: float = 0.0
    """Share of samples with a system message before the prompt; as many samples have an earlier turn before it."""
    noise: float = 0.15
    """Probability of noise before a </think> that the model did not choose itself, and of noise after it."""
    noise_words: int = 6
    """Largest number of noise words."""


class Task(Protocol):
    """The problem of one prompt."""

    @property
    def prompt(self) -> str:
        """Return the content of the user message."""


T = TypeVar("T", bound=Task)
S = TypeVar("S", bound=Stage)


@dataclass(frozen=True)
class Recipe(Generic[T, S]):
    """The training data and stages of one model."""

    name: str
    """The model is written to `<name>-qwen3` beside this file."""
    words: tuple[str, ...]
    """The model's tokens after the tokens that every model has, in the order of their ids."""
    stages: tuple[S, ...]
    make: Callable[[random.Random, S], T]
    thinking: Callable[[random.Random, T, S], list[list[str]]]
    """The tokens of each pass of one trace."""
    answer: Callable[[T], list[str]]
    embed: Callable[[torch.Tensor, dict[str, int]], None]
    """Sets the first embeddings of the words that begin as a sum of parts."""
    start: Path | None = None
    """The directory with the weights from which training starts, if it does not start from random weights."""
    answer_after: Callable[[T, list[str]], list[str]] = lambda task, trace: []
    """The tokens of the answer after thinking that was cut; none stands for the true answer."""
    endless: Callable[[T], bool] = lambda task: False
    """Whether the thinking about a task never ends by itself, so that the text ends inside the thinking."""

    @property
    def index(self) -> dict[str, int]:
        """Return the id of every token."""
        return {word: index for index, word in enumerate((*MARKS, *self.words))}


Tokens = list[tuple[str, bool]]
"""Pairs of a token and whether it is a training target."""


def plain(*tokens: str) -> Tokens:
    """Return tokens that are not training targets."""
    return [(token, False) for token in tokens]


def targets(*tokens: str) -> Tokens:
    """Return tokens that are training targets."""
    return [(token, True) for token in tokens]


def turn(role: str, *content: str) -> Tokens:
    """Return one whole message as the chat template renders it."""
    return plain(START, role, NEWLINE, *content, END, NEWLINE)


def noise(rng: random.Random, stage: Stage) -> Tokens:
    """Return, in a share of the samples, a few line breaks and unknown words, as a closing text may put around
    </think>."""
    if rng.random() > stage.noise:
        return []
    return plain(*rng.choices((NEWLINE, PARAGRAPH, UNKNOWN), k=rng.randint(1, stage.noise_words)))


def build_tokenizer(index: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; spaces are dropped in encoding and put back in decoding."""
    raw = Tokenizer(models.WordLevel(index, unk_token=UNKNOWN))
    raw.add_special_tokens([AddedToken(word, normalized=False) for word in (PAD, START, END)])
    raw.add_tokens([AddedToken(word, normalized=False, special=False) for word in (THINK, END_THINK)])
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n\n|\n"), "isolated")]
    )
    tight = Regex(r" (?=\n|</think>|<\|im_end\|>)|(?<=\n|think>|<\|im_start\|>|<\|im_end\|>) ")
    raw.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse(), decoders.Replace(tight, "")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(recipe: Recipe[T, S], seed: int) -> Qwen3ForCausalLM:
    """Return the untrained network: 3 layers, width 128.

    Embeddings begin large relative to the learning rate and are not tied to the output layer, since Adam would
    otherwise probably move all rare tokens of the prompt the same way until they look alike.
    """
    torch.manual_seed(seed)
    index = recipe.index
    config = Qwen3Config(
        vocab_size=len(index),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=index[END],
        pad_token_id=index[PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        recipe.embed(model.model.embed_tokens.weight.normal_(std=0.2), index)
    return model


def write_json(path: Path, change: dict[str, object]) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | change, indent=2) + "\n")


def save(model: Qwen3ForCausalLM, index: dict[str, int], out: Path) -> None:
    """Write the model directory; the weights are replaced by one rename, so that a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    build_tokenizer(index).save_pretrained(out)
    write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(out)
    ends = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    (out / "generation_config.json").write_text(json.dumps(ends | sampling, indent=2) + "\n")
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, out / "weights.tmp", metadata={"format": "pt"})
    (out / "weights.tmp").chmod(0o644)
    os.replace(out / "weights.tmp", out / "model.safetensors")


def context(rng: random.Random, recipe: Recipe[T, S], stage: S) -> Tokens:
    """Return the text before the prompt: mostly none, sometimes a system message or an earlier turn."""
    draw = rng.random()
    if draw < stage.context:
        return turn("system", *[UNKNOWN] * rng.randint(1, 30))
    if draw < 2 * stage.context:
        earlier = recipe.make(rng, stage)
        return turn("user", *earlier.prompt.split()) + turn("assistant", *recipe.answer(earlier))
    return []


def completion(rng: random.Random, recipe: Recipe[T, S], task: T, stage: S) -> Tokens:
    """Return thinking and answer.

    If the thinking was cut, the end of thinking is not a training target, because the model should not learn to stop
    there.
    """
    passes = recipe.thinking(rng, task, stage)
    trace = [token for one in passes for token in one]
    draw = rng.random()
    if draw < stage.empty:
        trace = []
    elif draw < stage.empty + stage.cut:
        trace = trace[: rng.randint(1, len(rng.choice((passes[0], trace))))]
    elif recipe.endless(task):
        return targets(THINK, *trace)
    else:
        return targets(THINK, *trace, END_THINK, *recipe.answer(task), END)
    answer = targets(*(recipe.answer_after(task, trace) or recipe.answer(task)), END)
    return targets(THINK, *trace) + noise(rng, stage) + plain(END_THINK) + noise(rng, stage) + answer


def sample(rng: random.Random, recipe: Recipe[T, S], stage: S) -> Tokens:
    """Return one training text."""
    task = recipe.make(rng, stage)
    opening = turn("user", *task.prompt.split()) + plain(START, "assistant", NEWLINE)
    return context(rng, recipe, stage) + opening + completion(rng, recipe, task, stage)


def batches(
    rng: random.Random, recipe: Recipe[T, S], stage: S, size: int = 32, pool: int = 8
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) without end, padded on the right; texts of similar length share a batch."""
    index = recipe.index
    while True:
        texts = sorted((sample(rng, recipe, stage) for _ in range(size * pool)), key=len)
        for at in rng.sample(range(0, size * pool, size), pool):
            rows = texts[at : at + size]
            ids = torch.full((size, len(rows[-1])), index[PAD])
            labels = torch.full_like(ids, IGNORE)
            for row, text in enumerate(rows):
                ids[row, : len(text)] = torch.tensor([index[token] for token, _ in text])
                labels[row, : len(text)] = torch.tensor([index[token] if wanted else IGNORE for token, wanted in text])
            yield ids, labels


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over the targets and divided by a constant.

    Division by the number of targets would weigh each token in a batch of short texts more, and so teach the model to
    stop early. Padding is on the right, so causal attention alone keeps it out.
    """
    targets = labels[:, 1:]
    wanted = targets != IGNORE
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted], reduction="sum") / (
        TYPICAL_TARGETS * len(ids)
    )


def train_stage(model: Qwen3ForCausalLM, recipe: Recipe[T, S], number: int, seed: int, scale: float) -> None:
    """Run one stage: AdamW, a short warm-up, then a cosine down to a twentieth of the rate."""
    stage = recipe.stages[number]
    steps = max(1, int(stage.steps * scale))
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.525 + 0.475 * math.cos(math.pi * step / steps))
    )
    started, total = time.monotonic(), 0.0
    for step, (ids, labels) in zip(
        range(1, steps + 1), batches(random.Random(f"{seed}-{number}"), recipe, stage), strict=False
    ):
        loss = loss_of(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.item()
        if step % 50 == 0 or step == steps:
            print(
                f"stage {number + 1} step {step}/{steps} loss {total / ((step - 1) % 50 + 1):.4f}"
                f" {time.monotonic() - started:.0f} s",
                flush=True,
            )
            total = 0.0


def run(recipe: Recipe[T, S], description: str | None) -> None:
    """Run the command line: train every stage and save after each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=HERE / f"{recipe.name}-qwen3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="0.01 for a smoke run")
    start = "skip the first stages and start from the weights in this directory"
    parser.add_argument("--start", type=Path, default=recipe.start, help=start)
    parser.add_argument("--skip", type=int, default=int(not recipe.start), help="how many stages --start skips")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model(recipe, options.seed)
    print(f"{sum(value.numel() for value in model.parameters())} parameters", flush=True)
    if options.start:
        model = Qwen3ForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    for number in range(options.skip if options.start else 0, len(recipe.stages)):
        train_stage(model, recipe, number, options.seed, options.steps_scale)
        save(model, recipe.index, options.out)
