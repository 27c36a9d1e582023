"""The bounded queue of hidden states between target workers and drafter workers.

It circulates a fixed set of equal buffers, so it is bounded in bytes and in items whatever the batches are. A sender
claims the next batch together with a free buffer before it starts to work, so whoever is ready makes the next batch,
and batches may be finished in any order. A receiver gives the buffer back once it has copied what is in it.

Which batch a receiver gets is a pure function of the order of the batches and their lengths, never of timing, so that
the same seed trains the same weights. A receiver waits until the oldest `hs_min_ready` batches are there (or all that
are left) and takes the longest of exactly those; ties go to the oldest. A small value mixes short and long sequences, a
large one favours long ones. Every `oldest_every`-th take is the oldest batch, so nothing starves. Several receivers
take in turn.

A receiver gets `EndOfStream` when the last batch has been taken. A sender gets `QueueClosedError` when no receiver is
left, and everybody when `abort` is called because a worker failed.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec


class Buffer(Protocol):
    """What the queue needs to know of a buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds at most."""


B = TypeVar("B", bound=Buffer)
T = TypeVar("T")


class Ticket(NamedTuple):
    """A batch that is to be made."""

    batch_index: int
    num_bytes: int
    """Bytes of its hidden states."""
    length: int
    """Sort key: the longest of the oldest goes first (tokens)."""


@dataclass(frozen=True, eq=False)
class Claim(Generic[B]):
    """A batch that one sender makes, and where to put its hidden states."""

    ticket: Ticket
    buffer: B


class EndOfStream(Exception):  # noqa: N818 - the end of the data is no error
    """Every batch has been taken."""


class QueueClosedError(Exception):
    """The other end is gone, or the queue was aborted."""


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent reading of the queue."""

    depth: int
    """Batches that are ready."""
    capacity: int
    num_bytes: int
    capacity_bytes: int
    puts_total: int
    gets_total: int
    put_blocked_s: float
    """Summed over senders, waits that are still going on included."""
    get_blocked_s: float
    """Summed over receivers, waits that are still going on included."""
    oldest_age_s: float


class _Slot(Generic[B, T]):
    """A batch from its claim to its take; `item` and `since_s` are set when it is ready."""

    def __init__(self, claim: Claim[B]) -> None:
        self.claim = claim
        self.item: T | None = None
        self.since_s = 0.0


class HiddenQueue(Generic[B, T]):
    """A bounded queue of hidden states; every method is safe from any thread.

    Args:
        tickets: the batches to make, in order.
        buffers: at least `hs_min_ready`.
        hs_min_ready: how many batches a receiver chooses from.
        oldest_every: every how many takes the oldest batch goes first.
        takes: takes already made by an earlier session of the run (resume).
    """

    def __init__(
        self,
        tickets: Iterator[Ticket],
        buffers: Sequence[B],
        *,
        hs_min_ready: int = 1,
        oldest_every: int = 8,
        takes: int = 0,
    ) -> None:
        if hs_min_ready > len(buffers):
            raise ValueError(
                f"queue.hs_min_ready={hs_min_ready} exceeds the {len(buffers)} batches that queue.max_items and "
                f"queue.max_bytes leave room for (up to {max((b.nbytes for b in buffers), default=0)} bytes each): "
                "lower it, or raise those"
            )
        self._tickets: Iterator[Ticket] | None = tickets
        self._free = list(buffers)
        self._capacity = len(buffers)
        self._capacity_bytes = sum(buffer.nbytes for buffer in buffers)
        self._hs_min_ready = hs_min_ready
        self._oldest_every = oldest_every
        self._takes = takes
        self._slots: list[_Slot[B, T]] = []
        self._puts = self._gets = 0
        self._changed = threading.Condition()
        self._num_receivers = self._open_receivers = 0
        self._aborted = False
        self._blocked_s = {"put": 0.0, "get": 0.0}
        self._waiting_since_s: dict[str, list[float]] = {"put": [], "get": []}

    def receiver(self) -> "Receiver[B, T]":
        """Open a receiving end; open all of them before anybody starts."""
        with self._changed:
            self._num_receivers += 1
            self._open_receivers += 1
            return Receiver(self, self._num_receivers - 1)

    def claim(self) -> Claim[B] | None:
        """Take on the next batch, waiting for a buffer; None when there is none left.

        Raises:
            QueueClosedError: nobody will take it.
        """
        with self._changed:
            if not self._may_claim():
                with self._blocked("put"):
                    self._changed.wait_for(self._may_claim)
            if self._tickets is None and not self._aborted:
                return None  # whoever comes late may find that the receivers have all and are gone
            self._check_open()
            ticket = next(self._tickets, None) if self._tickets else None
            if ticket is None:
                # From here on a receiver chooses from fewer than `hs_min_ready`.
                self._tickets = None
                self._changed.notify_all()
                return None
            claim = Claim(ticket, self._free.pop())
            self._slots.append(_Slot(claim))
            return claim

    def put(self, claim: Claim[B], item: T) -> None:
        """Hand over a batch that was claimed; raises QueueClosedError when nobody will take it."""
        with self._changed:
            self._check_open()
            slot = next(slot for slot in self._slots if slot.claim is claim)
            slot.item, slot.since_s = item, time.monotonic()
            self._puts += 1
            self._changed.notify_all()

    def release(self, buffer: B) -> None:
        """Give back the buffer of an item that was taken."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def abort(self) -> None:
        """Drop everything and wake everybody with QueueClosedError."""
        with self._changed:
            self._aborted = True
            self._slots.clear()
            self._changed.notify_all()

    def statistics(self) -> QueueStatistics:
        """Read all figures at once."""
        with self._changed:
            now_s = time.monotonic()
            waiting = {side: sum(now_s - since for since in starts) for side, starts in self._waiting_since_s.items()}
            ready = [slot for slot in self._slots if slot.item is not None]
            return QueueStatistics(
                depth=len(ready),
                capacity=self._capacity,
                num_bytes=sum(slot.claim.ticket.num_bytes for slot in ready),
                capacity_bytes=self._capacity_bytes,
                puts_total=self._puts,
                gets_total=self._gets,
                put_blocked_s=self._blocked_s["put"] + waiting["put"],
                get_blocked_s=self._blocked_s["get"] + waiting["get"],
                oldest_age_s=now_s - min((slot.since_s for slot in ready), default=now_s),
            )

    def _take(self, receiver: int, *, wait: bool) -> T | None:
        with self._changed:
            if not self._may_take(receiver):
                if not wait:
                    return None
                with self._blocked("get"):
                    self._changed.wait_for(lambda: self._may_take(receiver))
            if self._aborted:
                raise QueueClosedError("the queue was aborted")
            if not self._slots:
                raise EndOfStream
            item = self._slots.pop(self._choose()).item
            self._takes += 1
            self._gets += 1
            self._changed.notify_all()
            return item

    def _may_claim(self) -> bool:
        return bool(self._free) or self._aborted or not self._open_receivers or self._tickets is None

    def _may_take(self, receiver: int) -> bool:
        if self._aborted:
            return True
        all_known = self._tickets is None or len(self._slots) >= self._hs_min_ready
        window = self._slots[: self._hs_min_ready]
        if not all_known or any(slot.item is None for slot in window):
            return False
        return not window or self._takes % self._num_receivers == receiver

    def _choose(self) -> int:
        if self._takes % self._oldest_every == 0:
            return 0
        window = self._slots[: self._hs_min_ready]
        return max(range(len(window)), key=lambda index: (window[index].claim.ticket.length, -index))

    def _check_open(self) -> None:
        if self._aborted or not self._open_receivers:
            raise QueueClosedError("no receiver is left")

    @contextmanager
    def _blocked(self, side: str) -> Iterator[None]:
        start_s = time.monotonic()
        self._waiting_since_s[side].append(start_s)
        try:
            yield
        finally:
            self._waiting_since_s[side].remove(start_s)
            self._blocked_s[side] += time.monotonic() - start_s

    def _close_receiver(self) -> None:
        with self._changed:
            self._open_receivers -= 1
            self._changed.notify_all()


class Receiver(Generic[B, T]):
    """A receiving end; a context manager. One thread only."""

    def __init__(self, queue: HiddenQueue[B, T], number: int) -> None:
        self._queue = queue
        self._number = number

    def get(self) -> T:
        """Take an item, waiting for one; raises EndOfStream or QueueClosedError."""
        item = self._queue._take(self._number, wait=True)  # noqa: SLF001 - the ends are part of the queue
        assert item is not None
        return item

    def get_if_ready(self) -> T | None:
        """Take the item that `get` would return, if it could at once; raises EndOfStream or QueueClosedError."""
        return self._queue._take(self._number, wait=False)  # noqa: SLF001 - the ends are part of the queue

    def release(self, buffer: B) -> None:
        """Give back the buffer of an item that was taken."""
        self._queue.release(buffer)

    def __enter__(self) -> "Receiver[B, T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue._close_receiver()  # noqa: SLF001 - the ends are part of the queue
