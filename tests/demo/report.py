"""The demo's findings: numbers, the table and the line of JSON. Pure functions.

Requests of the period `before` ended before the policy changed; requests of `after` were sent when the engine had
acknowledged it. Requests of `across` are counted and belong to neither mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from tests.demo.load import ACROSS, AFTER, BEFORE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meridian.v1 import fleet_pb2

    from tests.demo.fleet import PolicyChange
    from tests.demo.load import Sample

NATURAL = "natural"


@dataclass(frozen=True, slots=True)
class Findings:
    """All measurements of the demo. ends: how thinking ended, as in Fleet.ends. found: what self-calibration has found
    after both periods."""

    samples: Sequence[Sample]
    ends: Mapping[str, str]
    change: PolicyChange
    engine: fleet_pb2.Engine
    found: fleet_pb2.SelfCalibration

    def period(self, name: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.period == name]

    def end(self, sample: Sample) -> str:
        return self.ends.get(sample.completion_id, NATURAL)

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error]


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value that a share `q` of the values does not exceed (nearest rank), or NaN without values."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))] if ordered else math.nan


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def accuracy(samples: Sequence[Sample]) -> float:
    return mean([float(sample.correct) for sample in samples])


def think_tokens(samples: Sequence[Sample]) -> list[float]:
    return [float(sample.think_tokens) for sample in samples]


def table(findings: Findings) -> Table:
    """Return the table: one column per policy, one row per measure."""
    columns = [_column(findings, findings.period(name)) for name in (BEFORE, AFTER)]
    grid = Table(title="Thinking, accuracy and latency under both policies")
    grid.add_column("")
    grid.add_column("before", justify="right")
    grid.add_column("after", justify="right")
    for name, *values in zip(columns[0], *(column.values() for column in columns), strict=True):
        grid.add_row(name, *values)
    return grid


def _column(findings: Findings, samples: list[Sample]) -> dict[str, str]:
    tokens = think_tokens(samples)
    ttot = [sample.ttot_ms for sample in samples]
    gaps = [gap for sample in samples for gap in sample.answer_gaps_ms]
    ends = Counter(findings.end(sample) for sample in samples)
    cut = [sample for sample in samples if not findings.end(sample).startswith(NATURAL)]
    return {
        "requests": str(len(samples)),
        "thinking tokens per request, mean": f"{mean(tokens):.1f}",
        "thinking tokens per request, p50 / p95": _quantiles(tokens, 0.5, 0.95, digits=0),
        "accuracy": f"{accuracy(samples):.1%}",
        "accuracy where thinking was ended": f"{accuracy(cut):.1%}" if cut else "",
        "TTOT ms, p50 / p95": _quantiles(ttot, 0.5, 0.95),
        "output ITL ms, p50 / p95 / p99": _quantiles(gaps, 0.5, 0.95, 0.99),
        "ends of thinking": "\n".join(f"{reason} {count}" for reason, count in ends.most_common()),
    }


def _quantiles(values: Sequence[float], *shares: float, digits: int = 1) -> str:
    return " / ".join(f"{quantile(values, share):.{digits}f}" for share in shares)


def notes(findings: Findings) -> list[str]:
    """Return further figures that the table does not contain, one line each."""
    engine, samples = findings.engine, findings.samples
    counted = sum(sample.think_tokens_of_usage is not None for sample in samples)
    source = "usage.completion_tokens_details.reasoning_tokens" if counted == len(samples) else "pieces of the stream"
    decisions, outcomes = sum(engine.decisions.values()), sum(engine.outcomes.values())
    return [
        f"policy change: revision {findings.change.revision} acknowledged by the engine "
        f"{findings.change.duration_ms:.1f} ms after the control plane accepted it, "
        f"{len(findings.period(ACROSS))} requests sent between the rounds",
        f"probe tokens: {engine.counters.probe_tokens}, for {engine.decisions.get('probe', 0)} probes, "
        f"{engine.counters.probe_tokens / len(samples):.1f} a request",
        f"decisions: {decisions} ({_listed(engine.decisions)})",
        f"outcomes:  {outcomes} ({_listed(engine.outcomes)}), {engine.open_decisions} open",
        f"ends as the engine reported them: {_listed(engine.ends) or 'none'}",
        f"preempted while answering: {engine.counters.output_critical}, "
        f"reports dropped: {engine.counters.reports_dropped}",
        f"thinking tokens are counted by {source}; TTOT: last piece of thinking to first piece of the answer",
    ]


def verdict(findings: Findings) -> list[str]:
    """Return what the figures mean, and what the saving costs, one paragraph each."""
    before, after = (findings.period(name) for name in (BEFORE, AFTER))
    tokens = [mean(think_tokens(samples)) for samples in (before, after)]
    right = [{sample.number for sample in samples if sample.correct} for samples in (before, after)]
    ttot = [quantile([sample.ttot_ms for sample in samples], 0.95) for samples in (before, after)]
    gaps = [quantile([g for sample in samples for g in sample.answer_gaps_ms], 0.99) for samples in (before, after)]
    return [
        f"Thinking fell from {tokens[0]:.0f} to {tokens[1]:.0f} tokens a request. Each question was asked under both "
        f"policies: of {len(before)}, {len(right[0] - right[1])} were answered right only before and "
        f"{len(right[1] - right[0])} only after. Sampling alone turns a few.",
        f"The price: the answer begins {ttot[1]:.0f} instead of {ttot[0]:.0f} ms after the thinking (P95), because a "
        "request waits for the decision where its answer is tried; the gaps between answer tokens are "
        f"{gaps[1]:.0f} instead of {gaps[0]:.0f} ms (P99).",
        self_calibration_text(findings.found),
    ]


def self_calibration_text(found: fleet_pb2.SelfCalibration) -> str:
    """Return what the control plane has found without a threshold from anybody, or why it has found nothing."""
    if found.rule:
        return (
            f"Then nobody wrote a threshold: on {found.proved_on_requests} recorded requests the control plane found "
            f"the rule {found.rule}, which saves {found.saved_ratio:.1%} of the thinking and, judged by trial answers, "
            f"loses at most {found.loss_bound:.1%} of the answers (allowed {found.max_loss:.0%}), and began to roll it "
            "out."
        )
    why = found.why or f"{found.recorded_requests} of {found.needed_requests} requests are recorded"
    return (
        f"Then nobody wrote a threshold, and the control plane found no rule: {why}. It goes on recording, and tries "
        f"again after {found.needed_requests} requests."
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def inconsistencies(findings: Findings) -> list[str]:
    """Return contradictions in the engine's own counts, one line each."""
    engine = findings.engine
    decisions, outcomes = sum(engine.decisions.values()), sum(engine.outcomes.values())
    found = []
    if decisions != outcomes + engine.open_decisions:
        found.append(f"{decisions} decisions, but {outcomes} outcomes and {engine.open_decisions} open decisions")
    if engine.open_decisions:
        found.append(f"{engine.open_decisions} decisions have no outcome")
    return found


def json_line(findings: Findings) -> str:
    """Return the machine-readable result, one line."""
    before, after, engine = findings.period(BEFORE), findings.period(AFTER), findings.engine
    return json.dumps(
        {
            "engine": engine.vllm_version,
            "requests": len(findings.samples),
            "failed": len(findings.failed),
            "phase_events": engine.token_events,
            "decisions": dict(sorted(engine.decisions.items())),
            "outcomes": dict(sorted(engine.outcomes.items())),
            "think_tokens_before": _rounded(mean(think_tokens(before)), 1),
            "think_tokens_after": _rounded(mean(think_tokens(after)), 1),
            "accuracy_before": _rounded(accuracy(before), 4),
            "accuracy_after": _rounded(accuracy(after), 4),
            "policy_change_ms": _rounded(findings.change.duration_ms, 1),
            "self_calibration": {"state": findings.found.state, "rule": findings.found.rule},
        }
    )


def request_lines(findings: Findings) -> Iterator[str]:
    """Yield one line of JSON per request; times are seconds since the epoch, null for events that did not happen."""
    for sample in findings.samples:
        values = dataclasses.asdict(sample) | {
            "end": findings.end(sample),
            "correct": sample.correct,
        }
        yield json.dumps({k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()})


def _rounded(value: float, digits: int) -> float | None:
    """Return the rounded value, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else round(value, digits)
