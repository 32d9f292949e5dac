"""The policy's section about loops: thinking that repeats the same tokens, round after round.

The module knows no engine and no request. Its values are immutable, so any thread may use them.
"""

from meridian_control.policy.section import (
    Section,
    field,
)


class LoopPolicy(Section):
    """Ends thinking that repeats the same tokens, round after round. In shadow by default, like every rule that ends
    thinking by itself."""

    enabled: bool = field(
        True,
        description="Have agents look for cycles of up to 512 tokens in the thinking; false looks for none.",
        advice="Set it to false to compare with thinking that may loop.",
    )
    shadow: bool = field(
        True,
        description="Make and count decisions, but do not end thinking.",
        advice="Set it to false once `meridianctl shadow` shows that only real loops would end.",
    )
    min_rounds: int = field(
        3,
        ge=2,
        le=1000,
        description="Rounds of a cycle, the first one included, from which on thinking ends; min_tokens must be "
        "reached too.",
        advice="Raise it if legitimate text repeats long parts, such as equal rows of a table.",
    )
    min_tokens: int = field(
        192,
        ge=32,
        le=2048,
        description="Thinking tokens that repeat, the first round included, from which on thinking ends; min_rounds "
        "must be reached too.",
        advice="Raise it if legitimate text repeats short parts, such as rows of zeros.",
    )
