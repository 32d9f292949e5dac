"""The policy's section about handovers: requests that think on one engine and answer on another.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from meridian_control.policy.section import Positive, Section, field

# KV connectors of vLLM that carry a handover, by fabric.
CONNECTORS = {"nixl": ("NixlConnector", "NixlPullConnector")}
# Reason why a fabric cannot carry a handover.
UNFIT = {
    "nixl_push": "it cannot add the block that the end marker fills",
    "mooncake": "in vLLM 0.32 it keeps the KV blocks only of requests that end by their length",
    "lmcache": "it keeps no KV blocks of a request for another engine",
    "offloading": "it keeps KV blocks for the same engine only",
}


def _fabric(name: str) -> str:
    if name in CONNECTORS:
        return name
    reason = UNFIT.get(name, "no handover over it is known")
    raise PydanticCustomError("fabric", 'must be "nixl": {reason}', {"reason": reason})


Labels = Annotated[Mapping[str, str], Field(max_length=32)]


class DisaggPolicy(Section):
    """Hands requests over at the end of their thinking to another engine, which answers them with the KV blocks of the
    engine that thought. Needs engines with a KV connector, and a relay in front of them."""

    enabled: bool = field(
        False,
        description="Decide handovers; false leaves each request on its engine.",
        advice="Set it to true once a relay stands in front of the engines.",
    )
    shadow: bool = field(
        True,
        description="Make and count decisions, but hand no request over.",
        advice="Set it to false once `meridianctl shadow` shows that handovers would save time.",
    )
    fabric: Annotated[str, AfterValidator(_fabric)] = field(
        "nixl",
        max_length=64,
        description="Transport of the KV blocks: an engine takes part only if its KV connector belongs to it.",
        advice="Leave it; other transports cannot carry a handover.",
        range="`nixl`",
    )
    offload_threshold_blocks: Positive = field(
        4,
        description="Smallest number of KV blocks that a request must hold to be handed over.",
        advice="Raise it if short requests are handed over for little gain.",
    )
    thinking_pool: Labels = field(
        {},
        description="Labels of the engines that hand requests over; empty means every engine.",
        advice="Set it to a label of the engines behind the relay.",
        range="up to 32 labels",
    )
    answering_pool: Labels = field(
        {},
        description="Labels of the engines that requests are handed over to; empty means every engine.",
        advice="Set it to a label of the engines that shall only answer.",
        range="up to 32 labels",
    )
    max_pool_kv_used: float = field(
        0.8,
        gt=0,
        le=1,
        description="Share of the KV cache in use, a fraction, above which an engine is full: a thinking engine then "
        "hands requests over, and an answering engine gets none.",
        advice="Lower it if answering engines preempt requests.",
    )

    def thinks(self, labels: Mapping[str, str]) -> bool:
        """Return whether an engine with these labels belongs to the thinking pool."""
        return _matches(self.thinking_pool, labels)

    def answers(self, labels: Mapping[str, str]) -> bool:
        """Return whether an engine with these labels belongs to the answering pool."""
        return _matches(self.answering_pool, labels)

    def pool_of(self, labels: Mapping[str, str]) -> str:
        """Return the engine's pool: thinking, answering or both; empty for none, and if the section is off."""
        if not self.enabled:
            return ""
        names = {(True, True): "both", (True, False): "thinking", (False, True): "answering"}
        return names.get((self.thinks(labels), self.answers(labels)), "")


def _matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())
