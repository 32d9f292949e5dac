"""Neither prompts nor output leave a real engine: every byte that it sends is compared with requests' tokens and texts.

The bytes include faults and refusals.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from typing import Any, Never

import pytest
from meridian.v1 import agent_pb2
from vllm import SamplingParams

from meridian_agent.core import guard as guard_module
from tests.data import maze
from tests.engine import Run, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE
from tests.engine.test_decisions import endless
from tests.engine.test_faults import _mend_observer, _observer, rebuilt  # noqa: F401 - a fixture
from tests.engine.test_foreign import lead
from tests.engine.wiretap import Wiretap
from tests.processes import Control, wait_for

# Length of a piece of a request, in tokens or, for texts, in words.
PIECE = 3
# The same where a token is a byte or a letter: three bytes in a row also stand in a message by chance.
LONG_PIECE = 8


@pytest.fixture
def wiretap(control: Control) -> Iterator[Wiretap]:
    tap = Wiretap(control.target)
    yield tap
    tap.stop()


def strings(message: Any) -> Iterator[str]:
    """Yield every text in a message and in the messages within it."""
    for field, value in message.ListFields():
        values = value.items() if hasattr(value, "items") else value if hasattr(value, "append") else [value]
        for one in values:
            for part in one if isinstance(one, tuple) else (one,):
                if isinstance(part, str):
                    yield part
                elif field.message_type is not None and hasattr(part, "ListFields"):
                    yield from strings(part)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def spellings(tokens: list[int]) -> list[bytes]:
    """Return the forms that consecutive tokens may have in bytes: decimal, and integers of either width."""
    texts = [f"{separator}".join(map(str, tokens)).encode() for separator in (", ", ",", " ")]
    return [*texts, *(struct.pack(f"<{len(tokens)}{kind}", *tokens) for kind in "Iq")]


def packed(tokens: list[int]) -> bytes:
    """Return the form that consecutive tokens have if protobuf packs them: mostly a byte for each."""
    return b"".join(map(varint, tokens))


def pieces(tokens: list[int], size: int = PIECE) -> Iterator[list[int]]:
    """Yield runs of `size` tokens that are not one token repeated."""
    for at in range(len(tokens) - size + 1):
        if len(set(tokens[at : at + size])) >= PIECE:
            yield tokens[at : at + size]


def quoting(*said: Any) -> Any:
    """Return a hook that fails with a request's tokens and text in the exception's text."""

    def fails(*_: Any) -> Never:
        raise KeyError(*said)

    return fails


def _break_observer(worker: Any, said: str) -> None:
    _observer(worker).before_sampling = quoting(said)


def cases() -> list[dict[str, Any]]:
    return [{"prompt": prompt, "template": {"open_think": True}} for prompt in maze.prompts(4, seed=77)]


@pytest.mark.usefixtures("rebuilt")
def test_neither_prompts_nor_output_leave_the_engine(  # noqa: PLR0917
    llm: Any,
    agent: Any,
    scheduler: Any,
    control: Control,
    settled: Settled,
    wiretap: Wiretap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run has probes, caps and their outcomes, an abort, a refused policy, and faults that quote the request.

    Each process has one such fault, and the agent comes back with a snapshot.
    """
    monkeypatch.setattr(guard_module, "RESTS_S", (3600.0,))
    prompts = [prompt_ids(llm, case) for case in cases()]
    quoted = f"{prompts} {[case['prompt'] for case in cases()]}"
    lead(agent.link, [wiretap.target])
    control.apply({**DENSE, "scheduler": {**DENSE["scheduler"], "max_think_tokens": 60}})
    run = Run(llm)
    for i, case in enumerate(cases()):
        run.add(f"r{i}", case, endless(agent, max_tokens=300) if i else copy.deepcopy(SamplingParams(max_tokens=100)))
    run.until(lambda: len(run.tokens["r0"]) > 20, settled=settled)
    run.abort("r3")
    refused = control.set_policy({**DENSE, "model": {"maze": {"reasoning_parser": "nobody"}}})
    wait_for(lambda: refused in agent.link.refused, 20, "the policy to be refused")
    # A fault of the worker and then one of the engine core, both with the requests' text in their exception.
    llm.collective_rpc(_break_observer, args=(quoted,))
    run.until(lambda: agent.measuring.no_entropy)
    llm.collective_rpc(_mend_observer)
    agent.after_update = quoting(quoted)
    run.until(lambda: scheduler._agent is None)
    assert quoted[:200] in scheduler._guard.text
    wait_for(lambda: any(m.hello.fault for m in wiretap.messages()), 20, "a Hello with the fault")
    # End the agent's rest.
    scheduler._guard._back_at = 0.0
    run.until(lambda: scheduler._agent is not None)
    hellos = sum(m.HasField("hello") for m in wiretap.messages())
    scheduler._agent.link.restart()
    again = scheduler._agent.link
    wait_for(
        lambda: sum(m.HasField("hello") for m in wiretap.messages()) > hellos and again.lease.connected,
        20,
        "the next stream",
    )
    run.until(lambda: wiretap.messages()[-1].HasField("step"))
    wait_for(lambda: wiretap.messages()[-1].HasField("step"), 20, "a report on the next stream")
    assert not scheduler._guard.fault
    for i, case in enumerate(cases()):
        run.add(f"again-{i}", case, endless(scheduler._agent, max_tokens=30))
    run.until()
    control.settled()
    lead(scheduler._agent.link, [control.target])
    sent, messages = b"".join(map(bytes, wiretap.sent)), wiretap.messages()
    all_was_said(messages)
    vocabulary = llm.get_tokenizer().convert_ids_to_tokens
    for tokens in [*prompts, *run.tokens.values()]:
        no_byte_quotes(sent, tokens, vocabulary)
    no_text_quotes(messages, {word for tokens in [*prompts, *run.tokens.values()] for word in vocabulary(tokens)})


def no_byte_quotes(sent: bytes, tokens: list[int], vocabulary: Any) -> None:
    """Check that no piece of these tokens is in the bytes, in any spelling. vocabulary: returns the words of tokens."""
    for piece in pieces(tokens):
        # The numbers of a report's rows have this form and ascend, so they may be such a piece.
        rows = {struct.pack(f"<{len(piece)}I", *piece)} if piece == sorted(piece) else set[bytes]()
        found = [spelled for spelled in spellings(piece) if spelled in sent and spelled not in rows]
        words = [separator.join(vocabulary(piece)).encode() for separator in (" ", "Ġ")]
        assert [*found, *(word for word in words if word in sent)] == [], piece
    for piece in pieces(tokens, LONG_PIECE):
        joined = "".join(vocabulary(piece)).encode()
        assert [spelled for spelled in (packed(piece), joined) if spelled in sent] == [], piece


def no_text_quotes(messages: list[agent_pb2.ConnectRequest], vocabulary: set[str]) -> None:
    """Check that no text of a message contains a word of the requests; words with a `>` occur nowhere else."""
    texts = {text for message in messages for text in strings(message)}
    said = {word for word in vocabulary if ">" in word}
    assert len(said) > 50
    assert [text for text in texts if any(word in text for word in said)] == []


def all_was_said(messages: list[agent_pb2.ConnectRequest]) -> None:
    """Check that the agent has sent each kind of message."""
    kinds = {message.WhichOneof("message") for message in messages}
    assert kinds >= {"hello", "snapshot", "step", "settings_status"}
    steps = [message.step for message in messages if message.HasField("step")]
    assert any(step.probes.slot for step in steps)
    assert any(step.outcomes for step in steps)
    assert any(step.closed for step in steps)
    assert any(message.settings_status.error for message in messages)
    hellos = [message.hello for message in messages if message.HasField("hello")]
    assert {"observer", "other"} <= set(hellos[-1].faults)
    assert any("KeyError at " in hello.last_fault for hello in hellos)
    assert any(message.snapshot.requests for message in messages)
