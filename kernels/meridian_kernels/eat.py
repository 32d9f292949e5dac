"""Keeps, for each request, the newest EAT sample and the exponential moving mean and variance of its EAT samples.

The module knows nothing about logits. An `EatHistory` belongs to one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

# Largest number of requests whose EAT state is kept, some 20 MB. Beyond that, the request that was sampled longest ago
# is forgotten.
MAX_REQUESTS = 65_536


@dataclass(slots=True)
class Eat:
    """EAT state of one request. newest: sample x_n in nats. mean: M_n in nats. variance: V_n in nats squared."""

    newest: float
    mean: float
    variance: float


UNKNOWN = Eat(math.nan, math.nan, math.nan)


class EatHistory:
    """EAT state of all requests. For samples x_n and a = ema_alpha, in float64 (arXiv 2509.26522): M_0 = x_0,
    M_n = a * x_n + (1 - a) * M_{n-1}; V_0 = 0, V_n = a * (x_n - M_n)^2 + (1 - a) * V_{n-1}."""

    def __init__(self, ema_alpha: float, max_requests: int = MAX_REQUESTS) -> None:
        self._alpha, self._max_requests = ema_alpha, max_requests
        self._by_request: OrderedDict[str, Eat] = OrderedDict()

    def add(self, req_id: str, sample_nats: float) -> None:
        """Add a request's next sample. A sample that could not be measured (NaN) is ignored."""
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
        # Python's power is not always the rounded product that NumPy's is.
        distance = sample_nats - mean
        variance = a * (distance * distance) + (1 - a) * known.variance
        self._by_request[req_id] = Eat(sample_nats, mean, variance)
        self._by_request.move_to_end(req_id)

    def of(self, req_id: str) -> Eat:
        """Return a request's EAT state; all fields are NaN before its first sample."""
        return self._by_request.get(req_id, UNKNOWN)

    def forget(self, req_id: str) -> None:
        self._by_request.pop(req_id, None)
