"""What one session still owes us: which records are here, which are missing, and when to ask for them again.

Pure bookkeeping on sequence numbers; sockets, files and clocks stay outside. Records below `next_seq` are all stored
or given up. Above it lie islands of held records, and the first gap between them is asked for in windows, one request
at a time, again after a timeout, with a growing pause while nothing comes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from shared.remote import is_remote
from shared.wire import Hello, ReplayRequest, Scalar
from sidecar.stored import StoredSession

WINDOW_RECORDS = 5_000
ANSWER_TIMEOUT_S = 2.0
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_EXIT_CODE = 2**31
MIN_SILENCE_S = 10.0
SILENT_INTERVALS = 5
GOODBYE_QUIET_S = 0.5
GOODBYE_PATIENCE_S = 2.0


class Subscription(NamedTuple):
    """One change to what an endpoint's socket subscribes to."""

    endpoint: str
    topic: bytes
    wanted: bool


class SessionTrack:
    """The receiver's view of one open session.

    Args:
        stored: the session as the journal has it.
        held: sequence numbers at or above `stored.next_seq` that the journal has.
        now_s: monotonic time.
    """

    def __init__(self, stored: StoredSession, held: Iterable[int], now_s: float) -> None:
        self.number = stored.number
        self.hello: Hello = stored.hello
        self.num_cells = stored.hello.schema.num_cells
        self.endpoint = stored.endpoint
        self.next_seq = stored.next_seq
        self._held = set(held)
        self.end_seq = max(self._held, default=self.next_seq - 1) + 1
        self.heard_s = now_s
        self.exit_code: int | None = None
        self.has_said_goodbye = False
        self.request: ReplayRequest | None = None
        self._asked_at_seq = 0
        self._deadline_s = 0.0
        self._ask_again_s = now_s
        self._pause_s = MIN_PAUSE_S
        self._advance()

    @property
    def name(self) -> str:
        """The session id."""
        return self.hello.session

    @property
    def is_complete(self) -> bool:
        """Whether everything that is known to exist is stored or given up."""
        return self.next_seq >= self.end_seq

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first run of missing records as [first, end), None when there is none."""
        if self.is_complete:
            return None
        return self.next_seq, min(self._held, default=self.end_seq)

    @property
    def silence_limit_s(self) -> float:
        """How long a live trainer may be silent before its endpoint is looked at."""
        return max(MIN_SILENCE_S, SILENT_INTERVALS * self.hello.interval_s)

    @property
    def is_remote(self) -> bool:
        """Whether the trainer is elsewhere, so that nobody can look whether it lives."""
        return is_remote(self.endpoint)

    def is_there(self, now_s: float, owner_pid: Callable[[Path], int | None]) -> bool:
        """Whether the trainer lives: somebody listens on its socket, or it was heard lately if it is elsewhere."""
        if self.is_remote:
            return now_s - self.heard_s < self.silence_limit_s
        return owner_pid(Path(self.endpoint)) is not None

    def has_ended(self, now_s: float, owner_pid: Callable[[Path], int | None]) -> bool:
        """Whether the session is over: after a goodbye when all is here, else after silence when nobody is there."""
        silence_s = now_s - self.heard_s
        if self.has_said_goodbye and self.is_complete:
            return silence_s >= GOODBYE_QUIET_S
        limit_s = GOODBYE_PATIENCE_S if self.has_said_goodbye else self.silence_limit_s
        return silence_s >= limit_s and not self.is_there(now_s, owner_pid)

    def expect(self, end_seq: int) -> None:
        """Note that records up to before `end_seq` exist."""
        self.end_seq = max(self.end_seq, end_seq)

    def accept(self, seq: int) -> bool:
        """Take in one record; False when it is already here or given up."""
        if seq < self.next_seq or seq in self._held:
            return False
        self._held.add(seq)
        self.expect(seq + 1)
        self._advance()
        return True

    def say_goodbye(self, exit_code: Scalar) -> None:
        """Note that the trainer said goodbye, and the exit code if it is one."""
        self.has_said_goodbye = True
        # SQLite has room for 64 bits, a frame may hold more.
        self.exit_code = exit_code if isinstance(exit_code, int) and abs(exit_code) < MAX_EXIT_CODE else None

    def give_up_before(self, seq: int) -> list[tuple[int, int]]:
        """Stop waiting for what is missing below `seq`, and return those runs as [first, end)."""
        self.expect(seq)
        runs = []
        while (gap := self.gap) is not None and gap[0] < seq:
            run = (gap[0], min(gap[1], seq))
            runs.append(run)
            self.next_seq = run[1]
            self._advance()
        return runs

    def ask(self, nonce: str, now_s: float) -> ReplayRequest | None:
        """The request to send now, if any; it stays open until `answered` or `is_overdue`."""
        gap = self.gap
        if gap is None or self.request is not None or now_s < self._ask_again_s:
            return None
        first, end = gap
        self.request = ReplayRequest(session=self.name, first=first, end=min(end, first + WINDOW_RECORDS), nonce=nonce)
        self._asked_at_seq = self.next_seq
        self._deadline_s = now_s + ANSWER_TIMEOUT_S
        return self.request

    def hear_answer(self, now_s: float) -> None:
        """Note that part of an answer came: there is reason to wait on."""
        self._deadline_s = now_s + ANSWER_TIMEOUT_S

    def is_overdue(self, now_s: float) -> bool:
        """Whether the open request has waited long enough."""
        return self.request is not None and now_s >= self._deadline_s

    def close_request(self, now_s: float) -> bool:
        """End the open request; True when it left something missing, so that a fresh hello must tell what is gone."""
        assert self.request is not None
        unfilled = self.next_seq < self.request.end
        if self.next_seq > self._asked_at_seq:
            self._pause_s = MIN_PAUSE_S
        self._ask_again_s = now_s + self._pause_s if unfilled else now_s
        if unfilled:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.request = None
        return unfilled

    def _advance(self) -> None:
        while self.next_seq in self._held:
            self._held.remove(self.next_seq)
            self.next_seq += 1


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rising runs [first, end), with those that touch made one."""
    result: list[tuple[int, int]] = []
    for first, end in runs:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], end)
        else:
            result.append((first, end))
    return result
