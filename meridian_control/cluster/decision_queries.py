"""Queries the decision logs of all replicas: this replica's own log, and those of the replicas that it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.cluster.peers import CALL_TIMEOUT_S
from meridian_control.common import paging
from meridian_control.common.errors import NotFound
from meridian_control.decision_log.messages import TOKEN_DIGITS, explain_request, list_decisions, newest_life, page_of

if TYPE_CHECKING:
    from meridian_control.cluster.cluster_fleet import WholeFleet
    from meridian_control.cluster.peers import Peer


async def explain(whole: WholeFleet, request: fleet_pb2.ExplainRequestRequest) -> fleet_pb2.ExplainRequestResponse:
    """Return the life of a request, merged from all replicas. Raises NotFound if no answering replica knows it."""
    answers: list[fleet_pb2.ExplainRequestResponse] = []
    unknown: NotFound | None = None
    try:
        live = whole.fleet.requests(request.engine_id)
        answers.append(explain_request(whole.fleet.decisions, live, request))
    except NotFound as error:
        unknown = error
    asked = fleet_pb2.ExplainRequestRequest()
    asked.CopyFrom(request)
    asked.local_only = True

    async def ask(peer: Peer) -> fleet_pb2.ExplainRequestResponse:
        return await peer.fleet.ExplainRequest(asked, timeout=CALL_TIMEOUT_S)

    unreachable: list[str] = []
    if whole.peers is not None and not request.local_only:
        others, unreachable = await whole.peers.ask_who_knows(ask)
        answers += others
    if not answers:
        assert unknown is not None
        raise NotFound(f"{unknown}; replicas that did not answer: {', '.join(unreachable)}") if unreachable else unknown
    told = newest_life(answers)
    told.unreachable_replicas.extend(unreachable)
    return told


async def decisions(whole: WholeFleet, request: fleet_pb2.ListDecisionsRequest) -> fleet_pb2.ListDecisionsResponse:
    """Return a page of the decisions of all replicas, newest first. Raises InvalidRequest."""
    limit, _ = paging.checked(request.page_size, request.page_token, TOKEN_DIGITS)
    here = list_decisions(whole.fleet.decisions, request)
    if whole.peers is None or request.local_only:
        return here
    asked = fleet_pb2.ListDecisionsRequest()
    asked.CopyFrom(request)
    asked.local_only = True

    async def ask(peer: Peer) -> fleet_pb2.ListDecisionsResponse:
        return await peer.fleet.ListDecisions(asked, timeout=CALL_TIMEOUT_S)

    heard, unreachable = await whole.peers.ask(ask)
    answer = page_of((d for part in (here, *heard.values()) for d in part.decisions), limit)
    answer.unreachable_replicas.extend(unreachable)
    return answer
