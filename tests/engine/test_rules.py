"""Rules that use natural boundaries, on the real engine: placement of probes, rank, soft close."""

from __future__ import annotations

import functools
import itertools
import random
import signal
from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from meridian_agent.core.phases import FLAG_END, FLAG_GOES_ON, FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_agent.core.probe_admission import MAX_HOLD_MS
from meridian_agent.core.request_info import is_probe
from tests.data import maze
from tests.engine import Run, chat, paced
from tests.engine.pacing import Settled
from tests.engine.policies import CONVERGED
from tests.engine.recording import probes, records, rows
from tests.fakes.sentences import ends_of, flags_of
from tests.processes import Control

OPEN = {"open_think": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=600)
CASES: list[dict[str, Any]] = [{"prompt": p, "template": OPEN} for p in maze.prompts(6, seed=31)]
# A paced step begins once the report of the step before it is answered, so the decision applies in that step.
LATE_TOKENS = 1


@functools.cache
def free_run(llm: Any, agent: Any) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the tokens of each case, and the rows that the agent measured for them, under the neutral policy, which is
    in force when a test begins. The run is the same for all tests."""
    with records(agent) as seen:
        free = chat(llm, CASES, GREEDY)
    return free, list(rows(seen).values())


def test_boundaries_of_the_vocabulary(llm: Any, agent: Any) -> None:
    vocabulary, table = llm.get_tokenizer().get_vocab(), agent.tracker.sentences
    word, stop, paragraph = (vocabulary[text] for text in ("Wait", ".", "\n\n"))
    flags = flags_of(table, [word, stop, word, stop, paragraph, word])
    assert [f & (FLAG_SENTENCE | FLAG_PARAGRAPH) for f in flags] == [0, 32, 0, 32, 96, 0]
    assert ends_of(flags) == [1, 4]
    assert sum(map(bool, table.may_end)) <= 4
    assert not table.may_end[vocabulary["A"]]


@pytest.mark.parametrize(("placement", "flag"), [("sentence", FLAG_SENTENCE), ("paragraph", FLAG_PARAGRAPH)])
def test_probes_wait_for_a_boundary(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, placement: str, flag: int
) -> None:
    shadow = {"shadow": True, "eat_probe_interval_tokens": 4, "eat_probe_placement": placement}
    control.apply({"scheduler": {"min_think_tokens": 0}, "entropy": shadow})
    with records(agent) as seen:
        (tokens,) = paced(llm, CASES[:1], SamplingParams(temperature=0.0, max_tokens=150), settled)
    at = [think_tokens for record, *_ in seen for _, _, think_tokens, *_ in record.probes]
    flags = flags_of(agent.tracker.sentences, tokens)
    assert at
    assert {n - 1 for n in at} <= {end for end in ends_of(flags) if flags[end] & flag}
    control.settled()


def ends_before(measured: list[Any], n: int) -> bool:
    """Return whether a sentence ends with the token before the n-th one."""
    (_, before, *_), (_, flags, *_) = measured[n - 1], measured[n]
    return bool(before & FLAG_SENTENCE) and (flags & (FLAG_GOES_ON | FLAG_END)) != FLAG_GOES_ON


def first_likely_end(measured: list[Any], max_rank: int, from_tokens: int = 0) -> int:
    """Return the thinking tokens at the first sentence end after which the end marker ranks at most `max_rank`."""
    for n in range(max(1, from_tokens), len(measured)):
        _, _, _, end_rank, *_ = measured[n]
        if ends_before(measured, n) and end_rank <= max_rank:
            return n
    return len(measured)


@pytest.mark.parametrize(("rule", "rpdi_threshold"), [("rank", 2.0), ("rank", 0.0), ("soft_close", 0.0)])
def test_rank_and_soft_close_end_thinking_at_their_boundary(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, rule: str, rpdi_threshold: float
) -> None:
    """Thinking equals the free run's up to the boundary that the rule asks for, and ends soon after it, not before,
    whether all tokens are measured or only those that follow a sentence end."""
    free, measured = free_run(llm, agent)
    end = agent.tracker.markers.end[0]
    expected = [first_likely_end(m, 2, 40 if rule == "soft_close" else 6) for m in measured]
    in_force = {"shadow": False, "holdout_share": 0.0, "rank_conditions": [{"max_ranks": [2]}]}
    rank = {"scheduler": {"min_think_tokens": 6}, "entropy": in_force | {"rpdi_threshold": rpdi_threshold}}
    soft = {"scheduler": {"soft_think_tokens": 40, "soft_close_rank": 2}, "entropy": {"enabled": False}}
    before = dict(control.settled().ends)
    control.apply(rank if rule == "rank" else soft)
    governed = paced(llm, CASES, GREEDY, settled)
    ended = control.settled().ends[rule] - before.get(rule, 0)
    assert ended > 0
    for f, g, bound in zip(free, governed, expected, strict=True):
        at, natural = g.index(end), f.index(end) if end in f else len(f)
        assert g[:at] == f[:at]
        assert min(bound, natural) <= at <= min(bound + LATE_TOKENS, natural)
    assert sum(len(g) < len(f) for f, g in zip(free, governed, strict=True)) >= ended


def test_answers_stay_right_when_the_rules_end_thinking(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    """Six requests run at a time, because an engine with as many requests as it can run has no place for a probe."""
    chosen = CASES
    free, _ = free_run(llm, agent)
    control.apply(CONVERGED)
    governed = paced(llm, chosen, GREEDY, settled)
    tokenizer = llm.get_tokenizer()
    end = agent.tracker.markers.end[0]

    def right(runs: list[list[int]]) -> int:
        answers = [str(tokenizer.decode(t[t.index(end) + 1 :])) if end in t else "" for t in runs]
        return sum(maze.is_correct(c["prompt"], a) for c, a in zip(chosen, answers, strict=True))

    assert sum(map(len, governed)) < 0.7 * sum(map(len, free))
    assert right(governed) >= right(free) - 1


def test_rules_end_thinking_while_prompts_come_in_pieces(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt after the other takes the tokens that each step has left.

    Probes still get their tokens, steps with probes are as full as others, and thinking up to its end equals that on an
    engine without prompts in pieces.
    """
    free = free_run(llm, agent)[0][:2]
    end, words = agent.tracker.markers.end[0], llm.get_tokenizer().convert_tokens_to_ids(list(maze.NODES))
    # A request is held until its decision comes, and no plan shares steps by their measured time, so that a busy
    # machine does not change the result.
    scheduling = {**CONVERGED["scheduler"], "strategy": "stock"}
    control.apply({"scheduler": scheduling, "entropy": {**CONVERGED["entropy"], "eat_hold_ms": 5000}})
    before = control.settled().ends["eat"]
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 32)
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    run, rng, numbers = Run(llm), random.Random(5), itertools.count()
    # Tokens of each step with a probe, and of each step without one; free blocks after each step that was not full.
    probed, plain, free_blocks = Counter[int](), Counter[int](), []
    names = [f"thinks-{i}" for i in range(2)]
    for name, case in zip(names, CASES, strict=False):
        run.add(name, case, GREEDY)

    def thought() -> bool:
        """Return whether both requests are done; until then there are always prompts that wait."""
        while len(run.tokens) - len(run.finished) < 5:
            run.put(f"prompt-{next(numbers)}", rng.choices(words, k=400), SamplingParams(max_tokens=1))
        return set(names) <= run.finished.keys()

    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        has_probe = any(is_probe(name) for name in output.num_scheduled_tokens)
        (probed if has_probe else plain)[output.total_num_scheduled_tokens] += 1
        if output.total_num_scheduled_tokens < 32 and scheduler.waiting:
            free_blocks.append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    run.until(thought, settled=settled)
    run.until()
    # vLLM fills a step less if the last piece of a prompt leaves room but too few blocks are free for the next prompt.
    assert probed[32] > 0
    assert all(free < 400 / agent.block_size for free in free_blocks), free_blocks
    assert scheduler.scheduler_config.long_prefill_token_threshold == threshold
    assert control.settled().ends["eat"] > before
    for name, f in zip(names, free, strict=True):
        at = run.tokens[name].index(end)
        assert run.tokens[name][:at] == f[:at]
    assert sum(len(run.tokens[name]) for name in names) < sum(map(len, free))


def paragraph_rule(hold_ms: int) -> dict[str, Any]:
    """Return a rule that ends thinking at the first probed paragraph end, because any entropy is below its level."""
    rule = {
        "shadow": False,
        "holdout_share": 0.0,
        "ema_alpha": 1.0,
        "eat_warmup_samples": 1,
        "eat_level_threshold_nats": 1e6,
        "eat_probe_interval_tokens": 1,
        "eat_probe_placement": "paragraph",
        "eat_hold_ms": hold_ms,
        "rpdi_threshold": 0.0,
    }
    return {"scheduler": {"min_think_tokens": 0}, "entropy": rule}


def test_a_held_request_ends_exactly_where_it_was_measured(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    """Thinking ends exactly at the probed paragraph end, although nobody answers before all requests wait there."""
    # The engine has a free place for a probe of each request.
    chosen, (free, _) = CASES[:4], free_run(llm, agent)
    end, paragraph = agent.tracker.markers.end[0], llm.get_tokenizer().convert_tokens_to_ids("\n\n")
    # The hold is as long as any engine allows, so that a busy machine does not change the result.
    control.apply(paragraph_rule(MAX_HOLD_MS))
    run, names = Run(llm), [f"r{i}" for i in range(len(chosen))]
    for name, case in zip(names, chosen, strict=True):
        run.add(name, case, GREEDY)
    asked, held = set[str](), agent.probing.held

    def all_asked() -> bool:
        asked.update(live.info.request_id for _, live, *_ in agent.directives.probes)
        return len(asked) == len(chosen)

    with records(agent) as seen:
        # A control plane that does not keep pace would ask for the first probe only after the first paragraph.
        run.until(all_asked, settled=settled)
        control.process.signal(signal.SIGSTOP)
        try:
            run.until(lambda: len(held) == len(chosen) and all(live.asked_in for live in held))
        finally:
            control.process.signal(signal.SIGCONT)
        run.until()
    probed = {think_tokens for record, *_ in seen for _, _, think_tokens, *_ in record.probes}
    for name, f in zip(names, free, strict=False):
        at = run.tokens[name].index(end)
        assert run.tokens[name][:at] == f[:at]
        assert at == f.index(paragraph) + 1
        assert at in probed
    assert not held
    control.settled()


def test_thinking_whose_eat_stays_high_is_given_up_and_other_thinking_is_left_alone(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    """The threshold lies between the requests' highest EAT from 20 tokens on, as a run without ends measures it. A
    request with a higher EAT ends exactly at its first such probe; the others generate what they generated before."""
    rule, chosen = paragraph_rule(MAX_HOLD_MS), CASES[:4]
    only = {"eat_level_threshold_nats": 0.0, "eat_probe_placement": "sentence", "give_up_tokens": 20}
    end = agent.tracker.markers.end[0]

    def apply(**thresholds: Any) -> None:
        # Reports after a time would let the machine's speed choose the places of the probes.
        regular = {"report_interval_steps": 8}
        control.apply({**rule, "entropy": {**rule["entropy"], **only, **thresholds}, "telemetry": regular})

    def probed(**thresholds: Any) -> tuple[list[list[int]], list[list[tuple[int, float]]]]:
        """Return the tokens of each request, and the places and values of its EAT samples."""
        apply(give_up_shadow=False, **thresholds)
        # A control plane that does not keep pace probes other places in each run.
        with records(agent) as seen:
            tokens = paced(llm, chosen, GREEDY, settled)
        # `paced` numbers the requests in the order of the cases, and vLLM adds letters to the number.
        ids = sorted(rows(seen), key=lambda request_id: int(request_id.split("-")[1]))
        return tokens, [[(probe.think_tokens, probe.eat_nats) for probe in probes(seen).get(i, [])] for i in ids]

    free, measured = probed(give_up_eat_nats=1e6)
    highest = sorted(max((eat for place, eat in each if place >= 20), default=0.0) for each in measured)
    level = (highest[1] + highest[2]) / 2
    assert highest[1] < level < highest[2]
    before = control.settled().ends.get("give_up", 0)
    # Without a hold fewer places are probed, so here any EAT counts as high.
    apply(give_up_eat_nats=1e-9)
    assert paced(llm, CASES[:2], GREEDY, settled) == free[:2], "the rule is in shadow"
    assert control.settled().ends["give_up_shadowed"] > 0
    governed, measured = probed(give_up_eat_nats=level)
    given_up = 0
    for f, g, samples in zip(free, governed, measured, strict=True):
        place = next((place for place, eat in samples if place >= 20 and eat >= level), None)
        if place is None:
            assert g == f
            continue
        given_up += 1
        assert g.index(end) == place
        assert g[:place] == f[:place]
        assert len(g) > place + 1, "an answer follows"
    assert 0 < given_up < len(chosen)
    assert control.settled().ends["give_up"] - before == given_up
    assert not agent.probing.held


def test_nobody_is_held_longer_than_allowed(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """The control plane falls silent: probes come back, answers do not, and every request goes on as in stock vLLM."""
    free, _ = free_run(llm, agent)
    control.apply(paragraph_rule(150))
    run = Run(llm)
    for i, case in enumerate(CASES):
        run.add(f"r{i}", case, GREEDY)
    run.until(lambda: bool(agent.directives.probes) or bool(agent.probing.placed), settled=settled)
    control.process.signal(signal.SIGSTOP)
    try:
        run.until()
    finally:
        control.process.signal(signal.SIGCONT)
    end = agent.tracker.markers.end[0]
    for i, f in enumerate(free):
        tokens = run.tokens[f"r{i}"]
        at = tokens.index(end)
        assert tokens[:at] == f[:at]
    assert run.finished.keys() == run.tokens.keys()
    assert not agent.probing.held
    control.settled()
