"""One thread that listens to every trainer of this machine, and to those elsewhere that it was told of.

It watches the runtime directory: each `*.sock` gets a SUB socket of its own, also before its owner is up, because
ZeroMQ keeps trying to connect. So does each configured `tcp://` endpoint, with CURVE; those have an I/O thread to
themselves, since looking up a name may take long. All judgement is in `sidecar.intake`; here are only sockets.
High-water marks are explicit, and what they drop is a gap that replay repairs.
"""

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from shared.curve import CurveClient
from shared.endpoint import MAX_PATH_BYTES, EndpointError, check_runtime_dir
from shared.wire import LIVE_TOPICS, MAX_FRAME_BYTES
from sidecar.intake import Intake

RECEIVE_HIGH_WATER_MARK = 10_000
RECONNECT_INTERVAL_MS = 100
MAX_RECONNECT_INTERVAL_MS = 2_000
CONNECT_TIMEOUT_MS = 5_000
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
"""Of trainers elsewhere. A connection that is dead without a word is made anew before the silence counts as an end."""
MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
"""Above this libzmq itself drops the connection; between the two limits the frame is counted as oversized."""
SCAN_INTERVAL_S = 1.0
RENEWAL_S = 30.0
"""A socket silent for longer is connected anew: ZeroMQ never goes back to a peer that once broke its protocol."""
HINT_AFTER_S = 10.0
POLL_MS = 50
IO_OF_LOCAL, IO_OF_REMOTE = 0b01, 0b10
"""Which of the two I/O threads serves a socket."""
MAX_FRAMES_PER_TURN = 200
"""From one endpoint, before the others have their turn."""
_log = logging.getLogger(__name__)


class Receiver:
    """Feeds an intake from the sockets of a directory until closed.

    Args:
        intake: owned by the receiver's thread from `start` on.
        directory: where endpoints appear; need not exist yet.
        remotes: `tcp://` endpoints of trainers elsewhere.
        curve: keys for those.
    """

    def __init__(
        self, intake: Intake, directory: Path, remotes: Sequence[str] = (), curve: CurveClient | None = None
    ) -> None:
        self._intake = intake
        self._directory = directory
        self._remotes = dict.fromkeys(remotes)
        self._curve = curve
        self._silent = set(self._remotes)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._heard_s: dict[str, float] = {}
        self._unusable: set[str] = set()
        self._context = zmq.Context(io_threads=2)
        self._poller = zmq.Poller()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self.failure: sqlite3.Error | None = None
        """Why the thread gave up: a damaged journal."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self) -> None:
        """Commit what came and stop; what is still under way comes again at the next start."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    def _run(self) -> None:
        scan_s = 0.0
        hint_s = time.monotonic() + HINT_AFTER_S
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                if now_s >= scan_s:
                    self._connect_remotes()
                    self._scan()
                    scan_s = now_s + SCAN_INTERVAL_S
                if now_s >= hint_s:
                    self._hint()
                    hint_s = math.inf
                self._poll(scan_s)
                for endpoint, topic, wanted in self._intake.turn(time.monotonic()):
                    if (subscriber := self._sockets.get(endpoint)) is not None:
                        subscriber.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, topic)
            self._intake.commit(time.monotonic())
        except sqlite3.Error as error:
            self.failure = error

    def _poll(self, scan_s: float) -> None:
        if not self._sockets:  # nothing can come before the next scan
            self._stopping.wait(max(scan_s - time.monotonic(), 0.0))
            return
        for subscriber, _ in self._poller.poll(POLL_MS):
            endpoint = next(path for path, known in self._sockets.items() if known is subscriber)
            for _ in range(MAX_FRAMES_PER_TURN):
                try:
                    parts = subscriber.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._silent.discard(endpoint)
                self._heard_s[endpoint] = now_s = time.monotonic()
                self._intake.take(endpoint, parts, now_s)

    def _scan(self) -> None:
        """Connect to new endpoints and let go of those that are gone."""
        try:
            check_runtime_dir(self._directory)
            present = {str(path) for path in self._directory.iterdir() if path.suffix == ".sock"}
        except FileNotFoundError:
            present = set()
        except OSError as error:
            self._complain(str(self._directory), f"cannot look for trainers: {error.strerror}")
            return
        except EndpointError as error:
            self._complain(str(self._directory), f"not looking for trainers there: {error}")
            return
        self._renew(present & self._sockets.keys())
        for endpoint in present - self._sockets.keys():
            try:
                self._connect(endpoint)
            except (UnicodeEncodeError, zmq.ZMQError) as error:  # a name that is no text, or too many sockets
                self._complain(ascii(endpoint), f"cannot listen to it: {error}")
        for endpoint in self._sockets.keys() - present - self._remotes.keys():
            if not self._intake.has_open_session(endpoint):
                self._disconnect(endpoint)

    def _connect_remotes(self) -> None:
        self._renew(self._remotes.keys() & self._sockets.keys())
        for endpoint in self._remotes.keys() - self._sockets.keys():
            self._connect_remote(endpoint)

    def _renew(self, endpoints: set[str]) -> None:
        """Let go of those that have been silent for long; they are connected again at once."""
        for endpoint in endpoints:
            if time.monotonic() >= self._heard_s[endpoint] + RENEWAL_S:
                self._disconnect(endpoint)

    def _disconnect(self, endpoint: str) -> None:
        subscriber = self._sockets.pop(endpoint)
        self._poller.unregister(subscriber)
        subscriber.close(linger=0)

    def _connect(self, endpoint: str) -> None:
        if len(endpoint.encode()) > MAX_PATH_BYTES:
            self._complain(endpoint, f"its path is longer than {MAX_PATH_BYTES} bytes")
            return
        subscriber = self._subscriber(IO_OF_LOCAL)
        subscriber.connect(f"ipc://{endpoint}")
        self._add(endpoint, subscriber)

    def _connect_remote(self, endpoint: str) -> None:
        assert self._curve is not None
        subscriber = self._subscriber(IO_OF_REMOTE)
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_INTERVAL_MS)
        subscriber.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        subscriber.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        subscriber.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        subscriber.setsockopt(zmq.IPV6, 1)
        self._curve.secure(subscriber)
        subscriber.connect(endpoint)
        self._add(endpoint, subscriber)

    def _subscriber(self, affinity: int) -> "zmq.Socket[bytes]":
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.AFFINITY, affinity)
        subscriber.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        for topic in LIVE_TOPICS:
            subscriber.setsockopt(zmq.SUBSCRIBE, topic)
        return subscriber

    def _add(self, endpoint: str, subscriber: "zmq.Socket[bytes]") -> None:
        self._sockets[endpoint] = subscriber
        self._heard_s[endpoint] = time.monotonic()
        self._poller.register(subscriber, zmq.POLLIN)

    def _hint(self) -> None:
        """Say what to look at, because a wrong key is answered with silence."""
        for endpoint in self._silent:
            _log.info(
                "nothing heard from %s so far: does the trainer run, is the port open, "
                "are the keys of both sides from one `dflash-sidecar keys`?",
                endpoint,
            )

    def _complain(self, what: str, why: str) -> None:
        if what not in self._unusable:
            self._unusable.add(what)
            _log.warning("%s: %s", what, why)
