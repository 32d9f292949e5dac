"""Checks an agent's message about a request that begins, and keeps the fields that the control plane needs."""

from __future__ import annotations

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import REASONS
from meridian_control.common.errors import BadReport

# Bound for slot numbers. Agents number requests densely, so only a broken or hostile agent exceeds the bound.
MAX_SLOTS = 1 << 16

# Bounds for a newly opened request: tokens in each count, characters in each text, and bytes of a text in UTF-8 that
# are kept.
MAX_COUNT, MAX_TEXT, MAX_TEXT_BYTES = 2**31 - 1, 1024, 1024
# A text of at most this many characters has at most MAX_TEXT_BYTES.
SHORT_TEXT = MAX_TEXT_BYTES // 4
# About as many bytes as an OpenedRequest takes without its texts.
OPENED_BYTES = 512
# The id and the number of prompt tokens tell the requests of an engine's process apart: all inputs of a streaming
# session have one id, and each has the input before it in its prompt.
Identity = tuple[str, int]
# Most texts of which equal ones are one object, because clients choose them; and those texts.
MAX_SHARED = 4096
_shared: dict[str, str] = {}


def is_under_way(opened: agent_pb2.RequestOpened | OpenedRequest) -> bool:
    """Return whether a request had tokens when the agent told of it: in a snapshot, or when the agent found it."""
    return bool(opened.think_tokens or opened.output_tokens)


def is_new(opened: OpenedRequest) -> bool:
    """Return whether a request counts when a report opens it: one that has tokens was counted before, as an agent that
    rested reports it again, one that was handed over was counted on its thinking engine, and one whose prompt alone an
    engine computes counts on the engine that decodes it."""
    return not (is_under_way(opened) or opened.handed_over_ref or opened.remote_decode)


class OpenedRequest:
    """The facts of a request that hold for as long as it lives; the fields are those of agent.RequestOpened.

    A plain object takes a fraction of a protobuf message's memory. Requests share the objects of equal models, tenants,
    classes and efforts. `max_think_tokens` is None if the request has no cap of its own, and `min_think_tokens` 0 if it
    has no floor. `held_bytes` is about the memory that the object takes.
    """

    __slots__ = (
        *("slot", "request_id", "model", "tenant", "slo_class", "effort", "traceparent", "handed_over_ref"),
        *("prompt_tokens", "max_tokens", "phase", "think_tokens", "output_tokens", "unreported_think_tokens"),
        *("min_think_tokens", "max_think_tokens", "remote_decode", "unmeasured", "chat", "sleeping_stops"),
        *("refused_slo_class", "ending", "held_bytes"),
    )

    def __init__(self, message: agent_pb2.RequestOpened) -> None:
        """Take the fields from a part of a report or snapshot. Raises BadReport if the slot, a count or a text is out
        of range."""
        self.slot = slot = message.slot
        self.prompt_tokens = prompt_tokens = message.prompt_tokens
        self.think_tokens = think_tokens = message.think_tokens
        self.output_tokens = output_tokens = message.output_tokens
        request_id, model, tenant = message.request_id, message.model, message.tenant
        slo_class, effort, traceparent, ref = (
            message.slo_class,
            message.effort,
            message.traceparent,
            message.handed_over_ref,
        )
        refused = message.refused_slo_class
        if slot >= MAX_SLOTS:
            raise BadReport(f"slot must be below {MAX_SLOTS}; got {slot}")
        if prompt_tokens > MAX_COUNT or think_tokens > MAX_COUNT or output_tokens > MAX_COUNT:
            _refuse_count(message)
        size = len(request_id) + len(model) + len(tenant) + len(slo_class) + len(effort) + len(traceparent) + len(ref)
        size += len(refused)
        if size > SHORT_TEXT:
            given = request_id, model, tenant, slo_class, effort, traceparent, ref, refused
            kept = [_bounded(name, text) for name, text in zip(TEXTS, given, strict=True)]
            request_id, model, tenant, slo_class, effort, traceparent, ref, refused = kept
            size = sum(len(text.encode()) for text in kept)
        self.request_id, self.traceparent, self.handed_over_ref = request_id, traceparent, ref
        self.model, self.tenant = _one(model), _one(tenant)
        self.slo_class, self.effort, self.refused_slo_class = _one(slo_class), _one(effort), _one(refused)
        self.max_tokens, self.phase, self.remote_decode = message.max_tokens, message.phase, message.remote_decode
        self.unreported_think_tokens = message.unreported_think_tokens
        self.min_think_tokens, self.unmeasured = message.min_think_tokens, message.unmeasured
        self.chat, self.sleeping_stops = message.chat, message.sleeping_stops
        self.max_think_tokens = message.max_think_tokens if message.HasField("max_think_tokens") else None
        self.ending = message.ending if message.ending in REASONS else agent_pb2.FORCE_REASON_UNSPECIFIED
        self.held_bytes = OPENED_BYTES + size

    @property
    def identity(self) -> Identity:
        return self.request_id, self.prompt_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenedRequest) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = object.__hash__


TEXTS = ("request_id", "model", "tenant", "slo_class", "effort", "traceparent", "handed_over_ref", "refused_slo_class")


def _one(text: str) -> str:
    """Return the one object for texts equal to this one. `sys.intern` does the same, but early releases of Python 3.12
    never free its texts (https://github.com/python/cpython/issues/113993)."""
    if (known := _shared.get(text)) is not None:
        return known
    if len(_shared) >= MAX_SHARED:
        _shared.clear()
    _shared[text] = text
    return text


def _bounded(name: str, text: str) -> str:
    """Return the first MAX_TEXT_BYTES bytes of a text. Raises BadReport if it has more than MAX_TEXT characters."""
    if len(text) > MAX_TEXT:
        raise BadReport(f"{name} must have at most {MAX_TEXT} characters; got {len(text)}")
    if len(text) <= SHORT_TEXT or text.isascii():
        return text
    return text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def _refuse_count(message: agent_pb2.RequestOpened) -> None:
    for name in ("prompt_tokens", "think_tokens", "output_tokens"):
        if (count := getattr(message, name)) > MAX_COUNT:
            raise BadReport(f"{name} must be at most {MAX_COUNT}; got {count}")
