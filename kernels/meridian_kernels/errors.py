"""Defines the only exception that the package raises."""


class KernelError(ValueError, RuntimeError):
    """The input cannot be measured at all, or not on this device. The message names the argument and its value, for
    example a wrong type, shape, dtype or device, or a token id outside the vocabulary."""
