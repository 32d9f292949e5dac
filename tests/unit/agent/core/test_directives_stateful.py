"""Each decision gets exactly one outcome, and thinking in which the model has stopped ends: for random requests,
tokens, decisions and lost leases."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES
from meridian_agent.core.step_record import Tier
from tests.fakes.engine import END, MARKERS, START, TEXT, FakeEngine
from tests.unit.directive_messages import TWO, cap, force, message, model_stops, plan


class OneOutcome(RuleBasedStateMachine):
    """Random requests, tokens and decisions, in any order of tokens and messages that asynchronous scheduling
    allows."""

    @initialize(two=st.booleans())
    def begin(self, two: bool) -> None:
        self.markers = TWO if two else MARKERS
        self.engine = FakeEngine(self.markers, lookahead=3)
        self.last_id = self.opened = 0
        self.drafts: dict[str, list[int]] = {}
        self.forgotten: set[int] = set()
        # Ends of thinking before the thinking in which the model has stopped, by request.
        self.stopped: dict[str, int] = {}

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    @property
    def now(self) -> int:
        return max(1, self.engine.tracker.newest)

    @precondition(lambda self: len(self.engine.live) < 4)
    @rule(prompt=st.sampled_from([(), (START,), (START,)]), own_cap=st.sampled_from([None, None, 0, 3]))
    def open(self, prompt: tuple[int, ...], own_cap: int | None) -> None:
        self.opened += 1
        self.engine.open(str(self.opened), prompt, own_cap)

    @precondition(lambda self: self.engine.live)
    @rule(which=st.integers(0, 9), aborted=st.booleans())
    def close(self, which: int, aborted: bool) -> None:
        name = sorted(self.engine.live)[which % len(self.engine.live)]
        (self.engine.abort if aborted else self.engine.finish)(name)

    @rule(drafts=st.lists(st.sampled_from([TEXT, END, START, 5, 6]), max_size=3))
    def schedule_and_mask(self, drafts: list[int]) -> None:
        self.engine.schedule()
        self.drafts = dict.fromkeys(self.engine.live, drafts)
        self.engine.mask(self.drafts)

    @rule(wanted=st.lists(st.sampled_from([TEXT, TEXT, TEXT, END, START, 5, 6]), min_size=4, max_size=4))
    def update(self, wanted: list[int]) -> None:
        for name, live in list(self.engine.live.items()):
            if live.ending is not None and live.ending.position and name not in self.engine._masks:
                # vLLM waits for the mask of each token of a marker that has begun.
                continue
            self.engine.feed(name, self.engine.sample(name, wanted, self.drafts.get(name, ())))
        self.engine.take()
        self.drafts = {}
        self.engine._masks = {}

    @precondition(lambda self: not self.drafts and any(map(self.engine.thinking, self.engine.live)))
    @rule(which=st.integers(0, 9))
    def stop(self, which: int) -> None:
        """Let the model of a request stop while it thinks, no step being under way."""
        thinking = sorted(filter(self.engine.thinking, self.engine.live))
        name = thinking[which % len(thinking)]
        self.stopped[name] = self.engine.live[name].state.ends
        model_stops(self.engine, name)

    @rule(slot=st.integers(0, 4), tokens=st.sampled_from([None, 0, 1, 3, 6]), shadow=st.booleans(), old=st.booleans())
    def send_cap(self, slot: int, tokens: int | None, shadow: bool, old: bool) -> None:
        step = self.now - 1 if old else self.now + 1
        self.engine.accept(message(step, caps=[cap(self.new_id(), slot, tokens, shadow)]))

    @rule(slot=st.integers(0, 4), shadow=st.booleans())
    def send_force(self, slot: int, shadow: bool) -> None:
        self.engine.accept(message(forces=[force(self.new_id(), slot, shadow)]))

    @rule(slot=st.integers(0, 4))
    def send_probe(self, slot: int) -> None:
        self.engine.accept(message(probes=[{"decision_id": self.new_id(), "slot": slot}]))

    @rule(slot=st.integers(0, 4), tier=st.sampled_from(Tier), shadow=st.booleans())
    def send_tier(self, slot: int, tier: Tier, shadow: bool) -> None:
        directives = message()
        directives.tiers.add(decision_id=self.new_id(), slot=slot, tier=int(tier), shadow=shadow)
        self.engine.accept(directives)

    @rule(slots=st.lists(st.integers(0, 4), unique=True), flag=st.sampled_from(["", "shadow", "stock"]))
    def send_plan(self, slots: list[int], flag: str) -> None:
        fields = {flag: True} if flag else {}
        self.engine.accept(message(plan=plan(self.new_id(), slot=slots, rank=[1] * len(slots), **fields)))

    @rule(parts=st.sampled_from([ALL_BUT_CAPS, ORDER, CAPS, RULES, MEMORY, ORDER | CAPS]))
    def lose_a_lease(self, parts: int) -> None:
        self.engine.directives.drop(parts)

    @rule()
    def freeze(self) -> None:
        self.engine.directives.freeze()
        self.stopped.clear()

    @rule()
    def new_stream(self) -> None:
        """The control plane has settled all earlier decisions itself. The ids go on, so that a mix-up of streams
        shows."""
        self.engine.take()
        self.forgotten = set(range(1, self.last_id + 1))
        self.reported_before = {i: list(o) for i, o in self.engine.outcomes.items()}
        self.engine.directives.new_stream()

    @invariant()
    def never_two(self) -> None:
        if hasattr(self, "engine"):
            assert [i for i, outcomes in self.engine.outcomes.items() if len(outcomes) > 1] == []
            assert set(self.engine.outcomes) <= set(range(1, self.last_id + 1))

    @invariant()
    def a_stop_ends_thinking(self) -> None:
        for name, live in self.engine.live.items() if hasattr(self, "engine") else ():
            assert live.ending is not None or live.state.ends != self.stopped.get(name)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine.live):
            self.engine.abort(name)
        self.engine.schedule()
        self.engine.take()
        self.never_two()
        assert set(range(1, self.last_id + 1)) - set(self.engine.outcomes) <= self.forgotten
        for decision_id in self.forgotten:
            assert self.engine.outcomes.get(decision_id) == self.reported_before.get(decision_id), (
                "decisions of an old stream get no further outcome"
            )


TestOneOutcome = OneOutcome.TestCase
TestOneOutcome.settings = settings(max_examples=200, stateful_step_count=40)
