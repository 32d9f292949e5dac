"""Trace files, and the columns that are read from them: the same as a live session's table would hold."""

from __future__ import annotations

import gzip
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.engine.request_table import OUTPUT, THINK, RequestTable
from meridian_control.engine.signals import rpdi
from meridian_control.engine.token_rows import FLAG_BOUNDARY, FLAG_GOES_ON, FLAG_MARKER
from meridian_control.offline import trace_file
from meridian_control.offline.correctness import from_probes
from meridian_control.offline.episodes import Episodes, collect
from meridian_control.offline.rule_replay import Replay
from meridian_control.offline.trace_file import FileError, TraceWriter, read
from meridian_control.policy.formats import to_proto
from meridian_control.policy.model import Policy
from tests.fakes import traces
from tests.fakes.agent import hello
from tests.fakes.tables import policy

WINDOW = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.trace"


def complaint_of(path: Path) -> str:
    with pytest.raises(FileError) as raised:
        list(read(path))
    return str(raised.value)


# -------------------------------------------------------------------------------------------------------- the format


def test_what_is_written_is_read(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(3)])
    with TraceWriter(path) as out:
        for record in made:
            out.write(record)
        assert (out.requests, out.records, out.steps) == (3, len(made), len(made) - 3)
    assert list(read(path)) == made


def test_only_requests_seen_from_their_beginning_count(path: Path) -> None:
    closed = agent_pb2.StepReport(steps=1, closed=[agent_pb2.RequestClosed(slot=4)])
    with TraceWriter(path) as out:
        out.write(fleet_pb2.TraceRecord(session_id="s", up=agent_pb2.ConnectRequest(step=closed)))
        assert (out.requests, out.steps) == (0, 1)


def test_an_existing_file_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(FileError, match="cannot be written: File exists"):
        TraceWriter(path)
    assert path.read_text() == "precious"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, _: open(path, "wb"))  # noqa: SIM115
    made = traces.records([traces.made_up(0)])
    with pytest.raises(FileError, match="/dev/full: cannot be written: No space left on device"):
        traces.write(Path("/dev/full"), made)


@pytest.mark.parametrize("missing", [1, 20_000])
def test_what_was_written_before_the_disk_was_full_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """The last byte is missed when the file is closed, others while a record is written."""
    monkeypatch.setattr(trace_file, "MEMBER_BYTES", 2000)
    made = traces.records([traces.made_up(n) for n in range(40)])
    room = traces.write(path.with_name("whole"), made).stat().st_size - missing
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(FileError, match="cannot be written: File too large"):
            traces.write(path, made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = list(read(path))
    assert kept == made[: len(kept)]
    assert len(kept) > len(made) / 2


def test_a_file_without_records(path: Path) -> None:
    """A recorder that was killed leaves an empty trace."""
    assert complaint_of(path) == f"{path}: cannot be read: No such file or directory"
    traces.write(path, [])
    for content in (path.read_bytes(), b""):
        path.write_bytes(content)
        assert complaint_of(path) == f"{path}: is empty: a trace has records from its beginning on"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[entropy]\nema_alpha = 1\n", "is not a trace: not gzip"),
        *(
            (gzip.compress(record, mtime=0), f"is not a record of a trace{reason}")
            for record, reason in (
                (b"\x05hello", ": "),
                (b"\x00", ""),
                (b"\x7f" + b"x" * 20, ": "),
                (b"\xff" * 8 + b"\x01", ": its length is given as "),
                (b"\xff" * 3, ": "),
            )
        ),
    ],
)
def test_a_foreign_file(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    assert complaint_of(path).startswith(f"{path}: at byte 0 (uncompressed) {reason}")


def test_a_file_that_is_cut_off(path: Path) -> None:
    made = traces.records([traces.made_up(0)])
    traces.write(path, made)
    path.write_bytes(path.read_bytes()[:-200])
    complaint = complaint_of(path)
    offset = int(complaint.split("at byte ")[1].split()[0])
    assert complaint == f"{path}: at byte {offset} (uncompressed) is cut off: the record is not complete"
    assert 0 < offset < sum(record.ByteSize() + 3 for record in made)


def test_what_can_be_kept_of_a_file_that_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that was killed leaves its newest part without an end."""
    monkeypatch.setattr(trace_file, "MEMBER_BYTES", 2000)
    made = traces.records([traces.made_up(n) for n in range(100)])
    traces.write(path, made)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    size = int(complaint_of(path).split("; its first ")[1].removesuffix(" bytes are a complete trace"))
    # From Python 3.12 on, gzip compresses 128 KiB at a time.
    compressed_at_once = (128 << 10) * len(whole) / sum(record.ByteSize() for record in made)
    assert len(whole) / 2 - 5000 - compressed_at_once < size < len(whole) / 2
    path.write_bytes(whole[:size])
    kept = list(read(path))
    assert kept == made[: len(kept)]
    assert len(kept) > len(made) / 4


def test_a_file_with_zeros_before_its_cut_end(path: Path) -> None:
    """After a power cut a file may have zeros in place of its newest bytes; gzip skips them behind a member."""
    whole = traces.write(path, traces.records([traces.made_up(0)])).read_bytes()
    path.write_bytes(whole + bytes(10) + whole[:2])
    assert complaint_of(path).endswith(f"; its first {len(whole)} bytes are a complete trace")


def test_a_message_of_a_newer_version(path: Path) -> None:
    newer = fleet_pb2.TraceRecord(session_id="s", engine_id="engine")
    traces.write(path, [newer])
    assert complaint_of(path).endswith(" is not a record of a trace, or one of a newer version")


# ---------------------------------------------------------------------------------------------------------- contents


def live(requests: list[traces.MadeUp]) -> list[tuple[Any, ...]]:
    """Return what a request table holds each time that a sentence end becomes known, request by request."""
    seen: list[tuple[Any, ...]] = []
    for number, request in enumerate(requests):
        table = RequestTable(WINDOW)
        table.open(agent_pb2.RequestOpened(slot=0, phase=agent_pb2.PHASE_THINK))
        for row in request.rows:
            columns = agent_pb2.TokenColumns()
            traces._add_rows(columns, [0], [row])
            table.add_tokens(columns)
            if table.boundary_now[0] and table.phase[0] == THINK:
                ranks, ratio = table.boundary_ranks[0].tolist(), float(rpdi(table)[0])
                sums = table.entropy_count[0], table.entropy_sum[0], ratio
                histories = ranks, table.boundary_rpdi[0].copy()
                seen.append((number, int(table.think_tokens[0]), int(table.boundary_count[0]), histories, *sums))
    return seen


def test_columns_are_those_of_a_live_table(path: Path) -> None:
    requests = [traces.made_up(n) for n in range(6)]
    # Request 2 has a marker of two tokens whose first was counted as thinking; request 3 thinks again.
    requests[2].rows[-4:-3] = [(THINK, 0, 0.2, 3), (THINK, 3 | 1 << 8, 0.1, 1)]
    requests[3].rows += [
        (OUTPUT, 1, 0.1, 9),
        *[(THINK, FLAG_BOUNDARY, 0.3, 7)] * 3,
        (THINK, FLAG_BOUNDARY | FLAG_GOES_ON, 0.3, 6),
        (THINK, 0, 0.3, 5),
        (THINK, 3, 0.1, 1),
        (OUTPUT, 0, 0, 9),
    ]
    for tokens in range(1, 5):
        requests[3].probes[max(requests[3].probes) + 1] = (0.5, tokens)
    found = collect([traces.write(path, traces.records(requests, at_once=3))])
    assert sorted(found.ids) == sorted(r.request_id for r in requests)
    by_id = [requests[[r.request_id for r in requests].index(i)] for i in found.ids]
    expected = live(by_id)
    assert len(expected) == len(found.owner)
    _, totals, sums = found.entropies(found.entropy_count, found.entropy_place, WINDOW)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(found.entropy_count >= WINDOW, sums / WINDOW / (totals / found.entropy_count), np.nan)
    base = policy(entropy={"rpdi_window_tokens": WINDOW})
    newest = Replay(found, from_probes(found), base, delay_tokens=2)._table.boundary_rpdi
    for at, (number, tokens, count, (ranks, earlier), entropies, total, ratio) in enumerate(expected):
        assert (found.owner[at], found.decided_tokens[at], found.rank_count[at]) == (number, tokens, count)
        assert found.ranks[at].tolist() == ranks
        np.testing.assert_allclose(newest[at], earlier, rtol=1e-5)
        assert found.entropy_count[at] == entropies
        np.testing.assert_allclose([totals[at], ratios[at]], [total, ratio], rtol=1e-5)


def test_samples_belong_to_their_sentence_ends(path: Path) -> None:
    requests = [traces.made_up(n) for n in range(4)]
    found = collect([traces.write(path, traces.records(requests, at_once=2))])
    has = np.flatnonzero(found.sample >= 0)
    assert len(has) == len(found.owner)
    assert (found.sample_tokens[found.sample] == found.think_tokens).all()
    assert (found.sample_owner[found.sample] == found.owner).all()
    late = found.sample_arrived[found.sample] - found.think_tokens
    assert set(late.tolist()) <= {1, 2}
    for at in has:
        request = next(r for r in requests if r.request_id == found.ids[found.owner[at]])
        eat, same = request.probes[int(found.think_tokens[at])]
        assert found.eat_nats[found.sample[at]] == pytest.approx(eat, rel=1e-6)
        assert found.same_answer[found.sample[at]] == same


def left_out(path: Path, *requests: traces.MadeUp) -> Episodes:
    return collect([traces.write(path, traces.records(list(requests)))])


def test_which_requests_are_used(path: Path) -> None:
    forced, aborted, unended, thoughtless = (traces.made_up(n, forced=n == 0) for n in range(4))
    aborted.finish = agent_pb2.FINISH_REASON_ABORT
    unended.rows = unended.rows[:-4]
    thoughtless.rows = [(OUTPUT, 0, 0.1, 9)] * 3
    unmeasured = replace(traces.made_up(5), unmeasured=True)
    # It thinks again, and is cut.
    again = replace(traces.made_up(6), finish=agent_pb2.FINISH_REASON_LENGTH)
    again.rows += [(THINK, FLAG_MARKER, 0.1, 9), (THINK, 0, 0.1, 9)]
    found = left_out(path, forced, aborted, unended, thoughtless, unmeasured, again, traces.made_up(4))
    assert len(found.ids) == 1
    assert found.left_out == {
        "not measured (telemetry.shadow_sample_ratio)": 1,
        "aborted or failed": 1,
        "did not think": 1,
        "thinking never ended": 2,
        "thinking was ended by force": 1,
    }
    assert len(found.seen) == 7


def test_requests_across_the_ends_of_a_recording_are_left_out(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(20)], at_once=4)
    cut = len(made) // 2
    again = fleet_pb2.TraceRecord(session_id="s", up=agent_pb2.ConnectRequest(hello=hello()), joined_late=True)
    found = collect([traces.write(path, [*made[:cut], again, *made[cut + 1 :]])])
    assert found.left_out == {"begun or finished outside the trace": 4}
    assert len(found.ids) == 16


def test_a_snapshot_ends_what_was_known(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(20)], at_once=4)
    rows = [agent_pb2.RequestOpened(slot=0, request_id="old", think_tokens=3)]
    made[len(made) // 2].up.CopyFrom(agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=rows)))
    found = collect([traces.write(path, made)])
    assert found.left_out == {"begun or finished outside the trace": 4}
    assert "old" not in found.seen


@pytest.mark.parametrize("session_id", ["s", "next"])
def test_a_request_that_waits_through_a_snapshot_is_one(path: Path, session_id: str) -> None:
    made = traces.records([traces.made_up(0)])
    opened = made[3].up.step.opened.pop()
    waits = agent_pb2.StepReport(steps=1, opened=[opened])
    ups: list[agent_pb2.ConnectRequest] = [agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=[opened]))]
    if session_id != made[0].session_id:
        ups.insert(0, made[0].up)
    before = fleet_pb2.TraceRecord(session_id=made[0].session_id, up=agent_pb2.ConnectRequest(step=waits))
    again = [fleet_pb2.TraceRecord(session_id=session_id, up=up) for up in ups]
    for record in made[3:]:
        record.session_id = session_id
    found = collect([traces.write(path, [*made[:3], before, *again, *made[3:]])])
    assert (found.ids, found.left_out) == ([opened.request_id], {})


def test_requests_with_one_id_on_two_engines_are_two(path: Path) -> None:
    """As a client's own request ids may be, of which one engine thinks and the other one answers."""
    made = traces.records([traces.made_up(0)])
    other = traces.records([traces.made_up(0)])
    for record in other:
        record.session_id = record.engine_id = "other"
    other[0].up.hello.engine_id = "other"
    found = collect([traces.write(path, [*made[:-1], *other])])
    assert (len(found.ids), found.left_out) == (1, {"begun or finished outside the trace": 1})


def test_a_request_that_the_agent_found_in_mid_course_is_left_out(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(4)])
    made[3].up.step.opened[1].think_tokens = 40
    made[3].up.step.opened[2].output_tokens = 1
    assert len(collect([traces.write(path, made)]).ids) == 2


def parts_of_two_snapshots(made: list[fleet_pb2.TraceRecord]) -> list[fleet_pb2.TraceRecord]:
    parts = [agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=step, continues=True)) for step in (1, 2)]
    return [*made, *(fleet_pb2.TraceRecord(session_id=made[0].session_id, up=part) for part in parts)]


def test_a_recorder_that_connects_again_may_have_half_a_snapshot(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(20)], at_once=4)
    part, again = (agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=n, continues=n == 1)) for n in (1, 2))
    middle = len(made) // 2
    ups = part, agent_pb2.ConnectRequest(hello=hello()), again
    made[middle:middle] = [fleet_pb2.TraceRecord(session_id=made[0].session_id, up=up) for up in ups]
    assert collect([traces.write(path, made)]).left_out == {"begun or finished outside the trace": 4}


def columns_of_two_lengths(made: list[fleet_pb2.TraceRecord]) -> list[fleet_pb2.TraceRecord]:
    made[5].up.step.tokens.flags.append(1)
    return made


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (columns_of_two_lengths, "record 5: its columns must have one length"),
        (parts_of_two_snapshots, "at byte .* a part of the snapshot of step 1 must follow; got step 2"),
        (lambda made: made[2:], "record 0: its session has no Hello before it"),
    ],
)
def test_records_that_break_the_contract(path: Path, spoil: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(FileError, match=complaint):
        collect([traces.write(path, spoil(traces.records([traces.made_up(0)])))])


def test_several_models(path: Path) -> None:
    made = traces.records([traces.made_up(n) for n in range(4)])
    made[3].up.step.opened[0].model = "other"
    traces.write(path, made)
    with pytest.raises(FileError, match=r"holds several models \(m, other\): choose one with --model"):
        collect([path])
    assert len(collect([path], "m").ids) == 3
    assert len(collect([path], "other").ids) == 1


def test_several_models_under_one_name(path: Path, tmp_path: Path) -> None:
    """Engines of which no fingerprint is known may have any model."""
    paths = []
    for number, fingerprint in enumerate(("bf16", "bf16", "", "fp8")):
        made = traces.records([traces.made_up(number)])
        made[0].up.hello.model_fingerprint = fingerprint
        paths.append(traces.write(tmp_path / f"{number}.trace", made))
    assert collect(paths[:3]).fingerprints == {"bf16"}
    with pytest.raises(FileError, match=r"holds several models of one name \(fingerprints bf16, fp8\)"):
        collect(paths)


@pytest.mark.parametrize(
    ("changed", "probings"),
    [
        ({"model": {"m": {"eat_answer_prefix": "So"}}}, 2),
        ({"entropy": {"eat_probe_interval_tokens": 7}}, 2),
        ({"override": [{"tenant": "a", "entropy": {"eat_probe_placement": "paragraph"}}]}, 1),
        ({"override": [{"model": "m", "entropy": {"eat_probe_placement": "paragraph"}}]}, 2),
        ({"entropy": {"eat_level_threshold_nats": 0.5}}, 1),
    ],
)
def test_in_how_many_ways_requests_were_probed(path: Path, changed: dict[str, Any], probings: int) -> None:
    made = traces.records([traces.made_up(n) for n in range(2)], at_once=1)
    given = fleet_pb2.TracedPolicy(revision=2, policy=to_proto(Policy.model_validate(changed)))
    made.insert(len(made) // 2, fleet_pb2.TraceRecord(session_id="s", policy=given))
    assert collect([traces.write(path, made)]).probings == probings


def test_the_newest_policy_is_that_of_the_newest_revision(path: Path) -> None:
    """An engine that refuses the newest revision is given an older one each time that it connects."""
    made = traces.records([traces.made_up(0)])
    for revision, cap in ((7, 700), (6, 600)):
        given = fleet_pb2.TracedPolicy(revision=revision, policy=to_proto(policy(scheduler={"max_think_tokens": cap})))
        made.append(fleet_pb2.TraceRecord(session_id="s", policy=given))
    newest = collect([traces.write(path, made)]).policy
    assert newest is not None
    assert newest.scheduler.max_think_tokens == 700
