"""Collects the facts of a request that a policy may match on, with the request's own values in `vllm_xargs`.

Clients write these values, so no value may do harm. Pure but for a line in the log.
"""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.phases import TokenEvent
from meridian_agent.core.plain_log import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meridian_agent.core.phases import Markers
    from meridian_agent.vllm_types import Request, SamplingParams, Scheduler

logger = logging.getLogger("vllm.meridian")

# Largest number of characters of a text that a client chooses; and the bytes of the hash, in hexadecimal digits, with
# which a longer name ends.
MAX_TEXT, HASH_BYTES = 128, 8
# Largest number of characters of a request id, which a client may choose too (X-Request-Id); what stands for the middle
# of a longer one; and the number of characters after it, which are vLLM's own random ones and their hyphen.
MAX_ID, LEFT_OUT, LAST = 256, "...", 9
MAX_TOKENS = 2**31 - 1
# Beginning of the ids of requests that run EAT probes; the number of the probe follows.
PROBE_PREFIX = "meridian-probe:"
# Names in the vllm_xargs: of a request that a relay can continue on another engine, with the value 1, and of a request
# that continues another engine's, with the reference of the decision.
CANDIDATE, HAND_OVER = "meridian_handover_candidate", "meridian_handover"
# Names of the tenant and of the SLO class in vllm_xargs; and if a gateway names both, of the SLO class that the client
# asks for itself. What a gateway names is bytes, so that the engine core knows it from a text that a client has written
# and that no front end with the agent has replaced: JSON has no bytes.
TENANT, SLO_CLASS, ASKED_SLO_CLASS = "meridian_tenant", "meridian_slo_class", "meridian_asked_slo_class"
# Name of the effort in vllm_xargs, and of the settings with which the model's own chat template rendered the request, a
# JSON text of at most MAX_TEMPLATE characters in which TOOLS stands for the list of tools. The value UNKNOWN_TEMPLATE
# says that these settings do not tell how later turns are rendered; so does a missing value.
EFFORT, TEMPLATE = "meridian_effort", "meridian_chat_template"
MAX_TEMPLATE, TOOLS, UNKNOWN_TEMPLATE = 256, "tools", "unknown"
# Name, with the value 1, of a chat whose earlier turns of the assistant have all come without their thinking.
THINKING_ABSENT = "meridian_thinking_absent"
# Name in vllm_xargs that marks a request which a client has sent as a chat, however vLLM renders it.
CHAT = "meridian_chat"
# Name, with the value 1 or 0, by which a request says whether its stops end its answer only.
ANSWER_ONLY_STOPS = "meridian_answer_only_stops"
# Number of tokens at a prompt's end in which the start marker of open thinking is searched.
OPEN_TAIL_TOKENS = 64


# A number of tokens that no request reaches.
NEVER = 1 << 62
# Smallest own cap, in thinking tokens, that the control plane may learn of as late as of anything else, so that the end
# at this cap still has a decision.
LEAST_LATE_CAP = 128


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The facts of a request that a policy may match on; they never include prompt or output text.

    context_tokens: largest number of tokens that the model's context leaves to the output; not reported.
    """

    request_id: str
    model: str
    tenant: str
    slo_class: str
    prompt_tokens: int
    max_tokens: int
    max_think_tokens: int | None
    effort: str = ""
    min_think_tokens: int | None = None
    traceparent: str = ""
    context_tokens: int = NEVER
    remote_decode: bool = False
    hand_over_candidate: bool = False
    handed_over_ref: str = ""
    # Settings with which the model's own chat template rendered the request, as JSON text; empty if they are not known.
    chat_template: str = ""
    # Whether vLLM has rendered the request from a chat.
    chat: bool = False
    # Whether the request wants its stop strings and stop tokens to end its answer only; None if it does not say.
    answer_only_stops: bool | None = None
    # Whether the request has stops that sleep while it thinks, by the settings when the agent begins to track it.
    sleeping_stops: bool = False
    # Number of the prompt's first tokens that the next turn of the conversation repeats; all of them, except if the
    # request continues another engine's, whose thinking is a part of the prompt.
    repeated_tokens: int = NEVER
    # Whether all earlier turns of the assistant have come without their thinking, and there are some.
    thinking_absent: bool = False
    # SLO class that the client asked for and may not choose; empty if there is none.
    refused_slo_class: str = ""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that the request may generate."""
        return min(self.max_tokens, self.context_tokens)

    @property
    def has_early_cap(self) -> bool:
        """Whether the request may reach a cap of its own while the report of its arrival waits for further steps."""
        return self.max_think_tokens is not None and self.max_think_tokens < LEAST_LATE_CAP


class Overrides(NamedTuple):
    """The values that a request sets for itself. min_think_tokens, max_think_tokens: the request's own floor and cap,
    None if it has none. repeated_tokens: number of the prompt's tokens before the thinking that another engine has
    generated. complaint: the ignored fields and their values. asked_slo_class: the SLO class that the client asks for
    although a gateway names one. answer_only_stops: as in RequestInfo."""

    tenant: str
    slo_class: str
    effort: str
    min_think_tokens: int | None
    max_think_tokens: int | None
    repeated_tokens: int
    complaint: str
    asked_slo_class: str = ""
    answer_only_stops: bool | None = None


NOTHING_SET = Overrides("", "", "", None, None, MAX_TOKENS, "")


def info_of(
    request: Request,
    model: str,
    markers: Markers,
    scheduler: Scheduler,
    client_slo_classes: Sequence[str] = (),
    *,
    by_gateway: bool = False,
) -> RequestInfo:
    """Return the facts of a request that the agent reports. model: the engine's model name, for requests without a LoRA
    adapter. scheduler: the engine's scheduler, which knows the length of the context and the KV connector.
    client_slo_classes: globs of the SLO classes that clients may choose although a gateway names one. by_gateway: as in
    `read`."""
    lora, own = request.lora_request, read(request.sampling_params.extra_args, by_gateway)
    asked = own.asked_slo_class
    may_choose = asked != "" and any(fnmatchcase(asked, glob) for glob in client_slo_classes)
    slo_class = asked if may_choose else own.slo_class
    caps = own.max_think_tokens, budget_of(request.sampling_params, request.prompt_token_ids or (), markers)
    ref = handed_over_ref(request)
    if own.complaint:
        logger.warning("meridian: request %s: %s", request.request_id, own.complaint)
    return RequestInfo(
        request_id=request.request_id,
        model=distinct(lora.lora_name) if lora is not None else model,
        tenant=own.tenant,
        slo_class=slo_class,
        refused_slo_class=asked if asked != slo_class else "",
        effort=own.effort,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=min(request.max_tokens, MAX_TOKENS),
        min_think_tokens=own.min_think_tokens,
        max_think_tokens=min((cap for cap in caps if cap is not None), default=None),
        traceparent=clean(request.trace_headers.get("traceparent", "")) if request.trace_headers else "",
        context_tokens=scheduler.max_model_len - request.num_prompt_tokens,
        remote_decode=scheduler.connector is not None and _is_remote_decode(request.kv_transfer_params),
        hand_over_candidate=_extra(request, CANDIDATE) == 1 and _can_move(request.sampling_params, markers),
        handed_over_ref=ref,
        chat_template=template_settings(request),
        thinking_absent=_extra(request, THINKING_ABSENT) == 1,
        chat=_extra(request, TEMPLATE) != "" or _extra(request, CHAT) != "",
        answer_only_stops=own.answer_only_stops,
        repeated_tokens=own.repeated_tokens if ref else request.num_prompt_tokens,
    )


def _is_remote_decode(kv_transfer_params: object) -> bool:
    return isinstance(kv_transfer_params, dict) and kv_transfer_params.get("do_remote_decode") is True


def _can_move(params: SamplingParams, markers: Markers) -> bool:
    """Whether another engine would give the same answer: a request that has an end marker of one token among its stop
    tokens wants none, and penalties count what is generated, but not the thinking once it is a prompt."""
    stops_at_end = any((token,) in markers.ends for token in params.stop_token_ids or ())
    return not (stops_at_end or params.presence_penalty or params.frequency_penalty)


def _extra(request: Request, name: str) -> object:
    params = request.sampling_params
    return (params.extra_args or {}).get(name, "") if params is not None else ""


def is_probe(request_id: str) -> bool:
    """Whether a request runs an EAT probe. No client's id is that of a probe, whatever the client chooses, because
    vLLM's server puts letters before it or appends a hyphen with other characters. A program that calls vLLM itself,
    with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, chooses its whole ids."""
    return request_id.startswith(PROBE_PREFIX) and request_id[len(PROBE_PREFIX) :].isdecimal()


def template_settings(request: Request) -> str:
    """Return the settings with which the model's own chat template rendered a request; empty if they are not known."""
    value = _extra(request, TEMPLATE)
    return value if isinstance(value, str) and value != UNKNOWN_TEMPLATE and len(value) <= MAX_TEMPLATE else ""


def handed_over_ref(request: Request) -> str:
    """Return the reference of the decision that a request continues, from its `vllm_xargs`; empty for every other
    request."""
    value = _extra(request, HAND_OVER)
    return clean(value) if value != "" else ""


def read(extra_args: Mapping[str, object] | None, by_gateway: bool = False) -> Overrides:
    """Read the values that a request sets for itself. A value that cannot be used is ignored and named in `complaint`;
    nothing is raised. by_gateway: only a gateway may name the tenant and the SLO class."""
    if not extra_args:
        return NOTHING_SET
    extra = extra_args
    if by_gateway:
        texts = {name for name in (TENANT, SLO_CLASS) if not isinstance(extra.get(name), bytes)}
        extra = {name: value for name, value in extra.items() if name not in texts}
    complaints: list[str] = []
    names = TENANT, SLO_CLASS, EFFORT, ASKED_SLO_CLASS
    tenant, slo_class, effort, asked = (_text(extra, name, complaints) for name in names)
    floor = _tokens(extra, "meridian_min_think_tokens", complaints)
    cap = _tokens(extra, "meridian_max_think_tokens", complaints)
    prompt = _tokens(extra, "meridian_prompt_tokens", complaints)
    repeated = MAX_TOKENS if prompt is None else prompt
    stops = _flag(extra, ANSWER_ONLY_STOPS, complaints)
    return Overrides(tenant, slo_class, effort, floor, cap, repeated, "; ".join(complaints), asked, stops)


def budget_of(params: SamplingParams, prompt: Sequence[int], markers: Markers) -> int | None:
    """Return vLLM's own thinking_token_budget of a request as a cap on generated tokens; None if the request has none.

    vLLM counts the prompt's tokens after the start marker as thinking, such as the newline of a chat template; the
    agent does not count them. With the same number both would end thinking at different tokens.
    """
    budget = getattr(params, "thinking_token_budget", None)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        return None
    event, after = markers.last_event(prompt[-OPEN_TAIL_TOKENS:])
    return min(max(0, budget - (after if event is TokenEvent.START else 0)), MAX_TOKENS)


def _text(extra: Mapping[str, object], name: str, complaints: list[str]) -> str:
    value = extra.get(name)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or isinstance(value, (str, int, float)):
        return distinct("" if value is None else value)
    # The client has written the class that it asks for under the usual name.
    written = SLO_CLASS if name == ASKED_SLO_CLASS else name
    complaints.append(f"{written} must be a text; got {clean(value)}")
    return ""


def _tokens(extra: Mapping[str, object], name: str, complaints: list[str]) -> int | None:
    value = extra.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return min(int(value), MAX_TOKENS)
    if value is not None:
        complaints.append(f"{name} must be a number of tokens, at least 0; got '{clean(value)}'")
    return None


def _flag(extra: Mapping[str, object], name: str, complaints: list[str]) -> bool | None:
    value = extra.get(name)
    if isinstance(value, (int, float)) and value in {0, 1}:
        return value == 1
    if value is not None:
        complaints.append(f"{name} must be 0 or 1; got '{clean(value)}'")
    return None


def in_sample(request_id: str, share: float) -> bool:
    """Return whether a request belongs to the sample of the share `share`, 0 to 1. A larger sample contains each
    smaller one.

    The control plane chooses its control group by the same hash of the reported id, so a sample of single requests that
    is no smaller contains the group.
    """
    if share >= 1:
        return True
    reported = shown_id(request_id).encode(errors="replace")
    digest = hashlib.blake2b(reported, digest_size=8, person=b"control-group").digest()
    return int.from_bytes(digest) < share * (1 << 64)


def shown_id(request_id: str) -> str:
    """Return a request's id as it is reported: cleaned, and without its middle if it is longer than MAX_ID. Ids that
    only begin alike stay different."""
    text = clean(request_id, MAX_ID + 1)
    if len(text) <= MAX_ID:
        return text
    last = clean(request_id[-LAST:])
    return text[: MAX_ID - len(LEFT_OUT) - len(last)] + LEFT_OUT + last


def distinct(value: object) -> str:
    """Return a name as `clean` does, but let one that is longer than MAX_TEXT end in a hash of the whole, so that names
    that only begin alike stay different. A name that has been through this function stays as it is."""
    whole = printable(value) if isinstance(value, str) else ""
    if len(whole) <= MAX_TEXT:
        return whole or clean(value)
    digest = hashlib.blake2b(whole.encode(), digest_size=HASH_BYTES, person=b"name").hexdigest()
    return f"{whole[: MAX_TEXT - len(digest) - 1]}-{digest}"


def clean(value: object, limit: int = MAX_TEXT) -> str:
    """Return a text or number as printable text of at most `limit` characters; empty for a number that is too long for
    Python to print. Of any other value, which may be large, return its type."""
    if not isinstance(value, (str, int, float)):
        return f"a {type(value).__name__}"
    try:
        text = str(value)
    except ValueError:
        return ""
    return printable(text[:limit])[:limit]
