"""The queue between target and drafter: its bounds, its ends, and what it hands out."""

import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.hidden_queue import EndOfStream, HiddenQueue, QueueClosedError


@dataclass(frozen=True)
class Item:
    """A queue item of a given weight and length."""

    length: int
    num_bytes: int = 1


def drain(items: list[Item], **bounds: int) -> list[Item]:
    """Send items from another thread and return them in the order they were taken."""
    queue: HiddenQueue[Item] = HiddenQueue(**bounds)
    sender, receiver = queue.sender(), queue.receiver()

    def send() -> None:
        with sender:
            for item in items:
                sender.put(item)

    thread = threading.Thread(target=send)
    thread.start()
    taken = []
    with receiver:
        while True:
            try:
                taken.append(receiver.get())
            except EndOfStream:
                break
    thread.join()
    return taken


def test_one_ready_keeps_the_order() -> None:
    """With hs_min_ready=1 items leave as they came."""
    items = [Item(3), Item(9), Item(1), Item(5)]

    assert drain(items, max_bytes=100, max_items=2, hs_min_ready=1) == items


def test_longest_of_the_oldest_goes_first() -> None:
    """A receiver takes the longest of exactly the oldest hs_min_ready items, the oldest of equals."""
    items = [Item(3), Item(1), Item(2), Item(9), Item(9, 2)]

    taken = drain(items, max_bytes=100, max_items=3, hs_min_ready=3, oldest_every=1000, takes=1)

    assert taken == [Item(3), Item(9), Item(9, 2), Item(2), Item(1)]


def test_nothing_starves() -> None:
    """Every oldest_every-th take is the oldest item, however short."""
    items = [Item(1), *[Item(9)] * 12]

    taken = drain(items, max_bytes=100, max_items=2, hs_min_ready=2, oldest_every=4, takes=1)

    assert taken.index(Item(1)) == 3


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30),
    window=st.integers(1, 4),
    max_bytes=st.integers(1, 20),
    jitter=st.integers(0, 3),
)
def test_order_does_not_depend_on_timing(
    lengths: list[tuple[int, int]], window: int, max_bytes: int, jitter: int
) -> None:
    """Whatever the speed of the two sides, the same items leave in the same order, each once."""
    items = [Item(length, num_bytes) for length, num_bytes in lengths]
    fast = drain(items, max_bytes=max_bytes, max_items=4, hs_min_ready=window)
    queue: HiddenQueue[Item] = HiddenQueue(max_bytes=max_bytes, max_items=4, hs_min_ready=window)
    sender, receiver = queue.sender(), queue.receiver()

    def send() -> None:
        with sender:
            for number, item in enumerate(items):
                time.sleep(0.0005 * ((number * 7 + jitter) % 3))
                sender.put(item)

    thread = threading.Thread(target=send)
    thread.start()
    slow = []
    with receiver:
        for number in range(len(items)):
            time.sleep(0.0005 * ((number * 5 + jitter) % 4))
            slow.append(receiver.get())
    thread.join()

    assert slow == fast
    assert sorted(fast, key=hash) == sorted(items, key=hash)


def test_bytes_are_bounded_but_a_giant_passes_alone() -> None:
    """A sender waits while the bytes do not fit; an item larger than the bound enters an empty queue."""
    queue: HiddenQueue[Item] = HiddenQueue(max_bytes=10, max_items=100)
    sender, receiver = queue.sender(), queue.receiver()
    sender.put(Item(1, 99))
    thread = threading.Thread(target=sender.put, args=(Item(2, 1),))
    thread.start()
    time.sleep(0.05)

    assert queue.statistics().depth == 1
    assert receiver.get() == Item(1, 99)
    thread.join(1)
    assert queue.statistics().num_bytes == 1


def test_sender_learns_that_nobody_receives() -> None:
    """A put without receivers, also one that is already waiting, raises instead of hanging."""
    queue: HiddenQueue[Item] = HiddenQueue(max_bytes=10, max_items=1)
    sender, receiver = queue.sender(), queue.receiver()
    failures: list[BaseException] = []

    def put_two() -> None:
        try:
            sender.put(Item(1))
            sender.put(Item(2))
        except QueueClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=put_two)
    thread.start()
    time.sleep(0.05)
    with receiver:
        pass
    thread.join(1)

    assert len(failures) == 1


def test_abort_wakes_both_sides() -> None:
    """After an abort a waiting receiver gets QueueClosedError, not the end of the stream."""
    queue: HiddenQueue[Item] = HiddenQueue(max_bytes=10, max_items=1)
    queue.sender()
    receiver = queue.receiver()
    threading.Timer(0.05, queue.abort).start()

    with pytest.raises(QueueClosedError):
        receiver.get()


def test_waiting_time_is_counted_while_it_lasts() -> None:
    """A receiver that is still waiting shows in the statistics."""
    queue: HiddenQueue[Item] = HiddenQueue(max_bytes=10, max_items=1)
    sender, receiver = queue.sender(), queue.receiver()
    thread = threading.Thread(target=receiver.get)
    thread.start()
    time.sleep(0.1)

    assert queue.statistics().get_blocked_s == pytest.approx(0.1, abs=0.05)
    sender.put(Item(1))
    thread.join(1)
    assert (queue.statistics().puts_total, queue.statistics().gets_total) == (1, 1)


def test_impossible_bounds_are_refused() -> None:
    """More items to choose from than the queue holds is an error that names both keys."""
    with pytest.raises(ValueError, match=r"queue\.hs_min_ready=5 exceeds queue\.max_items=4"):
        HiddenQueue(max_bytes=10, max_items=4, hs_min_ready=5)
