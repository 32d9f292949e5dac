"""Converts the decision log to messages of FleetService: lives, decisions, and the values that each rule compared.

The module owns the conversion of the log's records to messages. All functions are pure.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common import paging
from meridian_control.common.enum_names import stage_name
from meridian_control.common.errors import NotFound
from meridian_control.common.plain_data import same
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.journal.records import FREEZE, Decision
from meridian_control.journal.request_ids import is_called
from meridian_control.policy.effects import EXTENSION_LEAD_TOKENS, answer_reserve, only_gives_up, probe_lead_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_control.common.slices import Sliced
    from meridian_control.journal.log import DecisionLog
    from meridian_control.journal.records import Compared, Key, Life, LifeEvent
    from meridian_control.policy.model import Policy

THINK_TOKENS = "think_tokens"
# Names of limits that no field of the policy has.
OWN_FLOOR, OWN_CAP = "own min_think_tokens", "own max_think_tokens"
DEFAULT_CAP_NAME = "default cap, in the control group"
# Largest number of siblings in an explanation.
MAX_SIBLINGS = 32
START = datetime.fromtimestamp(0, UTC)
# Largest page token, which is a time in microseconds.
MAX_TOKEN = (datetime.max.replace(tzinfo=UTC) - START) // timedelta(microseconds=1)
# Fields of a life that are those of its request, and fields of a decision, in messages as in the log.
OPENED = (
    *("request_id", "model", "tenant", "slo_class", "refused_slo_class", "sleeping_stops", "effort", "prompt_tokens"),
    *("max_tokens", "max_think_tokens", "handed_over_ref"),
)
DECIDED = (
    *("decision_id", "session_id", "revision", "kind", "reason", "shadow", "outcome", "outcome_think_tokens"),
    *("detail", "measured_eat_nats", "operator_reason", "time", "outcome_time"),
)


def explain_request(
    log: DecisionLog, live: Iterable[fleet_pb2.LiveRequest], request: fleet_pb2.ExplainRequestRequest
) -> fleet_pb2.ExplainRequestResponse:
    """Return the life of a request, and the lives of the others that its client knows by the same id.

    Raises NotFound, with a text that says whether the request lives but is not in the sample.
    """
    lives = log.find(request.request_id, request.engine_id) if request.request_id else []
    life, siblings = lives[0] if lives else None, lives[1:]
    mine = (life.engine_id, *life.opened.identity) if life is not None else None
    now = [r for r in live if (r.engine_id, r.request_id, r.prompt_tokens) == mine]
    if life is None:
        where = f' of engine "{request.engine_id}"' if request.engine_id else ""
        if any(is_called(r.request_id, request.request_id) for r in live):
            why = "the request lives, but is not in the sample (telemetry.decision_log_sample_ratio)"
        else:
            why = "the request is unknown, is not in the sample, or was dropped for newer requests"
        raise NotFound(f'no request "{request.request_id}"{where} in the decision log: {why}')
    return fleet_pb2.ExplainRequestResponse(
        life=life_message(log, life),
        live=now[0] if now else None,
        siblings=[life_message(log, sibling) for sibling in siblings[:MAX_SIBLINGS]],
        siblings_left_out=max(0, len(siblings) - MAX_SIBLINGS),
    )


def related_lives(log: DecisionLog, refs: Iterable[str]) -> fleet_pb2.ExplainRequestResponse:
    """Return the lives to which these references belong."""
    wanted = set(refs)
    return fleet_pb2.ExplainRequestResponse(
        related=[life_message(log, life) for life in log.lives() if life.refs & wanted]
    )


def refs_in(life: fleet_pb2.RequestLife) -> list[str]:
    """Return the references by which other lives belong to a life, too."""
    return sorted({*(event.decision.hand_over.ref for event in life.events), life.handed_over_ref} - {""})


def list_decisions(
    log: DecisionLog, request: fleet_pb2.ListDecisionsRequest
) -> Sliced[fleet_pb2.ListDecisionsResponse]:
    """Return a page of the decisions that match the request, newest first. Raises InvalidRequest."""
    limit, before_us = paging.checked(request.page_size, request.page_token, MAX_TOKEN)

    def wanted(decision: Decision) -> bool:
        return (
            (not request.outcomes or decision.outcome in request.outcomes)
            and (before is None or decision.time < before)
            and request.engine_id in ("", decision.life.engine_id)
            and request.reason in ("", decision.reason)
            and decision.life.is_called(request.request_id)
        )

    before = START + timedelta(microseconds=before_us) if before_us is not None else None
    listed: list[fleet_pb2.LoggedDecision] = []
    last: datetime | None = None
    for count, decision in enumerate(log.decisions(request.kind), 1):
        if wanted(decision):
            if len(listed) >= limit and decision.time != last:
                break
            listed.append(decision_message(decision))
            last = decision.time
            yield
        elif not count % (4 * SLICE_ROWS):
            yield
    return page_of(listed, limit)


def page_of(decisions: Iterable[fleet_pb2.LoggedDecision], limit: int) -> fleet_pb2.ListDecisionsResponse:
    """Return a page of the newest decisions, extended by all decisions with the same time as the last on the page."""
    ordered = sorted(decisions, key=_microseconds, reverse=True)
    end = limit
    while 0 < end < len(ordered) and _microseconds(ordered[end]) == _microseconds(ordered[end - 1]):
        end += 1
    # A full page always has a next page token, so that an empty page may follow the last decision.
    token = str(_microseconds(ordered[end - 1])) if len(ordered) >= limit else ""
    return fleet_pb2.ListDecisionsResponse(decisions=ordered[:end], next_page_token=token)


def _microseconds(decision: fleet_pb2.LoggedDecision) -> int:
    return decision.time.ToMicroseconds()


def newest_life(answers: Iterable[fleet_pb2.ExplainRequestResponse]) -> fleet_pb2.ExplainRequestResponse:
    """Return the newest life in `answers`, with the parts of that life from all replicas merged.

    Each replica that an engine was connected to has a part of the lives of the engine's requests. `answers` must not be
    empty.
    """
    by_time = sorted(answers, key=lambda answer: answer.life.open_time.ToNanoseconds())
    newest = by_time[-1].life
    parts = [answer for answer in by_time if key_of(answer.life) == key_of(newest)]
    response = fleet_pb2.ExplainRequestResponse()
    for part in parts:
        response.MergeFrom(part)
    response.life.think_tokens = max(part.life.think_tokens for part in parts)
    response.life.output_tokens = max(part.life.output_tokens for part in parts)
    response.life.open_time.CopyFrom(parts[0].life.open_time)
    response.life.joined_late = parts[0].life.joined_late
    response.life.events_left_out = sum(part.life.events_left_out for part in parts)
    events = list(_with_thaws(sorted(response.life.events, key=lambda event: event.time.ToNanoseconds())))
    response.life.ClearField("events")
    response.life.events.extend(events)
    return response


def _with_thaws(events: list[fleet_pb2.RequestEvent]) -> Iterator[fleet_pb2.RequestEvent]:
    """Yield the events of a life, oldest first, with the thaws that no replica has seen: the engine thawed on its way
    to another replica, whose part of the life begins without a freeze. What two parts say of one freeze comes once."""
    freezes, newest = {event.time.ToNanoseconds() for event in events if event.kind == FREEZE[0]}, ""
    for event in events:
        if event.kind in FREEZE:
            if event.kind == newest:
                continue
            newest = event.kind
        yield event
        if event.kind == "opened" and newest == FREEZE[0] and event.time.ToNanoseconds() not in freezes:
            newest = FREEZE[1]
            yield fleet_pb2.RequestEvent(kind=newest, **same(event, "time", "think_tokens", "output_tokens"))


def key_of(life: fleet_pb2.RequestLife) -> Key:
    return life.engine_id, life.incarnation, life.request_id, life.prompt_tokens


def life_message(log: DecisionLog, life: Life) -> fleet_pb2.RequestLife:
    opened, (events, left_out) = life.opened, log.events_of(life)
    return fleet_pb2.RequestLife(
        **same(life, "engine_id", "incarnation", "joined_late", "think_tokens", "output_tokens"),
        **same(life, "open_time", "close_time"),
        **same(opened, *OPENED),
        min_think_tokens=opened.min_think_tokens or None,
        events=map(_event, events),
        events_left_out=left_out,
    )


def _event(event: LifeEvent | Decision) -> fleet_pb2.RequestEvent:
    if isinstance(event, Decision):
        seen = same(event.signals, "phase", "think_tokens", "output_tokens")
        return fleet_pb2.RequestEvent(kind="decision", decision=decision_message(event), **seen, **same(event, "time"))
    return fleet_pb2.RequestEvent(**same(event, "kind", "time", "phase", "think_tokens", "output_tokens", "detail"))


def decision_message(decision: Decision) -> fleet_pb2.LoggedDecision:
    life = decision.life
    message = fleet_pb2.LoggedDecision(
        **same(decision, *DECIDED),
        **same(life, "engine_id", "incarnation"),
        **same(life.opened, "request_id", "tenant", "slo_class"),
        control_group=decision.shadow and decision.under.behind.is_spared,
        signals=fleet_pb2.Signals(**decision.signals._asdict()),
    )
    for detail in decision.details:
        detail.fill(message)
    for row in compared(decision):
        message.comparisons.add(**dict(zip(("signal", "value", "operator", "limit_name", "limit"), row, strict=True)))
    return message


def compared(decision: Decision) -> list[Compared]:
    """Return the values that the rule behind a decision compared: the signals it saw and the limits of its policy."""
    rules = {
        ("force", "eat"): _eat,
        ("force", "rank"): _rank,
        ("force", "rpdi"): _rpdi,
        ("force", "give_up"): _give_up,
        ("force", "soft_close"): _soft_close,
        ("force", "loop"): _loop,
        ("probe", "eat"): _probe,
        ("probe", "empty_answer"): _cap_probe,
        # A probe with the reason `harm` follows an end in shadow and compares nothing.
    }
    rule = (
        _cap if decision.kind == "cap" and decision.reason != "lifted" else rules.get((decision.kind, decision.reason))
    )
    own = rule(decision, decision.policy) if rule is not None else ()
    return [*own, *(row for detail in decision.details for row in detail.compared(decision.policy))]


def _eat(decision: Decision, policy: Policy) -> Iterator[Compared]:
    seen, entropy = decision.signals, policy.entropy
    yield _floor(decision, policy)
    name, needed = decision.path_of("entropy", "eat_warmup_samples"), entropy.eat_warmup_samples
    if earlier := entropy.confirm_sentence_ends - 1:
        confirmed = decision.path_of("entropy", "confirm_sentence_ends")
        name, needed = f"{name} + {confirmed} - 1", needed + earlier
    yield "eat_samples", seen.eat_samples, ">=", name, needed
    low = "<", decision.path_of("entropy", "eat_level_threshold_nats"), entropy.eat_level_threshold_nats
    flat = "<", decision.path_of("entropy", "eat_ema_variance_threshold"), entropy.eat_ema_variance_threshold
    yield "eat_ema_variance", seen.eat_ema_variance, *flat
    yield "eat_ema_nats", seen.eat_ema_nats, *low
    for k in range(earlier):
        yield f"earlier_eat_ema_variance[{k}]", seen.earlier_eat_ema_variance[k], *flat
        yield f"earlier_eat_ema_nats[{k}]", seen.earlier_eat_ema_nats[k], *low


def _rank(decision: Decision, policy: Policy) -> Iterator[Compared]:
    yield _floor(decision, policy)
    name = decision.path_of("entropy", "rank_conditions")
    for age in range(policy.entropy.confirm_sentence_ends):
        yield from _rank_at(decision.signals.boundary_ranks, age, policy, name)


def _rank_at(newest: tuple[int, ...], age: int, policy: Policy, name: str) -> Iterator[Compared]:
    """Yield the comparisons of the condition that held at the sentence end that `age` others follow. name: that of the
    conditions."""
    ranks = newest[age:]
    for index, condition in enumerate(policy.entropy.rank_conditions):
        bounds = condition.max_ranks
        if len(ranks) >= len(bounds) and all(rank <= bound for rank, bound in zip(ranks, bounds, strict=False)):
            for k, (rank, bound) in enumerate(zip(ranks, bounds, strict=False)):
                yield f"boundary_ranks[{age + k}]", rank, "<=", f"{name}[{index}].max_ranks[{k}]", bound
            return


def _rpdi(decision: Decision, policy: Policy) -> Iterator[Compared]:
    yield _floor(decision, policy)
    limit = ">", decision.path_of("entropy", "rpdi_threshold"), policy.entropy.rpdi_threshold
    yield "rpdi", decision.signals.rpdi, *limit
    for k, ratio in enumerate(decision.signals.boundary_rpdi[1:], 1):
        yield f"boundary_rpdi[{k}]", ratio, *limit


def _give_up(decision: Decision, policy: Policy) -> Iterator[Compared]:
    seen = decision.signals
    yield _floor(decision, policy)
    for signal, value, field in (
        ("eat_think_tokens", seen.eat_think_tokens, "give_up_tokens"),
        ("eat_samples", seen.eat_samples, "eat_warmup_samples"),
        ("eat_ema_nats", seen.eat_ema_nats, "give_up_eat_nats"),
    ):
        yield signal, value, ">=", decision.path_of("entropy", field), getattr(policy.entropy, field)


def _soft_close(decision: Decision, policy: Policy) -> Iterator[Compared]:
    own, soft = decision.life.opened.min_think_tokens, policy.scheduler.soft_think_tokens
    name = _limit_name(decision, "soft_think_tokens") if soft >= own else OWN_FLOOR
    yield THINK_TOKENS, decision.signals.think_tokens, ">=", name, max(soft, own)
    rank, limit = decision.signals.boundary_ranks[0], policy.scheduler.soft_close_rank
    yield "boundary_ranks[0]", rank, "<=", decision.path_of("scheduler", "soft_close_rank"), limit


def _loop(decision: Decision, policy: Policy) -> Iterator[Compared]:
    seen, loop = decision.signals, policy.loop
    if own := decision.life.opened.min_think_tokens:
        yield THINK_TOKENS, seen.think_tokens, ">=", OWN_FLOOR, own
    rounds = seen.loop_tokens // max(1, seen.loop_period_tokens)
    yield "loop_rounds", rounds, ">=", decision.path_of("loop", "min_rounds"), loop.min_rounds
    yield "loop_tokens", seen.loop_tokens, ">=", decision.path_of("loop", "min_tokens"), loop.min_tokens


def _cap(decision: Decision, policy: Policy) -> Iterator[Compared]:
    cap, opened = decision.signals.max_think_tokens, decision.life.opened
    limit, name = policy.scheduler.max_think_tokens, _limit_name(decision, "max_think_tokens")
    if decision.reason == "empty_answer":
        limit += policy.scheduler.empty_answer_extension_tokens
        name += f" + {decision.path_of('scheduler', 'empty_answer_extension_tokens')}"
    if decision.shortening is not None and (floor := opened.min_think_tokens) > limit:
        # The request's own floor lifts the cap that an entry lowers.
        limit, name = floor, OWN_FLOOR
    if (own := opened.max_think_tokens) is not None and own < limit:
        limit, name = own, OWN_CAP
    if cap is not None:
        yield "max_think_tokens", cap, "=", name, limit
    if cap is not None and (reserve := answer_reserve(policy, opened)):
        yield "answer_reserve_tokens", reserve, "=", decision.path_of("scheduler", "answer_reserve_tokens"), reserve


def _limit_name(decision: Decision, field: str) -> str:
    """Return the name of a limit of the section scheduler: the entry that has changed its value, the control group's
    default, or the policy's field."""
    if (by := decision.shortening) is not None:
        return f"{by.section} {by.name} in stage {stage_name(by.stage)}"
    return DEFAULT_CAP_NAME if decision.under.behind.is_default_cap else decision.path_of("scheduler", field)


def _probe(decision: Decision, policy: Policy) -> Iterator[Compared]:
    lead = probe_lead_tokens(policy.entropy)
    signal, value, operator, name, floor = _floor(decision, policy)
    if only_gives_up(policy.entropy) and value >= (late := policy.entropy.give_up_tokens) - lead and late > floor:
        name, floor = decision.path_of("entropy", "give_up_tokens"), late
    name, limit = f"{name} - warm-up", max(0, floor - lead)
    if (due := decision.probed_tokens + policy.entropy.eat_probe_interval_tokens) > limit:
        name, limit = f"probe before + {decision.path_of('entropy', 'eat_probe_interval_tokens')}", due
    yield signal, value, operator, name, limit
    if gate := policy.entropy.eat_probe_max_rank:
        rank = decision.signals.boundary_ranks[0]
        yield "boundary_ranks[0]", rank, "<=", decision.path_of("entropy", "eat_probe_max_rank"), gate


def _cap_probe(decision: Decision, policy: Policy) -> Iterator[Compared]:
    if (cap := decision.signals.max_think_tokens) is not None:
        name, limit = f"max_think_tokens - {EXTENSION_LEAD_TOKENS}", max(0, cap - EXTENSION_LEAD_TOKENS)
        yield THINK_TOKENS, decision.signals.think_tokens, ">=", name, limit


def _floor(decision: Decision, policy: Policy) -> Compared:
    own, floor = decision.life.opened.min_think_tokens, policy.scheduler.min_think_tokens
    name = _floor_name(decision) if floor >= own else OWN_FLOOR
    return THINK_TOKENS, decision.signals.think_tokens, ">=", name, max(floor, own)


def _floor_name(decision: Decision) -> str:
    """Return the name of the policy's floor; that of the cap if the floor of another override is lowered to it."""
    scheduler, floor = decision.own_policy.scheduler, decision.path_of("scheduler", "min_think_tokens")
    cap = decision.path_of("scheduler", "max_think_tokens")
    is_set_beside = floor == cap.replace("max_", "min_")
    return floor if is_set_beside or scheduler.min_think_tokens < scheduler.max_think_tokens else cap
