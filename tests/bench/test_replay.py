"""Tests of `make bench-replay` on small recordings whose figures are known, and of what calibration does with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meridian_control.offline.calibration import Goal, calibrate
from meridian_control.offline.candidates import same_answer
from tests.bench import replay, replay_data
from tests.bench.program import BenchError
from tests.bench.replay import Evaluation, Options, evaluate
from tests.fakes import traces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.replay import Findings, Row

Branch = tuple[list[str], int, str]
SPLITS = 6


def write(path: Path, problems: list[list[Branch]], gold: str = "42") -> Path:
    made = [{"question": "?", "gold_answer": gold, "each_branch": branches, "probe_freq": 500} for branches in problems]
    path.write_text(json.dumps(made))
    return path


def options(**changed: Any) -> Options:
    return Options(**{"data": None, "pairs": [], "max_loss": 0.01, "splits": 2, "save": False} | changed)


def rows(found: Findings) -> dict[str, Row]:
    return {row.name: row for row in (*found.headroom, *found.rows)}


def deceived(rng: np.random.Generator, wrong: float) -> Branch:
    """Return a sample that repeats a wrong answer for long, with this probability, before it finds the right one."""
    places = int(rng.integers(24, 40))
    settles = int(rng.integers(places // 2, places - 4))
    begin = ["7"] * settles if rng.random() < wrong else [str(n) for n in range(1000, 1000 + settles)]
    return [*begin, *["42"] * (places - settles)], 500 * places + 250, "42"


def problems(wrong: float, count: int = 24, samples: int = 8) -> list[list[Branch]]:
    rng = np.random.default_rng(3)
    return [[deceived(rng, wrong) for _ in range(samples)] for _ in range(count)]


# ------------------------------------------------------------------------------------------------------ known figures

# Four samples with 10,000 thinking tokens in all.
KNOWN: list[Branch] = [
    (["7", "42", "42", "42"], 2400, "42"),
    (["42", "7", "7", "7", "7"], 2600, "7"),
    (["ERR", "ERR", "ERR", "1"], 2200, "2"),
    (["5", "6", "42", "42", "42"], 2800, "42"),
]


def evaluation(path: Path, **changed: Any) -> Evaluation:
    return Evaluation(replay_data.public(path), options(**changed))


def test_headroom(tmp_path: Path) -> None:
    made = evaluation(write(tmp_path / "known.json", [KNOWN]))
    first, never = made.headroom()
    # The first, second and fourth sample end at 1,000, 500 and 1,500 tokens; the third at its first trial answer.
    assert first.saved == pytest.approx((1400 + 2100 + 1300) / 10_000)
    assert never.saved == pytest.approx((1400 + 2100 + 1700 + 1300) / 10_000)
    assert first.accuracy_change == never.accuracy_change == pytest.approx(0.25)


def test_the_same_answer_rule_counts_whole_answers_or_first_tokens_and_pays_for_them(tmp_path: Path) -> None:
    recording = replay_data.public(write(tmp_path / "known.json", [KNOWN]))
    whole, first = recording.replays["whole"], recording.replays["first token"]
    assert whole.stops(same_answer(3)).at_tokens.tolist() == [2000, 2000, np.inf, 2500]
    assert whole.stops(same_answer(3)).right.tolist() == [1, 0, 0, 1]
    row = Evaluation(recording, options()).stops(whole, same_answer(3), "x")
    probes = 4 + 4 + 4 + 5
    assert row.saved == pytest.approx((400 + 600 + 300 - probes * replay_data.WHOLE_TOKENS) / 10_000)
    assert first.cost_tokens == replay_data.FIRST_TOKENS
    alike = replay_data.public(write(tmp_path / "alike.json", [[(["41", "42", "43"], 1700, "42")]]))
    assert alike.replays["whole"].stops(same_answer(3)).at_tokens.tolist() == [np.inf]
    assert alike.replays["first token"].stops(same_answer(3)).at_tokens.tolist() == [1500]


def test_an_answer_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    recording = replay_data.public(write(tmp_path / "known.json", [KNOWN]))
    for told in recording.replays.values():
        assert told.stops(same_answer(2)).at_tokens[2] == np.inf


def test_a_fixed_cap(tmp_path: Path) -> None:
    """Above 2,000 tokens no sample loses anything; the cap at 1,500 makes none wrong either."""
    made = evaluation(write(tmp_path / "known.json", [KNOWN] * 12))
    in_sample, held_out = made.caps()
    assert in_sample.note == "at 1500 tokens"
    assert in_sample.saved == pytest.approx((900 + 1100 + 700 + 1300) / 10_000)
    assert held_out.saved == pytest.approx(in_sample.saved)
    assert (in_sample.recommended, held_out.recommended) == (0, 0)


def test_siblings_agree(tmp_path: Path) -> None:
    """A sample that has ended counts with its final answer, and the others end where all have agreed twice."""
    agree: list[Branch] = [
        (["1", "42", "42", "42"], 2300, "42"),
        (["42", "42"], 1100, "42"),
        (["42", "7", "42", "42"], 2400, "7"),
        (["ERR", "42", "42", "42"], 2200, "42"),
    ]
    siblings = replay_data.public(write(tmp_path / "a.json", [agree])).siblings
    assert siblings is not None
    at, right = replay_data.consensus(siblings, 4, 2)
    assert at.tolist() == [2000, np.inf, 2000, 2000]
    assert right.tolist() == [1, 1, 1, 1]
    assert replay_data.consensus(siblings, 4, 1)[0].tolist() == [1500, np.inf, 1500, 1500]


# ------------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("kind", ["whole", "first token"])
def test_what_harms_is_refused_on_every_split(tmp_path: Path, kind: str) -> None:
    """Most samples repeat a wrong answer for longer than the right one, so that no number of equal answers is safe."""
    told = replay_data.public(write(tmp_path / "harm.json", problems(wrong=0.7))).replays[kind]
    assert told.stops(same_answer(8)).right.mean() < 0.5
    for split in range(SPLITS):
        found = calibrate(told, Goal(0.01), split)
        assert (found.best, found.confirmed, found.policy.entropy.shadow) == (None, False, True)


def test_what_helps_is_recommended_on_every_split(tmp_path: Path) -> None:
    """If no wrong answer is ever repeated, the same rule saves much and harms nothing."""
    told = replay_data.public(write(tmp_path / "help.json", problems(wrong=0.0))).replays["whole"]
    for split in range(SPLITS):
        found = calibrate(told, Goal(0.25), split)
        assert found.recommended is not None
        assert found.recommended.held_out.saved > 0.2
        assert calibrate(told, Goal(0.01), split).best is None, "twelve problems prove no loss below one point"


def test_the_findings_say_what_is_in_force(tmp_path: Path) -> None:
    harm, helps = (
        evaluate(replay_data.public(write(tmp_path / f"{wrong}.json", problems(wrong))), options(max_loss=0.25))
        for wrong in (0.7, 0.0)
    )
    assert not any(row.recommended for row in harm.rows)
    assert [c.rule for c in harm.chosen["whole"]] == ["", ""]
    (chosen,) = {c.rule for c in helps.chosen["whole"]}
    number = chosen.split()[4]
    assert chosen == f"the same trial answer {number} times in a row"
    assert rows(helps)[f"same answer {max(3, int(number))}, whole"].accuracy_change == 0


# ------------------------------------------------------------------------------------------------------- the program


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RESULTS", tmp_path / "results")
    data = tmp_path / "data"
    data.mkdir()
    write(data / "harm.json", problems(wrong=0.7))
    requests = [traces.made_up(n) for n in range(80)]
    trace = traces.write(tmp_path / "mine.trace", traces.records(requests))
    labels = traces.write_labels(tmp_path / "labels.jsonl", requests)
    given = ["--data", str(data), "--trace", str(trace), "--labels", str(labels), "--splits", "2", "--save"]
    replay.run(replay.parse(given))
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told) == ["harm", "mine"]
    for row in (row for each in told.values() for row in each.values()):
        assert set(row) == {"saved", "accuracy_change", "recommended"}
    assert not any(row["recommended"] for row in told["harm"].values())
    assert {"first right", "fixed cap, held out", "same answer 8, whole", "4 siblings"} <= set(told["harm"])
    assert {"first right", "EAT", "rank", "RPDI", "fixed cap, in sample"} <= set(told["mine"])
    page = (tmp_path / "results" / "replay.md").read_text()
    assert "## harm" in page
    assert "finds no rule on 2 of 2 splits" in page


def test_a_second_threshold_has_a_row(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"eat": "noise", "rank": "noise", "same": "noise"}
    requests = [traces.hopeless(n, **kinds) if n % 10 < 4 else traces.made_up(n, **kinds) for n in range(140)]
    trace = traces.write(tmp_path / "mine.trace", traces.records(requests))
    labels = traces.write_labels(tmp_path / "labels.jsonl", requests)
    found = evaluate(replay_data.own(trace, labels), options(max_loss=0.1))
    row = rows(found)["give up"]
    assert row.saved > 0.05
    assert row.accuracy_change >= -0.1
    assert row.recommended
    assert row.note.startswith("EAT >= ")


def test_without_data_the_program_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    replay.run(replay.parse([]))
    lines = capsys.readouterr().out.splitlines()
    assert "zhengkid/Parallel-Probe" in lines[0]
    assert lines[-1] == "{}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not a file of zhengkid/Parallel-Probe: JSONDecodeError"),
        ("[{}]", "is not a file of zhengkid/Parallel-Probe: KeyError"),
        ("[]", "is not a file of zhengkid/Parallel-Probe: ValueError"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(BenchError) as raised:
        replay_data.public(path)
    assert str(raised.value).startswith(f"{path}: {complaint}")


def test_a_folder_without_files_and_too_few_problems(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"has no \.json files"):
        replay.run(options(data=tmp_path))
    write(tmp_path / "few.json", problems(wrong=0.0, count=4))
    with pytest.raises(BenchError, match="few: 5 groups of requests are needed in each half; there are 2, 2"):
        replay.run(options(data=tmp_path))


def test_arguments_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--trace", "a"], ["--splits", "0"]):
        with pytest.raises(SystemExit):
            replay.parse(given)
    told = capsys.readouterr().err
    assert "--trace and --labels go together; got 1 traces and 0 labels" in told
    assert "--splits must be at least 1; got 0" in told
