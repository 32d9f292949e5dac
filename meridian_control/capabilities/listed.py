"""Lists the capabilities in the order in which they decide."""

from meridian_control.capabilities.budgets import fleet as budgets
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.caps.stream import Caps
from meridian_control.capabilities.control_group import metrics as control_group_metrics
from meridian_control.capabilities.control_group.fleet import Comparisons
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.entropy.stream import EntropyRules
from meridian_control.capabilities.gateway import stream as gateway
from meridian_control.capabilities.handover import fleet as handover
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.capabilities.loops.stream import Loops
from meridian_control.capabilities.order.stream import Order
from meridian_control.capabilities.preemption import stream as preemption
from meridian_control.capabilities.pressure import fleet as pressure
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.capabilities.self_calibration import fleet as self_calibration
from meridian_control.capabilities.tiers.stream import Tiers
from meridian_control.engine.part import Capability
from meridian_control.policy.section import Section

CAPABILITIES: tuple[Capability, ...] = (
    Capability("budgets", EngineBudgets, budgets.BudgetSharing, metrics=budgets.ENTRIES),
    Capability("pressure", EnginePressure, pressure.FleetPressure, metrics=pressure.ENTRIES),
    Capability("caps", Caps.of),
    Capability("entropy", EntropyRules.of),
    Capability("loops", Loops.of),
    Capability("control_group", ControlGroup, Comparisons, metrics=control_group_metrics.ENTRIES),
    Capability("self_calibration", fleet=self_calibration.SelfCalibration, metrics=self_calibration.ENTRIES),
    Capability("order", Order),
    Capability("tiers", Tiers),
    Capability("gateway", gateway.RefusedClasses.of, metrics=gateway.ENTRIES),
    Capability("preemption", preemption.Preemption.of, metrics=preemption.ENTRIES),
    Capability("handover", EngineHandovers, handover.FleetHandovers, metrics=handover.ENTRIES),
)
# The parts of these capabilities in an engine's stream that share nothing with other streams, as in replays.
STREAM_PARTS = tuple(capability.stream for capability in CAPABILITIES if capability.stream is not None)


def sections() -> dict[str, type[Section]]:
    """Return the schemas of a policy's extensions, by name."""
    return {capability.name: capability.section for capability in CAPABILITIES if capability.section is not None}
