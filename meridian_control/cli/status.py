"""Implements `meridianctl status`, which sums up the control plane and its fleet in about ten lines.

The module uses the control plane only through its gRPC API, with blocking calls, and asks what the policy store has on
several threads, so that a store that does not answer is waited for once.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import grpc
import typer
from meridian.v1 import fleet_pb2, freeze_pb2, policy_pb2, rollout_pb2

from meridian_control.capabilities.budgets.shown import row as budget_row
from meridian_control.capabilities.pressure.rule import MAX_LEVEL
from meridian_control.cli.console import (
    CALL_TIMEOUT_S,
    UNREACHABLE,
    Client,
    Output,
    OutputOption,
    WatchOption,
    add,
    connect,
    console,
    error_lines,
    first,
    new_table,
    show_value,
    stamp_text,
    warn_unreachable,
    watched,
)
from meridian_control.cli.expected import all_engines, connected, same_names
from meridian_control.cli.freeze import in_force
from meridian_control.cli.policy import policy_in_force
from meridian_control.cli.rollout import short_text
from meridian_control.cli.tables import saved_text, whole_harm_text
from meridian_control.common.engine_words import condition, names_text, trouble_text, troubles
from meridian_control.common.harm_words import withdrew_text
from meridian_control.common.look import percent
from meridian_control.common.plain_data import plain

# Number of freezes that a line shows.
SHOWN = 3
# Fields of the savings that a document shows; `meridianctl savings` shows all.
SAVINGS = ("since_revision", "saved_ratio", "saved_tokens", "max_loss", "harm_ratio", "harmful", "judged", "unjudged")


class Facts(NamedTuple):
    """What the control plane says of itself and of its fleet. policy: the revision in force, None before the first.
    rollout: the newest one, None if there was none. savings: of the rules in force. not_known: why the policy store's
    facts are not known, by their names."""

    server: str
    policy: policy_pb2.PolicyRevision | None
    engines: Sequence[fleet_pb2.Engine]
    rollout: rollout_pb2.Rollout | None
    freezes: Sequence[freeze_pb2.StoredFreeze]
    savings: fleet_pb2.Savings
    withdrawn_revision: int
    withdrawn_cause: str
    budgets: Sequence[fleet_pb2.Budget]
    not_known: dict[str, str]


def status(context: typer.Context, output: OutputOption = Output.table, watch: WatchOption = False) -> None:
    """Sum up policy, engines, requests, rollout, freezes, savings, harm, budgets and pressure in ten lines."""
    watched(partial(_show, context, output, watch), watch)


def _show(context: typer.Context, output: Output, watch: bool) -> None:
    # The channel is closed first, so that no thread waits for an answer after Ctrl-C.
    with ThreadPoolExecutor() as pool, connect(context) as client:
        facts, unreachable = _ask(context, client, pool)
    if output.is_table:
        shown = new_table("control plane", facts.server)
        for name, text in _lines(facts):
            add(shown, name, f"not known: {why}" if (why := facts.not_known.get(name)) else text)
        console().print(shown)
    else:
        show_value(_document(facts), output)
    warn_unreachable(unreachable)
    if facts.not_known and not watch:
        raise typer.Exit(UNREACHABLE)


def _ask(context: typer.Context, client: Client, pool: ThreadPoolExecutor) -> tuple[Facts, list[str]]:
    """Return the facts, and the replicas that did not answer."""
    # The command line, the environment or a context may name the address.
    server = context.obj.resolve()[0]
    engines, unreachable = all_engines(client)
    not_known: dict[str, str] = {}
    asks: dict[str, Callable[[], Any]] = {
        "policy": partial(policy_in_force, client),
        "rollout": partial(first, 1, client.rollout.ListRollouts, rollout_pb2.ListRolloutsRequest(), "rollouts"),
        "freezes": partial(in_force, client),
    }

    def told(name: str) -> Any:
        try:
            return asks[name]()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            not_known[name] = " ".join(error_lines(error))
            return None

    policy, newest, freezes = pool.map(told, asks)
    savings = client.fleet.GetSavings(fleet_pb2.GetSavingsRequest(), timeout=CALL_TIMEOUT_S)
    facts = Facts(
        server,
        policy,
        engines,
        newest[0] if newest else None,
        freezes or (),
        next((row for row in savings.savings if row.in_force), fleet_pb2.Savings()),
        savings.withdrawn_revision,
        savings.withdrawn_cause,
        client.fleet.ListBudgets(fleet_pb2.ListBudgetsRequest(), timeout=CALL_TIMEOUT_S).budgets,
        not_known,
    )
    return facts, unreachable


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the name of each line with its text."""
    live = connected(facts.engines)
    did = withdrew_text(facts.withdrawn_cause)
    withdrawn = f"; revision {facts.withdrawn_revision} {did}" if facts.withdrawn_revision else ""
    yield "policy", _policy(facts.policy)
    yield "engines", _engines(facts.engines)
    yield "requests", ", ".join(f"{count} {phase}" for phase, count in _requests(live).items())
    yield "rollout", short_text(facts.rollout) if facts.rollout is not None else "none yet"
    yield "freezes", _freezes(facts.freezes)
    yield "saved", saved_text(facts.savings)
    yield "harm", whole_harm_text(facts.savings) + withdrawn
    yield "budgets", _budgets(facts.budgets)
    yield "pressure", _pressure(live)


def _document(facts: Facts) -> dict[str, Any]:
    """Return the facts as plain data, without the fields of the policy."""
    policy, live, savings = facts.policy, connected(facts.engines), plain(facts.savings)
    header = {} if policy is None else plain(policy)
    header.pop("policy", None)
    troubles = {what.replace(" ", "_"): ids for what, ids in _troubles(facts.engines).items()}
    return {
        "control_plane": facts.server,
        "policy": header or None,
        "engines": {"connected": len(live), **troubles},
        "requests": _requests(live),
        "rollout": plain(facts.rollout) if facts.rollout is not None else None,
        "freezes": [plain(entry) for entry in facts.freezes],
        "savings": {name: savings.get(name) for name in SAVINGS} if facts.savings.in_force else None,
        "withdrawn_revision": facts.withdrawn_revision,
        "budgets": [plain(row) for row in facts.budgets],
        "pressure": _levels(live),
        "not_known": facts.not_known,
    }


def _policy(stored: policy_pb2.PolicyRevision | None) -> str:
    if stored is None:
        return "none is stored yet: the defaults hold"
    author = f" by {stored.author}" if stored.author else ""
    reason = f": {stored.reason}" if stored.reason else ""
    return f"revision {stored.revision}, {stamp_text(stored.create_time)}{author}{reason}"


def _troubles(engines: Sequence[fleet_pb2.Engine]) -> dict[str, list[str]]:
    """Return the ids of the engines by what is wrong with them."""
    live, shared = connected(engines), set(same_names(engines))
    groups = {
        "lost": [e for e in engines if e.lost],
        "at fault": [e for e in engines if e.fault],
        "frozen": [e for e in live if e.freeze.freeze_ids or e.freeze.confirmed],
        "with an older policy": [e for e in live if e.acked_revision < e.revision],
        "with unknown thinking markers": [e for e in live if e.unknown_markers],
        "without a name of its own": [e for e in live if e.engine_id in shared],
    }
    return {what: [e.engine_id for e in of] for what, of in groups.items()}


def _engines(engines: Sequence[fleet_pb2.Engine]) -> str:
    """Return how many engines there are, and what is wrong with some of them."""
    now, groups = datetime.now(UTC), _troubles(engines)
    ordered = sorted(engines, key=lambda e: e.engine_id)
    texts = [text for _, text in troubles((e.engine_id, condition(e, now)) for e in ordered)]
    # These are no states of a single engine.
    more = ("with an older policy", "without a name of its own")
    texts += [trouble_text(sorted(groups[what]), what) for what in more if groups[what]]
    return "; ".join((f"{len(connected(engines))} connected", *texts))


def _requests(engines: Sequence[fleet_pb2.Engine]) -> dict[str, int]:
    fields = ("thinking", "answering", "waiting")
    return {name: sum(getattr(e, name) for e in engines) for name in fields}


def _freezes(entries: Sequence[freeze_pb2.StoredFreeze]) -> str:
    texts = [f"{e.freeze_id} until {stamp_text(e.end_time)}: {e.reason}" for e in entries[:SHOWN]]
    return ", ".join((*texts, *(["…"] if len(entries) > SHOWN else []))) or "none"


def _budgets(rows: Sequence[fleet_pb2.Budget]) -> str:
    texts = [f"{row['name']} {percent(row['left_ratio'], 0)} left, {row['stage']}" for row in map(budget_row, rows)]
    return "; ".join(texts) or "none in the policy"


def _levels(engines: Sequence[fleet_pb2.Engine]) -> dict[str, dict[str, int]]:
    """Return the level of each entry of pressure on each engine."""
    levels: dict[str, dict[str, int]] = {}
    for e in engines:
        for row in e.pressures:
            levels.setdefault(row.name, {})[e.engine_id] = row.level
    return dict(sorted(levels.items()))


def _pressure(engines: Sequence[fleet_pb2.Engine]) -> str:
    texts = []
    for name, levels in _levels(engines).items():
        highest = max(levels.values())
        who = f" ({names_text([engine for engine, level in levels.items() if level == highest])})" if highest else ""
        texts.append(f"{name} level {highest} of {MAX_LEVEL}{who}")
    return "; ".join(texts) or "none in the policy"
