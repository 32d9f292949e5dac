"""Ends of thinking that the agent forces: at the right token, once, and with vLLM's own continuation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from meridian.v1 import agent_pb2

from tests.data import maze
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine, NotForBuild
from tests.engine.matrix.features.signals import ALL, EVERYWHERE, RANKS
from tests.engine.policies import CONVERGED, NEUTRAL, ending_turns
from tests.processes import wait_for

GREEDY: dict[str, Any] = {"temperature": 0.0}
# Only EAT decides, and a probed request waits for the decision, so that a busy machine does not change the result.
HELD = {**CONVERGED, "entropy": {**CONVERGED["entropy"], "eat_hold_ms": 10_000, "rpdi_threshold": 0.0}}
# Index of the prompt of seed 11 with the shortest thinking, 97 tokens.
SHORT = 14


@feature("caps: exact to the token, one end marker, nothing before it changed", *EVERYWHERE, *RANKS)
def caps(engine: Engine) -> None:
    count, most = (2, 24) if engine.slow else (6, 40)
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": most}) for i in range(count)]
    free = engine.tokens(asks)
    for cap in (1, 2, 20):
        engine.control.apply({"scheduler": {"max_think_tokens": cap}})
        for before, after in zip(free, engine.tokens(asks), strict=True):
            engine.check_ends_once(before, after, cap)


@feature("answer reserve: exactly so many tokens of max_tokens or of the context are left", *EVERYWHERE)
def answer_reserve(engine: Engine) -> None:
    most, marker = 40, len(engine.ending)
    reserve = most // 4 - marker
    # Thinking about these prompts takes more than `most` tokens. With drafts vLLM takes no bias against the end marker.
    sampling = {**GREEDY, "ignore_eos": True}
    prompts = [engine.prompt(i) for i in range(1 if engine.slow else 3)]
    # A prompt that leaves only `most` tokens of the context.
    words = [engine.token(word) for word in ("walk", "is", "where")]
    before_it = engine.scheduler.max_model_len - most - len(engine.opening)
    prompts.append([*(words * before_it)[:before_it], *engine.opening])
    free = engine.tokens([Ask(prompt, {**sampling, "max_tokens": most}) for prompt in prompts])
    engine.control.apply(_reserve(reserve))
    limits = [most] * (len(prompts) - 1) + [1000]
    asks = [Ask(prompt, {**sampling, "max_tokens": n}) for prompt, n in zip(prompts, limits, strict=True)]
    answers, seen = engine.observe(asks)
    for ask, before, (answer,), said in zip(asks, free, answers, seen, strict=True):
        assert len(answer.tokens) == most
        engine.check_ends_once(before, answer.tokens, most - reserve - marker)
        engine.check_phases(ask.prompt, answer.tokens, said)
    # A reserve that is too large for a request takes a quarter of its tokens, together with the forced end.
    engine.control.apply(_reserve(most))
    (tokens,) = engine.tokens([Ask(prompts[0], {**sampling, "max_tokens": most})])
    assert (len(tokens), tokens.index(engine.end)) == (most, most - most // 4)
    assert engine.control.settled().ends["answer_reserve"] >= len(asks)


def _reserve(tokens: int) -> dict[str, Any]:
    return {"scheduler": {"answer_reserve_tokens": tokens, "answer_reserve_for": "all"}}


@feature(
    "a model that stops while it thinks ends its thinking and answers, exactly as stock goes on",
    *("v1", "async", "v2-async", "ngram"),
)
def premature_stops(engine: Engine) -> None:
    if reason := engine.agent.facts.no_premature_stops:
        raise NotForBuild(reason)
    most = 44 if engine.slow else 120
    prompts = [engine.prompt(i) for i in range(2 if engine.slow else 4)]
    free = engine.tokens([Ask(prompt, {**GREEDY, "max_tokens": 24}) for prompt in prompts])
    asks, places = list[Ask](), list[int]()
    for prompt, tokens in zip(prompts, free, strict=True):
        # The model stops at a token that it has not generated before.
        at = next(at for at in range(len(tokens) - 1, -1, -1) if tokens.index(tokens[at]) == at)
        asks.append(Ask(prompt, {**GREEDY, "max_tokens": most, "stop_token_ids": [tokens[at]], "logprobs": 2}))
        places.append(at)
    for (stock,), tokens, at in zip(engine.stock.ask(asks), free, places, strict=True):
        assert (stock.tokens, stock.finish, stock.stop) == (tokens[: at + 1], "stop", tokens[at])
    stops = {ask.params["stop_token_ids"][0] for ask in asks}
    before = engine.control.settled().ends["premature_stop"]
    with ending_turns(stops):
        engine.control.apply(_reserve(10))
        answers, seen = engine.observe(asks)
        # After the stop of a request that runs alone, no step comes before the one in which it goes on.
        alone = engine.tokens(asks[:1])
    engine.control.apply(NEUTRAL)
    assert alone == [answers[0][0].tokens]
    if engine.build.asynchronous:
        _abort_between(engine, asks[0], stops)
    rest = [
        Ask([*ask.prompt, *tokens[:at], *engine.ending], {**ask.params, "max_tokens": most - at - len(engine.ending)})
        for ask, tokens, at in zip(asks, free, places, strict=True)
    ]
    told = zip(asks, answers, engine.stock.ask(rest), free, places, seen, strict=True)
    for ask, (answer,), (answered,), tokens, at, said in told:
        assert answer.tokens == [*tokens[:at], *engine.ending, *answered.tokens]
        assert (answer.finish, answer.stop) == (answered.finish, answered.stop)
        assert answer.logprobs is not None
        assert all(token in row for token, row in zip(answer.tokens, answer.logprobs, strict=True))
        assert len(answered.tokens) > 1
        engine.check_phases(ask.prompt, answer.tokens, said)
    assert engine.control.settled().ends["premature_stop"] == before + len(asks) + len(alone)
    if engine.build.asynchronous:
        _stop_while_preempted(engine, asks[0], stops, answers[0][0].tokens)
        _reset_between(engine, asks[0], stops, answers[0][0].tokens)
    _stop_at_once(engine, prompts[0], free[0][0])


def _stop_at_once(engine: Engine, prompt: list[int], first: int) -> None:
    """Let the model stop with its first token: the log-probabilities of the prompt come once."""
    found = []
    with ending_turns([first]):
        engine.control.apply(_reserve(10))
        for stops in ([], [first]):
            ask = Ask(prompt, {**GREEDY, "max_tokens": 24, "stop_token_ids": stops, "prompt_logprobs": 1})
            (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], ask.sampling(), use_tqdm=False)
            found.append([sorted(row or ()) for row in output.prompt_logprobs])
    engine.control.apply(NEUTRAL)
    assert list(output.outputs[0].token_ids)[: len(engine.ending)] == engine.ending
    assert len(found[0]) == len(prompt)
    assert found[1] == found[0]


def _abort_between(engine: Engine, ask: Ask, stops: set[int]) -> None:
    """Abort a request that has stopped while the step after its stop is under way."""
    with ending_turns(stops):
        engine.control.apply(_reserve(10))
        run = engine.run({"a": ask})
        run.until(lambda: bool(engine.agent.stops.waiting))
        assert engine.scheduler.get_num_unfinished_requests() == 1, "other ranks would stop computing"
        run.abort("a")
        assert engine.scheduler.get_num_unfinished_requests() == 0
        engine.drain()
    assert (engine.agent.stops.waiting, engine.scheduler.requests) == ({}, {})
    engine.control.apply(NEUTRAL)


def _stop_while_preempted(engine: Engine, ask: Ask, stops: set[int], tokens: list[int]) -> None:
    """Preempt a request, as for want of memory, while the step is under way whose token is its stop: once if it goes
    on, and once if it ends there."""
    at, scheduler = tokens.index(engine.end), engine.scheduler
    for name, reserve, resumed in (("goes on", 10, 1), ("ends", 0, 0)):
        with ending_turns(stops):
            engine.control.apply(_reserve(reserve))
            run = engine.run({name: ask})
            run.until(lambda run=run, name=name: len(run.tokens[name]) == at)
            (request,) = scheduler.running
            assert request.num_in_flight_tokens
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            run.until()
            engine.drain()
        assert run.tokens[name] == (tokens if resumed else [*tokens[:at], *ask.params["stop_token_ids"]])
        assert request.num_preemptions == 1
        engine.control.settled()
        life = [event.kind for event in engine.control.explain(name).events]
        assert (life.count("preempted"), life.count("resumed")) == (1, resumed), life
    engine.control.apply(NEUTRAL)


def _reset_between(engine: Engine, ask: Ask, stops: set[int], tokens: list[int]) -> None:
    """Let vLLM compute all requests anew while a step is under way with a request that has stopped, and again while a
    step is under way that writes its forced end."""
    by_id, other = engine.agent.tracker.by_id, Ask(engine.prompt(1), engine.endless(max_tokens=40))
    with ending_turns(stops):
        engine.control.apply(_reserve(10))
        for name in ("waits", "writes"):
            run = engine.run({name: ask, f"beside-{name}": other})
            waiting = engine.agent.stops.waiting
            while not any(live.expected if name == "writes" else r in waiting for r, live in by_id.items()):
                run.step()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            run.until()
            engine.drain()
            assert run.tokens[name] == tokens, name
    engine.control.apply(NEUTRAL)


@feature(
    "stop strings and stop tokens sleep while the model thinks, and end its answer where stock's would end",
    *("v1", "async", "v2-async", "ngram"),
)
def answer_only_stops(engine: Engine) -> None:
    most, cap, decode = 60, 20, engine.llm.get_tokenizer().decode
    plain = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": most}) for i in range(1 if engine.slow else 3)]
    scheduler = {"max_think_tokens": cap, "answer_reserve_tokens": 0, "answer_only_stops": "all"}
    engine.control.apply({"scheduler": scheduler})
    asks, rest, thoughts = list[Ask](), list[Ask](), list[list[int]]()
    for ask, free in zip(plain, engine.tokens(plain), strict=True):
        thought = free[: cap + len(engine.ending)]
        assert thought[cap:] == [*engine.ending]
        # The first word of the answer that the thinking has, too.
        token = next(t for t in free[len(thought) :] if t in thought[:cap] and decode([t]).isalpha())
        for stop in ({"stop_token_ids": [token]}, {"stop": [decode([token])]}):
            asks.append(Ask(ask.prompt, {**ask.params, **stop}))
            rest.append(Ask([*ask.prompt, *thought], {**ask.params, "max_tokens": most - len(thought), **stop}))
            thoughts.append(thought)
    answers, seen = engine.observe(asks)
    on_stock, stock_rest = engine.stock.ask(asks), engine.stock.ask(rest)
    for ask, (answer,), (unaware,), (ended,), thought, said in zip(
        asks, answers, on_stock, stock_rest, thoughts, seen, strict=True
    ):
        assert (unaware.finish, unaware.stop, len(unaware.tokens) <= cap) == ("stop", answer.stop, True)
        assert answer.tokens == [*thought, *ended.tokens]
        assert (answer.finish, answer.stop) == ("stop", ended.stop)
        engine.check_phases(ask.prompt, answer.tokens, said)


@contextlib.contextmanager
def _past_ends(engine: Engine) -> Iterator[dict[tuple[str, int], int]]:
    """Yield a dictionary that gets the probes of held requests: by request id and measured thinking token, how many
    tokens the request had after that token when the probe was placed."""
    past: dict[tuple[str, int], int] = {}
    probing = engine.agent.probing
    enter = probing._enter

    def watched(scheduler: Any, placed: Any, hold_ms: int) -> None:
        live = placed.parent
        past[live.info.request_id, placed.think_tokens] = live.think_tokens - placed.think_tokens
        enter(scheduler, placed, hold_ms)

    probing._enter = watched
    try:
        yield past
    finally:
        del probing._enter


@feature("entropy rules end thinking", *EVERYWHERE, *RANKS)
def rules(engine: Engine) -> None:
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 120 if engine.slow else 400}) for i in range(6)]
    free = engine.stock.ask(asks)
    before = engine.control.settled().ends["eat"]
    engine.control.apply(HELD)
    probing = engine.agent.probing

    def in_time() -> None:
        """Let the control plane keep pace until it has asked for a probe; then only the hold keeps its decision from
        being late."""
        if not (probing.placed or probing.held or engine.agent.directives.probes):
            engine.settled()

    run = engine.run({f"r{i}": ask for i, ask in enumerate(asks)})
    with engine.watched() as seen, _past_ends(engine) as past:
        run.until(settled=in_time)
        engine.drain()
    governed = list(run.tokens.values())
    late = []
    for (stock,), after, said in zip(free, governed, seen, strict=True):
        at = after.index(engine.end) if engine.end in after else len(after)
        assert after.count(engine.end) <= 1
        assert after[:at] == stock.tokens[:at]
        if at < len(after) and after[at] != stock.tokens[at]:
            _, _, measured, *_ = said.probes[-1]
            # The end of a sentence may be known one token late, or a probe may be asked for one token after it.
            late.append(at - measured - past[said.name, measured])
    # Thinking ends at the very token at which the probe was placed, or later by the lookahead under asynchronous
    # scheduling or with drafts.
    assert late
    assert max(past.values()) <= 1 + engine.scheduler.num_spec_tokens
    assert set(late) <= set(range(1 + engine.agent.tracker.lookahead)), (late, past)
    assert engine.control.settled().ends["eat"] > before


@feature("loops end within 256 tokens; other thinking stays", *ALL)
def loops(engine: Engine) -> None:
    """A bias makes two requests repeat one token for ever; the others think as without the rule. On slow engines loops
    are to end within 96 tokens: only where the look before has seen a loop, too, is the next one reported at once."""
    most = 96 if engine.slow else 256
    biases = [{engine.token(word): 100.0, engine.end: -30.0} for word in "AB"]
    biased = [engine.endless(max_tokens=most + 16, logit_bias=bias) for bias in biases]
    usual = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 40}) for i in range(1 if engine.slow else 4)]
    asks = [*(Ask(engine.prompt(4 + i), params) for i, params in enumerate(biased)), *usual]
    expected = [answer.tokens for (answer,) in engine.stock.ask(asks)]
    assert engine.end not in expected[0] + expected[1]
    before = engine.control.settled().ends["loop"]
    engine.control.apply({"loop": {"shadow": False, "min_tokens": most - 32}, "entropy": {"enabled": False}})
    runs = engine.paced(asks)
    assert runs[2:] == expected[2:]
    for tokens, free in zip(runs[:2], expected, strict=False):
        at = tokens.index(engine.end)
        assert at <= most
        assert tokens[:at] == free[:at]
        assert len(tokens) == len(free), "an answer follows"
    assert engine.control.settled().ends["loop"] == before + 2


@feature("closing text before a forced end", *EVERYWHERE)
def closing_text(engine: Engine) -> None:
    text, cap = "Wait . ", 12
    written = engine.llm.get_tokenizer().encode(text, add_special_tokens=False)
    engine.control.apply({"scheduler": {"max_think_tokens": cap}, "model": {"maze": {"closing_text": text}}})
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 40}) for i in range(2)]
    answers, seen = engine.observe(asks)
    for (answer,), (stock,), ask, said in zip(answers, engine.stock.ask(asks), asks, seen, strict=True):
        assert answer.tokens[:cap] == stock.tokens[:cap]
        assert answer.tokens[cap : cap + len(written) + len(engine.ending)] == [*written, *engine.ending]
        assert answer.tokens.count(engine.end) == 1
        engine.check_phases(ask.prompt, answer.tokens, said)


@feature("a freeze leaves stock vLLM", *EVERYWHERE, *RANKS)
def freeze(engine: Engine) -> None:
    engine.control.apply(CONVERGED)
    asks = [Ask(engine.prompt(i), {**GREEDY, "max_tokens": 80 if engine.slow else 250}) for i in range(6)]
    engine.control.freeze()
    wait_for(lambda: engine.control.engine().freeze.confirmed, 10, "the freeze")
    try:
        assert engine.ask(asks) == engine.stock.ask(asks)
    finally:
        engine.control.thaw()
        wait_for(lambda: not engine.control.engine().HasField("freeze"), 10, "the thaw")


@feature("no second end marker when the model ends thinking beside a force", *EVERYWHERE, *RANKS)
def beside_its_own_end(engine: Engine) -> None:
    """Forces arrive around the model's own end, as they might come down the stream at that moment."""
    opening = engine.chat(maze.prompts(SHORT + 1, seed=11)[SHORT])
    ((whole,),) = engine.stock.ask([Ask(opening, {**GREEDY, "max_tokens": 130})])
    prompt = opening + whole.tokens[: whole.tokens.index(engine.end) - 12]
    ((stock,),) = engine.stock.ask([Ask(prompt, {**GREEDY, "max_tokens": 40})])
    natural = stock.tokens.index(engine.end)
    assert stock.tokens[natural : natural + len(engine.ending)] == engine.ending, "the model does not end its thinking"
    # With drafts a step makes several tokens, and so does the step under way with asynchronous scheduling.
    apart = 1 + engine.agent.tracker.lookahead // 4
    places = range(4, -2 - len(engine.ending), -1)
    early = {f"r{i}": tokens * (apart if tokens > 0 else 1) for i, tokens in enumerate(places)}
    run = engine.run({name: Ask(prompt, {**GREEDY, "max_tokens": 40}) for name in early})
    waiting = dict(early)
    while engine.llm.llm_engine.has_unfinished_requests():
        for name, tokens in list(waiting.items()):
            if len(run.tokens[name]) >= natural - tokens:
                del waiting[name]
                force(engine, name)
        run.step()
    assert not waiting
    ends = {name: tokens.index(engine.end) for name, tokens in run.tokens.items()}
    for name, said in run.tokens.items():
        assert said.count(engine.end) == 1, name
        assert said[: ends[name]] == stock.tokens[: ends[name]]
        assert ends[name] < natural or said == stock.tokens
    assert set(ends.values()) > {natural}, "some forces came before the model's own end, some too late"


def force(engine: Engine, name: str) -> None:
    """Give the agent a force as the link would; decision id 0 keeps the control plane out of it."""
    slots = {live.info.request_id: slot for slot, live in engine.agent.tracker.by_slot.items()}
    wanted = [slot for request_id, slot in slots.items() if request_id.split("-")[0] == name]
    forces = [agent_pb2.ForceEnd(slot=slot, reason=agent_pb2.FORCE_REASON_EAT) for slot in wanted]
    step = max([live.opened_step for live in engine.agent.tracker.by_slot.values()], default=0)
    engine.agent.link.inbox.put(agent_pb2.Directives(step=step, forces=forces))


@feature("vLLM's own thinking budget: output as stock's, reported as a cap; the smaller of both holds", *ALL)
def budget(engine: Engine) -> None:
    """Prompts open thinking themselves or leave it to the model; the agent and vLLM force at the same token."""
    count, tokens = (2, 12) if engine.slow else (6, 24)
    opened: list[dict[str, Any]] = [{"open_think": True}, {}]
    asks = [
        Ask(engine.prompt(i, opened[i % 2]), {**GREEDY, "max_tokens": 2 * tokens, "thinking_token_budget": tokens - i})
        for i in range(count)
    ]
    engine.control.apply({"entropy": {"enabled": False}})
    before = engine.control.settled().ends["hard_cap"]
    stock = [answer.tokens for (answer,) in engine.stock.ask(asks)]
    assert all(answer.count(engine.end) == 1 for answer in stock)
    assert engine.tokens(asks) == stock
    assert engine.control.settled().ends["hard_cap"] == before + count
    engine.control.apply({"entropy": {"enabled": False}, "scheduler": {"max_think_tokens": 4}})
    for i, (free, capped) in enumerate(zip(stock, engine.tokens(asks), strict=True)):
        # A prompt that leaves thinking to the model is followed by the start marker.
        engine.check_ends_once(free, capped, 4 + i % 2)
    assert engine.control.settled().ends["hard_cap"] == before + 2 * count
