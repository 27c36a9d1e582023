"""The bounded queue of hidden states between target workers and drafter workers.

It is bounded in bytes and in items, since one long batch can weigh as much as ten short ones. It has two ends, each of
which closes: a receiver gets `EndOfStream` when every sender has closed and nothing is left, a sender gets
`QueueClosedError` when no receiver is left. `abort` closes both at once when a worker failed or the run is stopped.

Which item a receiver gets is a pure function of the order of the items, never of timing, so that the same seed trains
the same weights. A receiver waits until `hs_min_ready` items are there (or the queue is full, or the senders are done)
and takes the longest of exactly the oldest `hs_min_ready`; ties go to the oldest. A small value mixes short and long
sequences, a large one favours long ones. Every `oldest_every`-th take is the oldest item, so nothing starves.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import msgspec


class QueueItem(Protocol):
    """What the queue needs to know of an item."""

    @property
    def num_bytes(self) -> int:
        """Bytes the item occupies."""

    @property
    def length(self) -> int:
        """Sort key: the longest of the oldest items goes first (tokens)."""


T = TypeVar("T", bound=QueueItem)


class EndOfStream(Exception):  # noqa: N818 - the end of the data is no error
    """Every sender has closed and the queue is empty."""


class QueueClosedError(Exception):
    """The other end is gone, or the queue was aborted."""


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent reading of the queue."""

    depth: int
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


class HiddenQueue(Generic[T]):
    """A bounded queue of hidden states; every method is safe from any thread.

    Args:
        max_bytes: bound on the bytes of all items; a single larger item is let in alone.
        max_items: bound on the number of items; at least `hs_min_ready`.
        hs_min_ready: how many items a receiver chooses from.
        oldest_every: every how many takes the oldest item goes first.
        takes: takes already made by an earlier session of the run (resume).
    """

    def __init__(
        self, *, max_bytes: int, max_items: int, hs_min_ready: int = 1, oldest_every: int = 8, takes: int = 0
    ) -> None:
        if hs_min_ready > max_items:
            raise ValueError(f"queue.hs_min_ready={hs_min_ready} exceeds queue.max_items={max_items}: lower it")
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._hs_min_ready = hs_min_ready
        self._oldest_every = oldest_every
        self._takes = takes
        self._items: list[tuple[T, float]] = []
        self._blocked_items: list[T] = []
        self._num_bytes = 0
        self._puts = self._gets = 0
        self._changed = threading.Condition()
        self._senders = self._receivers = 0
        self._aborted = False
        self._blocked_s = {"put": 0.0, "get": 0.0}
        self._waiting_since_s: dict[str, list[float]] = {"put": [], "get": []}

    def sender(self) -> "Sender[T]":
        """Open a sending end; open all of them before the receivers start."""
        with self._changed:
            self._senders += 1
        return Sender(self)

    def receiver(self) -> "Receiver[T]":
        """Open a receiving end."""
        with self._changed:
            self._receivers += 1
        return Receiver(self)

    def abort(self) -> None:
        """Drop everything and wake everybody with QueueClosedError."""
        with self._changed:
            self._aborted = True
            self._items.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    def statistics(self) -> QueueStatistics:
        """Read all figures at once."""
        with self._changed:
            now_s = time.monotonic()
            waiting = {side: sum(now_s - since for since in starts) for side, starts in self._waiting_since_s.items()}
            return QueueStatistics(
                depth=len(self._items),
                capacity=self._max_items,
                num_bytes=self._num_bytes,
                capacity_bytes=self._max_bytes,
                puts_total=self._puts,
                gets_total=self._gets,
                put_blocked_s=self._blocked_s["put"] + waiting["put"],
                get_blocked_s=self._blocked_s["get"] + waiting["get"],
                oldest_age_s=now_s - min((since for _, since in self._items), default=now_s),
            )

    def _put(self, item: T) -> None:
        with self._changed:
            if not self._has_room(item):
                self._blocked_items.append(item)
                with self._blocked("put"):
                    self._changed.wait_for(lambda: self._has_room(item))
                self._blocked_items.remove(item)
            if self._aborted or not self._receivers:
                raise QueueClosedError("no receiver is left")
            self._items.append((item, time.monotonic()))
            self._num_bytes += item.num_bytes
            self._puts += 1
            self._changed.notify_all()

    def _get(self) -> T:
        with self._changed:
            if not self._can_choose():
                with self._blocked("get"):
                    self._changed.wait_for(self._can_choose)
            if self._aborted:
                raise QueueClosedError("the queue was aborted")
            if not self._items:
                raise EndOfStream
            item, _ = self._items.pop(self._choose())
            self._takes += 1
            self._gets += 1
            self._num_bytes -= item.num_bytes
            self._changed.notify_all()
            return item

    def _has_room(self, item: T) -> bool:
        if self._aborted or not self._receivers or not self._items:
            return True
        return len(self._items) < self._max_items and self._num_bytes + item.num_bytes <= self._max_bytes

    def _can_choose(self) -> bool:
        # Room may just have been made for a sender that has not woken up yet: then its item still comes first.
        full = bool(self._items) and any(not self._has_room(item) for item in self._blocked_items)
        return self._aborted or not self._senders or len(self._items) >= self._hs_min_ready or full

    def _choose(self) -> int:
        if self._takes % self._oldest_every == 0:
            return 0
        window = self._items[: self._hs_min_ready]
        return max(range(len(window)), key=lambda index: (window[index][0].length, -index))

    @contextmanager
    def _blocked(self, side: str) -> Iterator[None]:
        start_s = time.monotonic()
        self._waiting_since_s[side].append(start_s)
        # A receiver may be waiting for exactly this: a sender that cannot go on makes the queue full.
        self._changed.notify_all()
        try:
            yield
        finally:
            self._waiting_since_s[side].remove(start_s)
            self._blocked_s[side] += time.monotonic() - start_s

    def _close(self, *, sender: bool) -> None:
        with self._changed:
            if sender:
                self._senders -= 1
            else:
                self._receivers -= 1
            self._changed.notify_all()


class Sender(Generic[T]):
    """A sending end; a context manager. One thread only."""

    def __init__(self, queue: HiddenQueue[T]) -> None:
        self._queue = queue

    def put(self, item: T) -> None:
        """Add an item, waiting for room; raises QueueClosedError when nobody will take it."""
        self._queue._put(item)  # noqa: SLF001 - the ends are part of the queue

    def __enter__(self) -> "Sender[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue._close(sender=True)  # noqa: SLF001 - the ends are part of the queue


class Receiver(Generic[T]):
    """A receiving end; a context manager. One thread only."""

    def __init__(self, queue: HiddenQueue[T]) -> None:
        self._queue = queue

    def get(self) -> T:
        """Take an item, waiting for one; raises EndOfStream or QueueClosedError."""
        return self._queue._get()  # noqa: SLF001 - the ends are part of the queue

    def __enter__(self) -> "Receiver[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue._close(sender=False)  # noqa: SLF001 - the ends are part of the queue
