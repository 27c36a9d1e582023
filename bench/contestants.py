"""A training run that can be stopped and let go on, with everything that belongs to it."""

import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.workplace import BenchmarkError, Workplace, family_of, progress, send_signal

RUN_TIMEOUT_S = 180.0
_PAIR = struct.Struct("2d")


class StepEnd(NamedTuple):
    """When a step ended (monotonic clock), and the CPU time that the trainer had used by then."""

    time_s: float
    cpu_s: float


class Turn(NamedTuple):
    """Speed of a turn, and the CPU time that trainer and companions together used per step."""

    steps_per_second: float
    cpu_s_per_step: float


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
        self.first_step_s = self._step_ends()[0].time_s - start_s
        progress(f"{self.name}: first step after {self.first_step_s:.1f} s")

    def run_for(self, duration_s: float) -> Turn:
        """Go on for a while and stop again; returns what the steps in between took."""
        num_before, companions_before_s = self.num_steps, self._companions_cpu_s()
        start_s = time.monotonic()
        self.resume()
        time.sleep(duration_s)
        end_s = time.monotonic()
        self._signal(signal.SIGSTOP)
        ends = [end for end in self._step_ends()[num_before:] if start_s <= end.time_s <= end_s]
        beside_s = (self._companions_cpu_s() - companions_before_s) / max(len(ends), 1)
        turn = turn_of(ends, self.name)
        return turn._replace(cpu_s_per_step=turn.cpu_s_per_step + beside_s)

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
        return self._record.stat().st_size // _PAIR.size if self._record.exists() else 0

    def _step_ends(self) -> list[StepEnd]:
        content = self._record.read_bytes()
        return [StepEnd(*pair) for pair in _PAIR.iter_unpack(content[: len(content) // _PAIR.size * _PAIR.size])]

    def _companions_cpu_s(self) -> float:
        """CPU time of all that is not the trainer process itself: companions, and what anybody started."""
        mine = {process.pid: process for companion in self._companions for process in family_of(companion.pid)}
        mine |= {process.pid: process for process in family_of(self._trainer.pid)[1:]}
        return sum(sum(process.cpu_times()[:2]) for process in mine.values())


def turn_of(ends: Sequence[StepEnd], name: str) -> Turn:
    """Speed and cost of steps that ended one after the other; the first only says when the second one began."""
    if len(ends) < 3:  # noqa: PLR2004 - a speed out of less would be chance
        raise BenchmarkError(f"{name} made only {len(ends)} steps in its turn: the machine is too slow or too busy")
    num_steps = len(ends) - 1
    return Turn(
        steps_per_second=num_steps / (ends[-1].time_s - ends[0].time_s),
        cpu_s_per_step=(ends[-1].cpu_s - ends[0].cpu_s) / num_steps,
    )
