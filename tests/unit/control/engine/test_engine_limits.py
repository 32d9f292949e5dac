"""A session sends an engine its limits, and shows those in force."""

from __future__ import annotations

from typing import Any

from meridian.v1 import agent_pb2

from meridian_control.fleet.views import engine_limits
from tests.fakes.tables import policy
from tests.unit.sessions import Stream, freezes, stream, thaws

BOUNDS = agent_pb2.EngineLimits(
    max_num_active_seqs=agent_pb2.EngineLimit(startup=100, lowest=1, highest=128),
    long_prefill_token_threshold=agent_pb2.EngineLimit(startup=0, lowest=16, highest=1024),
)
SMALL = {"engine_labels": {"gpu": "l4"}, "engine": {"max_num_active_seqs": 8}}


def small(**fields: Any) -> Stream:
    return stream(hello_fields={"engine_limits": BOUNDS, "labels": {"gpu": "l4"}, **fields})


def shown(made: Stream) -> list[tuple[str, int, int]]:
    return [(row.name.partition("_")[0], row.wanted, row.in_force) for row in engine_limits(made.session)]


def sent(made: Stream) -> dict[str, int]:
    settings = [response.settings for response in made.responses if response.HasField("settings")]
    return {field.name: value for field, value in settings[-1].engine_limits.ListFields()}


def test_limits_come_and_go_with_their_revision() -> None:
    """The default policy sends none, and the policy of a rollback brings the start-up values back."""
    made = small()
    assert (sent(made), shown(made)) == ({}, [("max", 0, 100), ("long", 0, 0)])
    made.apply(policy(engine={"max_num_active_seqs": 64, "long_prefill_token_threshold": 256}, override=[SMALL]))
    assert sent(made) == {"max_num_active_seqs": 8, "long_prefill_token_threshold": 256}
    assert shown(made) == [("max", 8, 8), ("long", 256, 256)]
    made.apply(policy())
    assert (sent(made), shown(made)) == ({}, [("max", 0, 100), ("long", 0, 0)])


def test_refused_settings_leave_the_limits_as_they_are() -> None:
    made = small()
    made.apply(policy(override=[SMALL]))
    made.agent.refuse_settings = "no"
    made.apply(policy(engine={"max_num_active_seqs": 64}))
    assert shown(made)[0] == ("max", 8, 8)


def test_a_frozen_engine_has_its_start_up_values() -> None:
    made = small()
    made.apply(policy(override=[SMALL]))
    freezes(made)
    assert shown(made)[0] == ("max", 8, 100)
    thaws(made)
    assert shown(made)[0] == ("max", 8, 8)


def test_an_engine_with_an_older_agent_shows_no_limit() -> None:
    assert shown(stream()) == []
