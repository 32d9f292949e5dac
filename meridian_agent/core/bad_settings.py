"""Names the one error that means that settings of the control plane cannot be obeyed. Pure."""


class BadSettings(ValueError):  # noqa: N818 - the class is named after the condition that it reports
    """Settings name a value that this engine cannot use. Every other exception while settings are taken in is an error
    of the agent or of vLLM, and is logged with a traceback."""
