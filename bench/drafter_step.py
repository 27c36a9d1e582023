"""One whole drafter step - forward, loss, backward, optimizer - beside SpecForge's and that of speculators.

Every contestant is a process of its own that steps when it is told to, so that only one works at a time and its memory
is its own. All get the same weights, batch, anchors and dtype (bench/step/case.py), and that they compute the same is
checked: their losses agree step by step, where the peer reports a loss that can be compared.

The peers live in an environment of their own, `.venv-peers`, which `make bench` makes.
"""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from bench.results import Goal, Result, alone, compare
from bench.step.case import NUM_SEQUENCES, NUM_TOKENS
from bench.step.limit import matmul_rate, step_operations
from bench.workplace import ROOT, BenchmarkError, progress

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
CONTESTANTS = {"ours": "ours", "SpecForge": "specforge_step", "speculators": "speculators_step"}
VOCAB_SIZES = (49_152, 151_936)
WARM_UP_STEPS, STEPS_PER_TURN = 2, 3
MIN_SPEED_RATIO, MAX_MEMORY_RATIO, MAX_LOSS_RATIO = 2.0, 0.5, 1.01
MIB = 2**20


class Turn(NamedTuple):
    """What a contestant did in one turn."""

    tokens_per_second: float
    peak_mib: float
    loss: float


class Stepper:
    """A contestant's process; as a context it ends with it."""

    def __init__(self, module: str, vocab_size: int) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed where this context ends
        self._process = subprocess.Popen(  # noqa: S603 - our own modules
            [str(PEERS_PYTHON), "-m", f"bench.step.{module}", str(vocab_size)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        try:
            self._answer()
            for _ in range(WARM_UP_STEPS):
                self._step()
        except BenchmarkError:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        with self._process, self._log:
            self._process.kill()

    def turn(self) -> Turn:
        """Make some steps."""
        steps = [self._step() for _ in range(STEPS_PER_TURN)]
        return Turn(
            tokens_per_second=NUM_SEQUENCES * NUM_TOKENS / median(step["wall_s"] for step in steps),
            peak_mib=max(step["peak_bytes"] for step in steps) / MIB,
            loss=steps[-1]["loss"],
        )

    def _step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before it died is what counts
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise BenchmarkError(f"{self._module} ended: {self._log.read().decode(errors='replace')[-2000:]}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer


def drafter_step(num_rounds: int) -> list[Result]:
    """Tokens per second and peak memory of whole steps at two vocabularies."""
    if not PEERS_PYTHON.exists():
        raise BenchmarkError(f"{PEERS_PYTHON} is missing: `make bench` makes the environment of the peers")
    return [result for vocab_size in VOCAB_SIZES for result in _at_vocabulary(vocab_size, num_rounds)]


def _at_vocabulary(vocab_size: int, num_rounds: int) -> list[Result]:
    turns: dict[str, list[Turn]] = {name: [] for name in CONTESTANTS}
    rates, names = list[float](), list(CONTESTANTS)
    with (
        Stepper(CONTESTANTS["ours"], vocab_size) as ours,
        Stepper(CONTESTANTS["SpecForge"], vocab_size) as specforge,
        Stepper(CONTESTANTS["speculators"], vocab_size) as speculators,
    ):
        steppers = {"ours": ours, "SpecForge": specforge, "speculators": speculators}
        for index in range(num_rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                turns[name].append(steppers[name].turn())
            rates.append(matmul_rate())
            speeds = ", ".join(f"{name} {turns[name][-1].tokens_per_second:.0f}" for name in names)
            progress(f"vocabulary {vocab_size}, round {index + 1}/{num_rounds}: {speeds} tokens/s")
    shares = _matmul_shares(turns["ours"], rates, step_operations(vocab_size))
    return [*_results(f"drafter_step_{vocab_size}", turns), alone(f"drafter_step_{vocab_size}_matmul", "ratio", shares)]


def _matmul_shares(turns: Sequence[Turn], rates: Sequence[float], num_operations: int) -> list[float]:
    """The share of a step that its matrix products would take at the best rate of all rounds."""
    steps_per_second = [turn.tokens_per_second / (NUM_SEQUENCES * NUM_TOKENS) for turn in turns]
    return [num_operations / max(rates) * speed for speed in steps_per_second]


def _results(name: str, turns: Mapping[str, Sequence[Turn]]) -> list[Result]:
    def of(contestant: str, field: str) -> list[float]:
        return [getattr(turn, field) for turn in turns[contestant]]

    speeds, memory = of("ours", "tokens_per_second"), of("ours", "peak_mib")
    results = []
    for peer, suffix, min_ratio in (("SpecForge", "", MIN_SPEED_RATIO), ("speculators", "_beside_speculators", 1.0)):
        results += [
            compare(
                f"{name}{suffix}",
                "tokens/s",
                speeds,
                peer,
                of(peer, "tokens_per_second"),
                Goal("ratio", ">=", min_ratio),
            ),
            compare(
                f"{name}_memory{suffix}",
                "MiB",
                memory,
                peer,
                of(peer, "peak_mib"),
                Goal("ratio", "<=", MAX_MEMORY_RATIO),
            ),
        ]
    losses = compare(
        f"{name}_loss",
        "nats",
        of("ours", "loss"),
        "SpecForge",
        of("SpecForge", "loss"),
        Goal("ratio", "<=", MAX_LOSS_RATIO),
    )
    return [*results, losses]
