"""Reloads of the definitions that were asked for, from the asking until the page shows the outcome."""

import threading
import time
from collections import deque

MAX_SETTLE_S = 2.0
"""How long a reload that was asked for waits for a file that is being written."""
ANSWER_TIMEOUT_S = 10.0


class _Request:
    def __init__(self) -> None:
        self.asked_s = time.monotonic()
        self.done = threading.Event()
        self.problem: str | None = None

    def wait(self) -> str | None:
        """Wait for the outcome; returns what is wrong with the definitions."""
        if not self.done.wait(ANSWER_TIMEOUT_S):
            return f"no answer within {ANSWER_TIMEOUT_S:g} s; look at the log"
        return self.problem


class Reloads:
    """The queue between those who ask, on any thread or in a signal handler, and the main thread."""

    def __init__(self) -> None:
        self._asked: deque[_Request] = deque()
        self._unanswered: list[_Request] = []

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for a reload."""
        return bool(self._asked)

    @property
    def is_late(self) -> bool:
        """Whether somebody has waited for so long that the file is refused if it is still being written."""
        return self.is_asked and time.monotonic() > self._asked[0].asked_s + MAX_SETTLE_S

    def ask(self) -> _Request:
        """Ask for a reload."""
        request = _Request()
        self._asked.append(request)
        return request

    def take(self) -> int:
        """Begin a reload for all who have asked so far; returns how many they are."""
        taken = [self._asked.popleft() for _ in range(len(self._asked))]
        self._unanswered += taken
        return len(taken)

    def decide(self, num: int, problem: str | None) -> None:
        """Note the outcome for those who were taken last."""
        for request in self._unanswered[len(self._unanswered) - num :]:
            request.problem = problem

    def answer(self) -> None:
        """Tell everybody: who asked may count on seeing the outcome from now on."""
        for request in self._unanswered:
            request.done.set()
        self._unanswered.clear()
