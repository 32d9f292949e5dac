"""Ids as vLLM 0.30 to 0.33 make them, and the ids that clients know."""

from __future__ import annotations

import pytest

from meridian_agent.core.request_info import MAX_ID, shown_id
from meridian_control.journal.request_ids import is_called, is_later_choice, shortened, without_choice

RANDOM = "9f2e01ab"
BEAM = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        (f"chatcmpl-mine-{RANDOM}", ["chatcmpl-mine", "mine"]),
        (f"0_chatcmpl-mine-{RANDOM}", ["chatcmpl-mine", "mine", f"chatcmpl-mine-{RANDOM}"]),
        (f"chatcmpl-mine_1-{RANDOM}", ["chatcmpl-mine", "mine", "chatcmpl-mine_1"]),
        (f"11_chatcmpl-mine_1-{RANDOM}", ["chatcmpl-mine", "mine"]),
        (f"cmpl-mine-0-{RANDOM}", ["cmpl-mine", "mine", "cmpl-mine-0"]),
        (f"2_cmpl-a-b-c-3-{RANDOM}", ["cmpl-a-b-c", "a-b-c"]),
        (f"cmpl-mine-{BEAM}-beam-1-{RANDOM}", ["cmpl-mine", "mine"]),
        (f"resp_{BEAM}_0-{RANDOM}", [f"resp_{BEAM}"]),
        (f"resp_{BEAM}_12-{RANDOM}", [f"resp_{BEAM}"]),
        (f"chosen_0-{RANDOM}", ["chosen"]),
        (f"generate-tokens-mine-{RANDOM}", ["generate-tokens-mine", "mine"]),
        # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves the random characters out.
        ("chatcmpl-mine", ["mine"]),
        ("1_chatcmpl-mine", ["chatcmpl-mine", "mine"]),
        ("cmpl-mine-0", ["cmpl-mine", "mine"]),
        # A client's id with control characters, as an agent of 0.3.0 reports it and as a newer one does.
        (f"cmpl-a\nb-0-{RANDOM}", ["a\nb", "a\\nb", "cmpl-a\\nb"]),
        (f"cmpl-a\\nb-0-{RANDOM}", ["a\nb", "a\\nb", "cmpl-a\nb"]),
    ],
)
def test_a_request_is_called_what_its_client_sees(own: str, seen: list[str]) -> None:
    assert [name for name in seen if not is_called(own, name)] == []
    assert is_called(own, own)


@pytest.mark.parametrize("other", ["min", "ine", "mine-9", "chatcmpl", "0", RANDOM, "chatcmpl-", "cmpl-mine", ""])
def test_a_part_of_an_id_is_no_name(other: str) -> None:
    assert not is_called(f"0_chatcmpl-mine-{RANDOM}", other)


@pytest.mark.parametrize(
    ("own", "prompt", "is_later"),
    [
        (f"0_chatcmpl-mine-{RANDOM}", f"chatcmpl-mine-{RANDOM}", False),
        (f"11_chatcmpl-mine-{RANDOM}", f"chatcmpl-mine-{RANDOM}", True),
        (f"1_cmpl-mine-0-{RANDOM}", f"cmpl-mine-0-{RANDOM}", True),
        # A client's own id in the Responses API, which has no choices; another client's id differs behind the number.
        (f"7_mine-{RANDOM}", f"mine-{RANDOM}", False),
        (f"chatcmpl-1_mine-{RANDOM}", f"chatcmpl-1_mine-{RANDOM}", False),
        ("12", "12", False),
    ],
)
def test_choices_of_one_prompt(own: str, prompt: str, is_later: bool) -> None:
    assert (without_choice(own), is_later_choice(own)) == (prompt, is_later)


def test_names_are_parts_of_the_id() -> None:
    own = f"2_cmpl-a-b-c-3-{RANDOM}"
    assert all(name in own for name in shortened(own))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 3000, "a\nb" * 200, "日本" * 400, f"chatcmpl-{'x-' * 300}"])
@pytest.mark.parametrize("form", ["chatcmpl-{}-{}", "cmpl-{}-0-{}", "3_chatcmpl-{}-{}"])
def test_long_ids_stay_different_and_keep_their_names(name: str, form: str) -> None:
    """A client's id may be longer than what is reported of it."""
    one, other = (shown_id(form.format(name, random)) for random in (RANDOM, "00000000"))
    assert one != other
    assert len(one) <= MAX_ID
    assert is_called(one, name)
    assert is_called(one, one)
    assert not is_called(one, other)
    assert not is_called(one, name[:100])
    assert not is_called(one, f"y{name}")


def test_ids_of_the_largest_length_are_reported_whole() -> None:
    assert shown_id("x" * MAX_ID) == "x" * MAX_ID
