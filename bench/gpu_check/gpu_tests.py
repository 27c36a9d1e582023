"""The tests of the suite that need a GPU, such as kernels against their references, in a process of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check.outcome import CheckFailedError, CheckSkippedError, Figures

ROOT = Path(__file__).parents[2]
NOTHING_COLLECTED = 5
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)\b")


def check_gpu_tests(figures: Figures, selection: Sequence[str], timeout_s: float) -> str:
    """Every test marked `gpu` passes; without a GPU they are skipped, and so is this."""
    if importlib.util.find_spec("pytest") is None:
        raise CheckSkippedError("pytest is not installed here; `make gpu-check` installs it")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *selection]
    try:
        done = subprocess.run(  # noqa: S603 - our own tests
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailedError(f"not done after {timeout_s:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {what: int(number) for number, what in _COUNT.findall(lines[-1] if lines else "")}
    figures |= {f"tests_{what}": number for what, number in counts.items()}
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    figures["failures"] = failures
    if done.returncode == NOTHING_COLLECTED or not (counts.get("passed") or done.returncode):
        raise CheckSkippedError(f"none ran: {lines[-1] if lines else 'no word from pytest'}")
    if done.returncode:
        raise CheckFailedError("; ".join(failures) or "\n".join([*lines, done.stderr])[-500:])
    return lines[-1].strip("= ")
