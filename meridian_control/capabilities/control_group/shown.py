"""Describes savings and harm, as the control group shows them, for the status page. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meridian_control.capabilities.control_group.experiments import kind_of
from meridian_control.capabilities.control_group.savings import harming
from meridian_control.common.drift_bins import SIGNALS, drift_bins
from meridian_control.common.harm_words import harm_text, withdrew_text
from meridian_control.common.look import percent
from meridian_control.common.plain_data import plain
from meridian_control.fleet.part import Shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian.v1 import fleet_pb2

    from meridian_control.policy.model import Policy

# Largest number of sets of rules on the page.
MAX_SAVINGS = 3


def entries(compared: fleet_pb2.GetSavingsResponse, policies: Iterable[Policy]) -> Shown:
    """Return the page's entries; each kind of shortening that harms is a trouble. policies: those in force on
    engines."""
    harms = harming(compared.savings, policies)
    rows = [savings_row(row, [h for s, h in harms if s is row]) for row in compared.savings[:MAX_SAVINGS]]
    sentences = [f"{harm_sentence(*harm)}." for harm in harms]
    entry = {"savings": rows, "withdrawn": withdrawal_text(compared), "harm": sentences}
    return Shown(entry, troubles=len(sentences))


def point(savings: fleet_pb2.Savings) -> dict[str, float]:
    """Return saving and harm under one set of rules as the page's last hour shows them, each as a share; those that the
    counts do not allow are left out."""
    known = {
        "saved_ratio": (savings.HasField("saved_ratio"), savings.saved_ratio.value),
        "harm_ratio": (savings.HasField("harm_ratio"), savings.harm_ratio.value),
        "harm_high": (savings.HasField("harm_ratio"), savings.harm_ratio.high),
        "harm_allowed": (savings.HasField("harm_ratio"), savings.max_loss),
    }
    return {name: value for name, (is_known, value) in known.items() if is_known}


def savings_row(savings: fleet_pb2.Savings, harms: Iterable[fleet_pb2.ShorteningHarm] = ()) -> dict[str, Any]:
    """Return the counts under one set of rules: `harm` and `drift` say how near the rules are to a withdrawal, and
    `kinds` has the harm of each kind of shortening. harms: the kinds whose harm is above what the policy allows."""
    harmful = [kind_of(harm) for harm in harms]
    kinds = [
        plain(harm)
        | {
            "text": kind_of(harm).text,
            "harm": _harm(harm, savings),
            "level": "bad" if kind_of(harm) in harmful else "",
        }
        for harm in savings.kinds
    ]
    return plain(savings) | {"harm": _harm(savings, savings), "drift": drift_text(savings), "kinds": kinds}


def _harm(harm: fleet_pb2.Savings | fleet_pb2.ShorteningHarm, savings: fleet_pb2.Savings) -> str:
    return harm_text(harm, savings) + (_evidence(harm, "evidence_ratio") if harm.HasField("harm_ratio") else "")


def harm_sentence(savings: fleet_pb2.Savings, harm: fleet_pb2.ShorteningHarm) -> str:
    """Return in words that a kind of shortening harms too many answers, for the page, the log and the audit."""
    return (
        f"{kind_of(harm).text} would have changed {harm.harmful} of {harm.judged} answers of the control group, more "
        f"than entropy.max_loss {savings.max_loss:g} allows"
    )


def drift_text(savings: fleet_pb2.Savings) -> str:
    """Return the signals that are compared with the calibration, and the evidence that one of them has drifted."""
    compared = [
        f"{SIGNALS[signal].name}, {sum(sample_bin.seen for sample_bin in bins)} requests"
        for signal, bins in drift_bins(savings).items()
    ]
    return "; ".join(compared) + _evidence(savings, "drift_evidence_ratio") if compared else "not compared"


def _evidence(
    savings: fleet_pb2.Savings | fleet_pb2.ShorteningHarm, field: Literal["evidence_ratio", "drift_evidence_ratio"]
) -> str:
    """Return the evidence as a share of that at which the control plane withdraws; empty if it is not known."""
    return f"; evidence {percent(getattr(savings, field), 2)}" if savings.HasField(field) else ""  # type: ignore[arg-type]


def withdrawal_text(compared: fleet_pb2.GetSavingsResponse) -> str:
    """Return which revision of the control plane itself has withdrawn a kind of shortening, and why; empty if none
    has."""
    if not compared.withdrawn_revision:
        return ""
    did = withdrew_text(compared.withdrawn_cause)
    return f"Revision {compared.withdrawn_revision} {did}: {compared.withdrawn_reason}."
