"""EAT samples of requests: the newest one and its exponential moving variance, kept for each request across calls.

Knows nothing of logits. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

# Requests whose samples are remembered, some 20 MB; beyond that the one sampled longest ago is forgotten.
MAX_REQUESTS = 65_536


@dataclass(slots=True)
class Eat:
    """newest: x_n in nats. mean: M_n in nats. variance: V_n in nats squared."""

    newest: float
    mean: float
    variance: float


UNKNOWN = Eat(math.nan, math.nan, math.nan)


class EatHistory:
    """M_0 = x_0, M_n = a * x_n + (1 - a) * M_{n-1}; V_0 = 0, V_n = a * (x_n - M_n)^2 + (1 - a) * V_{n-1}
    (arXiv 2509.26522), with a = ema_alpha, in float64."""

    def __init__(self, ema_alpha: float, max_requests: int = MAX_REQUESTS) -> None:
        self._alpha, self._max_requests = ema_alpha, max_requests
        self._by_request: OrderedDict[str, Eat] = OrderedDict()

    def add(self, req_id: str, sample_nats: float) -> None:
        """Take in a request's next sample. One that could not be measured (NaN) is left out."""
        if not math.isfinite(sample_nats):
            return
        known = self._by_request.get(req_id)
        if known is None:
            self._by_request[req_id] = Eat(sample_nats, sample_nats, 0.0)
            if len(self._by_request) > self._max_requests:
                self._by_request.popitem(last=False)
            return
        a = self._alpha
        mean = a * sample_nats + (1 - a) * known.mean
        variance = a * (sample_nats - mean) ** 2 + (1 - a) * known.variance
        self._by_request[req_id] = Eat(sample_nats, mean, variance)
        self._by_request.move_to_end(req_id)

    def of(self, req_id: str) -> Eat:
        """Where a request stands; NaN in all fields before its first sample."""
        return self._by_request.get(req_id, UNKNOWN)

    def forget(self, req_id: str) -> None:
        self._by_request.pop(req_id, None)
