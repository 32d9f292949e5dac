"""The `vllm.general_plugins` entry point. vLLM calls it in every process, perhaps twice, and does not catch what it
raises; without MERIDIAN_CONTROL it imports nothing of ours."""

import contextlib
import os


def register() -> None:
    """Install the agent's hooks if MERIDIAN_CONTROL names a control plane. Never raises."""
    with contextlib.suppress(Exception):
        _install()


def _install() -> None:
    if not os.environ.get("MERIDIAN_CONTROL"):
        return
    try:
        from meridian_agent import install

        install.install()
    except Exception:
        import logging

        logging.getLogger("vllm.meridian").exception("meridian: the agent could not be installed; vLLM runs as stock")
