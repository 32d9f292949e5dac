"""The one error of the package."""


class KernelError(RuntimeError):
    """The input cannot be measured, or not here. The message names the argument and its value: a wrong type, shape,
    dtype or device, a token id outside the vocabulary, a GPU that cannot be used."""
