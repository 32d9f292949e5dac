"""The report and the last line of `make bench-cost`, from the parts' figures as they are stored."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.bench.cost_probes import Probes, time_share
from tests.bench.machine import machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# The parts of a step's time, by their names in the figures.
STEP_PARTS = {
    "between": "worker waits for its next step",
    "starved": "worker has a step but no core",
    "computing": "worker works on a step",
}
# A part of the benchmark, as JSON has it.
Part = dict[str, Any]


class Stored:
    """The results of all parts in a folder: `cost.json` and, made from it, `cost.md`."""

    def __init__(self, folder: Path) -> None:
        self._data, self._text = folder / "cost.json", folder / "cost.md"
        folder.mkdir(parents=True, exist_ok=True)

    def parts(self) -> dict[str, Part]:
        """Return the stored parts by name, without those of another layout."""
        stored = json.loads(self._data.read_text()) if self._data.exists() else {}
        return {
            name: part
            for name, part in stored.items()
            if name in SECTIONS and {"measured", LAYOUT[name]} <= part.keys()
        }

    def put(self, name: str, part: Part) -> None:
        """Replace a part, and leave the others as they are."""
        parts = self.parts() | {name: part | {"measured": f"{datetime.now(UTC):%Y-%m-%d} on {machine()}"}}
        self._data.write_text(json.dumps(parts, indent=1) + "\n")
        self._text.write_text(report(parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _steps(part: Part) -> list[str]:
    rows = part["rows"]
    lines = ["## Per step", "", _measured(part), "Steps last 10 ms or more.", ""]
    for title, long in (
        ("Short requests that begin together", False),
        ("Long thinking, begun one after another", True),
    ):
        if chosen := [row for row in rows if row["long"] is long]:
            lines += [f"### {title}", "", *_step_table(chosen), ""]
    lines += [
        "The next table shows the time by hook in us per step. The hook `mask` runs while the workers compute.",
        "",
    ]
    lines += [*_hook_table(rows), ""]
    if probed := [row for row in rows if row["probes"]]:
        lines += ["### EAT probes in long thinking", "", *_probe_table(probed), ""]
    return lines


def _step_table(rows: Sequence[Part]) -> list[str]:
    """Return the table per batch size: the agent's time in the engine-core thread and in the worker, beside stock's."""
    head = (
        "running requests",
        "stock schedule + update, us",
        "agent, us",
        "agent over stock",
        "waited for, us",
        "waited for over stock",
        "processor time: agent in us, over stock",
        "in the worker, us",
        "share of the worker's step",
    )
    return table(
        head,
        (
            (
                str(r["requests"]),
                f"{r['stock_us']:.0f}",
                f"{r['agent_us']:.1f}",
                f"{r['ratio']:.3f}",
                f"{r['critical_us']:.1f}",
                f"{r['critical_us'] / r['stock_us']:.3f}",
                f"{r['agent_cpu_us']:.1f}, {r['agent_cpu_us'] / r['stock_cpu_us']:.3f}",
                f"{r['observe_us']:.0f}",
                f"{r['observe_us'] / r['worker_us']:.3f}",
            )
            for r in rows
        ),
    )


def _hook_table(rows: Sequence[Part]) -> list[str]:
    hooks = list(rows[0]["hooks_us"])
    body = []
    for r in rows:
        numbers = [*(r["hooks_us"][hook] for hook in hooks), r["step_ms"], r["round_trip_ms"]]
        body.append([str(r["requests"]), "long" if r["long"] else "short", *(f"{number:.1f}" for number in numbers)])
    return table(["requests", "thinking", *hooks, "step, ms", "round trip, ms"], body)


def _probe_table(rows: Sequence[Part]) -> list[str]:
    head = (
        "running requests",
        "probe tokens per step",
        "us per probe token",
        "share of decode time, with its standard error",
    )
    return table(
        head,
        (
            (
                str(r["requests"]),
                f"{p['tokens_per_step']:.2f}",
                f"{p['us_per_token']:.0f}",
                f"{p['time_share']:.4f} ± {p['time_share_error']:.4f}",
            )
            for r in rows
            for p in [r["probes"]]
        ),
    )


def _throughput(part: Part) -> list[str]:
    """Return the table of all arms: tokens per second, the ratio to stock, processor time by process, and the parts of
    a step; and how much more of each part the governed engine has."""
    names, body = list(part["cpu_us"]["governed"]), []
    for arm, rate in part["tokens_per_s"].items():
        ratio = part["ratio"].get(arm)
        over = f"{ratio['value']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})" if ratio else "1"
        cpu = [f"{part['cpu_us'][arm][name]:.0f}" for name in names]
        body.append([arm, f"{rate:.0f}", over, *cpu, *(f"{part['parts_ms'][arm][name]:.2f}" for name in STEP_PARTS)])
    found = [part["more_ms"][name] for name in STEP_PARTS]
    more = [f"{more['value']:.2f} ({more['low']:.2f} to {more['high']:.2f})" for more in found]
    body.append(["governed less stock, 95 % interval", "", "", *([""] * len(names)), *more])
    head = ["engine", "tokens per second", "over stock, 95 % interval", *(f"{name}, us per token" for name in names)]
    head += [f"{title}, ms per step" for title in STEP_PARTS.values()]
    return [
        "## Throughput",
        "",
        f"{_measured(part)} The engines were started {part['starts']} times and had {part['rounds']} rounds in all, "
        f"with steps of {part['step_ms']:.1f} ms. In {part['unlike']} rounds the engines did not compute the same "
        f"prompts and tokens. A step had {part['probe_tokens']:.2f} tokens of EAT probes, and {part['calm_share']:.0%} "
        f"of the steps were calm. Other programs used at most {part['others_cores']:.2f} cores.",
        "",
        *table(head, body),
        "",
    ]


def _control(part: Part) -> list[str]:
    head = (
        "server",
        "token events per core-second",
        "engines per core",
        "today over it",
        "reports per second, us of processor time each",
        "cores used",
        "pace of the load, and share of its events that arrived, at least",
        "answer to a report, P50 and P99, ms",
    )
    body = [
        (
            arm,
            f"{a['token_events_per_core_s']:,.0f}",
            f"{a['engines_per_core']:.0f}",
            f"{part['over'][arm]:.3f}" if arm in part["over"] else "1",
            f"{a['messages_per_s']:.0f}, {a['us_per_message']:.0f}",
            f"{a['cores']:.3f}",
            f"{a['pace']:.3f}, {a['received']:.3f}",
            ", ".join(f"{ms:.1f}" for ms in a["latency_ms"]) or "–",
        )
        for arm, a in part["arms"].items()
    ]
    missing = [f"`before` is missing: {part['no_before']}.", ""] if part["no_before"] else []
    return [
        "## The control plane",
        "",
        f"{_measured(part)} {part['engines']} engines with {part['requests']} running requests each, {part['rounds']} "
        f"rounds; other programs used at most {part['others_cores']:.2f} cores. `before` is the control plane of "
        "commit 8206ef5 with its own agents, `echo` a bare gRPC server that receives today's reports.",
        "",
        *missing,
        *table(head, body),
        "",
    ]


# A figure of each part that other layouts of the part do not have.
LAYOUT = {"steps": "rows", "throughput": "parts_ms", "control": "arms"}
SECTIONS = {"steps": _steps, "throughput": _throughput, "control": _control}


def _measured(part: Part) -> str:
    return f"Measured on {part['measured']}, in {part['took_s'] / 60:.1f} minutes."


def report(parts: dict[str, Part]) -> str:
    """Return the report of the parts that have run."""
    lines = [
        "# Cost of the agent and of the control plane",
        "",
        "The [protocol](../cost.md) says how it is measured.",
        "",
    ]
    for name, section in SECTIONS.items():
        lines += section(parts[name]) if name in parts else []
    return "\n".join(lines)


def summary(parts: dict[str, Part]) -> dict[str, Any]:
    """Return the last line. The figures of parts that have not run are null."""
    rows: list[Part] = parts.get("steps", {}).get("rows", [])
    ratio = parts["throughput"]["ratio"]["governed"] if "throughput" in parts else None
    control = parts.get("control", {"arms": {}, "over": {}})
    today, before = control["arms"].get("today"), control["arms"].get("before")
    probed = [Probes(**row["probes"]) for row in rows if row["probes"]]
    return {
        "agent_of_stock": {str(r["requests"]): round(r["ratio"], 3) for r in rows if r["long"]} or None,
        "agent_of_stock_short": {str(r["requests"]): round(r["ratio"], 3) for r in rows if not r["long"]} or None,
        "throughput": ratio and round(ratio["value"], 4),
        "throughput_interval": ratio and [round(ratio["low"], 4), round(ratio["high"], 4)],
        "token_events_per_core_s": today and round(today["token_events_per_core_s"]),
        "engines_per_core": today and round(today["engines_per_core"], 1),
        "engines_per_core_before": before and round(before["engines_per_core"], 1),
        "of_echo": round(control["over"]["echo"], 3) if "echo" in control["over"] else None,
        "probe_time_share": round(time_share(probed), 4) if probed else None,
    }
