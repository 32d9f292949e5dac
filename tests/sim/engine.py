"""An engine without a model: vLLM's own scheduler with the agent in front of it, and tokens drawn by a hash.

The tokens depend only on the request's seed and its earlier tokens, so any difference from them comes from a mask.
Steps run as in vLLM's engine core, also with asynchronous scheduling.
"""

from __future__ import annotations

import copy
import functools
import json
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from meridian_agent.core.request_info import is_probe
from meridian_agent.core.step_signals import REQUEST, RESULT, StepSignals, WorkerRequestDecoder
from meridian_agent.engine.scheduler_mixin import governed
from meridian_agent.vllm_adapter import scheduler_api
from meridian_agent.vllm_adapter import tokenizer as tokenizer_module
from tests.engine import STRIPPED

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Set

    import pytest
    from vllm.config import VllmConfig

    from meridian_agent.core.sentences import SentenceTable

MODEL = Path(__file__).parent.parent / "data" / "maze-qwen3"
BLOCK = 8
DRAFTS = 2
# Largest number of tokens of a prompt and its output.
CONTEXT = 160
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Shape:
    """The configuration of an engine."""

    is_async: bool = False
    drafts: int = 0
    # Whether only the worker knows the drafts, as under asynchronous scheduling and with Model Runner V2.
    hidden: bool = False
    places: int = 4
    blocks: int = 32
    batch_tokens: int = 64
    policy: str = "fcfs"

    @staticmethod
    def draw(rng: random.Random) -> Shape:
        is_async, drafts = rng.random() < 0.3, rng.random() < 0.3
        return Shape(
            is_async=is_async,
            drafts=DRAFTS if drafts else 0,
            hidden=drafts and (is_async or rng.random() < 0.3),
            places=rng.choice((2, 4, 8, 64)),
            # Enough blocks for the longest request, and often for little more.
            blocks=rng.choice((24, 30, 64, 200)),
            batch_tokens=rng.choice((32, 128, 512)),
            policy="priority" if rng.random() < 0.25 else "fcfs",
        )


@functools.cache
def _base(drafts: int) -> VllmConfig:
    extra: dict[str, Any] = {}
    if drafts:
        extra["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    arguments = EngineArgs(
        model=str(MODEL),
        served_model_name="m",
        enforce_eager=True,
        dtype="float32",
        max_model_len=CONTEXT,
        num_gpu_blocks_override=64,
        reasoning_parser="qwen3",
        **extra,
    )
    init_none_hash(sha256)
    return arguments.create_engine_config()


@functools.cache
def config_of(shape: Shape) -> tuple[VllmConfig, StructuredOutputManager]:
    made = copy.copy(_base(shape.drafts))
    made.scheduler_config = copy.copy(made.scheduler_config)
    made.scheduler_config.max_num_seqs = shape.places
    made.scheduler_config.max_num_batched_tokens = shape.batch_tokens
    made.scheduler_config.enable_chunked_prefill = True
    made.scheduler_config.policy = shape.policy
    made.scheduler_config.async_scheduling = shape.is_async
    made.cache_config = copy.copy(made.cache_config)
    made.cache_config.num_gpu_blocks = shape.blocks
    made.cache_config.block_size = BLOCK
    made.cache_config.enable_prefix_caching = True
    return made, StructuredOutputManager(made)


@functools.cache
def tokenizer() -> Any:
    return tokenizer_module.tokenizer_of(_base(0))


@functools.cache
def sentences() -> SentenceTable:
    table, _ = tokenizer_module.sentences_of(tokenizer(), _base(0).model_config.get_vocab_size())
    return table


def share_tokenizer(patch: pytest.MonkeyPatch) -> None:
    """Let all engines have the tokenizer that was read once, because they have the same model."""
    known, found = tokenizer(), (sentences(), list[int]())
    patch.setattr(tokenizer_module, "tokenizer_of", lambda _: known)
    patch.setattr(tokenizer_module, "sentences_of", lambda *_: found)


@functools.cache
def words() -> tuple[int, int, int, tuple[int, ...]]:
    """Return token ids: think start, think end, end of text, and words, of which some end a sentence or a paragraph."""
    # Of the file alone: the tests' modules ask for the ids, and vLLM takes longer to read its configuration.
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [i for text, i in sorted(vocabulary.items()) if text in (".", "?", "\n\n")]
    plain = [i for text, i in sorted(vocabulary.items()) if text.isalpha()][:6]
    return vocabulary["<think>"], vocabulary["</think>"], vocabulary["<|im_end|>"], (*plain, *plain, *ends)


@dataclass(frozen=True)
class Script:
    """The course of one request's output. restless: it thinks several times, and writes markers at wrong places."""

    seed: int
    think_mean: int
    answer_mean: int
    restless: bool
    max_tokens: int = 100
    priority: int = 0
    # Tokens of the round that the thinking repeats from its beginning on; 0 for thinking that does not loop.
    loop: int = 0
    # Whether the first token of each round counts the rounds, so that the rounds are no exact loop.
    counts: bool = False
    # Mean number of tokens after which the model stops while it thinks; 0 for a model that never does.
    stops: int = 0


class Model:
    """Samples tokens for the requests of one engine, and keeps them as a model runner does."""

    def __init__(self) -> None:
        self.start, self.end, self.stop, self.text = words()
        self.scripts: dict[str, Script] = {}
        self.tokens: dict[str, list[int]] = {}
        # Numbers of tokens of the prompts.
        self.prompts: dict[str, int] = {}
        self._thinking: dict[str, bool] = {}
        # Requests that the model has stopped; all that it samples for them afterwards is thrown away.
        self.stopped: set[str] = set()

    def open(self, request_id: str, prompt: list[int], script: Script) -> None:
        self.scripts[request_id], self.tokens[request_id] = script, list(prompt)
        self._thinking[request_id] = self._thinks(prompt)
        self.prompts.setdefault(request_id, len(prompt))
        self.stopped.discard(request_id)

    def resume(self, request_id: str, generated: int, told: list[int] | None) -> None:
        """Take a resumed request's number of generated tokens over, as a model runner does. told: all tokens, if the
        scheduler has to tell them. After a stop that was taken back the model samples anew."""
        own, prompt = self.tokens[request_id], self.prompts[request_id]
        kept, gone = own[: prompt + generated], own[prompt + generated :]
        assert told in (None, kept), f"{request_id} is resumed with other tokens"
        if gone:
            assert gone[0] == self.stop, f"{request_id} is resumed without the tokens {gone}"
            script = self.scripts[request_id]
            self.open(request_id, kept, replace(script, seed=script.seed + 1))

    def _thinks(self, tokens: list[int]) -> bool:
        return next((t == self.start for t in reversed(tokens) if t in (self.start, self.end)), False)

    def wish(self, request_id: str) -> int:
        """Return the next token if no mask changes it."""
        script, tokens = self.scripts[request_id], self.tokens[request_id]
        x = mix(script.seed, len(tokens), tokens[-1])
        chance, word = (x & 0xFFFF) / 65536, self.text[(x >> 16) % len(self.text)]
        if self._thinking[request_id]:
            if script.stops and (x >> 32 & 0xFFFF) / 65536 < 1 / script.stops:
                return self.stop
            if script.loop:
                number, place = divmod(len(tokens), script.loop)
                return self.text[(number % 6 if script.counts and place == 0 else place) % len(self.text)]
            if chance < 1 / script.think_mean:
                return self.end
            return self.start if script.restless and chance > 0.99 else word
        if chance < 1 / script.answer_mean:
            return self.stop
        marker = self.start if chance > 0.93 else self.end
        return marker if script.restless and chance > 0.9 else word

    def add(self, request_id: str, token: int) -> None:
        self.tokens[request_id].append(token)
        if token == self.stop:
            self.stopped.add(request_id)
        if token in (self.start, self.end):
            self._thinking[request_id] = token == self.start

    def drafts(self, request_id: str, count: int) -> list[int]:
        """Return draft tokens, some of them right and some wrong."""
        x = mix(self.scripts[request_id].seed, len(self.tokens[request_id]), 7)
        return [self.wish(request_id) if x & 1 else self.text[x % 5], *([self.text[(x >> 8) % 5]] * (count - 1))]


def mix(*numbers: int) -> int:
    """Return a hash of integers that is the same in every run."""
    x = 0x9E3779B97F4A7C15
    for number in numbers:
        x = ((x ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
        x ^= x >> 29
    return x


@functools.cache
def _hasher() -> Any:
    return get_request_block_hasher(BLOCK, sha256)


class Engine:
    """One start of an engine process.

    `on_token` is called with every sampled token: request, token, whether it was forced. is_governed: False for stock
    vLLM. In a step `between` is called while the model runs, and `sampling` once the masks are made.
    """

    def __init__(self, shape: Shape, on_token: Callable[[str, int, bool], None], is_governed: bool = True) -> None:
        self.shape, self.on_token = shape, on_token
        known, structured = config_of(shape)
        # Each engine has a configuration of its own, because the agent may change a limit in it.
        config = copy.copy(known)
        config.scheduler_config = copy.copy(known.scheduler_config)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(shape.blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if shape.is_async else Scheduler
        self.scheduler: Any = (governed(kind) if is_governed else kind)(
            config, cache, structured, block_size=BLOCK, log_stats=False
        )
        self.model = Model()
        self.asked = WorkerRequestDecoder()
        self.finished: dict[str, str] = {}
        # Prompts of the requests, with the tokens that the clients have got so far.
        self.sent: dict[str, list[int]] = {}
        # Tokens that each step scheduled by request, probes left out.
        self.schedule: list[dict[str, int]] = []
        # Tokens of the newest step, those of probes included, the KV blocks it left free, and the step's probes.
        self.scheduled_tokens = 0
        self.free_blocks = 0
        self.probes: set[str] = set()
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._sampling: Callable[[], None] = lambda: None

    def open(self, request_id: str, prompt: list[int], script: Script, own: dict[str, Any], **more: Any) -> None:
        """Add a request. own: its own settings for the agent; more: further arguments of vLLM's request."""
        self.model.open(request_id, prompt, script)
        self.sent[request_id] = list(prompt)
        params = SamplingParams(
            max_tokens=script.max_tokens,
            stop_token_ids=[self.model.stop],
            # The stop is the client's own, which nothing may take back, unless the script says otherwise.
            ignore_eos=not script.stops,
            extra_args={**STRIPPED, **own},
        )
        known: dict[str, Any] = {"arrival_time": 0.0, "block_hasher": _hasher(), "priority": script.priority}
        self.scheduler.add_request(Request(request_id, list(prompt), params, None, **known, **more))

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished[request_id] = "abort"

    @property
    def agent(self) -> Any:
        """Return the agent; None in stock vLLM, and while a fault has switched it off."""
        scheduler = self.scheduler
        return None if not hasattr(scheduler, "_guard") or scheduler._guard.fault else scheduler._agent

    def limits(self) -> tuple[int, ...]:
        """Return the scheduler's limits that the agent may lower for a step."""
        scheduler = self.scheduler
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        return (
            getattr(scheduler, scheduler_api.admission_limit_name(scheduler)),
            scheduler.max_num_scheduled_tokens,
            threshold,
        )

    @property
    def live(self) -> list[str]:
        return [r for r in self.scheduler.requests if not is_probe(r)]

    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._queue)

    def step(self, between: Callable[[], None], sampling: Callable[[], None]) -> None:
        self._sampling = sampling
        if self.shape.is_async:
            self._step_async(between)
        else:
            self._step(between)

    def _step(self, between: Callable[[], None]) -> None:
        output = self._schedule()
        between()
        result = self._sample(output, self.scheduler.get_grammar_bitmask(output))
        self._update(output, result)
        if self.shape.drafts:
            ids = [r for r in output.num_scheduled_tokens if not is_probe(r) and r in self.scheduler.requests]
            count = self.shape.drafts
            made = [[-1] * count if self.shape.hidden else self.model.drafts(r, count) for r in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, made))

    def _step_async(self, between: Callable[[], None]) -> None:
        """Run a step like EngineCore.step_with_batch_queue with a queue of two."""
        deferred = None
        if self.scheduler.has_requests():
            output = self._schedule()
            between()
            executed = output.total_num_scheduled_tokens > 0
            if executed and output.pending_structured_output_tokens:
                deferred = output
            else:
                grammar = self.scheduler.get_grammar_bitmask(output) if executed else None
                self._queue.appendleft((output, self._sample(output, grammar)))
                if len(self._queue) < 2 and (executed or self.scheduler.has_requests()):
                    return
        elif not self._queue:
            return
        self._update(*self._queue.pop())
        if deferred is not None:
            result = self._sample(deferred, self.scheduler.get_grammar_bitmask(deferred))
            self._queue.appendleft((deferred, result))

    def _schedule(self) -> Any:
        output = self.scheduler.schedule()
        self.scheduled_tokens = output.total_num_scheduled_tokens
        self.free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.probes = {r for r in output.num_scheduled_tokens if is_probe(r)}
        self.schedule.append({r: n for r, n in output.num_scheduled_tokens.items() if not is_probe(r)})
        return output

    def _update(self, output: Any, result: ModelRunnerOutput) -> None:
        self._sampling()
        for group in self.scheduler.update_from_output(output, result).values():
            for out in group.outputs:
                assert not is_probe(out.request_id), "a probe's output reaches the clients"
                sent = self.sent[out.request_id]
                sent.extend(out.new_token_ids)
                wanted = self.model.tokens[out.request_id][: len(sent)]
                assert sent == wanted, f"the client of {out.request_id} gets {sent}, not {wanted}"
                if out.finish_reason is not None:
                    self.finished[out.request_id] = str(out.finish_reason)

    def _sample(self, output: Any, grammar: Any) -> ModelRunnerOutput:
        masks = forced(output, grammar)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, generated in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                told = cached.all_token_ids[request_id] if self.shape.is_async else None
                self.model.resume(request_id, generated, told)
        ids, sampled = list(output.num_scheduled_tokens), []
        for request_id in ids:
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            if is_probe(request_id):
                sampled.append(self._probe(request_id, output, computed))
                continue
            reached = computed[request_id] + output.num_scheduled_tokens[request_id] - len(drafts)
            if reached < len(self.model.tokens[request_id]):
                sampled.append([])
                continue
            sampled.append(self._tokens(request_id, drafts, masks.get(request_id, {})))
        result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
        if (request := getattr(output, REQUEST, None)) is not None:
            excluded_ids = self.asked.excluded_ids(request)
            if ids:
                setattr(result, RESULT, self._signals(output, ids, excluded_ids).encode())
        return result

    def _probe(self, request_id: str, output: Any, computed: dict[str, int]) -> list[int]:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            # The request is aborted during the step, so its output is thrown away.
            return [self.model.stop]
        if computed[request_id] + output.num_scheduled_tokens[request_id] < request.num_tokens:
            return []
        x = mix(request.num_tokens, 3)
        return [self.model.stop if x % 4 == 0 else self.model.text[x % 3]]

    def _tokens(self, request_id: str, drafts: list[int], mask: dict[int, int]) -> list[int]:
        tokens, stopped = [], frozenset(self.model.stopped)
        if self.shape.hidden:
            drafts = self.model.drafts(request_id, len(drafts)) if drafts else []
        for row in range(1 + len(drafts)):
            token = mask.get(row, self.model.wish(request_id))
            request = self.scheduler.requests.get(request_id)
            # Output for a request that has ended or stopped meanwhile is thrown away.
            if request is not None and request_id not in stopped:
                self.on_token(request_id, token, row in mask)
            self.model.add(request_id, token)
            tokens.append(token)
            stops = token == self.model.stop or (
                request is not None
                and len(self.model.tokens[request_id]) >= min(request.num_prompt_tokens + request.max_tokens, CONTEXT)
            )
            if stops or (row < len(drafts) and drafts[row] != token):
                break
        return tokens

    def _signals(self, output: Any, ids: list[str], excluded_ids: Set[str]) -> StepSignals:
        counts = [1 + len(output.scheduled_spec_decode_tokens.get(r, ())) for r in ids]
        rows = sum(counts)
        x = [mix(len(self.schedule), row) for row in range(rows)]
        entropy = np.array([(v % 1000) / 250 for v in x], np.float32)
        rank = np.array([1 + v % 30 for v in x], np.int32)
        unmeasured = np.repeat([r in excluded_ids for r in ids], counts)
        entropy[unmeasured], rank[unmeasured] = np.nan, 0
        first = None if rows == len(ids) else np.cumsum([0, *counts[:-1]], dtype=np.int32)
        return StepSignals(first, entropy, rank, -entropy, -entropy)


def forced(output: Any, grammar: Any) -> dict[str, dict[int, int]]:
    """Return the tokens that a mask forces, by request and row."""
    if grammar is None:
        return {}
    found: dict[str, dict[int, int]] = {}
    at = 0
    for request_id in grammar.structured_output_request_ids:
        rows = 1 + len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        for row in range(rows):
            words_of_row = grammar.grammar_bitmask[at + row]
            if (words_of_row == -1).all():
                continue
            allowed = np.flatnonzero(np.unpackbits(words_of_row.view(np.uint8), bitorder="little"))
            assert len(allowed) == 1, f"the mask of {request_id} allows {len(allowed)} tokens"
            found.setdefault(request_id, {})[row] = int(allowed[0])
        at += rows
    assert at == len(grammar.grammar_bitmask)
    return found
