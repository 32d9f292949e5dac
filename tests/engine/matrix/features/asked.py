"""Features of requests: several sequences, stops, limits, grammars, adapters, tools."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from meridian_agent.core.phases import FLAG_FORCED, Phase
from meridian_agent.vllm_adapter.tokenizer import Template
from tests.engine import STRIPPED, cases
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import CLOSED, LENGTH, OPEN, STOP, Engine, places_of
from tests.engine.matrix.features.forces import GREEDY, force
from tests.engine.matrix.features.signals import ALL, DRAFTS, EVERYWHERE, RANKS
from tests.engine.offline import entropy
from tests.engine.policies import DENSE
from tests.processes import MODEL

GRAMMAR = ("grammar", "grammar-v2-async", "grammar-ngram")


@feature("n > 1: each sequence has its own phases, signals and cap", *ALL)
def several_sequences(engine: Engine) -> None:
    params = {"temperature": 2.0, "seed": 5, "n": 3, "max_tokens": 30}
    ask = Ask(engine.prompt(), params)
    (expected,) = engine.stock.draw([ask])
    ((answers,), seen), cap = engine.observe([ask]), 6
    assert answers == expected
    assert len({tuple(a.tokens) for a in answers}) > 1
    for answer, said in zip(answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)
        engine.check_signals(ask.prompt, answer.tokens, said)
    engine.control.apply({"scheduler": {"max_think_tokens": cap}})
    (capped,), seen = engine.observe([ask])
    for answer, after, said in zip(answers, capped, seen, strict=True):
        engine.check_phases(ask.prompt, after.tokens, said)
        # At this temperature the model may say an end marker in its answer.
        forced = [at for at, (_, flags, *_) in enumerate(said.rows) if flags & FLAG_FORCED]
        ended = engine.check_ends(answer.tokens, after.tokens, cap)
        assert forced == ([ended + len(engine.ending) - 1] if ended == cap else [])


@feature("stop strings, stop tokens and max_tokens inside thinking", *EVERYWHERE)
def stops(engine: Engine) -> None:
    full_stop = engine.token(".")
    asks = [
        Ask(engine.prompt(0), {**GREEDY, "max_tokens": 40, "stop": ["."]}),
        Ask(engine.prompt(1), {**GREEDY, "max_tokens": 40, "stop_token_ids": [full_stop]}),
        Ask(engine.prompt(2), {**GREEDY, "max_tokens": 7}),
        Ask(engine.prompt(3), {**GREEDY, "max_tokens": 9 + len(engine.ending)}),
    ]
    engine.control.apply({"scheduler": {"max_think_tokens": 9}})
    answers, seen = engine.observe(asks)
    *same, (last,) = answers
    *expected, (free,) = engine.stock.ask(asks)
    assert same == expected
    # The end marker is the last that the request may generate.
    assert last.tokens == [*free.tokens[:9], *engine.ending]
    assert [said.closed for said in seen] == [STOP if answer.stop else LENGTH for (answer,) in answers]
    for ask, (answer,), said in zip(asks, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)


@feature("min_tokens inside thinking, a forced end with it", *ALL)
def minimum(engine: Engine) -> None:
    nodes = [engine.token(node) for node in "ABCDEFGHIJKLMNOPQRSTUVWX"]
    ask = Ask(engine.prompt(), engine.endless(max_tokens=40, min_tokens=20, stop_token_ids=nodes))
    ((free,),) = engine.stock.ask([ask])
    assert engine.ask([ask]) == [[free]]
    assert len(free.tokens) > 20
    engine.control.apply({"scheduler": {"max_think_tokens": 9}})
    ((capped,),) = engine.ask([ask])
    assert capped.tokens[: 9 + len(engine.ending)] == [*free.tokens[:9], *engine.ending]
    assert len(capped.tokens) > 20


@feature("min_tokens that the end marker would cut short: a forced end waits for them", *DRAFTS)
def held_back(engine: Engine) -> None:
    """A mask would allow only the end marker, which vLLM's own min_tokens rules out."""
    fewest = 15
    ask = Ask(engine.prompt(2), {**GREEDY, "max_tokens": 40, "min_tokens": fewest, "stop_token_ids": [engine.end]})
    ((free,),) = engine.stock.ask([ask])
    for steps in (0, 6, 12):
        run = engine.run({"r": ask})
        run.until(lambda run=run, steps=steps: len(run.tokens["r"]) >= steps)
        force(engine, "r")
        run.until()
        ended = run.tokens["r"].index(engine.end)
        assert fewest <= ended <= fewest + engine.scheduler.num_spec_tokens
        assert run.tokens["r"] == [*free.tokens[:ended], engine.end]


@feature("requests that rule the end marker out think on, as stock's", *ALL)
def ruled_out(engine: Engine) -> None:
    """A mask of one token that the request forbids would leave the sampler with nothing to choose from."""
    # An older vLLM refuses ids that the model has beyond those of its tokenizer.
    others = [token for token in range(len(engine.llm.get_tokenizer())) if token != engine.end]
    asks = [
        Ask(engine.prompt(0), {**GREEDY, "max_tokens": 25, "allowed_token_ids": others}),
        Ask(
            engine.prompt(1),
            {**GREEDY, "max_tokens": 25, "bad_words": [engine.llm.get_tokenizer().decode([engine.end])]},
        ),
        Ask(engine.prompt(2), {**GREEDY, "max_tokens": 25, "min_tokens": 15, "stop_token_ids": [engine.end]}),
        Ask(engine.prompt(3), {**GREEDY, "max_tokens": 25, "logit_bias": {engine.end: float("-inf")}}),
    ]
    engine.control.apply({"scheduler": {"max_think_tokens": 9}})
    *never, (late,) = [*engine.ask(asks[:2] + asks[3:]), *engine.ask(asks[2:3])]
    *expected, (free,) = [*engine.stock.ask(asks[:2] + asks[3:]), *engine.stock.ask(asks[2:3])]
    assert never == expected
    assert late.tokens == [*free.tokens[:15], engine.end]


@feature("prompts that open thinking, close it, or hold earlier turns", *EVERYWHERE)
def prompts(engine: Engine) -> None:
    """The last marker of a prompt counts, and a cap counts from the beginning of thinking."""
    engine.control.apply({"scheduler": {"max_think_tokens": 8}})
    turns = [{"role": "user", "content": cases()[0]["prompt"]}, {"role": "assistant", "content": "<think>A .</think>B"}]
    turns.append({"role": "user", "content": cases()[1]["prompt"]})
    earlier = engine.render(turns, {})
    plain = [engine.prompt(0, template) for template in (OPEN, {}, CLOSED)]
    kept = [*engine.opening, engine.token("A"), *engine.ending, *plain[1]]
    asked = [*plain, earlier, kept, [*kept, *engine.opening]]
    asks = [Ask(prompt, {**GREEDY, "max_tokens": 24}) for prompt in asked]
    answers, seen = engine.observe(asks)
    for ask, (answer,), (stock,), said in zip(asks, answers, engine.stock.ask(asks), seen, strict=True):
        closes = ask.prompt == asks[2].prompt
        engine.check_phases(ask.prompt, answer.tokens, said, closes)
        thinks = said.opened == 2 or bool(places_of(engine.opening, answer.tokens))
        assert (engine.end in answer.tokens) >= thinks
        until = answer.tokens.index(engine.end) if thinks else len(answer.tokens)
        assert answer.tokens[:until] == stock.tokens[:until]
        thought = 8 + len(engine.ending) - 1 if thinks else 0
        assert sum(phase == 2 and not flags & 1 for phase, flags, *_ in said.rows) == thought


@feature("thinking again and again in one answer", *(b for b in ALL if b != "gptoss-vocabulary"))
def reentry(engine: Engine) -> None:
    """Start and end markers come at random: phases follow the tokens, and a cap counts all of the request's
    thinking. Markers of several tokens do not come at random; `markers` scripts them."""
    words = [engine.start, engine.end, engine.token("A"), engine.token("B")]
    params = {"temperature": 2.0, "frequency_penalty": 2.0, "max_tokens": 40, "allowed_token_ids": words}
    asks = [Ask(engine.prompt(i), {**params, "seed": i}) for i in range(4)]
    # The stock engine runs first: if it ends with an error, a governed engine would, too.
    expected = engine.stock.ask(asks)
    answers, seen = engine.observe(asks)
    assert answers == expected
    assert sum(a.tokens.count(engine.start) for (a,) in answers) > 3
    for ask, (answer,), said in zip(asks, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)
    engine.control.apply({"scheduler": {"max_think_tokens": 5}})
    answers, seen = engine.observe(asks)
    for ask, (answer,), said in zip(asks, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said)
        again = answer.tokens.count(engine.start) if engine.build.asynchronous else 0
        assert sum(phase == 2 and not flags & 1 for phase, flags, *_ in said.rows) <= 5 + again


@feature("a tool-call loop: the next turn finds its thinking in the cache, and thinks anew", *ALL)
def tool_loop(engine: Engine) -> None:
    """The template keeps thinking until the tool has answered; in this test any full stop is a tool call."""
    templates = engine.agent.facts.later_turns._templates
    usual, templates["{}"] = templates["{}"], Template(True, engine.token("."))
    try:
        prompt = engine.chat("A>B B>B start A")
        for turn in range(3):
            engine.control.apply({"scheduler": {"max_think_tokens": 40 + turn}})
            ask = Ask(prompt, engine.endless(max_tokens=70, extra_args=STRIPPED))
            ((answer,),), (said,) = engine.observe([ask])
            engine.check_phases(prompt, answer.tokens, said)
            assert answer.tokens.index(engine.end) == 40 + turn
            assert turn == 0 or answer.cached == (len(prompt) - 3 - len(engine.opening)) // 32 * 32
            result = [engine.token(word) for word in ("is", "where")]
            prompt = [*prompt, *answer.tokens, *result, *engine.opening]
    finally:
        templates["{}"] = usual


@feature("a grammar after thinking, also after a forced end", *EVERYWHERE, *RANKS)
def grammar_after(engine: Engine) -> None:
    words = ["walk", "where"]
    params = {**GREEDY, "max_tokens": 30}
    constrained = {**params, "structured_outputs": {"choice": words}}
    asks = [Ask(engine.prompt(0), params), Ask(engine.prompt(0), constrained), Ask(engine.prompt(2), constrained)]
    asks.append(Ask(engine.prompt(1, CLOSED), constrained))
    decode, expected = engine.llm.get_tokenizer().decode, engine.stock.ask(asks)
    for cap in (1, 12):
        engine.control.apply({"scheduler": {"max_think_tokens": cap}})
        (free, *rest, answering), seen = engine.observe(asks)
        for ask, (answer,), said in zip(asks, [free, *rest, answering], seen, strict=True):
            engine.check_phases(ask.prompt, answer.tokens, said, ask is asks[3])
        engine.check_ends_once(expected[0][0].tokens, free[0].tokens, cap)
        assert answering == expected[3]
        if _constrains_thinking(engine, asks[1].prompt):
            # The grammar rules the end marker out, so the request is left as it is.
            assert rest == expected[1:3]
            continue
        assert free[0].tokens[: cap + 1] == rest[0][0].tokens[: cap + 1]
        for (answer,) in rest:
            assert (answer.tokens.index(engine.end), answer.tokens.count(engine.end)) == (cap, 1)
            assert decode(answer.tokens[cap + len(engine.ending) :], skip_special_tokens=True).strip() in words


def _constrains_thinking(engine: Engine, prompt: list[int]) -> bool:
    """Return whether vLLM's reasoning parser takes thinking for ended after a prompt that opens it, as the one for
    gpt-oss does, so that grammars hold from the first token on."""
    from vllm.reasoning import ReasoningParserManager

    name = engine.llm.llm_engine.vllm_config.structured_outputs_config.reasoning_parser
    parser = ReasoningParserManager.get_reasoning_parser(name)(engine.llm.get_tokenizer())
    return bool(parser.is_reasoning_end(prompt))


@feature("a grammar during thinking: it is kept, and no request fails for a cap", *GRAMMAR)
def grammar_during(engine: Engine) -> None:
    """A grammar that never allows the end marker wins over a cap; with one that allows it, thinking ends at the cap."""
    thinking = {**GREEDY, "max_tokens": 30, "structured_outputs": {"regex": "[A-X]{40}"}}
    choice = {**GREEDY, "max_tokens": 30, "structured_outputs": {"regex": "[A-X]{2,40}</think>(walk){3}"}}
    asks = [
        Ask(engine.prompt(0), thinking),
        Ask(engine.prompt(1), choice),
        Ask(engine.prompt(2), GREEDY | {"max_tokens": 30}),
    ]
    free = engine.stock.ask(asks)
    assert engine.ask(asks) == free
    engine.control.apply({"scheduler": {"max_think_tokens": 9}})
    kept, ended, plain = [answer for (answer,) in engine.ask(asks)]
    assert [kept] == free[0]
    assert kept.finish == "length"
    for after, ((before,)) in ((ended, free[1]), (plain, free[2])):
        assert after.tokens[:10] == [*before.tokens[:9], engine.end]
    assert ended.finish == "stop"


@feature("LoRA requests: phases, entropy and caps as for any other, and no probe", "lora", "lora-v2")
def lora(engine: Engine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        adapter(Path(folder))
        params = {**GREEDY, "max_tokens": 60, "logprobs": -1}
        asks = [Ask(engine.prompt(i), params, lora=folder if i % 2 else "") for i in range(4)]
        engine.control.apply(DENSE)
        answers, seen = engine.observe(asks)
        expected = engine.stock.ask(asks)
        vocabulary = engine.llm.llm_engine.model_config.get_vocab_size()
        plain = engine.tokens([Ask(ask.prompt, {**GREEDY, "max_tokens": 60}) for ask in asks])
        assert any(plain[i] != answer.tokens for i, (answer,) in enumerate(answers) if asks[i].lora)
        for ask, (answer,), (stock,), said in zip(asks, answers, expected, seen, strict=True):
            assert answer.tokens == stock.tokens
            assert said.model == ("adapter" if ask.lora else "maze")
            engine.check_phases(ask.prompt, answer.tokens, said)
            rows = zip(said.rows, stock.all_logprobs(vocabulary), strict=True)
            wrong = [abs(row[2] - entropy(full)) for row, full in rows if row[0] == Phase.THINK]
            assert len(wrong) > 9
            assert max(wrong) <= 1e-5
            assert not (ask.lora and said.probes)
        engine.control.apply({"scheduler": {"max_think_tokens": 9}})
        for (stock,), tokens in zip(expected, engine.tokens(asks), strict=True):
            assert tokens[:10] == [*stock.tokens[:9], engine.end]


def adapter(folder: Path) -> None:
    """Write a small random adapter for the queries and values of every layer."""
    import torch
    from safetensors.torch import save_file

    shape, rank = json.loads((MODEL / "config.json").read_text()), 4
    heads = {"q_proj": shape["num_attention_heads"], "v_proj": shape["num_key_value_heads"]}
    drawn, weights = torch.Generator().manual_seed(0), {}
    for layer in range(shape["num_hidden_layers"]):
        for name, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            sizes = {"A": (rank, shape["hidden_size"]), "B": (count * shape["head_dim"], rank)}
            for side, size in sizes.items():
                weights[f"{at}.lora_{side}.weight"] = torch.randn(size, generator=drawn)
    save_file(weights, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": list(heads)}
    (folder / "adapter_config.json").write_text(json.dumps({**said, "bias": "none", "base_model_name_or_path": ""}))
