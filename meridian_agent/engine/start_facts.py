"""Says which facts about its engine the agent needs at the start, and goes on without all others.

Necessary facts are read without `StartFacts`: a failure there keeps the agent off until the engine is restarted, and
the next Hello says why. Each optional fact is read through `StartFacts.find`: a failure there costs only what OPTIONAL
names for it. One log line and `Hello.missing_facts` list what is missing.

Knows no vLLM. Runs on the engine-core thread at the start, and on the link's thread when settings are prepared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from meridian_agent.core.guard import MAX_FAULT
from meridian_agent.core.request_info import clean

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger("vllm.meridian")

# What the agent can do without, and what it then does differently.
OPTIONAL = {
    "tokenizer": "as without markers, chat template and sentence ends",
    "markers": "no token counts as thinking, so nothing ends thinking until a policy names the markers",
    "fingerprint": "self-calibration does not notice when the model changes",
    "chat template": "finished thinking stays in the prefix cache, as in stock vLLM",
    "sentence ends": "no token ends a sentence: rules that read sentence ends do not act, nor do probes there",
    "texts of some tokens": "these tokens end no sentence",
    "hiding probes": "there are no EAT probes, which vLLM's metrics and KV connectors would see",
    "shared blocks": "an EAT probe computes the tokens since the last full KV block again",
    "probe rows": "each EAT probe is a request of its own",
    "entropy backend": "the worker names its backend with its first measurement",
    "scheduler limits": "no limit of vLLM's scheduler can be changed",
    "handover": "the engine hands no request over and answers none that others hand over",
    "preemption": "no request is preempted for a waiting one",
    "premature stops": "a request whose model stops while it thinks ends there, as in stock vLLM",
    "front end": "chats count as completions, so they have no answer reserve by default and their stops do not sleep; "
    "nothing tells their template and effort, nor a gateway's tenants and SLO classes",
    "settings on disk": "the agent begins without settings, as on a new engine",
}


class StartFacts:
    """The optional facts that one engine lacks."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}

    def find(self, name: str, read: Callable[[], T], without: T) -> T:
        """Return what `read` returns, or `without` if it raises an exception. name: one of OPTIONAL."""
        self.found(name)
        try:
            return read()
        except Exception as error:
            self.note(name, f"{type(error).__name__}: {error}")
            logger.debug("meridian: %s", name, exc_info=True)
            return without

    def found(self, name: str) -> None:
        """Note that a fact is known by now. name: one of OPTIONAL."""
        self._missing.pop(name, None)

    def note(self, name: str, why: str) -> None:
        """Note that a fact is missing, or a part of it. name: one of OPTIONAL."""
        self._missing[name] = clean(f"{name} ({' '.join(why.split())}): {OPTIONAL[name]}", MAX_FAULT)

    def why(self, name: str) -> str:
        """Return why a fact is missing, with what follows from that; empty if it is known."""
        return self._missing.get(name, "")

    @property
    def missing(self) -> list[str]:
        """What is missing, why, and what follows from that, for people to read."""
        return [*self._missing.values()]

    def log(self) -> None:
        """Log what is missing, in one line; nothing if nothing is."""
        if self._missing:
            logger.warning("meridian: the agent works without: %s", "; ".join(self._missing.values()))
