"""The sidecar as a service in a booted container, and trainers beside it as another user."""

import json
import re
import shutil
import socket
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from audit import assert_journal_equals
from booted_container import CHECKOUT, ROOT, BootedContainer
from sidecar_process import wait_for

SYSTEM_PYTHON = "/usr/bin/python3"
SIDECAR = "dflash-sidecar.service"
STATE_DIR = "/var/lib/dflash-sidecar"
RUNS = "/var/lib/dflash-trainer"
STEPS_PER_SECOND = 50
_STEPS = re.compile(r"^dflash_steps_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class InstalledService:
    """`make install` done in a container. One trainer's telemetry at a time is started beside it."""

    def __init__(self, container: BootedContainer) -> None:
        self.container = container
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.settings = f'listen = "{self.url.removeprefix("http://")}"\nwandb.mode = "offline"\n'
        container.write("/etc/dflash/sidecar.toml", self.settings)

    def install(self, *options: str, checkout: str = CHECKOUT, python: str = SYSTEM_PYTHON) -> list[str]:
        """Run `make install`; returns what it said, line by line."""
        arguments = f"ARGS={' '.join(options)}"
        command = ("make", "--silent", "-C", checkout, "install", f"PYTHON={python}", arguments)
        return self.container.run(*command, timeout_s=240).splitlines()

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl to its end."""
        return self.container.run("systemctl", *arguments)

    def shown(self, name: str, unit: str = SIDECAR) -> str:
        """A property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit).strip()

    @property
    def pid(self) -> int:
        """The sidecar's process id in the container."""
        return int(self.shown("MainPID"))

    def log(self) -> str:
        """What the sidecar has written since the container was booted."""
        return self.container.run("journalctl", "--unit", SIDECAR, "--output=cat", "--no-pager")

    def drop_in(self, content: str, unit: str = SIDECAR) -> None:
        """Override settings of a unit; empty takes that back."""
        path = f"/etc/systemd/system/{unit}.d/test.conf"
        if content:
            self.container.write(path, content)
        else:
            (self.container.root / path.lstrip("/")).unlink()
        self.systemctl("daemon-reload")

    def page(self, path: str = "/metrics") -> str:
        """Fetch a page of the sidecar."""
        with urllib.request.urlopen(self.url + path, timeout=5) as response:
            text: str = response.read().decode()
        return text

    def status(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = json.loads(self.page("/api/v1/status"))
        return document

    def wandb_state(self) -> str:
        """How the upload to W&B goes."""
        state: str = self.status()["sinks"]["wandb"]["state"]
        return state

    def steps(self) -> float | None:
        """The trainer's counter of steps on the page, None when there is no page or no trainer on it."""
        try:
            found = _STEPS.findall(self.page())
        except (OSError, HTTPException):  # away, or ended in the middle of the page
            return None
        return float(found[0]) if found else None

    def audited(self, run_id: str) -> int:
        """How many records a trainer has written down so far."""
        trail = self.container.root / RUNS.lstrip("/") / f"{run_id}.audit"
        return trail.read_bytes().count(b"\n") if trail.exists() else 0

    @contextmanager
    def no_sidecar_possible(self) -> Iterator[None]:
        """Let nothing start the sidecar, until `allow_sidecar`."""
        mask = self.container.root / "etc/systemd/system" / SIDECAR
        aside = mask.with_name("dflash-sidecar.aside")
        mask.rename(aside)
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            if aside.exists():
                aside.rename(mask)

    def allow_sidecar(self) -> None:
        """End `no_sidecar_possible`."""
        unit = self.container.root / "etc/systemd/system" / SIDECAR
        unit.with_name("dflash-sidecar.aside").rename(unit)
        self.systemctl("daemon-reload")

    def begin_afresh(self) -> None:
        """Forget every record and every run, and run the sidecar."""
        self.systemctl("stop", SIDECAR)
        for directory in (STATE_DIR, RUNS):
            shutil.rmtree(self.container.root / directory.lstrip("/"), ignore_errors=True)
        self.systemctl("start", SIDECAR)

    @contextmanager
    def trainer(self, run_id: str = "run") -> Iterator[str]:
        """A trainer for as long as the context lasts; then nothing of it may be missing, double or less than it was.

        Its process and the time that started are the same in the end, so nobody touched it in between.
        """
        unit = f"dflash-trainer@{run_id}.service"
        python = Path(self.container.run("readlink", "/usr/local/bin/dflash-sidecar").strip()).with_name("python3")
        self.container.write("/opt/trainer_process.py", (ROOT / "tests/trainer_process.py").read_text())
        script = f"{python} /opt/trainer_process.py {run_id} {STEPS_PER_SECOND} {2**26}"
        self.drop_in(f"[Service]\nExecStart=\nExecStart={script}\n", "dflash-trainer@.service")
        self.systemctl("start", unit)
        before = self._process(unit)
        with self._watched_counter() as seen:
            yield unit
            assert self._process(unit) == before
            self._await_everything(run_id, unit)
        assert seen == sorted(seen)
        assert self.status()["records"]["lost"] == 0

    def _process(self, unit: str) -> tuple[str, str, str]:
        """Process id, start time of the process and user of a running unit."""
        pid = self.shown("MainPID", unit)
        assert pid != "0"
        start = self.container.run("cat", f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
        return pid, start, self.container.run("stat", "-c", "%U", f"/proc/{pid}").strip()

    def _await_everything(self, run_id: str, unit: str) -> None:
        """Let the trainer say goodbye and compare what it wrote down with the journal."""
        wait_for(lambda: self.steps() is not None, "the sidecar to show the trainer")
        self.systemctl("stop", unit)
        trail = self.container.root / RUNS.lstrip("/") / f"{run_id}.audit"
        session = json.loads(trail.read_bytes().splitlines()[0])[1]
        copy = self.container.root.parent / "journal.sqlite"
        wait_for(lambda: self._has_ended(session, copy), "the trainer's goodbye")
        assert_journal_equals(copy, trail)

    def _has_ended(self, session: str, copy: Path) -> bool:
        """Copy the journal, and see whether the session is whole in there."""
        for path in copy.parent.glob(f"{copy.name}*"):
            path.unlink()
        journal = self.container.root / STATE_DIR.lstrip("/") / "journal.sqlite"
        with closing(sqlite3.connect(journal)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
            query = "SELECT ended_s IS NOT NULL AND next_seq = end_seq FROM sessions WHERE session = ?"
            return target.execute(query, (session,)).fetchone() == (1,)

    @contextmanager
    def _watched_counter(self) -> Iterator[list[float]]:
        """Scrape until the end; gives the counter of steps as it was seen."""
        seen: list[float] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                if (steps := self.steps()) is not None:
                    seen.append(steps)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()
        assert len(seen) > 5, seen


def await_restart(service: InstalledService, previous_pid: int, timeout_s: float = 30.0) -> None:
    """Wait until another process of the sidecar is ready."""
    deadline_s = time.monotonic() + timeout_s
    while service.pid in {0, previous_pid} or service.shown("ActiveState") != "active":
        assert time.monotonic() < deadline_s, service.log()[-3000:]
        time.sleep(0.05)


def older_checkout(container: BootedContainer) -> str:
    """A copy of this repository in the container that calls itself version 0.0.9."""
    path = container.root / "opt/older"
    ignored = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, path, ignore=ignored)
    project = path / "pyproject.toml"
    project.write_text(re.sub(r'^version = ".*"', 'version = "0.0.9"', project.read_text(), flags=re.MULTILINE))
    return "/opt/older"
