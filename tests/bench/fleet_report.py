"""The figures of `make bench-fleet`, its tables, its files and its last line. Pure but for the files."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tests.bench.cost_report import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Duration of a real engine's step in milliseconds.
STEP_MS = 20.0


@dataclass(frozen=True)
class Setting:
    """The figures of some engines under some replicas. Those in `_s` are per second of an engine at full speed, unless
    they are times.

    slower: factor by which engines were slower. cpu_ms: milliseconds of the replicas' processor time for one engine and
    second; idle_ms: the part of a silent stream. base_cores: of a replica without engines. cores: used by all replicas;
    busiest: by one of them; own_cores: by the engines. pace: share of the due steps that the engines made; received:
    share of these that the replicas received. latency_ms: P50 and P99 of the time from a report to its answer.
    mb_per_engine: with its requests. moved: engines of the replica that was killed; cut: decisions that had no outcome
    when it was killed. rows_s, wal_bytes_s: written by PostgreSQL per replica and second; connections: to the database,
    per replica. lost: engines that no replica has, and decisions on which a replica and an engine disagree.
    """

    engines: int
    replicas: int
    slower: float
    cpu_ms: float
    idle_ms: float
    base_cores: float
    cores: float
    busiest: float
    own_cores: float
    postgres_cores: float
    others_cores: float
    pace: float
    received: float
    reports_s: float
    answered: float
    decisions_s: float
    up_bytes_s: float
    down_bytes_s: float
    latency_ms: tuple[float, ...]
    rows_s: float
    wal_bytes_s: float
    connections: float
    connect_ms: float
    base_mb: float
    mb_per_engine: float
    kb_per_request: float
    delivery_p95_s: float
    delivery_all_s: float
    delivery_ms: float
    lost: int
    moved: int = 0
    moved_p95_s: float = 0.0
    moved_all_s: float = 0.0
    cut: int = 0

    @property
    def engines_per_core(self) -> float:
        return 1e3 / self.cpu_ms

    @property
    def latency_steps(self) -> tuple[float, ...]:
        """P50 and P99 of the time to an answer, in steps of an engine at full speed."""
        return tuple(ms / STEP_MS for ms in self.latency_ms)


@dataclass(frozen=True)
class Beside:
    """Engines per core of today's control plane and of an older one. missing: why they were not measured."""

    missing: str
    engines: int = 0
    today: float = 0.0
    before: float = 0.0
    ratios: Sequence[float] = ()


def last_line(setting: Setting) -> str:
    return json.dumps(
        {
            "engines": setting.engines,
            "replicas": setting.replicas,
            "engines_per_core": round(setting.engines_per_core, 1),
            "mb_per_engine": round(setting.mb_per_engine, 3),
            "decision_steps_p99": round(setting.latency_steps[1], 2),
            "delivery_p95_s": round(setting.delivery_p95_s, 2),
            "lost": setting.lost,
        }
    )


def write(settings: Sequence[Setting], compared: Beside, measured: str, folder: Path) -> None:
    """Write `fleet.md` and `fleet.json` into a folder. measured: when, on which machine, and for how long."""
    plain = [{**asdict(s), "engines_per_core": s.engines_per_core, "latency_steps": s.latency_steps} for s in settings]
    data = {"settings": plain, "beside": asdict(compared), "measured": measured}
    (folder / "fleet.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "fleet.md").write_text(markdown(settings, compared, measured))


def measured_on(machine: str, window_s: float, took_s: float) -> str:
    return f"{datetime.now(UTC):%Y-%m-%d} on {machine}, in {took_s / 60:.1f} minutes, with windows of {window_s:g} s"


def markdown(settings: Sequence[Setting], compared: Beside, measured: str) -> str:
    """Return the report."""
    lines = [
        "# A fleet under several replicas",
        "",
        f"The [protocol](../fleet.md) says how it is measured. Measured on {measured}.",
        "",
        *_load(settings),
        "",
        *_state(settings),
        "",
        *_events(settings),
        "",
        "## Beside commit 8206ef5",
        "",
        _beside(compared),
        "",
    ]
    return "\n".join(lines)


def _load(settings: Sequence[Setting]) -> list[str]:
    head = (
        "engines",
        "replicas",
        "slower by",
        "replicas' processor time per engine and second, ms (of it a silent stream)",
        "engines per core",
        "cores used: replicas, busiest one, PostgreSQL, engines, other programs",
        "pace, share received",
        "answer to a report, P50 and P99, ms",
        "in steps of 20 ms",
    )
    return table(
        head,
        (
            (
                f"{s.engines:,}",
                str(s.replicas),
                f"{s.slower:g}",
                f"{s.cpu_ms:.1f} ({s.idle_ms:.2f})",
                f"{s.engines_per_core:.0f}",
                f"{s.cores:.2f}, {s.busiest:.2f}, {s.postgres_cores:.2f}, {s.own_cores:.2f}, {s.others_cores:.2f}",
                f"{s.pace:.3f}, {s.received:.3f}",
                ", ".join(f"{ms:.1f}" for ms in s.latency_ms),
                ", ".join(f"{steps:.2f}" for steps in s.latency_steps),
            )
            for s in settings
        ),
    )


def _state(settings: Sequence[Setting]) -> list[str]:
    head = (
        "engines",
        "replicas",
        "empty replica: MB, cores",
        "memory per engine with its requests, MB",
        "memory per request, KB",
        "reports per engine and second, share answered, decisions",
        "bytes per engine and second, up and down",
        "PostgreSQL per replica: rows and bytes of WAL a second, connections",
        "to connect an engine, ms of processor time",
    )
    return table(
        head,
        (
            (
                f"{s.engines:,}",
                str(s.replicas),
                f"{s.base_mb:.0f}, {s.base_cores:.3f}",
                f"{s.mb_per_engine:.3f}",
                f"{s.kb_per_request:.2f}",
                f"{s.reports_s:.1f}, {s.answered:.2f}, {s.decisions_s:.1f}",
                f"{s.up_bytes_s:,.0f}, {s.down_bytes_s:,.0f}",
                f"{s.rows_s:.1f}, {s.wal_bytes_s:,.0f}, {s.connections:g}",
                f"{s.connect_ms:.1f}",
            )
            for s in settings
        ),
    )


def _events(settings: Sequence[Setting]) -> list[str]:
    head = (
        "engines",
        "replicas",
        "delivery of a policy, P95 and all engines, s",
        "ms of processor time per engine",
        "engines of the killed replica",
        "governed again, P95 and all, s",
        "decisions without an outcome at the kill",
        "lost",
    )
    return table(
        head,
        (
            (
                f"{s.engines:,}",
                str(s.replicas),
                f"{s.delivery_p95_s:.2f}, {s.delivery_all_s:.2f}",
                f"{s.delivery_ms:.1f}",
                f"{s.moved:,}" if s.moved else "–",
                f"{s.moved_p95_s:.2f}, {s.moved_all_s:.2f}" if s.moved else "–",
                f"{s.cut:,}" if s.moved else "–",
                str(s.lost),
            )
            for s in settings
        ),
    )


def _beside(compared: Beside) -> str:
    if compared.missing:
        return f"Not measured: {compared.missing}."
    ratio, ratios = statistics.median(compared.ratios), ", ".join(f"{ratio:.3f}" for ratio in compared.ratios)
    return (
        f"With {compared.engines} engines at full speed, each control plane with its own agents, one core carries "
        f"{compared.today:.0f} engines today and {compared.before:.0f} at 8206ef5: {ratio:.3f} times as many "
        f"(rounds: {ratios})."
    )
