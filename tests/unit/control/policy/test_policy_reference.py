"""The reference page of the policy's fields matches the schema and has advice on each field."""

from __future__ import annotations

import pytest

from meridian_control.policy.model import Policy
from tests import policy_reference


def test_the_page_is_what_the_schema_says() -> None:
    assert policy_reference.REFERENCE.read_text() == policy_reference.reference(), (
        "run python -m tests.policy_reference --write"
    )


def test_every_section_is_in_it() -> None:
    named = {name.partition(".")[0] for name in policy_reference.SECTIONS}
    assert named == Policy.model_fields.keys() - {"override", "extension"}


@pytest.mark.parametrize("section", policy_reference.SECTIONS)
def test_every_field_says_what_it_does_and_when_to_change_it(section: str) -> None:
    for name, of in policy_reference.SECTIONS[section].model_json_schema()["properties"].items():
        assert of["description"].endswith("."), name
        assert of["advice"].endswith("."), name
