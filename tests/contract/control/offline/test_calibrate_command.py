"""`meridianctl calibrate`: what it prints and writes, and the files that it cannot use."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meridian_control.cli.console import PlainConsole
from meridian_control.cli.main import app
from meridian_control.common.inference import binomial_upper
from meridian_control.policy import formats as forms
from tests.fakes import traces
from tests.fakes.replays import made, recorded_in
from tests.fakes.tables import policy

OK, FAILED, INVALID = range(3)
# A loss that the made-up requests can prove.
WIDE = ("--max-loss", 0.1)
# Names of the command's files.
OUT, REPORT = "policy.toml", "report.json"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a trace of requests that separate, and their labels."""
    folder, requests = tmp_path_factory.mktemp("recorded"), made()
    return recording(folder, requests), traces.write_labels(folder / "labels.jsonl", requests)


def recording(folder: Path, requests: list[traces.MadeUp]) -> Path:
    recorded_in(folder, requests)
    return folder / "a.trace"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)], env={"NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture(scope="module")
def proved(recorded: tuple[Path, Path]) -> Result:
    """Return what the command prints about requests whose loss is allowed; its files are beside their trace."""
    trace, labels = recorded
    files = ("--out", trace.with_name(OUT), "--report", trace.with_name(REPORT))
    result = run(trace, "--labels", labels, *WIDE, *files)
    assert result.exit_code == OK, result.output
    return result


def test_the_command(proved: Result, recorded: tuple[Path, Path]) -> None:
    out, report = (recorded[0].with_name(name) for name in (OUT, REPORT))
    result = proved
    told = " ".join(result.stdout.split())
    assert "fixed cap" in told
    assert "RPDI does not separate right from wrong stops on this model and is left out" in told
    assert told.startswith("Best: "), "the verdict comes first"
    assert "\\n" not in told, "each finding is a paragraph"
    assert "proxy" not in told
    policy = forms.load_config(out)
    assert (policy.entropy.shadow, policy.entropy.max_loss) == (False, 0.1)
    found = json.loads(report.read_text())
    assert found["policy"] == tomllib.loads(out.read_text())
    assert found["recommended"]["held_out"]["saved"] > 0.25
    assert found["recommended"]["held_out"]["harm_bound"] <= 0.1
    assert "The rule costs at most the allowed 10.0 points of accuracy with 95 % confidence." in told


def test_the_files_are_written_before_the_output_which_may_end(
    tmp_path: Path, recorded: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(PlainConsole, "say", ended)
    (trace, labels), out, report = recorded, tmp_path / OUT, tmp_path / REPORT
    arguments = ["calibrate", trace, "--labels", labels, *WIDE, "--out", out, "--report", report]
    assert CliRunner().invoke(app, [*map(str, arguments)]).exit_code == FAILED
    assert json.loads(report.read_text())["policy"] == tomllib.loads(out.read_text())


def test_the_command_says_what_is_not_proved(tmp_path: Path, recorded: tuple[Path, Path]) -> None:
    (trace, labels), report = recorded, tmp_path / "report.json"
    result = run(trace, "--labels", labels, "--report", report)
    assert result.exit_code == FAILED
    assert (
        "saves thinking and, with twice its harm, has an upper bound of at most 1.0 %. Without any harm, the bound "
        "needs at least 299 requests in each half. The policy stays in shadow."
    ) in " ".join(result.stdout.split())
    assert json.loads(report.read_text())["recommended"] is None


def test_the_command_in_a_series_needs_a_stronger_proof(
    tmp_path: Path, proved: Result, recorded: tuple[Path, Path]
) -> None:
    (trace, labels), report = recorded, tmp_path / "report.json"
    result = run(trace, "--labels", labels, *WIDE, "--attempt", 3, "--report", report)
    assert result.exit_code == OK, result.output
    bounds = []
    for attempt, file in ((0, trace.with_name(REPORT)), (3, report)):
        found = json.loads(file.read_text())
        figures = found["recommended"]["held_out"]
        confidence = 1 - 0.05 / (attempt * (attempt + 1) or 1)
        bounds.append(figures["harm_bound"])
        assert bounds[-1] == pytest.approx(binomial_upper(figures["harmful"], figures["requests"], confidence))
        assert found["goal"]["bound_confidence"] == pytest.approx(confidence)
    told = " ".join(result.stdout.split())
    assert "the allowed 10.0 points of accuracy with 95 % confidence over all attempts (this is attempt 3)." in told
    assert bounds == sorted(bounds)
    told = " ".join(run(trace, "--labels", labels, "--attempt", 2).stdout.split())
    assert "Without any harm, the bound needs at least 477 requests in each half." in told


def test_the_command_says_how_many_groups_there_are(tmp_path: Path, recorded: tuple[Path, Path]) -> None:
    trace, labels = recorded[0], tmp_path / "labels.jsonl"
    rows = [row | {"group": f"p{n % 14}"} for n, request in enumerate(made()) for row in request.labels()]
    labels.write_text("\n".join(map(json.dumps, rows)))
    told = " ".join(run(trace, "--labels", labels).stdout.split())
    assert "The requests belong to 14 groups." in told
    assert "Without any harm, the bound needs at least 299 groups in each half." in told
    rows = [row | {"group": "all"} for row in rows]
    labels.write_text("\n".join(map(json.dumps, rows)))
    result = run(trace, "--labels", labels)
    assert result.exit_code == FAILED
    assert result.stderr.startswith("5 groups of requests are needed in each half; there are 0, 1\n")


def test_the_command_without_labels_says_that_it_uses_a_proxy(tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    trace = recording(tmp_path, made(60, eat="noise", rank="noise"))
    result = run(trace, "--out", out)
    assert result.exit_code == FAILED
    told = " ".join(result.stdout.split())
    assert "This is a proxy for accuracy" in told
    assert "Nothing is recommended" in told
    assert forms.load_config(out).entropy.shadow


@pytest.mark.parametrize("other", [False, True])
def test_the_command_needs_labels_where_answers_begin_alike(tmp_path: Path, other: bool) -> None:
    requests = made(60)
    records = traces.records(requests)
    for record in (each for each in records if each.up.HasField("step")):
        record.up.step.probes.other_answer.extend([other] * len(record.up.step.probes.slot))
    trace, labels = traces.write(tmp_path / "a.trace", records), traces.write_labels(tmp_path / "l.jsonl", requests)
    told = run(trace)
    assert ("answers begin alike" in " ".join(told.stderr.split())) is not other
    assert ("or give --labels" in " ".join(told.stderr.split())) is not other
    assert "This is a proxy" not in run(trace, "--labels", labels).stdout


def test_the_command_takes_several_traces_and_a_base(tmp_path: Path) -> None:
    prefixed, (first, second) = policy(model={"m": {"eat_answer_prefix": "so "}}), (made()[:60], made()[60:])
    paths = [
        traces.write(tmp_path / f"{n}.trace", traces.records(half, policy=prefixed))
        for n, half in enumerate((first, second))
    ]
    out, base = tmp_path / "policy.toml", tmp_path / "base.toml"
    assert run(*paths, *WIDE, "--out", out).exit_code == OK
    assert forms.load_config(out).model["m"].eat_answer_prefix == "so "
    base.write_text("[fallback]\nlease_ms = 700\n")
    result = run(*paths, *WIDE, "--out", out, "--base", base)
    assert forms.load_config(out).fallback.lease_ms == 700
    said = " ".join(result.stdout.split())
    assert "recorded with the answer prefix 'so ' for m; the base policy has ''" in said
    assert "The policy probed the requests in" not in said
    other = traces.write(tmp_path / "other.trace", traces.records(made()[60:]))
    assert "The policy probed the requests in 2 ways" in " ".join(run(paths[0], other, *WIDE).stdout.split())


def test_the_command_with_files_it_cannot_use(tmp_path: Path) -> None:
    good = traces.write(tmp_path / "a.trace", traces.records(made(4)))
    bad = tmp_path / "b.trace"
    bad.write_text("no")
    result = run(bad)
    assert (result.exit_code, result.stderr) == (
        INVALID,
        f"{bad}: at byte 0 (uncompressed) is not a trace: not gzip\n",
    )
    assert run(good, "--base", tmp_path / "none.toml").exit_code == INVALID
    empty = traces.write(tmp_path / "c.trace", [])
    result = run(empty)
    why = f"{empty}: is empty: a trace has records from its beginning on\n"
    assert (result.exit_code, result.stderr) == (INVALID, why)
    result = run(good)
    assert (result.exit_code, result.stderr) == (FAILED, "10 requests are needed in each half; there are 2, 2\n")
    (tmp_path / "labels.jsonl").write_text("")
    for options, file, why in (
        (("--model", "nope"), good, "holds no request of the model 'nope', but of m"),
        (("--labels", tmp_path / "labels.jsonl"), tmp_path / "labels.jsonl", "holds no label"),
    ):
        result = run(good, *options)
        assert (result.exit_code, result.stderr) == (INVALID, f"{file}: {why}\n")
    # Without labels too, a request that counts twice would prove more than was recorded.
    result = run(good, good)
    why = f"{good}: cannot be used: the traces hold several requests with the id "
    assert (result.exit_code, result.stderr.startswith(why)) == (INVALID, True)


def test_the_removed_option_names_what_to_use() -> None:
    result = run("a.trace", "--plot", "frontier.png")
    assert result.exit_code == INVALID
    told = " ".join(result.stderr.replace("│", "").split())
    assert "is gone: draw the points of `families` that --report writes" in told
    assert "--plot" not in run("--help").stdout


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = run(tmp_path / "a.trace")
    assert result.exit_code == FAILED
    assert result.stderr == "calibrate needs scipy: pip install 'meridian-llm[calibrate]'\n"
