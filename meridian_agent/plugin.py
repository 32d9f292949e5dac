"""The agent's entry point in the group `vllm.general_plugins`. vLLM calls it in every process, sometimes twice, and
does not catch its exceptions. Without MERIDIAN_CONTROL the entry point imports nothing else of the agent."""

import contextlib
import os


def register() -> None:
    """Install the agent's hooks if MERIDIAN_CONTROL names a control plane. Never raises."""
    with contextlib.suppress(Exception):
        _install()


def _install() -> None:
    if not os.environ.get("MERIDIAN_CONTROL", "").strip(", \t\r\n"):
        return
    try:
        from meridian_agent import install

        install.install()
    except Exception:
        import logging

        logging.getLogger("vllm.meridian").exception(
            "meridian: the agent could not be installed; this process runs stock vLLM"
        )
