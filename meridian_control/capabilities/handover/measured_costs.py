"""Learns what a handover costs on an answering engine, and how long its answers are. The code does no I/O and reads no
clock."""

from __future__ import annotations

import math

import numpy as np

# First guess of the time from the arrival of a request to its first token: milliseconds, and milliseconds for each
# token whose KV is read. The guess counts as much as one measurement.
FIRST_TRANSFER_MS, FIRST_TRANSFER_TOKEN_MS = 40.0, 0.005
# A request that waited longer than this many milliseconds for its first token says nothing about its transfer.
MAX_TRANSFER_MS = 60_000.0
# Weight of the newest answer in the mean length.
ANSWER_WEIGHT = 1 / 32


class TransferCost:
    """Estimates the milliseconds from arrival to first token as a + b * tokens transferred.

    The estimate uses recursive least squares with exponential forgetting (weight LAMBDA per request). Coefficients
    below 0 are read as 0.
    """

    LAMBDA = 0.98
    # Factors that bring the two terms to one scale.
    SCALE = np.array([1.0, 1e-3])

    def __init__(self) -> None:
        self._weights = np.array([FIRST_TRANSFER_MS, FIRST_TRANSFER_TOKEN_MS]) / self.SCALE
        self._covariance = np.eye(2)

    def add_transfer(self, tokens: int, first_token_ms: float) -> None:
        """Take in one transfer; a time that is no number or out of range is left out."""
        if not (math.isfinite(first_token_ms) and 0 <= first_token_ms <= MAX_TRANSFER_MS):
            return
        x = np.array([1.0, tokens]) * self.SCALE
        gain = self._covariance @ x
        gain /= self.LAMBDA + x @ gain
        self._weights += gain * (first_token_ms - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / self.LAMBDA
        # The covariance would grow without bound in directions in which the input does not vary.
        if np.trace(covariance) < 1e3:
            self._covariance = (covariance + covariance.T) / 2

    @property
    def coefficients(self) -> tuple[float, float]:
        """The coefficients a (milliseconds) and b (milliseconds per token)."""
        a, b = np.maximum(self._weights * self.SCALE, 0.0)
        return float(a), float(b)


class AnswerLength:
    """The exponentially weighted mean of answer tokens; 0 before the first answer."""

    def __init__(self) -> None:
        self.tokens = 0.0

    def add_answer(self, answer_tokens: int) -> None:
        self.tokens += (answer_tokens - self.tokens) * (ANSWER_WEIGHT if self.tokens else 1.0)
