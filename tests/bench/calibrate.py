"""Calibrate as an operator does: run `meridianctl record` during requests, make labels, run `meridianctl calibrate`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from tests.bench import arms, cuts
from tests.bench.cuts import Reference
from tests.bench.driver import Batch, Engine, Sample
from tests.bench.harness import BenchError
from tests.processes import Process, wait_for

MERIDIANCTL = str(Path(sys.executable).with_name("meridianctl"))
# Seconds from the appearance of the trace file to the first record, which take one call over loopback.
CONNECTED_S = 1.0


# Places of the probes in a recording. The probe of a sentence end is still under way when the paragraph ends, one token
# later. So the rules that probe at paragraph ends need a recording of their own, which tells nothing about other EAT
# rules.
SENTENCES, PARAGRAPHS = "sentence", "paragraph"
AT_PARAGRAPHS = "EAT at paragraphs"
TRACE, LABELS = "trace", "labels.jsonl"


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration.

    policy: as `meridianctl calibrate` wrote it. report: its figures. natural_tokens: mean thinking of the calibration
    set.
    """

    policy: dict[str, Any]
    report: dict[str, Any]
    natural_tokens: float
    requests: int

    @property
    def recommends(self) -> bool:
        return bool(self.report["recommended"])

    @property
    def rule(self) -> str:
        """Return the recommended rule in the report's words."""
        return str(self.report["recommended"]["rule"]) if self.recommends else "nothing to recommend: in shadow"


def calibrate(engine: Engine, reference: Reference, samples: Sequence[Sample], folder: Path) -> Calibrated:
    """Record these requests twice and calibrate on both recordings. Raises BenchError.

    The recommendation of the recording with probes at paragraph ends is preferred if its rule probes there, because a
    live probe then reads the same text as the recorded one. A probe of a rule gated by rank reads two tokens later than
    the recorded one at a sentence end did.
    """
    sentences, paragraphs = (
        _calibrated(engine, reference, samples, folder, where) for where in (SENTENCES, PARAGRAPHS)
    )
    best = paragraphs.report["recommended"]
    chosen = paragraphs if best and best["family"].startswith(AT_PARAGRAPHS) else sentences
    families = {**sentences.report["families"]}
    families.pop(AT_PARAGRAPHS, None)
    if AT_PARAGRAPHS in paragraphs.report["families"]:
        families[AT_PARAGRAPHS] = paragraphs.report["families"][AT_PARAGRAPHS]
    return replace(chosen, report={**chosen.report, "families": families})


def _calibrated(
    engine: Engine, reference: Reference, samples: Sequence[Sample], folder: Path, where: str
) -> Calibrated:
    """Record once and run `meridianctl calibrate` on the recording, with files in a folder of its own. Raises
    BenchError."""
    task, folder = engine.task, folder / f"calibration-{where}"
    policy, report = folder / "policy.toml", folder / "report.json"
    for file in (policy, report):
        file.unlink(missing_ok=True)
    batch = record(engine, reference, samples, folder, where)
    # The base is not the policy of the recording, because that policy probes everywhere. A file without a header is no
    # policy.
    base = folder / "base.toml"
    base.write_text(tomli_w.dumps(arms.with_answer_prefix({"entropy": {}}, task.name, task.answer_prefix)))
    written = ["--out", str(policy), "--report", str(report)]
    process = subprocess.run(
        [
            MERIDIANCTL,
            "calibrate",
            str(folder / TRACE),
            "--labels",
            str(folder / LABELS),
            "--base",
            str(base),
            *written,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "calibration.txt").write_text(process.stdout + process.stderr)
    # `meridianctl calibrate` also exits with status 1 if it recommends no rule; the policy that it writes then is in
    # shadow.
    if process.returncode not in (0, 1) or not report.exists():
        raise BenchError(f"meridianctl calibrate exited with status {process.returncode}:\n{process.stderr[-2000:]}")
    figures = json.loads(report.read_text())
    return Calibrated(arms.load(policy), figures, batch.mean_think_tokens(), len(samples))


def record(engine: Engine, reference: Reference, samples: Sequence[Sample], folder: Path, where: str) -> Batch:
    """Run requests under a policy in shadow while `meridianctl record` writes a trace, and write their labels.

    The files are TRACE and LABELS of the folder, which is made. Raises BenchError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (trace := folder / TRACE).unlink(missing_ok=True)
    batch = _traced(engine, samples, trace, where)
    done = list(zip(samples, batch.completions, strict=True))
    cuts.write_labels(folder / LABELS, done, [reference.cuts(*pair) for pair in done])
    return batch


def _traced(engine: Engine, samples: Sequence[Sample], trace: Path, where: str) -> Batch:
    command = [MERIDIANCTL, "--server", engine.control.target, "record", str(trace)]
    recording = Process(command, trace.with_name("record.log"))
    try:
        wait_for(lambda: trace.exists() or recording.popen.poll() is not None, 60, "the recording to begin")
        time.sleep(CONNECTED_S)
        batch = engine.run(samples, arms.dense_probes(where, engine.task.name, engine.task.answer_prefix))
    finally:
        status = recording.stop()
    if status:
        raise BenchError(f"meridianctl record exited with status {status}:\n{recording.output()}")
    return batch
