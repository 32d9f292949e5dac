"""An engine's messages do not depend on the words of its requests: with other words it sends the same bytes."""

from __future__ import annotations

from typing import Never

import pytest

pytest.importorskip("vllm")

from collections import deque

from tests.sim import engine as engine_module
from tests.sim import inject as inject_module
from tests.sim import world as world_module
from tests.sim.engine import Model, tokenizer, words
from tests.sim.inject import Fault
from tests.sim.network import Stream
from tests.sim.world import Options, run

pytestmark = pytest.mark.filterwarnings("ignore")
# Number of the hook in a run that fails; None for no fault.
EARLY = (None, 40)
SEEDS = range(9)


def renamed() -> dict[int, int]:
    """Return other words for the plain ones: none that ends a sentence, and none that the simulator's policies
    write."""
    *_, text = words()
    plain = list(dict.fromkeys(text))[:6]
    vocabulary = tokenizer().get_vocab()
    kept = {*text, *tokenizer().encode("Wait . the", add_special_tokens=False)}
    others = [token for word, token in sorted(vocabulary.items(), reverse=True) if ">" in word and token not in kept]
    return dict(zip(plain, others, strict=False))


def sent(monkeypatch: pytest.MonkeyPatch, seed: int, names: dict[int, int], early: int | None) -> list[bytes]:
    """Return all messages of a run's engines, with the words of their requests replaced."""
    start, end, stop, text = words()
    known_as, said, quoted = {new: old for old, new in names.items()}, list[bytes](), list[list[int]]()

    def send(stream: Stream, way: deque[tuple[float, object]], message: object) -> None:
        if way is stream.up:
            said.append(message.SerializeToString(deterministic=True))  # type: ignore[attr-defined]
        plain_send(stream, way, message)

    def opened(model: Model, request_id: str, prompt: list[int], script: engine_module.Script) -> None:
        plain_open(model, request_id, prompt, script)
        quoted.append(model.tokens[request_id])

    def mixed(*numbers: int) -> int:
        *before, last = numbers
        return mix(*before, known_as.get(last, last))

    def fails() -> Never:
        raise KeyError(quoted)

    plain_send, plain_open, mix = Stream.send, Model.open, engine_module.mix
    with monkeypatch.context() as patch:
        other = start, end, stop, tuple(names.get(token, token) for token in text)
        for module in (engine_module, world_module):
            patch.setattr(module, "words", lambda: other)
        patch.setattr(engine_module, "mix", mixed)
        patch.setattr(Stream, "send", send)
        patch.setattr(Model, "open", opened)
        patch.setattr(inject_module, "_fails", fails)
        run(seed, Options(fault=None if early is None else Fault(early=early)))
    assert any(token in known_as for tokens in quoted for token in tokens) is bool(names)
    return said


@pytest.mark.parametrize("early", EARLY, ids=["no fault", "a fault that quotes every request"])
def test_other_words_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch, early: int | None) -> None:
    """The bytes stay the same for whatever a seed brings.

    Seeds bring rules, probes, caps, refusals, preemption, broken streams, drafts and other markers.
    """
    count = 0
    for seed in SEEDS:
        own, other = (sent(monkeypatch, seed, names, early) for names in ({}, renamed()))
        assert own == other, f"seed {seed}: a message depends on the words of requests"
        count += len(own)
    assert count > 200, count
