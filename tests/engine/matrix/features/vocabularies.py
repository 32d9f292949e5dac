"""Real vocabularies, of Qwen3 and of gpt-oss: markers, sentence ends, and everything that is read at sentence ends.

The model's tokens are scripted, as in `markers`, so the text is the same in each vocabulary.
"""

from __future__ import annotations

from typing import Any

from meridian_agent.core.phases import FLAG_END, FLAG_FORCED, FLAG_MARKER, FLAG_PARAGRAPH, Phase
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine, Observed
from tests.engine.matrix.features.markers import FINAL, NEXT, follow_script, take_script
from tests.engine.matrix.features.signals import VOCABULARIES
from tests.engine.policies import NEUTRAL
from tests.fakes.sentences import ends_of, flags_of

END = "‖"
# A sentence ends before each END. No judgement by the last character of a token finds these ends.
THINKING = (
    "So the value is 3.14, e.g. that of Dr. Smith, i.e. no. 5 in Fig. 3 of his list.‖ 那么，结果是对的。‖真的吗？‖"
    "对！‖ Hmm... that is (as I said.)‖ Now **this is bold.**‖ क्या यह ठीक है।‖ Then $x = 1.$‖\n\n1. Add it twice.‖\n"
    "2. Take 2.5 of it.‖ So it is 42.‖"
)
# Where thinking may end at the earliest: after more tokens than stand before the first full stop that ends nothing.
FLOOR = 4
# A rank that every token of the largest vocabulary has.
ANY_RANK = 201_088
# A decision arrives with the report of the token after a sentence end, and acts within two more steps.
LATE_TOKENS = 3


@feature("real vocabularies: phases, sentence ends, caps, soft close and probes at sentence ends", *VOCABULARIES)
def vocabularies(engine: Engine) -> None:
    tokenizer, markers = engine.llm.get_tokenizer(), engine.agent.tracker.markers
    assert markers.known
    harmony = markers.longest > 1
    prompt, begin, end = (
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", "<|channel|>analysis<|message|>", NEXT + FINAL)
        if harmony
        else ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<think>", "</think>")
    )
    text = THINKING.replace(END, "")
    parts = [list(tokenizer.encode(part, add_special_tokens=False)) for part in (begin, text, end, " then we turn")]
    script, (opened, thought, closed, _) = [token for part in parts for token in part], parts
    asked = list(tokenizer.encode(prompt, add_special_tokens=False))
    engine.llm.collective_rpc(follow_script)
    engine.llm.collective_rpc(take_script, args=(len(asked), script))
    table = engine.agent.tracker.sentences
    flags = flags_of(table, thought)
    ends = ends_of(flags)
    assert _places(tokenizer, thought, ends) == [len(part) for part in _parts()], "the ends are not those of the text"
    thinking = slice(len(opened), len(opened) + len(thought))

    def ask(**own: Any) -> tuple[list[int], Observed]:
        params = {"temperature": 0.0, "max_tokens": len(script), "ignore_eos": True, **own}
        with engine.watched() as seen:
            (tokens,) = engine.paced([Ask(asked, params)])
        return tokens, seen[0]

    # All features watch, and nothing is changed.
    dense = {"shadow": True, "eat_probe_interval_tokens": 1, "eat_probe_placement": "sentence"}
    engine.control.apply(
        {**NEUTRAL, "scheduler": {"max_think_tokens": 100_000, "min_think_tokens": 0}, "entropy": dense}
    )
    tokens, seen = ask()
    assert tokens == script
    rows = seen.rows[thinking]
    # The rows of a marker's first tokens count as thinking until the marker is complete.
    assert [row[1] for row in rows] == [f & 0x70 for f in flags], "the rows' flags depend on more than the tokens"
    assert all(row[0] == Phase.THINK for row in rows)
    (over,) = [at for at, row in enumerate(seen.rows) if row[1] & FLAG_END]
    assert over == thinking.stop + len(closed) - 1
    assert seen.rows[over][1] & FLAG_MARKER
    probed = [think_tokens for _, _, think_tokens, *_ in seen.probes]
    assert len(probed) > 2
    assert {n - 1 for n in probed} <= set(ends), (probed, ends)
    # Only rows after sentence ends are measured where the engine can choose them; the ends stay the same.
    soft = {"soft_think_tokens": FLOOR, "soft_close_rank": ANY_RANK, "min_think_tokens": 0}
    engine.control.apply({"scheduler": soft, "entropy": {"enabled": False}})
    tokens, seen = ask()
    (forced,) = [at for at, row in enumerate(seen.rows) if row[1] & FLAG_FORCED]
    written = forced + 1 - len(opened) - len(closed)
    first = next(at + 1 for at in ends if at + 1 >= FLOOR)
    assert first <= written <= first + LATE_TOKENS, (first, written)
    # Caps are exact, also in the middle of a number.
    engine.control.apply(NEUTRAL)
    cap = thought.index(tokenizer.encode(".", add_special_tokens=False)[0]) + 1
    most = len(opened) + cap + len(closed)
    tokens, seen = ask(max_tokens=most, extra_args={"meridian_max_think_tokens": cap})
    assert tokens == [*opened, *thought[:cap], *closed]
    assert any(f & FLAG_PARAGRAPH for f in flags)


def _parts() -> list[str]:
    """Return the text up to each sentence end, without END."""
    parts = THINKING.split(END)[:-1]
    return ["".join(parts[: n + 1]) for n in range(len(parts))]


def _places(tokenizer: Any, tokens: list[int], ends: list[int]) -> list[int]:
    """Return the number of characters up to the last one of each sentence that is no line feed. A token may have a
    sentence's end and the beginning of the next sentence, so the end is the next one of the text."""
    found = list[int]()
    places = [len(part) for part in _parts()]
    for end in ends:
        before, here = (len(tokenizer.decode(tokens[:n])) for n in (end, end + 1))
        found += [place for place in places if before < place <= here or (place <= before and place not in found)][:1]
    return found
