"""Lists the capabilities in the order in which they decide."""

from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.caps.stream import Caps
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.entropy.stream import EntropyRules
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.capabilities.loops.stream import Loops
from meridian_control.capabilities.order.stream import Order
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.capabilities.tiers.stream import Tiers
from meridian_control.engine.part import Capability

CAPABILITIES: tuple[Capability, ...] = (
    Capability("budgets", EngineBudgets),
    Capability("pressure", EnginePressure),
    Capability("caps", Caps.of),
    Capability("entropy", EntropyRules.of),
    Capability("loops", Loops.of),
    Capability("control_group", ControlGroup),
    Capability("order", Order),
    Capability("tiers", Tiers),
    Capability("handover", EngineHandovers),
)
# The parts of these capabilities in an engine's stream that share nothing with other streams, as in replays.
STREAM_PARTS = tuple(capability.stream for capability in CAPABILITIES if capability.stream is not None)
