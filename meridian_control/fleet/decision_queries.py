"""Queries the decision logs of all replicas: this replica's own log, and those of the replicas that it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common import paging
from meridian_control.common.decision_words import DECISION_REASONS, KINDS
from meridian_control.common.errors import InvalidRequest, NotFound
from meridian_control.fleet.peers import CALL_TIMEOUT_S, local
from meridian_control.fleet.turns import with_pauses
from meridian_control.journal.messages import (
    MAX_SIBLINGS,
    MAX_TOKEN,
    explain_request,
    key_of,
    list_decisions,
    newest_life,
    page_of,
    refs_in,
    related_lives,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.journal.records import Key


async def explain(whole: WholeFleet, request: fleet_pb2.ExplainRequestRequest) -> fleet_pb2.ExplainRequestResponse:
    """Return the life of a request, merged from all replicas. Raises NotFound if no answering replica knows it."""
    if request.handed_over_refs:
        return related_lives(whole.fleet.decisions, request.handed_over_refs)
    answers: list[fleet_pb2.ExplainRequestResponse] = []
    unknown = NotFound("")
    try:
        live = whole.fleet.views.requests_called(request.engine_id, request.request_id)
        answers.append(explain_request(whole.fleet.decisions, live, request))
    except NotFound as error:
        unknown = error
    unreachable: list[str] = []
    if not request.local_only:
        unreachable = await _ask_others(whole, local(request), answers)
    if not answers:
        raise NotFound(str(unknown), unreachable)
    response = newest_life(answers)
    response.ClearField("related")
    _merge_siblings(response, answers, request.request_id)
    if refs := refs_in(response.life):
        related, silent = await _related(whole, request.local_only, refs)
        response.related.extend(life for life in related if key_of(life) != key_of(response.life))
        unreachable = sorted({*unreachable, *silent})
    response.unreachable_replicas.extend(unreachable)
    return response


def _merge_siblings(
    response: fleet_pb2.ExplainRequestResponse, answers: list[fleet_pb2.ExplainRequestResponse], request_id: str
) -> None:
    """Set the siblings of the life in `response` to the lives of all answers but this one, newest first."""
    lives = [life for answer in answers for life in (answer.life, *answer.siblings)]
    response.ClearField("siblings")
    others = [life for life in _merged(lives) if key_of(life) != key_of(response.life)]
    if response.life.request_id == request_id:
        # A replica that does not have this request may have answered with others whose client knows them by this id.
        others = [life for life in others if life.request_id == request_id]
    others.sort(key=lambda life: life.open_time.ToNanoseconds(), reverse=True)
    response.siblings.extend(others[:MAX_SIBLINGS])
    response.siblings_left_out = max(0, len(others) - MAX_SIBLINGS) + max(
        answer.siblings_left_out for answer in answers
    )


def _merged(lives: Iterable[fleet_pb2.RequestLife]) -> list[fleet_pb2.RequestLife]:
    """Return the lives with the parts of each life joined, which several replicas may have."""
    parts: dict[Key, list[fleet_pb2.ExplainRequestResponse]] = {}
    for life in lives:
        parts.setdefault(key_of(life), []).append(fleet_pb2.ExplainRequestResponse(life=life))
    return [newest_life(life_parts).life for life_parts in parts.values()]


async def _related(
    whole: WholeFleet, local_only: bool, refs: list[str]
) -> tuple[list[fleet_pb2.RequestLife], list[str]]:
    """Return the lives that the handovers concern, oldest first, and the ids of the replicas that did not answer."""
    answers, silent = [related_lives(whole.fleet.decisions, refs)], list[str]()
    if not local_only:
        asked = fleet_pb2.ExplainRequestRequest(handed_over_refs=refs, local_only=True)
        silent = await _ask_others(whole, asked, answers)
    lives = _merged(life for answer in answers for life in answer.related)
    return sorted(lives, key=lambda life: life.open_time.ToNanoseconds()), silent


async def _ask_others(
    whole: WholeFleet, asked: fleet_pb2.ExplainRequestRequest, answers: list[fleet_pb2.ExplainRequestResponse]
) -> list[str]:
    """Add the answers of the other replicas, and return the ids of those that did not answer."""
    if whole.peers is None:
        return []
    others, silent = await whole.peers.ask_who_knows(
        lambda peer: peer.fleet.ExplainRequest(asked, timeout=CALL_TIMEOUT_S)
    )
    answers += others
    return silent


async def decisions(whole: WholeFleet, request: fleet_pb2.ListDecisionsRequest) -> fleet_pb2.ListDecisionsResponse:
    """Return a page of the decisions of all replicas, newest first. Raises InvalidRequest, also if no decision has the
    wanted kind or reason and this version does not know it: a capability or a newer replica may have others."""
    answer = await _decisions(whole, request)
    if not (answer.decisions or request.local_only or request.page_token):
        # The reason of a capability of one's own is its name.
        reasons = {*DECISION_REASONS, *(one.name for one in whole.fleet.capabilities if one.section is not None)}
        for field, name, known in (("kind", request.kind, KINDS), ("reason", request.reason, reasons)):
            if name and name not in known:
                raise InvalidRequest.unknown_name(field, name, known)
    return answer


async def _decisions(whole: WholeFleet, request: fleet_pb2.ListDecisionsRequest) -> fleet_pb2.ListDecisionsResponse:
    limit, _ = paging.checked(request.page_size, request.page_token, MAX_TOKEN)
    here = await with_pauses(list_decisions(whole.fleet.decisions, request))
    if whole.peers is None or request.local_only:
        return here
    asked = local(request)
    answers, unreachable = await whole.peers.ask(lambda peer: peer.fleet.ListDecisions(asked, timeout=CALL_TIMEOUT_S))
    # Replicas of 0.3.0 return decisions of all outcomes, which would take the others' places.
    listed = (decision for part in (here, *answers.values()) for decision in part.decisions)
    answer = page_of((d for d in listed if not request.outcomes or d.outcome in request.outcomes), limit)
    answer.unreachable_replicas.extend(unreachable)
    return answer
