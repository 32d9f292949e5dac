"""Ids as vLLM 0.30 to 0.33 make them, and the ids that clients know."""

from __future__ import annotations

import pytest

from meridian_control.journal.request_ids import is_called, shortened

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


def test_names_are_parts_of_the_id() -> None:
    own = f"2_cmpl-a-b-c-3-{RANDOM}"
    assert all(name in own for name in shortened(own))
