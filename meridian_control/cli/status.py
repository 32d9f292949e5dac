"""Implements `meridianctl status`, which sums up the control plane and its fleet in about ten lines.

The module uses the control plane only through its gRPC API, on one thread with blocking calls.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import grpc
import typer
from meridian.v1 import fleet_pb2, rollout_pb2

from meridian_control.capabilities.pressure.rule import MAX_LEVEL
from meridian_control.cli.console import (
    CALL_TIMEOUT_S,
    Client,
    WatchOption,
    add,
    connect,
    console,
    first,
    new_table,
    stamp_text,
    warn_unreachable,
    watched,
)
from meridian_control.cli.expected import all_engines, connected, same_names
from meridian_control.cli.freeze import in_force
from meridian_control.cli.policy import current
from meridian_control.cli.rollout import short_text
from meridian_control.cli.tables import harm_text, saved_text
from meridian_control.common.enum_names import stage_name
from meridian_control.common.look import percent

# Number of names that a line shows.
SHOWN = 3


def status(context: typer.Context, watch: WatchOption = False) -> None:
    """Sum up policy, engines, requests, rollout, freezes, savings, harm, budgets and pressure in ten lines."""
    watched(partial(_show, context), watch)


def _show(context: typer.Context) -> None:
    with connect(context) as client:
        # The command line, the environment or a context may name the address.
        server, _ = context.obj.resolve()
        engines, unreachable = all_engines(client)
        lines = [
            ("policy", _policy(client)),
            ("engines", _engines(engines)),
            ("requests", _requests(connected(engines))),
            ("rollout", _rollout(client)),
            ("freezes", _freezes(client)),
            *_savings(client),
            ("budgets", _budgets(client)),
            ("pressure", _pressure(connected(engines))),
        ]
    shown = new_table("control plane", server)
    for name, text in lines:
        add(shown, name, text)
    console().print(shown)
    warn_unreachable(unreachable)


def _policy(client: Client) -> str:
    try:
        stored = current(client)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return "none is stored yet: the defaults hold"
    author = f" by {stored.author}" if stored.author else ""
    reason = f": {stored.reason}" if stored.reason else ""
    return f"revision {stored.revision}, {stamp_text(stored.create_time)}{author}{reason}"


def _engines(engines: Sequence[fleet_pb2.Engine]) -> str:
    """Return how many engines there are, and what is wrong with some of them."""
    live = connected(engines)
    groups = {
        "lost": [e for e in engines if e.lost],
        "at fault": [e for e in engines if e.fault],
        "frozen": [e for e in live if e.freeze.freeze_ids or e.freeze.confirmed],
        "with an older policy": [e for e in live if e.acked_revision < e.revision],
        "with unknown thinking markers": [e for e in live if e.unknown_markers],
        "without a name of its own": [e for e in live if e.engine_id in same_names(live)],
    }
    texts = [f"{len(of)} {what} ({_names([e.engine_id for e in of])})" for what, of in groups.items() if of]
    return ", ".join((f"{len(live)} connected", *texts))


def _names(names: Sequence[str]) -> str:
    shown = sorted(set(names))
    return ", ".join(shown[:SHOWN]) + ", …" * (len(shown) > SHOWN)


def _requests(engines: Sequence[fleet_pb2.Engine]) -> str:
    fields = ("thinking", "answering", "waiting")
    return ", ".join(f"{sum(getattr(e, name) for e in engines)} {name}" for name in fields)


def _rollout(client: Client) -> str:
    newest = first(1, client.rollout.ListRollouts, rollout_pb2.ListRolloutsRequest(page_size=1), "rollouts")
    return short_text(newest[0]) if newest else "none yet"


def _freezes(client: Client) -> str:
    entries = in_force(client)
    texts = [f"{e.freeze_id} until {e.end_time.ToDatetime():%H:%M:%S UTC}: {e.reason}" for e in entries[:SHOWN]]
    return ", ".join((*texts, *(["…"] if len(entries) > SHOWN else []))) or "none"


def _savings(client: Client) -> Iterator[tuple[str, str]]:
    """Yield what the rules in force save, and the harm that they do."""
    answer = client.fleet.GetSavings(fleet_pb2.GetSavingsRequest(), timeout=CALL_TIMEOUT_S)
    row = next((row for row in answer.savings if row.in_force), fleet_pb2.Savings())
    yield "saved", saved_text(row)
    withdrawn = f"; revision {answer.withdrawn_revision} withdrew what did harm" if answer.withdrawn_revision else ""
    yield "harm", harm_text(row) + withdrawn


def _budgets(client: Client) -> str:
    rows = client.fleet.ListBudgets(fleet_pb2.ListBudgetsRequest(), timeout=CALL_TIMEOUT_S).budgets
    texts = [f"{row.policy.name} {percent(row.left_ratio, 0)} left, {stage_name(row.stage)}" for row in rows]
    return "; ".join(texts) or "none in the policy"


def _pressure(engines: Sequence[fleet_pb2.Engine]) -> str:
    names = sorted({row.name for e in engines for row in e.pressures})
    texts = []
    for name in names:
        levels = {e.engine_id: row.level for e in engines for row in e.pressures if row.name == name}
        highest = max(levels.values())
        who = f" ({_names([engine for engine, level in levels.items() if level == highest])})" if highest else ""
        texts.append(f"{name} level {highest} of {MAX_LEVEL}{who}")
    return "; ".join(texts) or "none in the policy"
