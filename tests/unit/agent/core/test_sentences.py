"""The ends of sentences: in made-up tokens, in real vocabularies, and however an engine cuts the tokens into steps."""

from __future__ import annotations

import functools
import gc
import random
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core.phases import FLAG_GOES_ON, FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_agent.core.sentences import (
    CERTAIN,
    ENDED,
    NO_SENTENCES,
    ROW_FLAGS,
    SentenceTable,
    States,
    StepStates,
    TokenText,
    newest_end,
    split_bytes,
    table_of,
)
from meridian_agent.core.tracker import Tracker
from meridian_agent.vllm_adapter.tokenizer import sentences_of
from tests.fakes.engine import MARKERS, opened
from tests.fakes.sentences import ends_of, flags_of
from tests.needed import VOCABULARIES, VOCABULARY_NAMES, vocabulary_folder

END = "‖"


def marked(pieces: Sequence[str]) -> str:
    """Return the texts of tokens one after another, with END after each token that ends a sentence and a bar after all
    others."""
    ends = ends_of(flags_of(table_of(map(TokenText, pieces)), range(len(pieces))))
    return "".join(text + (END if at in ends else "|") for at, text in enumerate(pieces))


@pytest.mark.parametrize(
    "expected",
    [
        # One token decides, whatever its script, and also if the next sentence begins in it.
        "是|的|。‖那么|",
        "好|！‖对|？‖嗯|…‖对|",
        "是|的|。那么‖好|",
        " ठीक| है|।‖ फिर|",
        " صحيح|؟‖ نعم|",
        " khmer|។‖ ក|",
        # Closing brackets, quotes and signs of Markdown and LaTeX belong to the end.
        " it|.)‖ Then|",
        " it|.|)‖ Then|",
        ' Stop|!"‖ He|',
        " bold|.**‖ Then|",
        " bold|.|**‖ Then|",
        " $|x|.$‖ Then|",
        " \\(|x|.|\\|)‖ Then|",
        "「|はい|。|」‖と|",
        "『|はい|。』‖と|",
        # Numbers, abbreviations, initials and the numbers of lists.
        " is| |3|.|14| here|",
        " is| |3|.‖ Then|",
        " e|.g|.| this|",
        " e|.|g|.| The|",
        " i|.e|.,| so|",
        " Dr|.| Smith|.‖",
        " z|.B|.| Haus|",
        " U|.S|.| law|",
        " J|.| Smith|",
        " Fig|.| 3|",
        " Fig|.| |3|",
        " No|.‖ That|",
        "1|.| Add| two|.\n‖2|.| Take| it|.‖",
        "\n|1|0|.| Add|",
        "**|1|.|**| Add|",
        " z|.| B|.| Haus|",
        " Eq|.| (|2|)|",
        # A letter and a German ordinal end a sentence only before a word that begins many, so no name and no date ends.
        " is| B|.‖ The|",
        " plan| B|.‖ Then|",
        " of| the| U|.S|.‖ It|",
        " is| B|.|\n‖",
        " z|.| B|.| Die|",
        " z|.B|.| Die|",
        " by| J|.| Smith|",
        " J|.| R|.| Smith|",
        "\n|B|.| The|",
        " am| |3|.| Mai|",
        " im| |1|9|.| Jahrhundert|",
        " Am| |3|.| Mai|",
        " ist| der| |3|.‖ Er|",
        " I| am| |30|.‖ He|",
        " am| |3|.|5| mm|",
        " der| A|.| Mann|",
        " in| |2019|.‖ Germany|",
        # A factorial, and the end of an address.
        " n|!| =| |6|",
        " n|!| >| |2|",
        " n|!‖ So|",
        " c|.org|.‖ At|",
        # What follows shows whether the sentence goes on.
        " Hmm|...| so|",
        " Hmm|...‖ So|",
        " ok|.| and|",
        " file|.|txt| is|",
        " a| !|=| b|",
        " what|?|,| he|",
        " what|?|!‖ He|",
        # Lines and paragraphs.
        " so|.|\n|\n‖Then|",
        " so|\n‖Then|\n\n‖Now|",
        "\n|\n\n|First|",
    ],
)
def test_tokens_end_sentences(expected: str) -> None:
    pieces = expected.replace(END, "|").split("|")[:-1]
    assert marked(pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        ([" है".encode(), "।".encode()[:2], "।".encode()[2:], " फिर".encode()], [2]),
        ([b"x", *(bytes([b]) for b in "۔".encode()), b" x"], [2]),
        ([b"x", *(bytes([b]) for b in "。".encode()), "那么".encode()], [3]),
        ([b"x", "的。".encode()[:4], "的。那".encode()[4:], b"x"], [2]),
        # Another character with the same first bytes, and one that nothing completes.
        ([b"x", "अ".encode()[:2], "अ".encode()[2:], b" x"], []),
        ([b"x", "。".encode()[:2], b" x", "。".encode()[2:]], []),
        # A sentence ends before a character that a token only begins.
        ([b"xy", b".", "你".encode()[:2], "你".encode()[2:]], [1]),
    ],
)
def test_a_token_may_hold_a_part_of_a_character(pieces: list[bytes], ends: list[int]) -> None:
    table = table_of(map(split_bytes, pieces))
    assert ends_of(flags_of(table, range(len(pieces)))) == ends


def test_paragraphs_and_markers() -> None:
    texts = [TokenText(" We"), TokenText("\n"), TokenText("\n\n"), TokenText("."), TokenText("", special=True)]
    table = table_of(texts)
    word, line, paragraph, stop, special = range(5)
    both = FLAG_SENTENCE | FLAG_PARAGRAPH
    flags = flags_of(table, [word, line, line, word, paragraph, word])
    assert [f & both for f in flags] == [0, FLAG_SENTENCE, both, 0, both, 0]
    assert flags[2] & FLAG_GOES_ON, "the end belongs to the later line feed"
    assert ends_of(flags_of(table, [word, stop, special])) == [1], "a marker ends what seemed to end"
    known = [newest_end(f) for f in flags_of(table, [word, stop, word, paragraph, word])]
    assert known == [None, None, (1, FLAG_SENTENCE), (0, both), (1, both)]


def test_ids_outside_of_the_vocabulary_are_words() -> None:
    table = table_of([TokenText("."), TokenText(" a")])
    for unknown in (2, 1 << 40, -1):
        assert ends_of(flags_of(table, [unknown, 0, 1])) == []
        assert ends_of(flags_of(table, [unknown, 0, 2])) == []
    assert flags_of(NO_SENTENCES, [0, 1, 2]) == [0, 0, 0]
    assert table.may_end == bytes([1, 0])


def test_a_row_is_measured_if_its_token_may_end_a_sentence() -> None:
    """`may_end` leaves out no token that ends a sentence; a token that only belongs to an end follows another such."""
    texts = [TokenText(t) for t in (" a", ".", ")", " ", "\n", "。那么", "!", "1", ",")] + [split_bytes(b"\xe3\x80")]
    texts.append(split_bytes(b"\x82"))
    table, rng = table_of(texts), random.Random(1)
    tokens = rng.choices(range(len(texts)), k=5000)
    for at in ends_of(flags_of(table, tokens)):
        kind = table.may_end[tokens[at]]
        assert kind == 1 or (kind == 2 and table.may_end[tokens[at - 1]])


# ------------------------------------------------------------------------------------------------- steps of an engine

TEXTS = [
    " a",
    " A",
    " so",
    ".",
    ".)",
    "!",
    "?",
    "。",
    "」",
    "。那",
    "3",
    " ",
    "\n",
    "\n\n",
    " Dr",
    "e",
    ".g",
    ",",
    "**",
]
VOCABULARY = [*map(TokenText, TEXTS), *map(split_bytes, (b"\xe0\xa5", b"\xa4")), TokenText("", special=True)]
TABLE = table_of(VOCABULARY)
FIRST = 3


def shifted(table: SentenceTable) -> SentenceTable:
    """Return the table with its first token at the id FIRST; the ids below are markers, like the last token."""
    classes = array("H", [*[table.classes[-2]] * FIRST, *table.classes])
    return SentenceTable(classes, table.after, table.flags, bytes(FIRST) + table.may_end)


WORDS = st.integers(FIRST, FIRST + len(TEXTS) + 1)


@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_ends_do_not_depend_on_how_tokens_are_cut_into_steps(
    thinking: list[list[int]], drafts: int, rng: random.Random
) -> None:
    """Requests get their tokens in steps of one or several, in changing rows; they leave steps out, are preempted, end
    in the middle of the run, and a new agent begins to track them."""
    table = shifted(TABLE)
    expected = {f"r{n}": [f & ROW_FLAGS for f in flags_of(table, tokens)] for n, tokens in enumerate(thinking)}
    seen: dict[str, list[int]] = {name: [] for name in expected}
    tracker = made(table, drafts)
    for name in expected:
        opened(tracker, name)
    while any(len(seen[name]) < len(expected[name]) for name in seen):
        if rng.random() < 0.05:
            tracker = handed_over(tracker, table, drafts, thinking, seen)
        names = [name for name in seen if len(seen[name]) < len(expected[name]) and rng.random() < 0.9]
        rng.shuffle(names)
        if names:
            step(tracker, names, thinking, seen, rng)
    assert seen == expected


def test_states_are_the_same_in_whatever_order_two_threads_read_them() -> None:
    rng, table = random.Random(1), shifted(TABLE)
    steps = [rng.choices(range(FIRST, FIRST + len(TEXTS) + 2), k=3) for _ in range(200)]
    expected = [[0] * 3]
    for tokens in steps:
        expected.append([table.step(state, token) for state, token in zip(expected[-1], tokens, strict=True)])
    for _ in range(20):
        chain = [States(np.zeros(3, np.uint32))]
        for tokens in steps:
            chain.append(StepStates(chain[-1], table, tokens))
        reads = [rng.sample(chain, 20) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(lambda read: [each.get() for each in read], read) for read in reads]
        assert all(each.result() for each in done)
        assert [each.get().tolist() for each in chain] == expected


def test_no_awaited_end_is_missed_in_a_long_run() -> None:
    rng, tracker = random.Random(1), made(shifted(TABLE), 0)
    thinking = [rng.choices(range(FIRST, FIRST + len(TEXTS) + 2), k=300) for _ in range(2)]
    seen: dict[str, list[int]] = {name: [] for name in ("r0", "r1")}
    for name in seen:
        opened(tracker, name)
    for _ in thinking[0]:
        step(tracker, list(seen), thinking, seen, rng)


def made(table: SentenceTable, drafts: int) -> Tracker:
    tracker = Tracker(MARKERS, 1 + drafts)
    tracker.lookahead, tracker.sentences = drafts, table
    return tracker


def handed_over(
    old: Tracker, table: SentenceTable, drafts: int, thinking: list[list[int]], seen: dict[str, list[int]]
) -> Tracker:
    """Return the tracker of an agent that follows another one, and finds the requests in the engine."""
    new = made(table, drafts)
    for name, live in old.by_id.items():
        done = thinking[int(name[1:])][: len(seen[name])]
        new.enter(live.info, live.state, 0, SimpleNamespace(), sentence=table.state_of(done))
    return new


def step(
    tracker: Tracker, names: list[str], thinking: list[list[int]], seen: dict[str, list[int]], rng: random.Random
) -> None:
    """Account a step as the agent does, note the flags that its record reports, and check the state and the newest end
    of each request."""
    most, sampled = tracker.run.tokens_per_step, list[list[int]]()
    for name in names:
        at = len(seen[name])
        sampled.append(thinking[int(name[1:])][at : at + rng.randint(1, most)])
        if rng.random() < 0.05:
            tracker.preempt(tracker.by_id[name])
            tracker.resume(tracker.by_id[name])
    run, slots = tracker.run, {live.slot: name for name, live in tracker.by_id.items()}
    text = run.count_all(names, sampled, tracker.markers.by_last.keys()) if rng.random() < 0.9 else None
    if text is not None:
        columns: Any = run.slots, run.phases, run.rows, text, run.sentences, run.text_states, None
        tracker.record.tell((0, 0, 0, 0, 0, *columns, run.lengths_for(None)))
    else:
        others = tracker.note(names, sampled)
        tracker.count(others)
        for row in others:
            tracker.feed(tracker.by_id[names[row]], sampled[row], row)
        tracker.looked_at(others)
    record = tracker.take_record()
    record.spread()
    for slot, flags in zip(record.slots, record.row_flags(), strict=True):
        seen[slots[slot]].append(flags)
    for live in tracker.by_id.values():
        assert live.sentence == tracker.sentences.state_of(thinking[int(live.info.request_id[1:])][: live.think_tokens])
    if most == 1:
        members = [live for live in tracker.by_id.values() if live.run_row >= 0]
        newest = {live: newest_end(tracker.sentences.flags[live.sentence]) for live in members}
        awaited = {live.run_row: (FLAG_SENTENCE, CERTAIN) for live in members}
        assert run.at_ends(awaited) == {live: end[0] for live, end in newest.items() if end is not None}


@given(st.lists(WORDS, max_size=60))
def test_each_end_becomes_known_once(tokens: list[int]) -> None:
    """Where a sentence ends for certain, or is known to have ended, is where the flags of the rows say so."""
    flags = flags_of(shifted(TABLE), tokens)
    known = {at - 1 for at, f in enumerate(flags) if f & ENDED}
    ended = set(ends_of(flags)[: -1 if flags and flags[-1] & FLAG_SENTENCE else None])
    certain = {at for at, f in enumerate(flags) if f & CERTAIN}
    assert known <= ended
    assert ended <= known | certain


# -------------------------------------------------------------------------------------------------- real vocabularies

# Line feeds at which a text is continued are left out.
TEXT = {
    "English": """
Okay, so I need to find the value.‖ It is about 3.14, i.e. slightly more than 3.‖ Dr. Smith said "Stop!"‖ Then he left.‖
 Is that right?‖ Yes (I checked it twice).‖ Wait, the total is $4.50, not 4.‖ See Fig. 3 for the U.S. data.‖ Hmm... that
 gives 12.‖ "Really?"‖ Prices rose 2.5% in Jan. 2024 vs. 2023.‖ So the answer is 42.‖
""",
    "German": """
Also, ich muss das Ergebnis prüfen.‖ Das sind z. B. 1.000 Euro, d.h. ca. 5 % mehr.‖ Stimmt das?‖ Ja, denn x ist größer
 als 2,5.‖ „Gut.“‖ Dr. Müller sagt bzw. schreibt es so.‖ Moment!‖ Die Summe ist dann 7.‖
""",
    "Chinese": """
好的，我们来计算一下。‖那么，结果是3.14吗？‖不对！‖他说：“是的。”‖然后我们继续……‖所以答案是42。‖（这一点很重要。）‖因此，x大于2。‖
""",
    "Japanese": """
まず、値を計算します。‖答えは3.5ですか？‖いいえ！‖彼は「はい。」‖と言いました。‖しかし、これは正しくない。‖したがって、答えは42です。‖
""",
    "Hindi": """
पहले हमें मान निकालना है।‖ क्या यह 3.14 है?‖ नहीं, यह गलत है।‖ इसलिए उत्तर 42 है।‖ ठीक है!‖ अब आगे बढ़ते हैं।‖
""",
    "Arabic": """
أولاً نحسب القيمة.‖ هل الناتج 3.14؟‖ لا، هذا غير صحيح!‖ إذن الجواب هو 42.‖ حسناً، لنتابع الحل.‖
""",
    "Urdu": """
پہلے ہم قیمت نکالتے ہیں۔‖ کیا یہ درست ہے؟‖ نہیں، یہ غلط ہے۔‖ اس لیے جواب 42 ہے۔‖
""",
    "LaTeX": r"""
We have $x = 1.5$ and $y = 2.$‖ Then \(x + y = 3.5.\)‖ Hence $$z > 0.$$‖ By Eq. (2), $f(x) = x^2.$‖ Let
 $\mathbf{v} = 0$.‖ So $n = 4$.‖
""",
    "mathematics": r"""
Let $\epsilon = 1.5e-3$ and $N \ge 10^6$.‖ Then $$\sum_{i=1}^{n} a_i = 2.75.$$‖ Since \(p \mid q\), we get \(p = 7\).‖
 By Thm. 4.2, $f'(x) \to 0$.‖ So the error is at most 2.5e-4.‖ The answer is B.‖ Then check C.‖ Therefore x! = 120.‖ Is
 $n! > 2^n$?‖ Yes.‖ Note that e.g. $5! = 120$, i.e. more.‖ Thus \boxed{42}.‖ Done!‖
""",
    "web and names": """
See https://example.com/a.b/c?d=1.2&e=f! for details.‖ Visit www.foo.org.‖ The version is v1.2.3, not 1.2.4-rc.1.‖ J. R.
 R. Tolkien met C. S. Lewis in Oxford.‖ Mail me at a.b@c.org.‖ At 3 p.m. we left, at 5 a.m. we came.‖ Fig. 3 and
 Eq. (7) show it, cf. Sec. 2.‖ The U.S. economy grew.‖ He lives in the U.S.‖ She does not.‖ Mr. and Mrs. Brown paid
 $1,299.99.‖ Wait... what?‖ Hmm…‖ Okay.‖ Plan B.‖ So we go.‖ In 2019.‖ That was it.‖ It was No. 5 of 10.‖
""",
    "German dates": """
Am 3. Mai 2020 begann es.‖ Im 19. Jahrhundert war das anders.‖ Der 2. Weltkrieg endete am 8. Mai 1945.‖ Die Antwort ist
 B.‖ Dann prüfen wir C.‖ Das kostet 3,50 Euro.‖ Es waren 12.‖ Das ist viel.‖ „Kommst du?“, fragte er.‖ »Ja.«‖ Gut.‖
""",
    "French": """
Il a dit : « Oui.‖ » Puis il est parti.‖ M. Dupont habite ici.‖ Pourquoi ?‖ Parce que c’est 3,14 !‖ Mme Durand, p. ex.,
 viendra.‖ D'accord.‖
""",
    "Spanish": """
¿Cuánto es 2,5?‖ ¡Es mucho!‖ El Sr. López llegó a las 3 p. m. con la Dra. Ruiz.‖ Luego salió.‖ EE. UU. es grande.‖
""",
    "Chinese quotes": """
老师问：「你懂了吗？」‖他点点头。‖『当然。』‖圆周率约为3.14159，也就是π。‖第1.步不对！‖Wait，再算一次……‖所以选B。‖接下来看C。‖（见图3。）‖嗯……‖好的！！‖
""",
    "Japanese quotes": """
「そうですか。」‖と彼女は言った。‖3.5は正しい？‖いや、違う！‖Aが答えだ。‖よし…‖次へ進もう。‖『なるほど！』‖と思った。‖
""",
    "more Hindi": """
यह प्रश्न कठिन है।‖ राम ने कहा, "चलो।"‖ क्या उत्तर 2.5 है?‖ हाँ।‖ डॉ. शर्मा आए।‖ ठीक॥‖ अब x = 7।‖
""",
    "more Arabic": """
نبدأ بالحل.‖ كم الناتج؟‖ الناتج 2.5، أليس كذلك؟‖ نعم!‖ قال: «حسناً.»‖ ثم انتهى.‖
""",
    "Korean": """
먼저 값을 구한다.‖ 답은 3.14인가?‖ 아니다!‖ "좋아."‖ 그러면 42이다.‖
""",
    "Russian": """
Найдём значение, т.е. корень.‖ Это 2,5?‖ Нет!‖ А. С. Пушкин писал это в 1830 г. в Болдине.‖ Итак, ответ 42.‖
""",
    "emoji": """
Great!‖ 🎉 That works.‖ 👍 Next step: 3.5 🙂.‖ OK!‖ Now 🚀 go.‖
""",
}
TEXT = {name: text.replace("\n", "") for name, text in TEXT.items()} | {
    "Markdown": """**Step one.**‖ Read the text.

‖1. Add the numbers.
‖2. **Multiply** them by 3.
‖10. Check the result (twice).

‖- The first point is `x.y`.
‖- *This is the second.*‖ It is short.

‖> He wrote it.‖ Then he left.
‖""",
    "Thai": """เราต้องหาค่าก่อน แล้วจึงคำนวณ
‖คำตอบคือ 3.14 ครับ
‖""",
    "Windows": "First line.\r\n‖Second line is 3.5\r\n\r\n‖- Item one.\r\n‖- Item two\r\n‖Done.‖",
    "lists": """1. First, compute 2.5.
‖2) Then add e.g. 3.
‖a) Check.
‖B. The second option.
‖* Bullet with `a.b()`.
‖   - Nested, i.e. deep!
‖### 3. Heading
‖| a | 1.5 |
‖""",
    "fenced code": """```python
‖x = obj.method(1.0)  # no. 3
‖if x != 1e-5: return x.y
‖```
It prints "3.0".‖ Then `foo.bar` fails.‖ Why?‖
""",
    "code": """def area(r):
‖    return 3.14 * r ** 2

‖x = area(2.0)
‖assert x != 0, "Wrong."
‖print(x.real)
‖""",
}


@functools.cache
def vocabulary(name: str) -> tuple[Any, SentenceTable]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(vocabulary_folder() / name / "tokenizer.json"))
    table, failed = sentences_of(tokenizer, 1 << 20)
    assert not failed
    # About four bytes for each id.
    assert sum(memoryview(part).nbytes for part in (table.classes, table.after, table.flags, table.may_end)) < 2_000_000
    return tokenizer, table


def by_last_character(text: str) -> bool:
    """The judgement that looks at one token: whether it has a line feed, or ends with a sign of Latin script."""
    return "\n" in text or text.rstrip().endswith((".", "?", "!", ";"))


def judged(text: str, spans: list[tuple[int, int]], ends: list[int]) -> tuple[int, int, int]:
    """Return how many ends of the text were found, were invented, and were missed. spans: of the tokens. ends: the
    tokens that are said to end sentences. A token ends a sentence if it has the sentence's last character, or only
    spaces after it."""
    places, plain = list[int](), text.replace(END, "")
    for part in text.split(END)[:-1]:
        places.append((places[-1] if places else 0) + len(part))
    found, invented = set[int](), 0
    for begin, end in (spans[at] for at in ends):
        here = [p for p in places if begin < p <= end or (p <= begin and not plain[p:end].strip())]
        if here and here[-1] not in found:
            found.add(here[-1])
        else:
            invented += 1
    return len(found), invented, len(places) - len(found)


@VOCABULARIES.mark
@pytest.mark.parametrize("name", VOCABULARY_NAMES)
def test_ends_in_real_vocabularies(name: str) -> None:
    """In each language, hardly an end is missed or invented, and the whole is far better than a judgement by the last
    character of each token."""
    tokenizer, table = vocabulary(name)
    total, before = [0, 0, 0], [0, 0, 0]
    for language, text in TEXT.items():
        encoded = tokenizer(text.replace(END, ""), add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        here = judged(text, spans, ends_of(flags_of(table, ids)))
        old = judged(text, spans, [at for at, i in enumerate(ids) if by_last_character(tokenizer.decode([i]))])
        total, before = ([a + b for a, b in zip(x, y, strict=True)] for x, y in ((total, here), (before, old)))
        print(line := shown(name, language, here, old))
        assert min(of(here)) >= 0.8, line
    print(shown(name, "all", total, before))
    assert min(of(total)) >= 0.97


def shown(name: str, language: str, here: Sequence[int], old: Sequence[int]) -> str:
    (precision, recall), (old_precision, old_recall) = of(here), of(old)
    return (
        f"{name:12} {language:9} precision {precision:.2f} (last character {old_precision:.2f}),"
        f" recall {recall:.2f} ({old_recall:.2f})"
    )


def of(counts: Sequence[int]) -> tuple[float, float]:
    """Return precision and recall."""
    found, invented, missed = counts
    return found / max(1, found + invented), found / max(1, found + missed)


def test_states_keep_nothing_that_they_came_from() -> None:
    """A run of any length keeps the states of its newest step only."""
    tracker = made(shifted(TABLE), 2)
    for name in ("r0", "r1"):
        opened(tracker, name)
    thinking, seen = [[FIRST] * 400] * 2, {"r0": list[int](), "r1": list[int]()}
    rng, kept = random.Random(1), list[int]()
    # A process that has run other tests has millions of other objects, which each collection would go through.
    gc.freeze()
    for _ in range(120):
        step(tracker, ["r0", "r1"], thinking, seen, rng)
        tracker.run.read()
        gc.collect()
        kept.append(sum(isinstance(each, States) for each in gc.get_objects()))
    assert max(kept[20:]) <= max(kept[:20]) + 2
