"""The policy's section about preemption: waiting requests that may take the places of thinking ones.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from meridian_control.policy.section import Count, Positive, Section, field


class PreemptionPolicy(Section):
    """Lets waiting requests preempt thinking ones that take all places or KV blocks of an engine. No request may before
    the policy says so, and the section is in shadow by default ([how it
    works](../capabilities/preemption/README.md))."""

    shadow: bool = field(
        True,
        description="Make and count decisions, but preempt nothing.",
        advice="Set it to false once `meridianctl decisions --kind preempt` shows the preemptions that you want.",
    )
    may_preempt: bool = field(
        False,
        description="Whether a waiting request may preempt thinking ones, if it finds no place among the running "
        "requests or no KV blocks.",
        advice="Set it to true in an override for the tenant or the SLO class of people who wait.",
    )
    max_prompt_tokens: Count = field(
        0,
        description="Most prompt tokens outside of the prefix cache with which a waiting request may preempt others, "
        "so that short prompts may, and next turns of conversations whose beginning is cached; 0 means no limit.",
        advice="Set it to a few hundred if long prompts of the same tenant can wait.",
    )
    preemptible_from_tokens: Count = field(
        256,
        description="Thinking tokens from which on a request may be preempted for others.",
        advice="Set it to 1000000 in an override for tenants whose thinking must not be interrupted.",
    )
    max_preemptions: Positive = field(
        3,
        description="Number of preemptions of a request, those by vLLM itself included, after which it is not "
        "preempted for others any more.",
        advice="Lower it if thinking takes too long; raise it if waiting requests find nobody to preempt.",
    )
    recomputed_tokens_per_s: Positive = field(
        1000,
        description="Tokens per second that preempted requests of an engine may compute again. While they have "
        "computed more, no request is preempted for others.",
        advice="Set it to the share that you would give away of the prompt tokens per second that an engine computes.",
    )
    max_wait_ms: Positive = field(
        10_000,
        description="Milliseconds after which a preempted request comes before all waiting ones, and no other is "
        "preempted until it runs again.",
        advice="Lower it if preempted requests wait too long while many others preempt.",
    )
