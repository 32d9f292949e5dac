"""Thinking markers of vLLM's own reasoning parsers and of other sources, without an engine.

Each parser gets a tokenizer that is made for it (`tests/parsers.py`). The code that an engine runs finds the markers,
and vLLM itself is asked whether it agrees.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import Markers, Phase, PhaseState
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model_families import ModelFamily, model_families
from meridian_control.policy.schema import ModelPolicy
from tests import parsers

pytestmark = pytest.mark.filterwarnings("ignore")


def resolve(
    folder: Path, added: list[str], parser: str = "", configured: tuple[str, str] | None = None, **settings: Any
) -> Markers:
    """Return the markers that an engine finds if its tokenizer has the `added` tokens and those that its parser asks
    for."""
    from meridian_agent.vllm_adapter import reasoning_markers as markers

    config = parsers.config_of(parsers.tokenizer_with(added), folder, parser, "a model")
    if configured is not None:
        config.reasoning_config = SimpleNamespace(
            reasoning_parser=parser, reasoning_start_str=configured[0], reasoning_end_str=configured[1]
        )
    return markers.resolve(config, agent_pb2.Settings(**settings))


THINK = ["<think>", "</think>"]


@pytest.mark.parametrize("parser", ["olmo3", "kimi_k3", "muse_glimmer", "granite"])
def test_markers_of_ordinary_text_are_found_however_they_are_spelled(parser: str, tmp_path: Path) -> None:
    """A tokenizer may merge the space before a marker, or the line feed after it, into the marker's first or last
    token."""
    tokenizer = parsers.made_for(parser, parsers.asked_for(parser))
    markers = resolve(tmp_path, parsers.asked_for(parser), parser)
    for text in (tokenizer.decode(markers.end) + after for after in ("", "\n", "\n\n", " so")):
        for before in ("", " ", "\n", "so "):
            tokens = tokenizer.encode(before + text, add_special_tokens=False)
            assert any(markers.match(tokens[:n])[0].name == "END" for n in range(1, len(tokens) + 1)), (before, text)


# --------------------------------------------------------------------------------------------- other sources of markers


def test_without_a_parser_the_tokens_themselves_are_the_markers(tmp_path: Path) -> None:
    markers = resolve(tmp_path, THINK)
    assert (len(markers.starts), len(markers.ends), markers.known) == (1, 1, True)


def test_the_tokens_that_end_a_turn_come_from_the_configurations_and_the_tokenizer(tmp_path: Path) -> None:
    from meridian_agent.vllm_adapter import reasoning_markers

    tokenizer = parsers.tokenizer_with([*THINK, "<|im_end|>"])
    tokenizer.eos_token = "<|im_end|>"
    for named, generation, more in (
        (None, {}, set()),
        (5, {"temperature": 1.0}, {5}),
        ([5, 6], {"eos_token_id": 7}, {5, 6, 7}),
        (5, {"eos_token_id": [5, 8]}, {5, 8}),
    ):
        config = parsers.config_of(tokenizer, tmp_path, "qwen3")
        config.model_config.hf_config = SimpleNamespace(eos_token_id=named)
        config.model_config.try_get_generation_config = lambda found=generation: found
        assert reasoning_markers.resolve(config, agent_pb2.Settings()).turn_ends == more | {tokenizer.eos_token_id}


def test_the_texts_of_vllms_reasoning_config(tmp_path: Path) -> None:
    """The configured end may begin with a transition phrase before the parser's own end; text after that end belongs to
    the answer."""
    tokenizer = parsers.tokenizer_with(THINK)
    markers = resolve(tmp_path, THINK, "qwen3", ("<think>", "so we so.</think>\n\n"))
    assert tokenizer.decode(markers.ending) == "so we so.</think>"
    assert tokenizer.decode(markers.end) == "</think>"
    own = resolve(tmp_path, THINK, "qwen3", ("<think>", "so.</think>"), closing_text="we")
    assert tokenizer.decode(own.ending) == "we</think>", "the policy's closing text replaces the configured phrase"


def test_a_reasoning_config_where_no_parser_tells(tmp_path: Path) -> None:
    added = ["[[think]]", "[[/think]]"]
    markers = resolve(tmp_path, added, "", ("[[think]]", "[[/think]]"))
    tokenizer = parsers.tokenizer_with(added)
    assert [tokenizer.decode(m) for m in (markers.starts[0], markers.end)] == added
    assert not resolve(tmp_path, added, "", ("", "[[/think]]")).known


@pytest.mark.parametrize(
    ("parser", "began"),
    [
        (
            "",
            "vLLM was started without --reasoning-parser, and its tokenizer has no tokens <think> and </think>; name",
        ),
        ("deepseek_r1", "vLLM was started with --reasoning-parser deepseek_r1, which does not fit this tokenizer: "),
        ("nobody", "vLLM was started with --reasoning-parser nobody, which this vLLM does not have: "),
    ],
)
def test_what_is_missing_and_how_to_name_it(parser: str, began: str, tmp_path: Path) -> None:
    markers = resolve(tmp_path, [], parser)
    assert not markers.known
    assert markers.unknown.startswith(began), markers.unknown
    assert "reasoning_parser, or the tokens as think_start_token_ids and think_end_token_ids" in markers.unknown
    assert '[model."a model"] of the policy' in markers.unknown
    assert markers.unknown.endswith("or start vLLM with another one" if parser else "or start vLLM with one")


def test_an_engine_without_a_tokenizer(tmp_path: Path) -> None:
    from meridian_agent.vllm_adapter import reasoning_markers as markers

    config = parsers.config_of(parsers.tokenizer_with([]), tmp_path, "qwen3")
    config.model_config.skip_tokenizer_init = True
    assert "the engine has no tokenizer" in markers.resolve(config, agent_pb2.Settings()).unknown
    named = agent_pb2.Settings(think_start_token_ids=[4], think_end_token_ids=[5])
    assert markers.resolve(config, named).end == (5,)
    with pytest.raises(ValueError, match="closing_text cannot be encoded: the engine has no tokenizer"):
        markers.resolve(config, agent_pb2.Settings(closing_text="so"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"think_end_token_ids": [1, 40_000]}, r"think_end_token_ids must be below 40000, .*; got 40000"),
        ({"think_start_token_ids": [50_000]}, r"think_start_token_ids must be below 40000, .*; got 50000"),
        ({"reasoning_parser": "nobody"}, r"reasoning_parser 'nobody': which this vLLM does not have: "),
        ({"reasoning_parser": "k2_horizon"}, r"reasoning_parser 'k2_horizon': which does not fit this tokenizer: "),
    ],
)
def test_what_policy_names_in_vain_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A policy's markers that the tokenizer lacks are refused, also if the engine's own markers are known."""
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path, THINK, "qwen3", **settings)


def test_policy_names_half_of_them(tmp_path: Path) -> None:
    tokenizer = parsers.tokenizer_with(THINK)
    markers = resolve(tmp_path, THINK, "qwen3", think_end_token_ids=[198, 198])
    assert (tokenizer.decode(markers.starts[0]), markers.ends) == ("<think>", ((198, 198),))


def test_a_parser_for_another_vocabulary_is_told_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hunyuan's parser compares with fixed token ids, so if those ids are other texts, the parser finds no marker."""
    assert resolve(tmp_path / "own", [], "hunyuan_a13b").end == (198, 524, 27963, 397, 27, 9399, 397)
    monkeypatch.setitem(parsers.HUNYUAN, "</", 525)
    markers = resolve(tmp_path / "other", [], "hunyuan_a13b")
    assert "those are other texts in this tokenizer" in markers.unknown


# ------------------------------------------------------------------------------------------------------ model families

FAMILIES = model_families()
MAX_CLOSING = 2000


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_settings_of_a_family_resolve_with_their_closing_text(family: ModelFamily, tmp_path: Path) -> None:
    """An engine finds the parser, and the closing text has no marker in it: a forced end writes the text exactly as it
    is shipped, and then the marker that it writes without a closing text."""
    name, text = family.settings.reasoning_parser, family.settings.closing_text
    assert any("vllm_agrees_by" in kept["parsers"].get(name, {}) for kept in parsers.saved())
    # A shipped section has the parser, the closing text and nothing that has no source.
    assert family.settings == ModelPolicy(reasoning_parser=name, closing_text=text)
    added = parsers.asked_for(name)
    bare = resolve(tmp_path / "bare", added, reasoning_parser=name)
    closed = resolve(tmp_path / "closed", added, reasoning_parser=name, closing_text=text)
    decode = parsers.made_for(name, added).decode
    assert len(text) <= MAX_CLOSING
    assert (decode(closed.ending), closed.end) == (text + decode(bare.ending), bare.end)
    state = PhaseState(Phase.THINK)
    for token in closed.ending:
        state.feed(token, closed)
    assert state.phase is Phase.OUTPUT
    assert (state.think_tokens, state.output_tokens) == (len(closed.closing), 0)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_is_a_section_of_a_policy_for_any_served_name(family: ModelFamily) -> None:
    for served in (family.name, "org/Model-8B", 'a "quoted" one'):
        policy = parse_toml(f"scheduler.max_think_tokens = 9\n\n{family.section(served)}")
        assert policy.model == {served: family.settings}
