"""The reference page of the policy's fields matches the schema and has advice on each field."""

from __future__ import annotations

from tests import policy_reference


def test_the_page_is_what_the_schema_says() -> None:
    assert policy_reference.REFERENCE.read_text() == policy_reference.reference(), (
        "run python -m tests.policy_reference --write"
    )
