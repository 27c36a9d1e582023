"""The queue between targets and drafters: its bounds, its ends, and what it hands out."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.hidden_queue import Claim, EndOfStream, HiddenQueue, QueueClosedError, Ticket


@dataclass(eq=False)
class Memory:
    """A buffer of a hundred bytes."""

    nbytes: int = 100


Queue = HiddenQueue[Memory, tuple[Claim[Memory], int]]


def make_queue(lengths: Sequence[int], num_buffers: int, **settings: int) -> Queue:
    """A queue over batches of these lengths."""
    tickets = (Ticket(index, 10 * length, length) for index, length in enumerate(lengths))
    return HiddenQueue(tickets, [Memory() for _ in range(num_buffers)], **settings)


def send(queue: Queue, pauses_s: Sequence[float] = (0.0,)) -> None:
    """Make every batch that is left, with a pause for each."""
    while (claim := queue.claim()) is not None:
        time.sleep(pauses_s[claim.ticket.batch_index % len(pauses_s)])
        queue.put(claim, (claim, claim.ticket.batch_index))


def drain(queue: Queue, num_senders: int = 1, num_receivers: int = 1, pauses_s: Sequence[float] = (0.0,)) -> list[int]:
    """Let senders and receivers run; returns the batches in the order of the turns of the receivers."""
    taken: list[list[int]] = [[] for _ in range(num_receivers)]
    receivers = [queue.receiver() for _ in range(num_receivers)]

    def receive(number: int) -> None:
        with receivers[number] as receiver:
            while True:
                try:
                    claim, index = receiver.get()
                except EndOfStream:
                    return
                taken[number].append(index)
                time.sleep(pauses_s[(index + number) % len(pauses_s)])
                receiver.release(claim.buffer)

    threads = [threading.Thread(target=send, args=(queue, pauses_s)) for _ in range(num_senders)]
    threads += [threading.Thread(target=receive, args=(number,)) for number in range(num_receivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [taken[turn % num_receivers][turn // num_receivers] for turn in range(sum(map(len, taken)))]


def test_one_ready_keeps_the_order() -> None:
    """With hs_min_ready=1 batches leave in their order."""
    assert drain(make_queue([3, 9, 1, 5], num_buffers=2)) == [0, 1, 2, 3]


def test_longest_of_the_oldest_goes_first() -> None:
    """A receiver takes the longest of exactly the oldest hs_min_ready batches, the oldest of equals."""
    queue = make_queue([3, 1, 2, 9, 9], num_buffers=3, hs_min_ready=3, oldest_every=1000, takes=1)

    assert drain(queue) == [0, 3, 4, 2, 1]


def test_nothing_starves() -> None:
    """Every oldest_every-th take is the oldest batch, however short."""
    queue = make_queue([1] + [9] * 12, num_buffers=2, hs_min_ready=2, oldest_every=4, takes=1)

    assert drain(queue).index(0) == 3


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=24),
    window=st.integers(1, 4),
    num_senders=st.integers(1, 3),
    num_receivers=st.integers(1, 3),
    pauses_s=st.lists(st.sampled_from([0.0, 0.0005, 0.002]), min_size=1, max_size=5),
)
def test_order_depends_on_neither_timing_nor_workers(
    lengths: list[int], window: int, num_senders: int, num_receivers: int, pauses_s: list[float]
) -> None:
    """However many senders and receivers at whatever speed: the same batches in the same order of turns, each once."""
    alone = drain(make_queue(lengths, 4, hs_min_ready=window))
    together = drain(make_queue(lengths, 4, hs_min_ready=window), num_senders, num_receivers, pauses_s)

    assert together == alone
    assert sorted(alone) == list(range(len(lengths)))


def test_a_large_window_favours_long_batches() -> None:
    """The first half taken of 800 random lengths is longer, with fewer short ones, the larger hs_min_ready is."""

    def mix(window: int) -> tuple[float, float]:
        """Mean length of the first half taken, and the share in it that is below 100."""
        rng = random.Random(0)
        lengths = [rng.randrange(1000) for _ in range(800)]
        taken = [lengths[index] for index in drain(make_queue(lengths, 32, hs_min_ready=window))[:400]]
        return sum(taken) / 400, sum(length < 100 for length in taken) / 400

    (mean_1, short_1), (mean_8, short_8), (mean_32, short_32) = mix(1), mix(8), mix(32)

    assert mean_1 < mean_8 < mean_32
    assert short_1 > short_8 > short_32 > 0


def test_late_sender_finds_the_end() -> None:
    """A sender that asks when receivers have taken everything and left is told that nothing is left: no failure."""
    queue = make_queue([1, 1], num_buffers=2)

    assert sorted(drain(queue)) == [0, 1]
    assert queue.claim() is None


def test_claims_wait_for_a_buffer() -> None:
    """A sender cannot begin a batch before there is room for it; the room of a batch comes back on release."""
    queue = make_queue([1, 1, 1], num_buffers=2)
    receiver = queue.receiver()
    claims = [queue.claim(), queue.claim()]
    for claim in claims:
        assert claim is not None
        queue.put(claim, (claim, claim.ticket.batch_index))
    third: list[Claim[Memory] | None] = []
    thread = threading.Thread(target=lambda: third.append(queue.claim()))
    thread.start()
    claim, _ = receiver.get()
    thread.join(0.05)

    assert not third
    assert (queue.statistics().depth, queue.statistics().num_bytes, queue.statistics().capacity_bytes) == (1, 10, 200)
    receiver.release(claim.buffer)
    thread.join(5)
    assert third[0] is not None


def test_sender_learns_that_nobody_receives() -> None:
    """Claiming or putting without receivers, also when already waiting, raises instead of hanging."""
    queue = make_queue([1, 1], num_buffers=1)
    receiver = queue.receiver()
    claim = queue.claim()
    failures: list[BaseException] = []

    def claim_another() -> None:
        try:
            queue.claim()
        except QueueClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=claim_another)
    thread.start()
    with receiver:
        pass
    thread.join(5)

    assert len(failures) == 1
    assert claim is not None
    with pytest.raises(QueueClosedError):
        queue.put(claim, (claim, 0))


def test_abort_wakes_both_sides() -> None:
    """After an abort a waiting receiver gets QueueClosedError, not the end of the stream."""
    queue = make_queue([1], num_buffers=1)
    receiver = queue.receiver()
    threading.Timer(0.05, queue.abort).start()

    with pytest.raises(QueueClosedError):
        receiver.get()


def test_waiting_time_is_counted_while_it_lasts() -> None:
    """A receiver that is still waiting shows in the statistics."""
    queue = make_queue([1], num_buffers=2)
    receiver = queue.receiver()
    thread = threading.Thread(target=receiver.get)
    thread.start()
    time.sleep(0.1)

    assert queue.statistics().get_blocked_s == pytest.approx(0.1, abs=0.05)
    send(queue)
    thread.join(5)
    assert (queue.statistics().puts_total, queue.statistics().gets_total) == (1, 1)


def test_impossible_bounds_are_refused() -> None:
    """More batches to choose from than the queue holds is an error that names the keys."""
    with pytest.raises(ValueError, match=r"queue\.hs_min_ready=5 exceeds the 4 batches that queue\.max_items"):
        make_queue([], num_buffers=4, hs_min_ready=5)
