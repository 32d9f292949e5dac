"""The ring between the engine's thread and the sending thread: when the reader is woken, and that nothing is lost."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from meridian_agent.link.record_queue import RecordQueue

LONG_S = 30.0


def reader(ring: RecordQueue[int], wanted: int = 1, patient: int = 0) -> tuple[threading.Thread, list[int]]:
    """Start a thread that takes one item; the thread sleeps in the ring when this function returns."""
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(ring.get(LONG_S, wanted, patient)))
    thread.start()
    while not ring._wanted:
        time.sleep(0.001)
    return thread, got


def test_first_in_first_out() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1)
    ring.put(2)
    ring.lay(3)
    assert ring.qsize() == 3
    assert [ring.get(LONG_S), ring.get(LONG_S), ring.get_nowait()] == [1, 2, 3]
    for get in (ring.get_nowait, lambda: ring.get(0.001)):
        with pytest.raises(queue.Empty):
            get()


# Each row says how many items the reader waits for, `wanted` or, if it is `patient`, more; what happens while it sleeps
# on; and what wakes it. `lay` and `due` and `press` add an item and offer a wake, `silent` only adds one, `put` adds
# one at once.
READERS: dict[str, tuple[tuple[int, int], str, str]] = {
    "what is laid down waits for the wake": ((1, 0), "silent", "wake"),
    "what cannot wait wakes at once": ((5, 0), "", "put"),
    "as many as it wants": ((3, 0), "lay lay", "lay"),
    "something that presses": ((3, 0), "lay", "press"),
    "a patient one, of whose items none is due": ((2, 4), "lay lay lay", "lay"),
    "a patient one, of whose items the first is due": ((2, 4), "due", "lay"),
    "a patient one, of whose items the second is due": ((2, 4), "lay", "due"),
    "a patient one, of whose items the third is due": ((2, 4), "lay lay", "due"),
}


@pytest.mark.parametrize(("waits_for", "before", "waking"), READERS.values(), ids=READERS)
def test_what_wakes_a_reader(waits_for: tuple[int, int], before: str, waking: str) -> None:
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring, *waits_for)
    events = [*before.split(), waking]
    for number, event in enumerate(events, 1):
        assert bool(ring._wanted), "the reader is awake too early"
        if event == "put":
            ring.put(number)
        elif event != "wake":
            ring.lay(number, presses=event == "press", due=event == "due")
        if event != "silent":
            ring.wake()
        if number == len(events) - 1:
            thread.join(0.05)
            assert thread.is_alive()
    thread.join(LONG_S)
    assert got == [1]


def test_it_is_taken_without_a_wake_when_the_time_is_up() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1)
    assert ring.get(0.001, wanted=2) == 1


def test_what_was_taken_out_is_due_no_longer() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1, due=True)
    assert ring.get(LONG_S) == 1
    ring.took(0, True)
    thread, got = reader(ring, wanted=2, patient=4)
    for number in (2, 3):
        ring.lay(number)
        ring.wake()
        assert ring._wanted
    ring.put(4)
    thread.join(LONG_S)
    assert got == [2]


def test_an_item_that_must_be_sent_at_once_is_not_held_back() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1, presses=True)
    assert ring.presses
    assert ring.get(LONG_S, wanted=3) == 1
    ring.took(1)
    assert not ring.presses


def test_nobody_is_woken_while_the_reader_rests_but_for_what_cannot_wait() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1)
    ring.wake()
    assert ring._bell.empty(), "no reader sleeps, so nothing is woken"
    thread = threading.Thread(target=ring.rest, args=(LONG_S,))
    thread.start()
    ring.wake()
    thread.join(0.05)
    assert thread.is_alive()
    ring.put(2)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_no_wake_is_lost() -> None:
    """Each item is added when the last one has been taken, at any point of the reader's way to sleep."""
    ring: RecordQueue[int] = RecordQueue()
    taken = threading.Semaphore(0)
    got: list[int] = []

    def read() -> None:
        for _ in range(2000):
            got.append(ring.get(LONG_S))
            taken.release()

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(2000):
        ring.lay(number)
        ring.wake()
        assert taken.acquire(timeout=LONG_S)
    thread.join(LONG_S)
    assert got == list(range(2000))
