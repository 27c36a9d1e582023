"""Whatever the sidecar does or suffers, training is the same: to the bit, without a stall, in bounded memory."""

import itertools
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from audit import audited
from sidecar_process import Place, Sidecar
from training_run import trainer_arguments

NUM_STEPS = 400
MAX_STALL_S = 2.0
"""Far above any step, also where two cores are shared with a starting sidecar, and far below any time-out."""
MAX_RSS_RATIO = 1.1


@contextmanager
def absent(_place: Place) -> Iterator[None]:
    """No sidecar."""
    yield


@contextmanager
def live(place: Place) -> Iterator[None]:
    """A sidecar as it should be."""
    sidecar = place.sidecar()
    yield
    sidecar.terminate()


@contextmanager
def slow(place: Place) -> Iterator[None]:
    """A sidecar that is stopped for nine tenths of the time."""
    sidecar = place.sidecar()
    with repeating(lambda: blink(sidecar)):
        yield
    sidecar.kill()


@contextmanager
def stopped(place: Place) -> Iterator[None]:
    """A sidecar that subscribes and then takes nothing any more."""
    sidecar = place.sidecar()
    sidecar.process.send_signal(signal.SIGSTOP)
    yield
    sidecar.kill()


@contextmanager
def killed_in_a_loop(place: Place) -> Iterator[None]:
    """One sidecar after the other, each killed as soon as it answers."""
    with repeating(lambda: place.sidecar().kill()):
        yield


@contextmanager
def scraped(place: Place) -> Iterator[None]:
    """A sidecar whose page is fetched 50 times a second."""
    sidecar = place.sidecar()
    with repeating(lambda: (sidecar.metrics(), time.sleep(0.02))):
        yield
    sidecar.terminate()


@contextmanager
def repeating(action: Callable[[], object]) -> Iterator[None]:
    """Do something again and again beside the block, at least once."""
    over = threading.Event()

    def repeat() -> None:
        action()
        while not over.is_set():
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def blink(sidecar: Sidecar) -> None:
    """Let it run for a moment."""
    sidecar.process.send_signal(signal.SIGCONT)
    time.sleep(0.05)
    sidecar.process.send_signal(signal.SIGSTOP)
    time.sleep(0.45)


class Outcome:
    """What a run of NUM_STEPS came to."""

    def __init__(self, out_dir: Path, audit: Path, max_rss_kib: int) -> None:
        self.weights = (out_dir / f"checkpoints/step-{NUM_STEPS:08}/drafter.safetensors").read_bytes()
        times_s = [fields[3] for fields in audited(audit, "step")]
        self.step_s = sorted(later - earlier for earlier, later in itertools.pairwise(times_s))
        self.max_rss_kib = max_rss_kib

    def __str__(self) -> str:
        median, p99 = statistics.median(self.step_s), self.step_s[len(self.step_s) * 99 // 100]
        times = f"median {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, longest {self.step_s[-1] * 1e3:.0f} ms"
        return f"step {times}; at most {self.max_rss_kib / 1024:.0f} MiB"


def run(place: Place, target: Path, name: str) -> Outcome:
    """Train in a process of its own, under GNU time's figure for the largest resident set."""
    out_dir, audit = place.state_dir.parent / name, place.state_dir.parent / f"{name}-audit"
    arguments = trainer_arguments(target, out_dir, run__id=name, telemetry__audit_path=audit)
    trainer = place.popen(*arguments, "--max-steps", str(NUM_STEPS))
    peak_kib = 0
    while trainer.poll() is None:
        peak_kib = max(peak_kib, _peak_kib(trainer))
        time.sleep(0.05)
    assert trainer.returncode == 0
    return Outcome(out_dir, audit, peak_kib)


def _peak_kib(process: "subprocess.Popen[str]") -> int:
    """The largest resident set that the kernel has seen of a process."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


@pytest.mark.timeout(600)
def test_training_is_the_same_whatever_the_sidecar_does(small_target: Path, place: Place) -> None:
    """Absent, live, slow, stopped, killed in a loop, scraped at 50 Hz: the same weights, no stall, no more memory."""
    scenarios: list[Callable[[Place], AbstractContextManager[None]]]
    scenarios = [absent, live, slow, stopped, killed_in_a_loop, scraped]
    outcomes = {}
    for scenario in scenarios:
        with scenario(place):
            outcomes[scenario.__name__] = run(place, small_target, scenario.__name__)
        print(f"{scenario.__name__:16} {outcomes[scenario.__name__]}")  # noqa: T201 - figures, shown with -rP

    alone = outcomes.pop("absent")
    for name, outcome in outcomes.items():
        assert outcome.weights == alone.weights, name
        assert outcome.step_s[-1] < MAX_STALL_S, name
        assert outcome.max_rss_kib < alone.max_rss_kib * MAX_RSS_RATIO, name
