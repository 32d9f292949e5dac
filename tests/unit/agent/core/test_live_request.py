"""What is kept of the trial answers of a request and of its neighbours."""

import pytest

from meridian_agent.core.live_request import OtherAnswers


@pytest.mark.parametrize(
    ("probes", "others"),
    [
        ([("a", 7)], [False]),
        ([("a", 7), ("b", 7), ("a", 7)], [False, False, False]),
        ([("a", 7), ("b", 8), ("a", 7)], [False, True, True]),
        ([("a", 7), ("a", 8), ("a", 7)], [False, False, False]),
        ([("a", 7), ("b", 8), ("b", 7), ("b", 9), ("a", 9)], [False, True, False, True, False]),
    ],
    ids=["the first", "alike", "two that differ", "one that changes", "compared with the other's newest"],
)
def test_trial_answers_are_compared_with_the_request_that_was_probed_before(
    probes: list[tuple[str, int]], others: list[bool]
) -> None:
    answers = OtherAnswers()
    assert [answers.is_other(*probe) for probe in probes] == others
