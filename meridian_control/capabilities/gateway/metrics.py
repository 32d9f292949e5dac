"""The metric of SLO classes that clients may not choose: its entry in the catalogue."""

from meridian_control.common.metric_entry import counter

REFUSED_TOTAL = "meridian_refused_slo_classes_total"
ENTRIES = (
    counter(
        REFUSED_TOTAL,
        (),
        "Requests whose client asked for an SLO class that it may not choose, because a gateway names another.",
        "Grows: `meridianctl explain` shows a request's wish; let clients choose the class "
        "(`gateway.client_slo_classes`), or correct the client.",
    ),
)
