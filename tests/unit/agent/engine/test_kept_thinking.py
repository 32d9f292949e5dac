"""Kept thinking waits for the next turn of its conversation, for as long as the policy says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meridian_agent.engine.agent import Agent
from meridian_agent.engine.kept_thinking import MAX_GIVEN_UP, MAX_KEPT, KeptThinking


class Engine:
    """An engine whose block `n` has the hash `n` until it is reused, and a clock."""

    def __init__(self, seconds: int = 10) -> None:
        self.now_s = 0.0
        self.kept = KeptThinking(lambda: self.now_s)
        self.kept.set_seconds(seconds)
        self.blocks = {n: SimpleNamespace(block_hash=n, ref_cnt=0) for n in range(100)}
        self.evicted: list[int] = []
        self.freed: list[Any] = []
        self.held: dict[str, list[int]] = {}
        # Number of each block by its hash, if it is another one.
        self.places: dict[int, int] = {}
        pool = SimpleNamespace(blocks=self.blocks, touch=lambda _: None, free_blocks=self.freed.extend)
        self.scheduler: Any = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(
                block_pool=pool, evict_blocks=self._evict, get_block_ids=lambda name: (self.held[name],)
            )
        )

    def _evict(self, numbers: set[int]) -> None:
        self.evicted += sorted(numbers)
        for number in numbers:
            self.blocks[number].block_hash = None

    def compute(self, hashes: range, at: int) -> range:
        """Let vLLM reuse the blocks from this number on for blocks with these hashes."""
        for number, known in enumerate(hashes, at):
            self.places[known] = number
            self.blocks[number].block_hash = known
        return hashes

    def request(self, name: str, *hashes: int) -> Any:
        self.held[name] = [self.places.get(known, known) for known in hashes]
        return SimpleNamespace(request_id=name, block_hashes=list(hashes))

    def arrives(self, name: str, *numbers: int) -> list[int]:
        """Let a request with a prompt of these blocks arrive; return all blocks that were given up so far."""
        self.kept.arrived(self.scheduler, self.request(name, *numbers))
        return self.evicted

    def ends(self, name: str, *numbers: int, first: int | None = None) -> None:
        """End a request that has these blocks. first: index of the first one with a generated token, None if the
        request has no kept thinking of its own."""
        request = self.request(name, *numbers)
        if first is None:
            self.kept.ended(self.scheduler, request)
        else:
            self.kept.keep(self.scheduler, request, first)


def test_blocks_wait_and_each_turn_that_repeats_them_begins_their_time_anew() -> None:
    engine = Engine()
    engine.ends("a", 1, 2, 3, 4, first=2)
    engine.now_s = 9
    assert engine.arrives("b", 1, 2, 3, 4, 5) == []
    # The second turn runs past the first one's time, and ends without thinking.
    engine.now_s = 30
    assert engine.arrives("other", 50) == []
    engine.ends("b", 1, 2, 3, 4, 5, 6)
    engine.now_s = 39
    assert engine.arrives("other", 50) == []
    engine.now_s = 40
    assert engine.arrives("other", 50) == [3, 4, 5, 6]
    assert [block.block_hash for block in engine.freed] == [None] * 4
    assert engine.kept.given_up == 4


def test_a_turn_whose_blocks_a_connector_keeps_past_its_end_repeats_nothing_any_more() -> None:
    """The agent has forgotten the request by then."""
    engine, known = Engine(), SimpleNamespace(freeing=lambda _: None)
    engine.ends("a", 1, 2, 3, first=1)
    engine.arrives("b", 1, 2, 3)
    ended = engine.request("b", 1, 2, 3)
    ended.is_finished = lambda: True
    agent: Any = SimpleNamespace(
        accounts=SimpleNamespace(take_postponed=lambda: None),
        probing=SimpleNamespace(placed={}),
        tracker=known,
        blocks=SimpleNamespace(kept=engine.kept),
    )
    Agent.freeing(agent, engine.scheduler, ended)
    engine.now_s = 10
    assert engine.arrives("other", 50) == [2, 3]


def test_two_answers_to_one_question_wait_together() -> None:
    engine = Engine()
    engine.ends("a", 1, 2, 3, first=1)
    engine.now_s = 5
    engine.ends("b", 1, 2, 4, first=1)
    engine.now_s = 12
    assert engine.arrives("other", 50) == []
    engine.now_s = 15
    assert engine.arrives("other", 50) == [2, 3, 4]


def test_a_turn_that_repeats_a_part_takes_all_with_it() -> None:
    """The last block of a turn may differ from what the next prompt has there, and a conversation may branch."""
    engine = Engine()
    engine.ends("a", 1, 2, 3, 4, first=1)
    engine.ends("branch", 1, 2, 3, 5, 6, first=3)
    engine.now_s = 9
    engine.arrives("b", 1, 2, 3, 5, 7)
    engine.now_s = 19
    assert engine.arrives("other", 50) == []
    engine.ends("b", 1, 2, 3, 5, 7, 8)
    engine.now_s = 29
    assert engine.arrives("other", 50) == [2, 3, 4, 5, 6, 7, 8]


def test_turns_that_repeat_the_same_thinking_at_once_each_keep_it() -> None:
    """As with a sampling of several answers to one prompt, some of which wait while others end."""
    engine = Engine()
    engine.ends("a", 1, 2, 3, first=1)
    engine.arrives("b", 1, 2, 3)
    engine.arrives("c", 1, 2, 3)
    engine.now_s = 5
    engine.ends("b", 1, 2, 3, 4)
    # The other turn waits without blocks, perhaps after a preemption.
    engine.now_s = 30
    assert engine.arrives("d", 1, 2, 3) == []
    engine.ends("c", 1, 2, 3, 5)
    engine.now_s = 50
    assert engine.arrives("other", 50) == []
    engine.ends("d", 1, 2, 3, 6)
    engine.now_s = 59
    assert engine.arrives("other", 50) == []
    engine.now_s = 60
    assert engine.arrives("other", 50) == [2, 3, 4, 5, 6]


def test_blocks_that_are_used_or_were_reused_stay() -> None:
    engine = Engine()
    engine.ends("a", 1, 2, 3, 4, first=1)
    engine.blocks[3].block_hash, engine.blocks[4].ref_cnt = "another request's", 1
    engine.now_s = 10
    assert engine.arrives("other", 50) == [2]


def test_the_time_changes_while_blocks_wait() -> None:
    engine = Engine(0)
    engine.ends("never", 1, 2, first=1)
    engine.kept.set_seconds(100)
    engine.ends("a", 3, 4, first=1)
    engine.now_s = 20
    assert engine.arrives("other", 50) == []
    engine.kept.set_seconds(20)
    assert engine.arrives("other", 50) == [4]
    engine.ends("b", 5, 6, first=1)
    engine.kept.set_seconds(0)
    engine.now_s = 1000
    assert engine.arrives("other", 50) == [4]


def test_a_turn_whose_repeated_thinking_has_been_forgotten_leaves_its_prompt_alone() -> None:
    """Blocks 1 and 2 are a prompt that other conversations share."""
    engine = Engine()
    engine.ends("a", 1, 2, 3, 4, first=2)
    engine.arrives("b", 1, 2, 3, 4, 5)
    for n in range(MAX_KEPT):
        engine.held["r"] = []
        engine.kept.keep(engine.scheduler, SimpleNamespace(request_id="r", block_hashes=[f"h{n}"]), 0)
    engine.ends("b", 1, 2, 3, 4, 5)
    engine.now_s = 30
    assert engine.arrives("c", 50) == []


def test_conversations_are_not_remembered_without_end() -> None:
    engine = Engine()
    for n in range(MAX_KEPT + 1):
        engine.held["r"] = []
        engine.kept.keep(engine.scheduler, SimpleNamespace(request_id="r", block_hashes=[f"h{n}"]), 0)
    assert len(engine.kept._kept) == MAX_KEPT


def test_a_request_that_arrives_after_a_quiet_time_waits_for_few_conversations() -> None:
    engine, number = Engine(), 3 * MAX_GIVEN_UP
    for n in range(number):
        engine.ends(f"r{n}", 2 * n, 2 * n + 1, first=1)
    engine.now_s = 10
    given_up = [len(engine.arrives("other", 99)) for _ in range(4)]
    assert given_up == [MAX_GIVEN_UP, 2 * MAX_GIVEN_UP, number, number]


def test_no_more_blocks_are_remembered_than_the_engine_has() -> None:
    """Blocks that vLLM has reused belong to several conversations, of which the oldest has lost them."""
    engine = Engine()
    for n in range(10):
        engine.ends(f"old{n}", 0, n + 1, *range(11, 70), first=1)
        assert sum(len(kept.blocks) for kept in engine.kept._kept.values()) == 60
    engine.ends("new", 98, 99, first=1)
    engine.now_s = 10
    assert len(engine.arrives("other", 97)) == 61


def test_a_conversation_that_is_computed_again_counts_with_its_own_blocks_only() -> None:
    """Its earlier blocks belong to another conversation, which would be forgotten otherwise."""
    engine = Engine()
    engine.ends("a", *range(40), first=0)
    engine.ends("b", *engine.compute(range(100, 140), at=0), first=0)
    engine.arrives("c", *range(40))
    engine.ends("c", *engine.compute(range(40), at=40))
    engine.now_s = 10
    assert engine.arrives("other", 99) == [*range(80)]


def test_a_conversation_with_a_live_turn_is_not_forgotten_before_others() -> None:
    engine = Engine()
    engine.ends("a", *range(40), first=0)
    engine.arrives("turn", *range(40))
    engine.ends("b", *range(40, 80), first=0)
    engine.ends("c", *engine.compute(range(100, 140), at=40), first=0)
    engine.ends("turn", *range(40))
    engine.now_s = 10
    assert engine.arrives("other", 99) == [*range(40, 80), *range(40)]
