"""Features of the scheduler: order, waiting, preemption and chunked prompts, through all of which the agent must
work."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from meridian_agent.core.phases import FLAG_FORCED, Phase
from meridian_agent.core.request_info import is_probe
from tests.data import maze
from tests.engine import STRIPPED, stops_next
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import ABORT, CLOSED, Engine, NotForBuild, Observed
from tests.engine.matrix.features.forces import GREEDY, SHORT, force
from tests.engine.matrix.features.signals import ALL, DRAFTS
from tests.engine.policies import DENSE, NEUTRAL
from tests.engine.queueing import compared
from tests.fakes.sentences import ends_of, flags_of

# On the prompt of `drafted`, the last paragraph of thinking begins this many tokens before its end; AROUND tokens on
# either side of the end are available for drafts.
LAST_PARAGRAPH, AROUND = 10, 6
TIGHT = ("tight", "tight-async", "tight-v2", "tight-v2-async")


@feature(
    "asynchronous scheduling waits for a step's tokens in steps that carry a force, in no other",
    "async",
    "v2-async",
    "gptoss-vocabulary",
)
def overlap(engine: Engine) -> None:
    """Steps with probes do not wait; with a cap, the steps that write an end marker wait, also one of several
    tokens."""
    asks = [Ask(engine.prompt(i), engine.endless(max_tokens=60)) for i in range(4)]
    engine.control.apply(DENSE)
    with engine.watched() as seen, counted(engine) as free:
        engine.paced(asks)
    assert any(said.probes for said in seen)
    assert free["steps"] >= 60
    assert (free["waits"], free["forces"]) == (0, 0)
    for text in ("", "Wait . "):
        written = engine.llm.get_tokenizer().encode(text, add_special_tokens=False)
        tokens = len(written) + len(engine.ending)
        # No two requests write their ends in the same step.
        apart = tokens + 4
        caps = [{"extra_args": {"meridian_max_think_tokens": apart * i + 3}} for i in range(len(asks))]
        capped = [Ask(ask.prompt, ask.params | own) for ask, own in zip(asks, caps, strict=True)]
        cap = apart * len(asks)
        engine.control.apply({"scheduler": {"max_think_tokens": cap}, "model": {"maze": {"closing_text": text}}})
        with counted(engine) as forced:
            engine.ask(capped)
        assert forced["steps"] >= 60
        assert (forced["waits"], forced["forces"], forced["both"]) == (tokens * len(asks),) * 3, forced


class counted:  # noqa: N801
    """Counts the steps inside the block: all, those that wait for the step before, those with a force, and those with
    both."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler, self.counts = engine.scheduler, dict.fromkeys(("steps", "waits", "forces", "both"), 0)

    def __enter__(self) -> dict[str, int]:
        masks = self._scheduler.get_grammar_bitmask

        def watch(output: Any) -> Any:
            mask = masks(output)
            waits, forces = bool(output.pending_structured_output_tokens), mask is not None
            for name, holds in zip(self.counts, (True, waits, forces, waits and forces), strict=True):
                self.counts[name] += holds
            return mask

        self._scheduler.get_grammar_bitmask = watch
        return self.counts

    def __exit__(self, *_: object) -> None:
        del self._scheduler.get_grammar_bitmask


@feature("drafts: steps of several tokens across the end of thinking, caps inside drafts", *DRAFTS)
def across_the_boundary(engine: Engine) -> None:
    """Whole drafts are accepted, the end marker among them; caps fall on each of their places and past the model's
    end. Steps in which nothing happens are calm, also with accepted drafts."""
    _check_calm(engine)
    ask, free = drafted(engine)
    end = free.index(engine.end)
    caps = range(1, end + 4)
    own = [{"extra_args": {"meridian_max_think_tokens": cap}} for cap in caps]
    answers, seen = engine.observe([Ask(ask.prompt, ask.params | more) for more in own])
    inside = 0
    for cap, (answer,), said in zip(caps, answers, seen, strict=True):
        engine.check_ends_once(free, answer.tokens, cap)
        engine.check_phases(ask.prompt, answer.tokens, said)
        forced = [at for at, (_, flags, *_) in enumerate(said.rows) if flags & FLAG_FORCED]
        assert forced == ([cap] if cap <= end else []), (cap, forced)
        assert cap < end or answer.tokens == free
        inside += any(begin < at < past for at in forced for begin, past in steps_of(said))
    # If only the workers know the drafts, no drafts are made near a cap.
    hidden = engine.build.v2 or engine.build.asynchronous
    assert hidden or inside > 3, "no forced end came with tokens before it in its step"


def _check_calm(engine: Engine) -> None:
    """Check that some of the steps that bring several tokens are calm, and that tokens and signals are right."""
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 80}) for i in range(3)]
    calm, lengths = engine.agent.calm, list[int]()
    update = engine.scheduler.update_from_output

    def watch(output: Any, result: Any) -> Any:
        if calm.number == engine.agent.tracker.run.number:
            lengths.extend(len(new) for new in result.sampled_token_ids)
        return update(output, result)

    before, engine.scheduler.update_from_output = calm.calm_steps, watch
    try:
        answers, seen = engine.observe(asks)
    finally:
        del engine.scheduler.update_from_output
    assert answers == engine.stock.ask(asks)
    for ask, (answer,), said in zip(asks, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)
        engine.check_signals(ask.prompt, answer.tokens, said)
    assert calm.calm_steps > before
    assert max(lengths, default=0) > 1, "no calm step accepted a draft"


@feature("drafts: a sentence that ends within a step is probed at its end", *DRAFTS)
def within_a_step(engine: Engine) -> None:
    """Each probe is at the end of a sentence, with the right value, even if its step went on after the sentence."""
    at_sentences = {**DENSE["entropy"], "eat_probe_placement": "sentence"}
    engine.control.apply({**DENSE, "entropy": at_sentences})
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 200}) for i in range(5)]
    with engine.watched() as seen:
        runs = engine.paced(asks)
    assert runs == [answer.tokens for (answer,) in engine.stock.ask(asks)]
    within = 0
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        engine.check_probes(ask.prompt, tokens, said)
        places = [think_tokens for _, _, think_tokens, *_ in said.probes]
        assert len(places) == len(set(places)), "an end is probed twice"
        assert {place - 1 for place in places} <= {*ends_of(flags_of(engine.agent.tracker.sentences, tokens))}
        within += len({*places} - {past for _, past in steps_of(said)})
    assert within, "no sentence ended within a step"


def drafted(engine: Engine) -> tuple[Ask, list[int]]:
    """Return a request that is about to end thinking in the middle of a step, and stock vLLM's tokens for it.

    The tokens around its end marker are placed before its prompt and occur nowhere else in it. V1 drafts the first
    continuation found in the text and V2 the last one, and either way that is the end. The model's own thinking has its
    result twice in each paragraph, so its end would repeat earlier text; here the earlier paragraphs have the result
    once.
    """
    opening = engine.chat(maze.prompts(SHORT + 1, seed=11)[SHORT])
    thinks = _stock(engine, Ask(opening, {**GREEDY, "max_tokens": 130}))
    end = thinks.index(engine.end)
    around, earlier = thinks[end - AROUND : end + AROUND], thinks[: end - LAST_PARAGRAPH]
    once = [t for i, t in enumerate(earlier) if not (t == earlier[i - 1] and earlier[i + 2 : i + 3] == earlier[-1:])]
    ask = Ask([*around, *opening, *once], {**GREEDY, "max_tokens": 30})
    told = _stock(engine, ask)
    assert told[LAST_PARAGRAPH - AROUND : LAST_PARAGRAPH + AROUND] == around
    assert _crosses(engine, ask, told, LAST_PARAGRAPH), "no step across the end of thinking"
    return ask, told


def _crosses(engine: Engine, ask: Ask, told: list[int], end: int) -> bool:
    """Return whether the end marker is in the middle of a step; the governed engine's tokens must equal stock's."""
    ((answer,),), (said,) = engine.observe([ask])
    assert answer.tokens == told
    engine.check_phases(ask.prompt, told, said)
    engine.check_signals(ask.prompt, told, said)
    return any(start < end < stop - 1 for start, stop in steps_of(said))


def _stock(engine: Engine, ask: Ask) -> list[int]:
    return engine.stock.ask([ask])[0][0].tokens


def steps_of(said: Observed) -> list[tuple[int, int]]:
    """Return where each step's tokens begin and where they end."""
    past = list(itertools.accumulate(said.steps))
    return list(zip([0, *past], past, strict=False))


@feature("chunked prefill, with probes and caps", "chunked", "chunked-v2-async")
def chunked(engine: Engine) -> None:
    """Prompts come in pieces of at most 16 tokens, beside requests that think and answer and beside their probes."""
    engine.control.apply(DENSE)
    asks = [Ask(engine.prompt(i, CLOSED if i == 3 else None), {**GREEDY, "max_tokens": 80}) for i in range(6)]
    assert all(len(ask.prompt) > 2 * engine.scheduler.max_num_scheduled_tokens for ask in asks)
    with _probes_beside_pieces(engine) as totals, engine.watched() as seen:
        runs = engine.paced(asks)
    assert set(totals) == {16}, "a step with a probe and a prompt in pieces is as full as any"
    assert runs == [answer.tokens for (answer,) in engine.stock.ask(asks)]
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        engine.check_phases(ask.prompt, tokens, said, ask is asks[3])
        engine.check_signals(ask.prompt, tokens, said)
        engine.check_probes(ask.prompt, tokens, said)
    assert any(said.probes for said in seen)
    engine.control.apply({"scheduler": {"max_think_tokens": 7}})
    for before, after in zip(runs, engine.tokens(asks[:3]), strict=False):
        engine.check_ends_once(before, after, 7)


@contextlib.contextmanager
def _probes_beside_pieces(engine: Engine) -> Iterator[list[int]]:
    """Yield the tokens of each step inside the block that has probes and leaves a prompt unfinished."""
    scheduler, totals = engine.scheduler, list[int]()
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        pieces = [r for r in scheduler.running if r.is_prefill_chunk and r.request_id in output.num_scheduled_tokens]
        if pieces and any(is_probe(name) for name in output.num_scheduled_tokens):
            totals.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = watched
    try:
        yield totals
    finally:
        del scheduler.schedule


@feature("no prefix cache: says that it cannot probe, all else holds", "uncached", "uncached-v2-async")
def uncached(engine: Engine) -> None:
    capabilities = engine.control.engine().capabilities
    assert (capabilities.eat_probe, capabilities.reclaim, capabilities.token_entropy) == (False, False, True)
    engine.control.apply(DENSE)
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 60}) for i in range(4)]
    answers, seen = engine.observe(asks)
    assert answers == engine.stock.ask(asks)
    for ask, (answer,), said in zip(asks, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)
        engine.check_signals(ask.prompt, answer.tokens, said)
        assert not said.probes
    engine.control.apply({"scheduler": {"max_think_tokens": 7}})
    for (before,), after in zip(answers, engine.tokens(asks), strict=True):
        engine.check_ends_once(before.tokens, after, 7)


@feature("preemption and resumption in each phase: phases, caps, output as stock's", *TIGHT)
def preemption(engine: Engine) -> None:
    """There are more requests than the cache holds, in vLLM's own order; prompts come in pieces, so they are preempted,
    too."""
    engine.control.apply({**NEUTRAL, "scheduler": {"enabled": False}})
    last_goes_first = [squeezed(engine, order) for order in ("taoc", "tcoa", "aoct")]
    assert set().union(*last_goes_first) == {Phase.PROMPT, Phase.THINK, Phase.OUTPUT}, last_goes_first


def squeezed(engine: Engine, order: str) -> set[Phase]:
    """Run four requests in this order, then two more while blocks run out; return the phases in which some were
    preempted.

    The letters t and o think, c thinks with a cap of its own, a answers. All outputs must equal stock's.
    """
    own = {"extra_args": {"meridian_max_think_tokens": 50}}
    capped = {**engine.endless(max_tokens=90), **own}
    asks = {
        "t": Ask(engine.prompt(0), engine.endless(max_tokens=90)),
        "o": Ask(engine.prompt(1), engine.endless(max_tokens=90)),
        "c": Ask(engine.prompt(2), capped),
        "a": Ask(engine.prompt(3, CLOSED), engine.endless(max_tokens=80)),
    }
    late = {"prompt": Ask(engine.chat("A>B " * 100, {}), engine.endless(max_tokens=4))}
    late["capped"] = Ask(engine.prompt(0), capped)
    phases: set[Phase] = set()
    preempted = engine.agent.preempted

    def watch(scheduler: Any, request: Any, *rest: Any) -> None:
        phases.add(engine.agent.tracker.by_id[request.request_id].state.phase)
        preempted(scheduler, request, *rest)

    engine.agent.preempted = watch
    try:
        with engine.watched() as seen:
            run = engine.run({name: asks[name] for name in order})
            run.until(lambda: (len(asks["t"].prompt) + len(run.tokens["t"])) % 32 == 24)
            for name, ask in late.items():
                ask.put(run, name)
            run.until()
    finally:
        del engine.agent.preempted
    asks |= late
    free = dict(zip(asks, engine.stock.ask(list(asks.values())), strict=True))
    for said in seen:
        name = said.name.split("-")[0]
        engine.check_phases(asks[name].prompt, run.tokens[name], said, name == "a")
        if asks[name].params is capped:
            assert run.tokens[name][:51] == [*free[name][0].tokens[:50], engine.end]
        else:
            assert run.tokens[name] == free[name][0].tokens
    return phases


@feature("queueing time: vLLM's own, and none for a resumption", *TIGHT)
def queueing(engine: Engine) -> None:
    preempted = engine.agent.preempted_think
    asks = {f"r{i}": Ask(engine.prompt(i % 6), engine.endless(max_tokens=60)) for i in range(12)}
    with compared(engine.llm, engine.scheduler, engine.agent) as times_ms:
        engine.run(asks).until()
        engine.drain()
    assert len(times_ms) == len(asks)
    assert engine.agent.preempted_think > preempted


@feature("answers are never preempted before thinking", *TIGHT)
def victims(engine: Engine) -> None:
    """Stock vLLM preempts the answers that came last; governed, it preempts only thinking. Tokens are the same."""
    asks = {f"think{i}": Ask(engine.prompt(i), engine.endless(max_tokens=90)) for i in range(3)}
    asks |= {f"answer{i}": Ask(engine.prompt(i, CLOSED), engine.endless(max_tokens=80)) for i in range(2)}
    found = {}
    for enabled in (False, True):
        engine.control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], "enabled": enabled}})
        before = engine.agent.preempted_think, engine.agent.output_critical
        run = engine.run(asks)
        run.until()
        counts = engine.agent.preempted_think - before[0], engine.agent.output_critical - before[1]
        found[enabled] = counts, run.tokens
    assert found[False][0][1] > 0
    assert (found[True][0][0] > 0, found[True][0][1]) == (True, 0)
    assert found[True][1] == found[False][1]


@feature("blocks past the prompt are reused first", *ALL)
def reclaim(engine: Engine) -> None:
    """The prompt's blocks stay cached, those of thinking and answer lose their hash, unless the policy is off.

    vLLM renders gpt-oss's chats without a chat template, so the agent cannot know whether later turns repeat thinking,
    and all blocks keep their hash.
    """
    harmony = engine.words is not None and engine.words.harmony
    pool = engine.scheduler.kv_cache_manager.block_pool
    for enabled in (True, False):
        engine.llm.llm_engine.reset_prefix_cache()
        engine.control.apply({**NEUTRAL, "kv_memory": {"enabled": enabled}})
        ask = Ask(engine.prompt(), engine.endless(max_tokens=70, extra_args=STRIPPED))
        run = engine.run({"r": ask})
        run.until(lambda run=run: len(run.tokens["r"]) == 60, settled=engine.settled)
        (name,) = engine.agent.tracker.by_id
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
        stops_next(engine.scheduler, name)
        run.until()
        full = [pool.blocks[b].block_hash is not None for b in blocks[: (len(ask.prompt) + 60) // 32]]
        of_prompt = len(ask.prompt) // 32
        assert 0 < of_prompt < len(full)
        assert full == [True] * of_prompt + [harmony or not enabled] * (len(full) - of_prompt)
        engine.drain()
        engine.control.settled()
    if harmony:
        raise NotForBuild("vLLM renders gpt-oss's chats without a chat template, so all blocks stay in its own order")


@feature("aborts in each phase, and with an end half written", *ALL)
def aborts(engine: Engine) -> None:
    engine.control.apply({**DENSE, "model": {"maze": {"closing_text": "Wait . Wait . "}}})
    params = engine.endless(max_tokens=40)
    asks = {"prompt": Ask(engine.prompt(0, {}), params), "think": Ask(engine.prompt(1), params)}
    asks |= {"answer": Ask(engine.prompt(2, CLOSED), params), "ending": Ask(engine.prompt(3), params)}
    asks |= {"stays": Ask(engine.prompt(4), params), "also": Ask(engine.prompt(5, CLOSED), params)}
    closing = engine.llm.get_tokenizer().encode("Wait . Wait . ", add_special_tokens=False)
    with engine.watched() as seen:
        run = engine.run(asks)
        run.abort("prompt")
        for name in ("think", "answer"):
            run.until(lambda name=name: len(run.tokens[name]) > 8)
            run.abort(name)
        force(engine, "ending")
        run.until(lambda: run.tokens["ending"][-2:] == closing[:2])
        run.abort("ending")
        run.until()
    at = {said.name.split("-")[0]: said for said in seen}
    gone = {"prompt": Phase.PROMPT, "think": Phase.THINK, "answer": Phase.OUTPUT, "ending": Phase.THINK}
    assert {name for name, said in at.items() if said.closed == ABORT} == set(gone)
    for name, phase in gone.items():
        reported = [row[0] for row in at[name].rows]
        assert (reported[-1] if reported else at[name].opened) == phase
    for name in ("stays", "also"):
        assert run.tokens[name] == engine.stock.ask([asks[name]])[0][0].tokens
        engine.check_phases(asks[name].prompt, run.tokens[name], at[name], name == "also")

    if engine.build.asynchronous:
        engine.control.apply(NEUTRAL)
        _go_on_after_an_error(engine, asks["stays"])


def _go_on_after_an_error(engine: Engine, ask: Ask) -> None:
    """Let a step fail, and end all requests as vLLM's fault tolerance does: no step is under way any more for which the
    next request would wait."""
    from vllm.v1.request import RequestStatus

    core, text = engine.llm.llm_engine.engine_core.engine_core, "made by the test"
    sample = core.model_executor.sample_tokens

    def fails(*args: Any, **kwargs: Any) -> Any:
        core.model_executor.sample_tokens = sample
        sample(*args, **kwargs)
        raise RuntimeError(text)

    run = engine.run({"lost": ask})
    run.until(lambda: len(run.tokens["lost"]) > 8)
    core.model_executor.sample_tokens = fails
    with contextlib.suppress(RuntimeError):
        run.until()
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    core.batch_queue.clear()
    engine.llm.llm_engine.abort_request(["lost"])
    capped = Ask(ask.prompt, ask.params | {"extra_args": {"meridian_max_think_tokens": 0}})
    (tokens,) = engine.tokens([capped])
    assert tokens[: len(engine.ending)] == engine.ending


@feature("priority policy: answers first between requests of equal priority", "priority", "priority-async")
def priority(engine: Engine) -> None:
    """Stock preempts answers that came last; governed, it does not, unless a request's own priority asks for it."""

    def load(strategy: str, think_priority: int) -> tuple[int, int, dict[str, list[int]]]:
        engine.control.apply({"scheduler": {"strategy": strategy}, "entropy": {"shadow": True}})
        before = engine.agent.preempted_think, engine.agent.output_critical
        more, less = engine.endless(max_tokens=150), engine.endless(max_tokens=110)
        asks = {f"think{i}": Ask(engine.prompt(i), more, priority=think_priority) for i in range(5)}
        asks |= {f"answer{i}": Ask(engine.prompt(i, CLOSED), less) for i in range(3)}
        run = engine.run(asks)
        run.until(settled=engine.settled)
        engine.drain()
        engine.control.settled()
        after = engine.agent.preempted_think, engine.agent.output_critical
        return after[0] - before[0], after[1] - before[1], run.tokens

    stock, governed, urgent = load("stock", 0), load("output_first", 0), load("output_first", -1)
    assert engine.llm.llm_engine.vllm_config.scheduler_config.policy == "priority"
    assert stock[1] > 0
    assert (governed[0] > 0, governed[1]) == (True, 0)
    assert urgent[1] > 0, "a request's own priority comes before its phase"
    assert stock[2] == governed[2] == urgent[2]
    assert {len(t) for n, t in stock[2].items() if n.startswith("answer")} == {110}
