"""Write the reference of the policy's fields, `meridian_control/policy/reference.md`, from the schema.

`python -m tests.policy_reference` prints it; `--write` replaces the file.
"""

from __future__ import annotations

import sys
from typing import Any

from meridian_control.policy.diff import spelled
from meridian_control.policy.disagg_schema import DisaggPolicy
from meridian_control.policy.drift_schema import EatBin, SignalBin
from meridian_control.policy.model import IN_OVERRIDES
from meridian_control.policy.schema import (
    EnginePolicy,
    EntropyPolicy,
    FallbackPolicy,
    GatewayPolicy,
    KvMemoryPolicy,
    LoopPolicy,
    ModelPolicy,
    PreemptionPolicy,
    RankCondition,
    SchedulerPolicy,
    TelemetryPolicy,
)
from meridian_control.policy.section import INT32_MAX, Section
from meridian_control.policy.shortening_schema import BudgetPolicy, PressurePolicy
from tests.processes import ROOT

REFERENCE = ROOT / "meridian_control" / "policy" / "reference.md"
SECTIONS: dict[str, type[Section]] = {
    "scheduler": SchedulerPolicy,
    "entropy": EntropyPolicy,
    "entropy.rank_conditions[]": RankCondition,
    "entropy.eat_reference[]": EatBin,
    "entropy.rank_reference[], rpdi_reference[]": SignalBin,
    "loop": LoopPolicy,
    "disagg": DisaggPolicy,
    "engine": EnginePolicy,
    "gateway": GatewayPolicy,
    "kv_memory": KvMemoryPolicy,
    "preemption": PreemptionPolicy,
    "telemetry": TelemetryPolicy,
    "fallback": FallbackPolicy,
    "budget": BudgetPolicy,
    "pressure": PressurePolicy,
    "model.NAME": ModelPolicy,
}
HEAD = """# Policy fields

`python -m tests.policy_reference --write` makes this page from the schema. An `[[override]]` may set the fields marked
with `*` for the requests or engines that it matches ([how](policy.md#who-gets-what)). The default of a field shows its
type: a number has a decimal point, an integer has none. EAT is the entropy after `</think>`, RPDI the reasoning path
deviation index ([glossary](../../proto/glossary.md)). A capability beside the usual ones has its fields in
`[extension.NAME]`.
"""
COLUMNS = f"| field | default; range | what it does | when to change it |\n{'|---' * 4}|\n"
# Texts of a field with more characters than this are not repeated for the same field of another section.
LONG = 60
BOUNDS = (("exclusiveMinimum", "above"), ("minimum", "from"), ("exclusiveMaximum", "below"), ("maximum", "to"))


def reference() -> str:
    """Return the page with one table for each section, in the order of the schema."""
    first: dict[tuple[str, ...], str] = {}
    return HEAD + "".join(_section(name, kind, first) for name, kind in SECTIONS.items())


def _section(name: str, kind: type[Section], first: dict[tuple[str, ...], str]) -> str:
    said = " ".join((kind.__doc__ or "").split())
    fields = kind.model_json_schema()["properties"]
    rows = "".join(_row(name, field, of, first) for field, of in fields.items())
    return f"\n## {name}\n{said}\n\n{COLUMNS}{rows}"


def _row(section: str, field: str, of: dict[str, Any], first: dict[tuple[str, ...], str]) -> str:
    """Return the row of a field. first: the field that had each pair of texts first; a later one refers to it."""
    mark = "*" if field in IN_OVERRIDES.get(section, ()) else ""
    texts = of["description"], of["advice"]
    if len(" ".join(texts)) > LONG and first.setdefault((field, *texts), section) != section:
        texts = f"As `{first[field, *texts]}.{field}`.", ""
    values = "; ".join(filter(None, (f"`{spelled(of['default'])}`", _range(of))))
    cells = f"`{field}`{mark}", values, *texts
    return f"| {' | '.join(cells)} |\n"


def _range(of: dict[str, Any]) -> str:
    if of.get("type") == "array":
        least, most = of.get("minItems", 0), of["maxItems"]
        inner = _range(of["items"])
        return f"{least} to {most} entries" + (f", each {inner}" if inner else "")
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if "maxLength" in of and "range" not in of:
        return f"up to {of['maxLength']:,} characters"
    # INT32_MAX is only the largest value of the proto's field, not a limit of its own.
    bounds = {key: bound for key, bound in of.items() if bound != INT32_MAX}
    return of.get("range") or " ".join(f"{word} {bounds[key]:,}" for key, word in BOUNDS if key in bounds)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        REFERENCE.write_text(reference())
    else:
        print(reference(), end="")


if __name__ == "__main__":
    main()
