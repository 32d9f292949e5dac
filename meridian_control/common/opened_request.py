"""Checks and copies what an agent tells of a request when the request begins."""

from meridian.v1 import agent_pb2

from meridian_control.common.errors import BadReport

# Bound for slot numbers. Agents number requests densely, so only a broken or hostile agent exceeds the bound.
MAX_SLOTS = 1 << 16

# Bounds for a newly opened request: tokens in each count, characters in each text.
MAX_COUNT, MAX_TEXT = 2**31 - 1, 1024
COUNTS = ("prompt_tokens", "think_tokens", "output_tokens")
TEXTS = ("request_id", "model", "tenant", "slo_class", "effort", "traceparent", "handed_over_ref")


def copied(told: agent_pb2.RequestOpened) -> agent_pb2.RequestOpened:
    """Return a copy of a part of a report or snapshot, to be kept as long as the request lives: a reference to the part
    itself would keep the whole message. Raises BadReport if the slot, a count or a text is out of range."""
    if (slot := told.slot) >= MAX_SLOTS:
        raise BadReport(f"slot must be below {MAX_SLOTS}; got {slot}")
    for name in COUNTS:
        if (count := getattr(told, name)) > MAX_COUNT:
            raise BadReport(f"{name} must be at most {MAX_COUNT}; got {count}")
    for name in TEXTS:
        if (length := len(getattr(told, name))) > MAX_TEXT:
            raise BadReport(f"{name} must have at most {MAX_TEXT} characters; got {length}")
    opened = agent_pb2.RequestOpened()
    opened.CopyFrom(told)
    # Fields that this version does not know have no bound.
    opened.DiscardUnknownFields()
    return opened
