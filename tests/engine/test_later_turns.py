"""The second turn of a conversation finds as many of its tokens in the prefix cache as on stock vLLM, whenever it
repeats the thinking of the first; blocks that no turn repeats are given up.

Each server is a real one. Stock vLLM is the same server without the agent. Each test takes prompts of its own, because
answers are the same for the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.engine import SHORT, served
from tests.engine.served import KEEPS, STRIPS
from tests.processes import MODEL, RPC_S, Control, wait_for

POLICY = {
    "scheduler": {"answer_reserve_tokens": 0},
    "entropy": {"enabled": False},
    "kv_memory": {"enabled": True},
}
BLOCK = 32
# Most tokens of a last turn, of which the hits and the first tokens count.
LAST = 40


class Turn(NamedTuple):
    """An answer of the server. cached: number of the prompt's tokens that were in the prefix cache."""

    content: str
    prompt_tokens: int
    cached: int
    prompt: list[int]
    tokens: list[int]


class Server:
    """A server, and its control plane, None for stock vLLM."""

    def __init__(self, server: served.Served, control: Control | None) -> None:
        self._port, self.process, self._control = server.port, server.process, control

    @property
    def control(self) -> Control:
        assert self._control is not None
        return self._control

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        sent = {"model": "maze", "temperature": 0.0, "max_tokens": 400, **body}
        url = f"http://127.0.0.1:{self._port}/v1{path}"
        answer = httpx.post(url, json=sent, timeout=RPC_S * 10, verify=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def chat(self, *said: str, **body: Any) -> Turn:
        """Send a chat in which user and assistant take turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        answer = self.post("/chat/completions", messages=messages, **body)
        (choice,) = answer["choices"]
        message, ids = choice["message"], choice.get("token_ids") or []
        content = f"<think>{message['reasoning']}</think>{message['content']}" if message.get("reasoning") else ""
        return _turn(answer, content, answer.get("prompt_token_ids") or [], ids)

    def complete(self, prompt: list[int], **body: Any) -> Turn:
        """Send a prompt of token ids."""
        answer = self.post("/completions", prompt=prompt, return_token_ids=True, **body)
        (choice,) = answer["choices"]
        return _turn(answer, choice["text"], prompt, choice["token_ids"])

    def second_turn(self, index: int, **body: Any) -> tuple[Turn, Turn]:
        """Send two turns of a conversation; the second repeats the whole answer to the first, thinking included, and is
        cut unless `max_tokens` is given."""
        first = self.chat(SHORT[index], **body)
        assert first.content
        return first, self.chat(SHORT[index], first.content, SHORT[index + 1], **{"max_tokens": LAST, **body})

    def outcomes(self) -> dict[str, int]:
        return dict(self.control.settled().outcomes)

    def reclaimed(self) -> float:
        """Return the number of blocks that were given up, because no later turn can hit them."""
        return self._blocks("unreachable")

    def expired(self) -> float:
        """Return the number of blocks that were given up, because no later turn has hit them for too long."""
        return self._blocks("kept_too_long")

    def _blocks(self, tier: str) -> float:
        self.control.settled()
        text = httpx.get(f"http://{self.control.options[-1]}/metrics", timeout=RPC_S, verify=False).text
        name = "meridian_agent_blocks_reclaimed_total{"
        lines = [line for line in text.splitlines() if line.startswith(name) and f'tier="{tier}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _turn(answer: dict[str, Any], content: str, prompt: list[int], tokens: list[int]) -> Turn:
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(content, usage["prompt_tokens"], cached, prompt, tokens)


@pytest.fixture
def governed(apart: tuple[served.Served, Control]) -> Server:
    apart[1].apply(POLICY)
    return Server(*apart)


@pytest.fixture(scope="module")
def stock(folder: Path, switched: list[str]) -> Iterator[Server]:
    where = folder / "turns-stock"
    where.mkdir()
    server = served.Served(where, "", options=switched, more={"VLLM_PLUGINS": ""})
    try:
        wait_for(server.ready, 300, "vLLM to serve")
        yield Server(server, None)
    finally:
        server.process.stop()


def both(governed: Server, stock: Server, index: int, **body: Any) -> tuple[Turn, Turn]:
    """Return the second turn of a conversation on both servers."""
    (first, ours), (expected, theirs) = governed.second_turn(index, **body), stock.second_turn(index, **body)
    assert (first.content, ours.content, ours.prompt_tokens) == (expected.content, theirs.content, theirs.prompt_tokens)
    return ours, theirs


def test_a_chat_whose_template_strips_thinking_gives_its_blocks_up(governed: Server, stock: Server) -> None:
    """The second turn loses nothing by it, because its prompt ends the first turn's prefix before the thinking."""
    before, outcomes = governed.reclaimed(), governed.outcomes()
    ours, theirs = both(governed, stock, 0, max_tokens=400)
    assert ours.cached == theirs.cached
    assert governed.reclaimed() - before >= 4
    assert governed.outcomes().get("refused", 0) == outcomes.get("refused", 0)


def test_a_request_may_keep_its_thinking(governed: Server, stock: Server) -> None:
    before = governed.reclaimed()
    ours, theirs = both(governed, stock, 2, chat_template_kwargs=KEEPS)
    assert ours.cached == theirs.cached > 3 * BLOCK
    assert governed.reclaimed() == before


def test_a_client_that_sends_no_thinking_back_decides_for_its_conversation(governed: Server, stock: Server) -> None:
    """The template keeps thinking, but the client sends answers only, so no later turn can hit the thinking. From the
    second turn on the engine knows it, and the third turn finds as much in the cache as on stock vLLM."""
    before, found = governed.reclaimed(), []
    for server in (governed, stock):
        said, cached = [SHORT[1]], []
        for nxt in (SHORT[11], SHORT[9], ""):
            turn = server.chat(*said, chat_template_kwargs=KEEPS, max_tokens=800 if nxt else LAST)
            cached.append((turn.cached, turn.content))
            said += [turn.content.partition("</think>")[2].strip(), nxt]
            if server is governed and len(cached) == 1:
                assert governed.reclaimed() == before, "nothing is known of the first turn's successor"
        found.append(cached)
    assert found[0] == found[1]
    assert governed.reclaimed() > before


def test_kept_thinking_waits_for_the_next_turn_as_long_as_the_policy_says(governed: Server, stock: Server) -> None:
    """Within the time the next turn hits as much as on stock vLLM, and begins the time anew; after it the blocks are
    reused first, and only the prompt is hit. The explanation says for how long a request's thinking is kept."""

    def keep(seconds: int) -> None:
        governed.control.apply({**POLICY, "kv_memory": {"enabled": True, "keep_thinking_s": seconds}})

    keep(100_000)
    try:
        ours, theirs = both(governed, stock, 11, chat_template_kwargs=KEEPS)
        assert ours.cached == theirs.cached > 3 * BLOCK
        assert governed.expired() == 0
        # Only the next request's thinking is to wait. An idle engine obeys a policy from its next request on.
        keep(0)
        governed.chat("left", max_tokens=1)
        keep(100_000)
        first = governed.chat(SHORT[13], chat_template_kwargs=KEEPS, request_id="kept")
        governed.control.settled()
        details = [event.decision.detail for event in governed.control.explain("kept").events]
        assert "the chat template keeps the thinking; kept for 100000 s" in details
        # The time also holds for the requests that ended before it was set.
        keep(1)

        def expired() -> bool:
            governed.chat("left", max_tokens=1)
            return governed.expired() > 3

        wait_for(expired, 60, "the kept thinking to be given up")
        late = governed.chat(SHORT[13], first.content, SHORT[0], max_tokens=LAST, chat_template_kwargs=KEEPS)
        assert late.cached <= first.prompt_tokens
        assert stock.chat(SHORT[13], chat_template_kwargs=KEEPS).content == first.content
        same = stock.chat(SHORT[13], first.content, SHORT[0], max_tokens=LAST, chat_template_kwargs=KEEPS)
        assert same.content == late.content
        assert same.cached > 3 * BLOCK
    finally:
        governed.control.apply(POLICY)


def test_settings_that_change_nothing_are_learned(governed: Server) -> None:
    """The first such request keeps its blocks, because the template has not been rendered with its settings yet."""
    settings: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True, "other": 1}}
    before = governed.reclaimed()

    def given_up() -> bool:
        governed.chat(SHORT[12], max_tokens=800, **settings)
        return governed.reclaimed() > before

    wait_for(given_up, 60, "the blocks of such a request to be given up")


def test_a_request_may_have_a_template_of_its_own(governed: Server, stock: Server) -> None:
    before = governed.reclaimed()
    own = (MODEL / "chat_template.jinja").read_text().replace(STRIPS, "false")
    ours, theirs = both(governed, stock, 4, chat_template=own)
    assert ours.cached == theirs.cached > 3 * BLOCK
    assert governed.reclaimed() == before


def test_token_ids_that_are_sent_back_find_their_blocks(governed: Server, stock: Server) -> None:
    """By completions of token ids, and by a chat that asks for its token ids."""
    before, found = governed.reclaimed(), []
    for server in (governed, stock):
        first = server.chat(SHORT[6], return_token_ids=True)
        assert first.prompt
        second = server.complete([*first.prompt, *first.tokens, *first.prompt])
        third = server.complete([*second.prompt, *second.tokens, *first.prompt], max_tokens=LAST)
        found.append([(turn.cached, turn.tokens) for turn in (first, second, third)])
    assert found[0] == found[1]
    assert found[0][2][0] > found[0][1][0] > 3 * BLOCK
    assert governed.reclaimed() == before


def test_a_cut_answer_may_be_continued(governed: Server, stock: Server) -> None:
    """A client goes on with an answer that has reached `max_tokens` while it thought."""
    before, found = governed.reclaimed(), []
    for server in (governed, stock):
        said = [{"role": "user", "content": SHORT[3]}]
        (choice,) = server.post("/chat/completions", messages=said, max_tokens=100)["choices"]
        assert choice["finish_reason"] == "length"
        begun = {"role": "assistant", "content": f"<think>{choice['message']['reasoning']}"}
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        usage = server.post("/chat/completions", messages=[*said, begun], max_tokens=30, **goes_on)["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found[0] == found[1] > 2 * BLOCK
    assert governed.reclaimed() == before


def test_an_engine_learns_from_thinking_that_comes_back(governed: Server, stock: Server) -> None:
    """A client that sends a chat, and then the tokens of its answer, loses its hits once. The engine says so."""
    tenant = {"vllm_xargs": {"meridian_tenant": "sends 'all' back"}}
    found = []
    for server in (governed, stock):
        hits = []
        for index in (7, 8):
            first = server.chat(SHORT[index], **tenant)
            ids = server.chat(SHORT[index], return_token_ids=True)
            assert ids.content == first.content
            hits.append(server.complete([*ids.prompt, *ids.tokens, *ids.prompt], max_tokens=1).cached)
        found.append(hits)
    # The second chat of each pair computes the blocks again, so only the first of them is a loss.
    assert found[0] == found[1]
    note = str(wait_for(lambda: governed.control.engine().reclaim_note, 20, "the note"))
    assert "sends \\'all\\' back" in note or "sends 'all' back" in note
    before = governed.reclaimed()
    governed.chat(SHORT[9], max_tokens=800, **tenant)
    assert governed.reclaimed() == before
    governed.chat(SHORT[9], max_tokens=800)
    assert governed.reclaimed() > before, "other requests' blocks are given up as before"
    (line,) = [line for line in governed.process.output().splitlines() if "later prompts have repeated" in line]
    assert "WARNING" in line


def test_the_servers_own_template_and_default_settings_keep_thinking(
    by_default: tuple[served.Served, Control], stock: Server
) -> None:
    """The model's own template strips thinking, and so does the server's without the settings. The settings also have
    an effort, which is the effort of each chat that names no other."""
    by_default[1].apply(POLICY)
    server = Server(*by_default)
    before = server.reclaimed()
    (_, ours), (_, theirs) = server.second_turn(10), stock.second_turn(10, chat_template_kwargs=KEEPS)
    assert (ours.content, ours.cached) == (theirs.content, theirs.cached)
    assert ours.cached > 3 * BLOCK
    assert server.reclaimed() == before
    server.chat(SHORT[0], request_id="by-default", max_tokens=5)
    server.chat(SHORT[0], request_id="by-client", max_tokens=5, reasoning_effort="high")
    server.control.settled()
    assert [server.control.explain(name).effort for name in ("by-default", "by-client")] == ["low", "high"]
