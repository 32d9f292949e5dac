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


def test_what_is_laid_down_waits_for_the_wake() -> None:
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring)
    ring.lay(1)
    thread.join(0.05)
    assert thread.is_alive()
    ring.wake()
    thread.join(LONG_S)
    assert got == [1]


def test_it_is_taken_without_a_wake_when_the_time_is_up() -> None:
    ring: RecordQueue[int] = RecordQueue()
    ring.lay(1)
    assert ring.get(0.001, wanted=2) == 1


def test_what_cannot_wait_wakes_at_once() -> None:
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring, wanted=5)
    ring.put(1)
    thread.join(LONG_S)
    assert got == [1]


def test_the_reader_is_woken_once_as_many_are_there_as_it_wants() -> None:
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring, wanted=3)
    for number in (1, 2):
        ring.lay(number)
        ring.wake()
    thread.join(0.05)
    assert thread.is_alive()
    ring.lay(3)
    ring.wake()
    thread.join(LONG_S)
    assert got == [1]


@pytest.mark.parametrize("due", [0, 1, 2, 3])
def test_a_patient_reader_waits_for_more_until_something_is_due(due: int) -> None:
    """due: which of the items is due, 0 for none."""
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring, wanted=2, patient=4)
    enough = max(2, due) if due else 4
    for number in range(1, enough + 1):
        assert thread.is_alive()
        assert bool(ring._wanted), "the reader is awake too early"
        ring.lay(number, due=number == due)
        ring.wake()
    thread.join(LONG_S)
    assert got == [1]
    ring.took(0, bool(due))
    assert [ring.get_nowait() for _ in range(enough - 1)] == list(range(2, enough + 1))
    thread, got = reader(ring, wanted=2, patient=4)
    ring.lay(7)
    ring.lay(8)
    ring.wake()
    assert ring._wanted, "what was taken out is due no longer"
    ring.put(9)
    thread.join(LONG_S)
    assert got == [7]


def test_something_that_presses_wakes_a_reader_who_wants_more() -> None:
    ring: RecordQueue[int] = RecordQueue()
    thread, got = reader(ring, wanted=3)
    ring.lay(1)
    ring.lay(2, presses=True)
    ring.wake()
    thread.join(LONG_S)
    assert (got, ring.presses) == ([1], True)
    assert ring.get(LONG_S, wanted=3) == 2, "an item that must be sent at once is not held back"
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
