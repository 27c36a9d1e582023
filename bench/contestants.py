"""A training run that can be stopped and let go on, with everything that belongs to it."""

import signal
import subprocess
import time
from array import array
from collections.abc import Mapping, Sequence

from bench.workplace import BenchmarkError, Workplace, family_of, progress, send_signal

RUN_TIMEOUT_S = 180.0


class Contestant:
    """One run of the instrumented trainer.

    Args:
        place: where it lives.
        name: for its files and for people.
        companions: processes that run and stand still with it.
    """

    def __init__(self, place: Workplace, name: str, companions: "Sequence[subprocess.Popen[bytes]]" = ()) -> None:
        self.name = name
        self.first_step_s = 0.0
        """From the start of the process to the end of its first step."""
        self._place = place
        self._record = place.path / f"{name}.times"
        self._companions = companions

    def start(
        self, kind: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None, *, steps: int
    ) -> None:
        """Start training, wait until so many steps are done, and stop."""
        start_s = time.monotonic()
        command = ("-m", "bench.instrumented_trainer", kind, str(self._record), *arguments)
        self._trainer = self._place.popen(command, environ)
        self._place.wait(lambda: self.num_steps >= steps, self._trainer, f"{steps} steps", RUN_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        self.first_step_s = self._step_times_s()[0] - start_s
        progress(f"{self.name}: first step after {self.first_step_s:.1f} s")

    def run_for(self, duration_s: float) -> float:
        """Go on for a while and stop again; returns the steps per second in between."""
        num_before = self.num_steps
        start_s = time.monotonic()
        self.resume()
        time.sleep(duration_s)
        end_s = time.monotonic()
        self._signal(signal.SIGSTOP)
        times_s = [ended_s for ended_s in self._step_times_s()[num_before:] if start_s <= ended_s <= end_s]
        return steps_per_second(times_s, self.name)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def terminate(self, timeout_s: float) -> float:
        """Let it go on and ask the trainer to end; returns how long that took, at most the timeout."""
        start_s = time.monotonic()
        self.resume()
        self._trainer.terminate()
        try:
            self._trainer.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return timeout_s
        return time.monotonic() - start_s

    def _signal(self, number: signal.Signals) -> None:
        for process in (self._trainer, *self._companions):
            send_signal(family_of(process.pid), number)

    @property
    def num_steps(self) -> int:
        """Steps done so far."""
        return self._record.stat().st_size // array("d").itemsize if self._record.exists() else 0

    def _step_times_s(self) -> "array[float]":
        times_s = array("d")
        content = self._record.read_bytes()
        times_s.frombytes(content[: len(content) // times_s.itemsize * times_s.itemsize])
        return times_s


def steps_per_second(ends_s: Sequence[float], name: str) -> float:
    """Speed over steps that ended one after the other; the first one only says when the second began."""
    if len(ends_s) < 3:  # noqa: PLR2004 - a speed out of less would be chance
        raise BenchmarkError(f"{name} made only {len(ends_s)} steps in its turn: the machine is too slow or too busy")
    return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
