"""The columns of the request table: their types, the values that a new row begins with, and what each column means.

Only `RequestTable` writes columns; all other modules read them. Pure data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A request's newest token: none in a report yet, an answer's, an end of thinking, any other.
NO_TOKEN, ANSWER_TOKEN, THINK_END, OTHER_TOKEN = range(4)

# Values of the cap that the agent was told: nothing yet, or that the request has no cap.
UNTOLD, NO_CAP = -1, -2

# name: (dtype, value of a row that is opened)
COLUMNS: dict[str, tuple[Any, Any]] = {
    "live": (bool, True),
    "phase": (np.uint8, 0),
    # The number of the session's policy that holds for the request.
    "group": (np.int64, 0),
    # The request's own floor.
    "own_min_think_tokens": (np.int64, 0),
    "prompt_tokens": (np.int64, 0),
    "think_tokens": (np.int64, 0),
    "output_tokens": (np.int64, 0),
    "preempted": (bool, False),
    # When its newest token was reported, or it was opened: milliseconds on the session's clock.
    "token_ms": (np.float64, 0.0),
    "newest_token": (np.uint8, NO_TOKEN),
    # Newest token's signals.
    "entropy_nats": (np.float32, np.nan),
    "end_rank": (np.uint32, 0),
    "end_logprob_nats": (np.float32, np.nan),
    # Token entropies of the thinking so far, for RPDI.
    "entropy_sum": (np.float64, 0.0),
    "entropy_window_sum": (np.float64, 0.0),
    "entropy_count": (np.int64, 0),
    # Whether the newest token ended a sentence; whether the rank at a sentence end came to be known with it; how many
    # are known.
    "at_boundary": (bool, False),
    "boundary_now": (bool, False),
    "boundary_count": (np.int64, 0),
    # EAT samples and their exponential moving mean and variance.
    "eat_nats": (np.float64, np.nan),
    "eat_ema_nats": (np.float64, np.nan),
    "eat_ema_variance": (np.float64, 0.0),
    "eat_count": (np.int64, 0),
    "next_probe_tokens": (np.int64, 0),
    "probe_open": (bool, False),
    # The newest probe found that the answer would be empty; the cap was probed for that; the cap was extended for it.
    "empty_answer": (bool, False),
    "cap_probed": (bool, False),
    "extended": (bool, False),
    # Closed in the report that is being taken in.
    "closing": (bool, False),
    # Decisions: what the agent was last told.
    "rank": (np.int64, UNTOLD),
    "tier": (np.uint8, 0),
    "max_think_tokens": (np.int64, UNTOLD),
    "cap_shadow": (bool, False),
    # Thinking has ended at least once; the newest end was forced.
    "ended": (bool, False),
    "forced": (bool, False),
    # The rule that decided to end this request's thinking, as a ForceReason.
    "end_decided": (np.uint8, 0),
    # The rules in shadow that did, a bit for each ForceReason.
    "shadow_decided": (np.uint8, 0),
}


class Columns:
    """The columns as attributes, each [slots]."""

    live: NDArray[np.bool_]
    phase: NDArray[np.uint8]
    group: NDArray[np.int64]
    own_min_think_tokens: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    think_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    preempted: NDArray[np.bool_]
    token_ms: NDArray[np.float64]
    newest_token: NDArray[np.uint8]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.uint32]
    end_logprob_nats: NDArray[np.float32]
    entropy_sum: NDArray[np.float64]
    entropy_window_sum: NDArray[np.float64]
    entropy_count: NDArray[np.int64]
    at_boundary: NDArray[np.bool_]
    boundary_now: NDArray[np.bool_]
    boundary_count: NDArray[np.int64]
    eat_nats: NDArray[np.float64]
    eat_ema_nats: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]
    eat_count: NDArray[np.int64]
    next_probe_tokens: NDArray[np.int64]
    probe_open: NDArray[np.bool_]
    empty_answer: NDArray[np.bool_]
    cap_probed: NDArray[np.bool_]
    extended: NDArray[np.bool_]
    closing: NDArray[np.bool_]
    rank: NDArray[np.int64]
    tier: NDArray[np.uint8]
    max_think_tokens: NDArray[np.int64]
    cap_shadow: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    forced: NDArray[np.bool_]
    end_decided: NDArray[np.uint8]
    shadow_decided: NDArray[np.uint8]
