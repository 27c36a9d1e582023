"""Finds the process behind each trainer of this machine, and never takes a stranger for it.

The process id in a hello is the trainer's own: in another PID namespace (a container) another process bears that
number here. So the kernel is asked who listens on the trainer's socket, in our own numbering, and that process must
also know itself by the hello's number and be no younger than the session. From then on its start time tells it from
a later process with the same number.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from sidecar.samples import Labels
from sidecar.stored import StoredSession

RETRY_S = 30.0
"""How long until a trainer whose process was not found is looked for again; each time its socket is connected to."""
CLOCK_SLACK_S = 60.0
"""How far the wall clock may have been set forward between the start of a trainer and its first sighting."""
_log = logging.getLogger(__name__)


class Watched:
    """One trainer whose process is known."""

    def __init__(self, session: StoredSession, process: psutil.Process) -> None:
        self.session = session
        self.process = process

    @property
    def labels(self) -> Labels:
        """What each of its series carries."""
        return self.session.labels

    @property
    def proc(self) -> Path:
        """Its directory in the file system of processes."""
        return proc_of(self.process.pid)

    def __str__(self) -> str:
        return f"trainer {self.session.hello.run_id} (process {self.process.pid})"


class WatchedTrainers:
    """The processes of all live trainers. Any thread may ask.

    Args:
        trainers: every live session of this machine.
        clock: monotonic seconds.
    """

    def __init__(
        self, trainers: Callable[[], Sequence[StoredSession]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trainers = trainers
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, Watched] = {}
        self._retry_s: dict[str, float] = {}
        self._unseen: set[str] = set()

    def __call__(self) -> list[Watched]:
        """The trainers that live and whose process is known, each the same object as before."""
        with self._lock:
            sessions = {session.name: session for session in self._trainers()}
            self._found = {n: w for n, w in self._found.items() if n in sessions and w.process.is_running()}
            self._retry_s = {name: retry_s for name, retry_s in self._retry_s.items() if name in sessions}
            self._unseen &= sessions.keys()
            for name, session in sessions.items():
                if name not in self._found and self._clock() >= self._retry_s.get(name, float("-inf")):
                    self._look_for(session)
            return list(self._found.values())

    def labels_by_pid(self) -> dict[int, Labels]:
        """Process id, as it is here, to labels of each."""
        return {watched.process.pid: watched.labels for watched in self()}

    def _look_for(self, session: StoredSession) -> None:
        """Find a process, and say once when it cannot be found and once when it is found after all."""
        found = find(session)
        if isinstance(found, psutil.Process):
            watched = self._found[session.name] = Watched(session, found)
            self._retry_s.pop(session.name, None)
            if session.name in self._unseen:
                _log.info("%s: its process is seen now", watched)
            return
        if found and session.name not in self._unseen:
            self._unseen.add(session.name)
            _log.warning("trainer %s: %s; what dflash_process_... shows of it is left out", session.hello.run_id, found)
        self._retry_s[session.name] = self._clock() + RETRY_S


def proc_of(pid: int) -> Path:
    """Directory of a process in the file system of processes."""
    return Path(psutil.PROCFS_PATH) / str(pid)


def find(session: StoredSession) -> psutil.Process | str:
    """The process behind a session, or why it cannot be seen; nothing when it is about to end or does not answer."""
    pid = _listener_pid(session.endpoint)
    if pid is None:
        return ""
    if pid == 0:
        return "its process is in a PID namespace that is not seen from here (run the sidecar with the host's)"
    try:
        process = psutil.Process(pid)
        own_pid = _own_pid(pid)
        start_s = process.create_time()
    except (psutil.Error, FileNotFoundError, ProcessLookupError, PermissionError):
        return f"its process {pid} is hidden (a /proc with hidepid, or ProtectProc=)"
    if own_pid != session.hello.pid:
        return f"{pid} listens on {session.endpoint}, which is not the process that said hello"
    if start_s > session.hello.start_time_s + CLOCK_SLACK_S:
        return f"process {pid} is younger than the session (or the clock was set forward since)"
    return process


def _listener_pid(path: str) -> int | None:
    """Who listens on a socket, in our numbering; 0 when that is none that we can see, None when nobody answers now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a stopped trainer's backlog fills up, and a connect would wait for it
        try:
            probe.connect(path)
        except OSError:
            return None
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[
            0
        ]
        return pid


def _own_pid(pid: int) -> int:
    """The number by which a process knows itself: the innermost of its PID namespaces."""
    lines = (proc_of(pid) / "status").read_text(errors="replace").splitlines()
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), pid)
