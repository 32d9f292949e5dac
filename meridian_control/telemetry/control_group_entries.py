"""The catalogue's metrics of the control group. The module holds declarations only."""

from meridian_control.common.metric_entry import _counter, _gauge

ARM = ("arm",)
KIND = ("kind", "name")

CONTROL_GROUP = (
    _counter(
        "meridian_arm_requests_total",
        ARM,
        "Closed requests that thought, by arm: treated, or control, whose requests nothing shortens.",
        "No `control`: nothing in force shortens thinking, or `entropy.holdout_share` is 0, so nothing is compared.",
    ),
    _counter(
        "meridian_arm_think_tokens_total",
        ARM,
        "Thinking tokens of these requests.",
        "Divide by `meridian_arm_requests_total`: the difference of the arms is what shortening saves per request.",
    ),
    _counter(
        "meridian_arm_answer_tokens_total",
        ARM,
        "Answer tokens of these requests, if they finished after their thinking had ended.",
        "Longer answers of `treated`: the model goes on thinking in the answer; set a `closing_text`, or calibrate.",
    ),
    _counter(
        "meridian_arm_events_total",
        ("arm", "event"),
        "These requests by event: stopped (shortening ended the thinking, or would have), answered, reentry (the "
        "request thought again), abort (by the client), length (finished by its length).",
        "More `reentry`, `abort` or `length` per request in `treated`: thinking ends early; see `meridianctl savings`.",
    ),
    _counter(
        "meridian_compared_ends_total",
        (*KIND, "end", "event"),
        "Requests by kind of shortening (budgets and pressure also by name), by the first end of their thinking, and "
        "by event. Ends: forced (by the kind) and natural (in the control group, after the kind would have ended the "
        "thinking). Events: ended (every such request), reentry, empty, abort, length.",
        "More `reentry`, `empty` or `abort` per `ended` after `forced`: see the alert MeridianForcedEndsSpill.",
    ),
    _counter(
        "meridian_control_group_shadow_saved_tokens_total",
        (),
        "Thinking tokens of the control group after the places where shortening would have ended the thinking.",
        "Per request of the control group, compare with the difference of the arms. Far apart: ends come late, or "
        "requests think again.",
    ),
    _counter(
        "meridian_control_group_verdicts_total",
        (*KIND, "verdict"),
        "Finished requests of the control group, by each kind that could have shortened them, and by what it would "
        "have done to their answer: harmless, harmful, or unjudged (no probe near).",
        "Mostly `unjudged`: harm is not measured; the engines have no room for probes, or cannot probe.",
    ),
    _gauge(
        "meridian_saved_ratio",
        ("bound",),
        "Share of the thinking that the policy in force saves, by value, low and high end of the 95 % interval. Like "
        "the metrics below, it comes from the replica that leads, for all replicas.",
        "`low` below 0 with many requests: shortening saves nothing that can be shown.",
    ),
    _gauge(
        "meridian_harm_ratio",
        (*KIND, "bound"),
        "Share of the judged requests whose answer a kind in force would have changed, by value and one-sided exact "
        "95 % bounds low and high. Absent while harm is not measured.",
        "`high` above `entropy.max_loss`: collect more requests, or calibrate again.",
    ),
    _gauge(
        "meridian_long_answer_difference_ratio",
        ("bound",),
        "Share of the forced ends whose answer is longer than 95 % of those after natural ends, minus the same share "
        "of the natural ends, by value, low and high end of the 99 % interval. Absent until both sides have 30 ends.",
        "`low` above 0: the model goes on thinking in the answer; see `closing_text`, `meridianctl policy families`.",
    ),
    _gauge(
        "meridian_spill_difference_ratio",
        ("bound",),
        "As meridian_long_answer_difference_ratio, for ends after which requests think again or answer at length.",
        "`low` above 0.05: MeridianForcedEndsSpill fires; set the model's `closing_text`, or calibrate again.",
    ),
    _gauge(
        "meridian_harm_evidence_ratio",
        KIND,
        "Evidence that the harm of a kind exceeds `entropy.max_loss`; at 1 it is withdrawn, unless it is the cap.",
        "Near 1: raise the floor or the cap in question; 1 for a cap: see the alert MeridianShorteningHarms.",
    ),
    _gauge(
        "meridian_drift_evidence_ratio",
        (),
        "Evidence that a signal of live requests has left the calibrated distribution; at 1 the control plane puts the "
        "rules into shadow. Absent if the policy describes no signal.",
        "Near 1: the model, its chat template or the workload has changed; compare the bins in `meridianctl savings`.",
    ),
    _gauge(
        "meridian_entropy_withdrawn",
        (),
        "1 while the policy in force is one by which the control plane itself withdrew a kind of shortening.",
        "1: `meridianctl savings` says what was withdrawn, and why; correct or calibrate it, then apply a policy.",
    ),
)
