"""Real processes for tests: a sidecar, and a trainer's telemetry."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_SAMPLE = re.compile(r"^(\S+?)(\{.*\})? (\S+)$", re.MULTILINE)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


class Place:
    """One test's state directory and runtime directory, and everything started there."""

    def __init__(self, path: Path) -> None:
        self.state_dir = path / "state"
        self.runtime_dir = path / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("DFLASH_", "WANDB_"))},
            "DFLASH_RUNTIME_DIR": str(self.runtime_dir),
            "PYTHONPATH": str(ROOT),
            "HOME": str(path),
        }
        self._started: list[subprocess.Popen[str]] = []

    def popen(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a Python process of this place."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environ,
            cwd=self.state_dir.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a `dflash-sidecar` command to its end, on this state directory unless it takes none."""
        return subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments],
            env=self.environ,
            cwd=self.state_dir.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def trainer(self, run_id: str = "run", steps_per_second: float = 50.0, ring_bytes: int = 2**26) -> "Trainer":
        """Start a trainer's telemetry."""
        script = str(ROOT / "tests/trainer_process.py")
        return Trainer(self.popen(script, run_id, str(steps_per_second), str(ring_bytes)))

    def audit(self, run_id: str) -> Path:
        """What the trainer of a run wrote down for itself."""
        return self.state_dir.parent / f"{run_id}.audit"

    def sidecar(self, *options: str, port: int = 0) -> "Sidecar":
        """Start a sidecar and wait until it answers."""
        sidecar = self.starting_sidecar(*options, port=port)
        sidecar.wait_until_ready()
        return sidecar

    def starting_sidecar(self, *options: str, port: int = 0) -> "Sidecar":
        """Start a sidecar without waiting for it."""
        defaults = ("--state-dir", str(self.state_dir), "--listen", f"127.0.0.1:{port}", "--set", "wandb.mode=offline")
        return Sidecar(self.popen("-m", "sidecar", "run", *defaults, *options), self.state_dir)

    def attached(self, process: "subprocess.Popen[Any]") -> "Sidecar":
        """A sidecar that was started in another way, once it answers."""
        sidecar = Sidecar(process, self.state_dir)
        sidecar.wait_until_ready()
        return sidecar

    def close(self) -> None:
        """Kill what is left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


class Trainer:
    """A running trainer's telemetry."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.output = ""
        """What it wrote, once it has stopped."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def stop(self) -> tuple[int, int]:
        """Let it say goodbye; returns the number of steps and of records."""
        self.process.send_signal(signal.SIGTERM)
        self.output, _ = self.process.communicate(timeout=30)
        steps, records = self.output.splitlines()[-1].split()
        return int(steps), int(records)


class Sidecar:
    """A running sidecar."""

    def __init__(self, process: "subprocess.Popen[Any]", state_dir: Path) -> None:
        self.process = process
        self._lock = state_dir / "sidecar.lock"
        self.url = ""

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        wait_for(self._is_ready, "the sidecar to answer")

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            self.get("/-/ready")
        except OSError:
            return False
        return True

    def get(self, path: str) -> str:
        """Fetch a page."""
        with urllib.request.urlopen(self.url + path, timeout=5) as response:
            text: str = response.read().decode()
        return text

    def post(self, path: str) -> tuple[int, str]:
        """Post to a path; returns status and text."""
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, method="POST"), timeout=15) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = json.loads(self.get("/api/v1/status"))
        return document

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name and labels."""
        return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(self.get("/metrics"))}

    def kill(self) -> str:
        """Kill -9 and wait for the end; returns everything it wrote."""
        self.process.kill()
        output, _ = self.process.communicate()
        return output

    def terminate(self) -> tuple[float, str]:
        """SIGTERM; returns how long it took to end, and everything it wrote."""
        started_s = time.monotonic()
        self.process.terminate()
        output, _ = self.process.communicate(timeout=20)
        return time.monotonic() - started_s, output

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the sidecar ended: {self.process.communicate()[0]}"
        try:
            owner = json.loads(self._lock.read_text())
            if owner["pid"] != self.process.pid or not owner["url"]:
                return False
            self.url = owner["url"]
        except (OSError, ValueError):
            return False
        return self.answers()
