"""The engines of several replicas as one list, in which each engine appears once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import fleet_pb2

from meridian_control.fleet.whole_fleet import CONNECTED, once

GONE = fleet_pb2.CONNECTION_STATE_DISCONNECTED


def engine(engine_id: str, incarnation: str, connected: bool, since: int, replica: str) -> fleet_pb2.Engine:
    shown = fleet_pb2.Engine(engine_id=engine_id, incarnation=incarnation, replica=replica)
    shown.state = CONNECTED if connected else GONE
    shown.connect_time.FromSeconds(since)
    return shown


def test_an_engine_that_moved_is_shown_where_it_is() -> None:
    stale, moved = engine("e", "1", True, 10, "a"), engine("e", "1", True, 20, "b")
    assert once([moved, stale]) == once([stale, moved]) == [moved]


def test_an_engine_that_left_one_replica_for_another_is_not_gone() -> None:
    left, came = engine("e", "1", False, 30, "a"), engine("e", "1", True, 20, "b")
    assert once([left, came]) == [came]


ENGINES = st.lists(
    st.builds(
        engine, st.sampled_from("xyz"), st.sampled_from("12"), st.booleans(), st.integers(0, 9), st.sampled_from("abc")
    )
)


@given(ENGINES)
def test_each_engine_once_as_its_newest_connection_has_it(engines: list[fleet_pb2.Engine]) -> None:
    shown = once(engines)
    assert {e.engine_id for e in shown} == {e.engine_id for e in engines}, "no engine is lost"
    keys = [(e.engine_id, e.incarnation) for e in shown]
    assert keys == sorted(set(keys)), "no engine is shown twice"
    for one in shown:
        rivals = [e for e in engines if e.engine_id == one.engine_id]
        if one.state == CONNECTED:
            same = [e for e in rivals if e.state == CONNECTED and e.incarnation == one.incarnation]
        else:
            assert not [e for e in rivals if e.state == CONNECTED], "an engine that is connected is not shown as gone"
            same = rivals
        assert one.connect_time.seconds == max(e.connect_time.seconds for e in same)
