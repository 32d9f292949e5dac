"""The policy's section about requests whose tenant and SLO class a gateway names.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from typing import Annotated

from pydantic import Field

from meridian_control.policy.section import Glob, Section, field

# Most globs; the agent compares a client's wish with each of them.
MAX_CLASSES = 64


class GatewayPolicy(Section):
    """Says what a client may choose on engines whose gateway names the tenant and the SLO class of requests
    ([how](../capabilities/gateway/README.md)). On all other engines clients name both."""

    client_slo_classes: Annotated[tuple[Glob, ...], Field(max_length=MAX_CLASSES)] = field(
        (),
        strict=False,
        description="Globs of the SLO classes that a client may choose for its request, by `meridian_slo_class`, in "
        "place of the gateway's.",
        advice='List the classes that cost the client something, such as `["batch"]`; `["*"]` lets it choose any.',
    )
