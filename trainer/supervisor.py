"""Workers as threads: start them, watch them, stop them together.

The first failure wins: it is kept with its own traceback, the stop flag goes up, the queue is aborted so that nobody
waits for ever, and `run` raises it.
"""

import threading
import time
from collections.abc import Callable, Mapping

import torch

from shared.thread_name import name_this_thread
from trainer.hidden_queue import QueueClosedError
from trainer.out_of_memory import explain_out_of_memory
from trainer.stopping import Stop

JOIN_TIMEOUT_S = 60.0


class Supervisor:
    """Run worker functions in named threads until all are done or one fails.

    Args:
        stop: the flag that workers look at.
        abort: called once when workers must not wait any longer (closes the queue).
    """

    def __init__(self, stop: Stop, abort: Callable[[], None]) -> None:
        self._stop = stop
        self._abort = abort
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(
        self, workers: Mapping[str, Callable[[], None]], watch: Callable[[], None], interval_s: float = 0.2
    ) -> None:
        """Start every worker, call `watch` regularly, return when all have ended.

        Raises:
            BaseException: whatever the first failing worker raised.
            TimeoutError: a worker did not end in time after the stop.
        """
        threads = [
            threading.Thread(target=self._guard, args=(name, work), name=name, daemon=True)
            for name, work in workers.items()
        ]
        for thread in threads:
            thread.start()
        stopping_since_s: float | None = None
        while any(thread.is_alive() for thread in threads):
            watch()
            if self._stop.requested():
                stopping_since_s = stopping_since_s or time.monotonic()
                if time.monotonic() - stopping_since_s > JOIN_TIMEOUT_S:
                    hung = [thread.name for thread in threads if thread.is_alive()]
                    raise TimeoutError(f"workers did not stop within {JOIN_TIMEOUT_S:.0f} s: {', '.join(hung)}")
            next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(interval_s)
        watch()
        if self._failure is not None:
            raise self._failure

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        name_this_thread(name)
        try:
            work()
        except (QueueClosedError, threading.BrokenBarrierError):
            # Only ever the consequence of another worker's end, which tells its own story.
            return
        except torch.OutOfMemoryError as error:
            # On this thread, whose current GPU is the one that is full.
            explain_out_of_memory(error, name, torch.cuda.memory_stats())
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - kept and raised in the main thread
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._stop.request()
        self._abort()
