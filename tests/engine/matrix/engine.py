"""The governed engine that a feature gets, with a stock one beside it, and the checks that features share.

The engine runs in the process of one build. The module knows no feature.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import FLAG_END, FLAG_MARKER, Phase
from tests import needed
from tests.engine import Run, cases, offline
from tests.engine.matrix import grown
from tests.engine.matrix.asks import Ask, generate
from tests.engine.matrix.builds import ON_GPU
from tests.engine.pacing import Settled
from tests.engine.policies import NEUTRAL
from tests.engine.recording import probes, records, rows
from tests.processes import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_agent.core.step_record import MeasuredProbe
    from tests.engine.matrix.asks import Answer
    from tests.engine.matrix.builds import Build
    from tests.engine.matrix.stock import Stock
    from tests.processes import Control

OPEN = {"open_think": True}
CLOSED = {"enable_thinking": False}
# Values of meridian.v1.FinishReason.
STOP, LENGTH, ABORT = 1, 2, 3


class NotForBuild(Exception):  # noqa: N818
    """The feature cannot take effect on the build, as the feature has checked; the text is the reason."""


class Engine:
    """A vLLM engine whose core is in this process, the control plane that governs it, and a stock engine."""

    def __init__(self, build: Build, llm: Any, control: Control, stock: Stock) -> None:
        self.build, self.llm, self.control, self.stock = build, llm, control, stock
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.agent = self.scheduler._agent
        self.settled = control.caught_up = Settled(self.scheduler)
        # The tokens of the markers. start, end: the first token of each.
        self.ending: list[int] = list(self.agent.tracker.markers.ending)
        self.end: int = self.agent.tracker.markers.end[0]
        self.start: int = self.agent.tracker.markers.starts[0][0]
        self.words = grown.words_of(needed.vocabulary_folder() / build.vocabulary) if build.vocabulary else None
        self.opening: list[int] = self.words.opening if self.words else [self.start]
        # Triton's interpreter generates some 70 tokens a second; drafts on a CPU are not fast either.
        self.slow = (build.v2 and not ON_GPU) or self.scheduler.num_spec_tokens > 0

    def reset(self) -> None:
        """Prepare for a feature: no request runs, and a neutral policy is in force."""
        assert not self.scheduler._guard.fault
        assert not self.llm.llm_engine.has_unfinished_requests()
        self.control.apply(NEUTRAL)

    def check_over(self) -> None:
        """Check after a feature that the agent is on, no request is left behind, and each decision has its outcome."""
        self.drain()
        assert not self.scheduler._guard.fault, self.scheduler._guard.fault
        engine = self.control.settled()
        assert engine.open_decisions == 0
        agent = self.agent
        assert [*agent.tracker.by_id, *agent.probing.placed, *agent.probing.held] == []

    def drain(self) -> None:
        """Step until the core is empty, as a core in its own process does; the front end does not know of probes."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()

    @functools.cached_property
    def logprobs(self) -> offline.Logprobs:
        """Return the independent computation of log-probabilities, by Transformers."""
        return offline.load(Path(self.build.engine_args()["model"]))

    def prompt(self, index: int = 0, template: dict[str, Any] | None = None) -> list[int]:
        """Return one of the shared cases as the chat template renders it, by default with thinking opened."""
        return self.chat(cases()[index]["prompt"], OPEN if template is None else template)

    def token(self, word: str) -> int:
        """Return the token of one of the maze model's words."""
        if self.words:
            return self.words.ids[word]
        return int(self.llm.get_tokenizer().convert_tokens_to_ids(word))

    def chat(self, text: str, template: dict[str, Any] | None = None) -> list[int]:
        return self.render([{"role": "user", "content": text}], OPEN if template is None else template)

    def render(self, turns: list[dict[str, str]], template: dict[str, Any]) -> list[int]:
        """Return a chat as the maze model's template renders it, in the form that the vocabulary's family has."""
        tokenizer = self.maze if self.words else self.llm.get_tokenizer()
        ids = list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **template))
        return self.words.prompt(tokenizer.convert_ids_to_tokens(ids)) if self.words else ids

    @functools.cached_property
    def maze(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(MODEL)

    def endless(self, **params: Any) -> dict[str, Any]:
        """Return greedy sampling that never ends thinking by itself, without touching what a forced token needs."""
        return {"temperature": 0.0, "ignore_eos": True, "logit_bias": {self.end: -30.0}, **params}

    def ask(self, asks: list[Ask]) -> list[list[Answer]]:
        return generate(self.llm, asks)

    def tokens(self, asks: list[Ask]) -> list[list[int]]:
        return [answers[0].tokens for answers in self.ask(asks)]

    def paced(self, asks: list[Ask]) -> list[list[int]]:
        """Run requests like `tokens`, but let each step wait until the reports before it are answered."""
        names = [f"paced{i}" for i in range(len(asks))]
        run = self.run(dict(zip(names, asks, strict=True)))
        run.until(settled=self.settled)
        self.drain()
        return [run.tokens[name] for name in names]

    def observe(self, asks: list[Ask]) -> tuple[list[list[Answer]], list[Observed]]:
        """Return the answers and the agent's reports of each sequence, in the order in which they were opened."""
        with self.watched() as seen:
            answers = self.ask(asks)
        return answers, seen

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Observed]]:
        """Yield a list that gets the agent's reports inside the block, by sequence in the order of opening, at its
        end."""
        found: list[Observed] = []
        with records(self.agent) as seen:
            yield found
            self.drain()
        found += observed(seen)

    def run(self, asks: dict[str, Ask]) -> Run:
        """Return requests to be driven step by step, by name."""
        run = Run(self.llm)
        for name, ask in asks.items():
            ask.put(run, name)
        return run

    def check_phases(self, prompt: list[int], tokens: list[int], seen: Observed, template_closes: bool = False) -> None:
        """Check that every token's phase and flags are those of its place before or after the markers.

        The engine may have generated more tokens than it returned, if the front end stopped a request, at a stop string
        or for a client.
        """
        assert len(seen.rows) == len(tokens) or (seen.closed != LENGTH and len(seen.rows) > len(tokens))
        phase = opening_phase(prompt, self.opening, self.ending, template_closes)
        assert seen.opened == phase
        # A prompt may end with a part of a marker.
        whole, past = [*prompt, *tokens], len(prompt) + 1
        starts, ends = ({at + len(m) - past for at in places_of(m, whole)} for m in (self.opening, self.ending))
        # Which phase the first tokens of a marker have is checked in `markers`.
        within = {
            at - n for m, last in ((self.opening, starts), (self.ending, ends)) for at in last for n in range(len(m))
        }
        for at, (_, (reported, flags, *_)) in enumerate(zip(tokens, seen.rows, strict=False)):
            over = at in ends and phase is Phase.THINK
            if at in starts:
                phase = Phase.THINK
            elif phase is Phase.PROMPT:
                phase = Phase.OUTPUT
            assert reported == phase or (at in within and at not in starts | ends)
            assert bool(flags & FLAG_END) == over
            assert bool(flags & FLAG_MARKER) == (at in starts or at in ends)
            if at in ends:
                phase = Phase.OUTPUT

    @contextlib.contextmanager
    def looked_up(self) -> Iterator[list[int]]:
        """Yield the prompt tokens that vLLM looks up in its prefix cache inside the block, according to its metrics.

        vLLM 0.26 loses some of these counts.
        """
        manager, found = self.scheduler.kv_cache_manager, [0]
        make = manager.make_prefix_cache_stats

        def made() -> Any:
            stats = make()
            found[0] += stats.queries
            return stats

        made()
        found[0] = 0
        manager.make_prefix_cache_stats = made
        try:
            yield found
            made()
        finally:
            manager.make_prefix_cache_stats = make

    def check_signals(self, prompt: list[int], tokens: list[int], seen: Observed) -> None:
        """Check entropy to `offline.tolerance`, and the end marker's rank, against Transformers on the same tokens."""
        wrong = offline.mismatches(self.logprobs, prompt, tokens, seen.rows, self.end)
        assert not wrong, wrong[:5]

    def check_probes(self, prompt: list[int], tokens: list[int], seen: Observed) -> None:
        """Check EAT to `offline.tolerance` against Transformers, and that each probe costs the tokens of the end
        marker, and one more as a request of its own."""
        wrong = offline.probe_mismatches(self.logprobs, prompt, tokens, seen.probes, self.ending)
        assert not wrong, wrong[:5]
        costs = {probe.cost_tokens for probe in seen.probes}
        # If drafts are made, vLLM computes rows for them after a probe, too.
        marker = len(self.ending)
        most = marker + 1 + self.scheduler.num_spec_tokens
        least = marker + 1 if self.scheduler._agent.facts.no_probe_rows else marker
        assert all(least <= cost <= most for cost in costs), costs
        assert least in costs or not costs, costs

    def check_ends(self, free: list[int], capped: list[int], cap: int) -> int:
        """Check that thinking ends after exactly `cap` tokens, or at its own end, with all tokens before it unchanged;
        return where its end begins."""
        natural, ended = first_begun(self.ending, free), first_begun(self.ending, capped)
        assert ended == min(cap, natural) < len(capped), (ended, cap, natural)
        assert capped[:ended] == free[:ended]
        return ended

    def check_ends_once(self, free: list[int], capped: list[int], cap: int) -> None:
        """Check the same, and that the answer has no end marker."""
        ended = self.check_ends(free, capped, cap)
        assert not places_of(self.ending, capped[ended + len(self.ending) :])


class Observed:
    """The agent's reports of one sequence.

    rows: (phase, flags, entropy, end rank, end log-probability, end margin) per token. probes: as in the step record.
    opened: its phase when it was opened. steps: its tokens in each step. closed: the reason as
    meridian.v1.FinishReason.
    """

    def __init__(self, name: str, model: str, opened: Phase) -> None:
        self.name, self.model, self.opened, self.closed = name, model, opened, 0
        self.rows: list[tuple[int, int, float, int, float, float]] = []
        self.probes: list[MeasuredProbe] = []
        self.steps: list[int] = []


def observed(seen: list[Any]) -> list[Observed]:
    found: dict[str, Observed] = {}
    names: dict[int, str] = {}
    for _, opened, slots, closed in seen:
        for slot, info, phase, *_ in opened:
            names[slot] = info.request_id
            found[info.request_id] = Observed(info.request_id, info.model, Phase(phase))
        for slot, count in collections.Counter(slots).items():
            found[names[slot]].steps.append(count)
        for slot, reason in closed:
            found[names.pop(slot)].closed = reason
    for name, of in rows(seen).items():
        found[name].rows = of
    for name, probed in probes(seen).items():
        found[name].probes = probed
    return list(found.values())


def places_of(marker: list[int], tokens: list[int]) -> list[int]:
    """Return where a marker begins in a text."""
    return [at for at in range(len(tokens) - len(marker) + 1) if tokens[at : at + len(marker)] == marker]


def first_begun(marker: list[int], tokens: list[int]) -> int:
    """Return where a marker first begins in a text, even if the text ends before the marker does; the text's length if
    it has none."""
    for at in range(len(tokens)):
        if tokens[at : at + len(marker)] == marker[: len(tokens) - at]:
            return at
    return len(tokens)


def opening_phase(prompt: list[int], opening: list[int], ending: list[int], template_closes: bool) -> Phase:
    """Return the phase that a prompt's last marker gives; an end counts only if the template closes thinking with
    it."""
    starts, ends = places_of(opening, prompt), places_of(ending, prompt)
    if starts and starts[-1] > max(ends, default=-1):
        return Phase.THINK
    return Phase.OUTPUT if template_closes else Phase.PROMPT
