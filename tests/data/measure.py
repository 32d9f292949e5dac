"""Measure a trained model offline, without vLLM, and print a JSON summary.

The module computes, for thinking traces, the accuracy without a cut, and the accuracy and the answer entropy at each
cut. A cut appends </think>, and for the chain task the words that its answer begins with. Entropies are in nats.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests.data import chain, maze, running
from tests.data.training import END, HERE, PAD

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BUDGETS = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NAIVE_BELOW = 0.25


@dataclass(frozen=True)
class Task:
    """A task to measure, and how its traces are evaluated."""

    module: ModuleType
    first: str
    """Name of the first pass in the report."""
    limit: int
    """Largest number of tokens of a completion."""
    prefix: tuple[str, ...] = ()
    """Words with which the answer begins, before the word that counts."""


TASKS = {
    "maze": Task(maze, "first_walk", limit=640),
    "chain": Task(chain, "first_pass", limit=704, prefix=chain.ANSWER_PREFIX),
    "running": Task(running, "first_pass", limit=704, prefix=running.ANSWER_PREFIX),
}


@dataclass
class Trace:
    """One completion, and the results of cutting it at every boundary."""

    prompt: str
    prompt_ids: list[int]
    thinking: list[int]
    answer: str | None
    """The completion's answer; None if it never stopped thinking."""
    truth: str
    first_end: int
    """Thinking tokens up to the end of the first pass."""
    first_result: str
    """Result of the first pass, which differs from the true answer if the pass slipped."""
    entropy: list[float]
    """Entropy of the answering token after a cut, per position: entry n has n thinking tokens before the cut."""
    entropy_bare: list[float]
    """Entropy right after </think>, before the words that the answer begins with, per position."""
    guess: list[str]
    """The likeliest answer, per position."""
    chance: list[float]
    """Probability of the true answer, per position."""


class Subject:
    """A model with its tokenizer."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.end, self.pad, self.close = (self.tokenizer.convert_tokens_to_ids(t) for t in (END, PAD, maze.END_THINK))
        self.appended = [self.close, *self.tokenizer.convert_tokens_to_ids(task.prefix)]

    def ids(self, prompt: str, **template: object) -> list[int]:
        """Return the token ids of the prompt in the chat template."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False, **template
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def generate(self, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
        """Return completions without the end token; shorter prompts are padded on the left."""
        extra = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        width = max(map(len, prompts))
        whole = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self.model.generate(
            whole, attention_mask=mask, max_new_tokens=self.task.limit, pad_token_id=self.pad, **extra
        )
        rows = out[:, width:].tolist()
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def trace(self, prompt: str, prompt_ids: list[int], completion: list[int]) -> Trace:
        """Evaluate every position of one completion's thinking, in one batch of cut copies."""
        close = completion.index(self.close) if self.close in completion else len(completion)
        thinking = completion[1:close]
        whole = [*prompt_ids, completion[0], *thinking]
        offset = len(prompt_ids) + 1
        cut = self._after_cut(whole, offset)
        bare, entropy = (-(cut.softmax(-1) * cut.log_softmax(-1)).sum(-1))[:, [0, -1]].T.tolist()
        after = cut[:, -1]
        truth = self.task.module.parse_prompt(prompt).answer
        paragraph = self.tokenizer.convert_tokens_to_ids(maze.PARAGRAPH)
        first_end = thinking.index(paragraph) if paragraph in thinking else len(thinking)
        return Trace(
            prompt,
            prompt_ids,
            thinking,
            self.task.module.answer_of(self.tokenizer.decode(completion)),
            truth,
            first_end,
            self.tokenizer.convert_ids_to_tokens(thinking[max(0, first_end - 2)]),
            entropy,
            bare,
            self.tokenizer.convert_ids_to_tokens(after.argmax(-1).tolist()),
            after.softmax(-1)[:, self.tokenizer.convert_tokens_to_ids(truth)].tolist(),
        )

    def _after_cut(self, whole: list[int], offset: int) -> torch.Tensor:
        """Return the logits after each appended token, for every cut from `offset` on; all cuts share one forward pass.

        The appended tokens are placed behind the text, each with the position and the attention mask that it would have
        after its cut.
        """
        length, width = len(whole), len(self.appended)
        starts = torch.arange(offset, length + 1)
        positions = torch.cat([torch.arange(length), (starts[:, None] + torch.arange(width)).flatten()])
        seen = torch.ones(length + len(starts) * width, len(positions), dtype=torch.bool).tril()
        seen[length:, :length] = torch.arange(length)[None, :] < starts.repeat_interleave(width)[:, None]
        seen[length:, length:] &= torch.block_diag(*[torch.ones(width, width)] * len(starts)).bool()
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        ids = torch.tensor([[*whole, *self.appended * len(starts)]])
        logits: torch.Tensor = self.model(ids, position_ids=positions[None], attention_mask=mask[None, None]).logits
        return logits[0, length:].unflatten(0, (len(starts), width))


def boundaries(trace: Trace, stop: int) -> list[int]:
    """Return the positions right after a sentence end."""
    return [at for at in range(1, len(trace.thinking) + 1) if trace.thinking[at - 1] == stop]


def naive_stop(trace: Trace, stop: int) -> int:
    """Return the first position at which two sentence ends in a row have an entropy below the threshold.

    If there is none, return the length of the whole thinking.
    """
    low = 0
    for at in boundaries(trace, stop):
        low = low + 1 if trace.entropy[at] < NAIVE_BELOW else 0
        if low == 2:
            return at
    return len(trace.thinking)


def share(values: list[bool]) -> float:
    """Return the share of true values."""
    return round(sum(values) / max(1, len(values)), 4)


def average(values: list[float]) -> float:
    """Return the mean, rounded."""
    return round(statistics.fmean(values), 3) if values else float("nan")


def cut_accuracy(traces: list[Trace], at: list[int]) -> float:
    """Return the expected accuracy at temperature 1 if each trace is cut at its position in `at`."""
    return average([trace.chance[min(n, len(trace.thinking))] for trace, n in zip(traces, at, strict=True)])


def at_sentence_ends(traces: list[Trace], name: str, stop: int) -> dict[str, float]:
    """Return mean values at sentence ends, by the number of sentences from the end of the first pass."""
    found: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        ends = boundaries(trace, stop)
        last = sum(at <= trace.first_end for at in ends) - 1
        for place, at in enumerate(ends):
            found[place - last].append(getattr(trace, name)[at])
    return {f"{place:+d}": average(found[place]) for place in range(-6, 7)} | {
        "before": average([value for place, values in found.items() if place < 0 for value in values]),
        "after": average([value for place, values in found.items() if place > 0 for value in values]),
    }


def summary(task: Task, traces: list[Trace], stop: int) -> dict[str, object]:
    """Return every number of the report that comes from the sampled traces."""
    tokens = sorted(len(trace.thinking) for trace in traces)
    right = [trace.answer == trace.truth for trace in traces]
    naive = [naive_stop(trace, stop) for trace in traces]
    slipped = [trace for trace in traces if trace.first_result != trace.truth]
    early = [e for t in traces for e in t.entropy[: t.first_end // 2]]
    late = [e for t in traces for e in t.entropy[t.first_end :]]
    return {
        "prompts": len(traces),
        "accuracy": share(right),
        "unfinished": share([trace.answer is None for trace in traces]),
        "thinking_tokens": {"mean": average([float(n) for n in tokens])}
        | {f"p{p}": tokens[min(len(tokens) - 1, len(tokens) * p // 100)] for p in (5, 25, 50, 75, 95, 100)},
        f"{task.first}_tokens_mean": average([float(t.first_end) for t in traces]),
        f"{task.first}_slipped": round(len(slipped) / len(traces), 4),
        "accuracy_of_slipped": share([t.answer == t.truth for t in slipped]),
        "accuracy_cut_after_slip": average([t.chance[t.first_end] for t in slipped]),
        f"accuracy_cut_after_{task.first}": average([t.chance[t.first_end] for t in traces]),
        "entropy": {
            f"first_half_of_{task.first}": average(early),
            f"from_end_of_{task.first}": average(late),
            "last": average([t.entropy[-1] for t in traces]),
        },
        "naive_rule": {
            "below": NAIVE_BELOW,
            "accuracy": cut_accuracy(traces, naive),
            "saved": round(1 - sum(naive) / max(1, sum(tokens)), 4),
        },
        "accuracy_cut_at_fraction": {
            str(f): cut_accuracy(traces, [round(f * len(t.thinking)) for t in traces]) for f in FRACTIONS
        },
        "accuracy_cut_at_tokens": {str(n): cut_accuracy(traces, [n] * len(traces)) for n in BUDGETS},
    }


def accuracy(subject: Subject, prompts: list[str], greedy: bool, **template: object) -> float:
    """Return the accuracy of generated answers, without any cut."""
    ids = [subject.ids(prompt, **template) for prompt in prompts]
    lead = "<think></think>" if template else ""
    texts = [lead + subject.tokenizer.decode(out) for out in subject.generate(ids, greedy)]
    return share([subject.task.module.is_correct(prompt, text) for prompt, text in zip(prompts, texts, strict=True)])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="maze")
    parser.add_argument("--model", type=Path, help="default: the folder shipped for the task")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    task = TASKS[options.task]
    subject = Subject(task, options.model or HERE / f"{options.task}-qwen3")
    prompts: list[str] = task.module.prompts(options.count, options.seed)
    ids = [subject.ids(prompt) for prompt in prompts]
    completions = subject.generate(ids, greedy=False)
    traces = [subject.trace(*row) for row in zip(prompts, ids, completions, strict=True)]
    stop = subject.tokenizer.convert_tokens_to_ids(maze.STOP)
    report = summary(task, traces, stop) | {
        "accuracy_greedy": accuracy(subject, prompts, greedy=True),
        "accuracy_without_thinking": accuracy(subject, prompts, greedy=False, enable_thinking=False),
    }
    if task.prefix:
        report |= {
            "entropy_at_sentence_ends": at_sentence_ends(traces, "entropy", stop),
            "entropy_at_sentence_ends_without_prefix": at_sentence_ends(traces, "entropy_bare", stop),
            "accuracy_at_sentence_ends": at_sentence_ends(traces, "chance", stop),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
