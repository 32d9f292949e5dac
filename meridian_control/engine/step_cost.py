"""Estimates how long a step of one engine takes. The code does no I/O; each object belongs to one session."""

from __future__ import annotations

# Number of measured steps after which the estimate of the step cost is used.
WARM_STEPS = 32


class StepCost:
    """Estimates the duration of a step in milliseconds as a + b * sequences + c * prefill tokens.

    The estimate uses recursive least squares with exponential forgetting (weight LAMBDA per step). Coefficients below 0
    are read as 0. prefill_tokens: exponentially weighted mean of prefill tokens per step.
    """

    LAMBDA = 0.995
    # Sequences and prefill tokens are divided by these numbers, which brings the three terms to one scale.
    SEQUENCES, PREFILL_TOKENS = 32, 512

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0.0
        # The weights, and the upper triangle of their covariance, row by row. Arrays of three numbers would cost ten
        # times as much as the numbers do.
        self._weights = 0.0, 0.0, 0.0
        self._covariance = 1e3, 0.0, 0.0, 1e3, 0.0, 1e3

    def add_step_time(self, sequences: int, prefill_tokens: int, step_time_ms: float) -> None:
        """Take in the measurement of one step."""
        x1, x2 = sequences / self.SEQUENCES, prefill_tokens / self.PREFILL_TOKENS
        c00, c01, c02, c11, c12, c22 = self._covariance
        # The product of the covariance and the input (1, x1, x2).
        p0, p1, p2 = c00 + c01 * x1 + c02 * x2, c01 + c11 * x1 + c12 * x2, c02 + c12 * x1 + c22 * x2
        total = self.LAMBDA + p0 + x1 * p1 + x2 * p2
        g0, g1, g2 = p0 / total, p1 / total, p2 / total
        w0, w1, w2 = self._weights
        error_ms = step_time_ms - (w0 + x1 * w1 + x2 * w2)
        self._weights = w0 + g0 * error_ms, w1 + g1 * error_ms, w2 + g2 * error_ms
        grown = c00 - g0 * p0, c01 - g0 * p1, c02 - g0 * p2, c11 - g1 * p1, c12 - g1 * p2, c22 - g2 * p2
        # The covariance would grow without bound in directions in which the input does not vary.
        if grown[0] + grown[3] + grown[5] < 1e6 * self.LAMBDA:
            c00, c01, c02, c11, c12, c22 = grown
            over = 1 / self.LAMBDA
            self._covariance = c00 * over, c01 * over, c02 * over, c11 * over, c12 * over, c22 * over
        self.steps += 1
        self.prefill_tokens += (1 - self.LAMBDA) * (prefill_tokens - self.prefill_tokens)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """The coefficients a (milliseconds), b (milliseconds per sequence) and c (milliseconds per token)."""
        a, b, c = self._weights
        return max(a, 0.0), max(b / self.SEQUENCES, 0.0), max(c / self.PREFILL_TOKENS, 0.0)
