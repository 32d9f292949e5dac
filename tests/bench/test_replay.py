"""Tests of `make bench-replay` on small recordings whose figures are known, and of what calibration does with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.bench import replay, replay_data
from tests.bench.program import BenchError
from tests.bench.replay import Evaluation, Options, evaluate
from tests.fakes import traces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.replay import Findings, Row

Branch = tuple[list[str], int, str]


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
    assert {"first right", "fixed cap, held out", "4 siblings"} <= set(told["harm"])
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
