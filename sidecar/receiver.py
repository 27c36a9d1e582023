"""One thread that listens to every trainer of this machine.

It watches the runtime directory: each `*.sock` gets a SUB socket of its own, also before its owner is up, because
ZeroMQ keeps trying to connect. All judgement is in `sidecar.intake`; here are only sockets. High-water marks are
explicit, and what they drop is a gap that replay repairs.
"""

import logging
import os
import sqlite3
import threading
import time
from pathlib import Path

import zmq

from shared.endpoint import MAX_PATH_BYTES
from shared.wire import LIVE_TOPICS, MAX_FRAME_BYTES
from sidecar.intake import Intake

RECEIVE_HIGH_WATER_MARK = 10_000
RECONNECT_INTERVAL_MS = 100
MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
"""Above this libzmq itself drops the connection; between the two limits the frame is counted as oversized."""
SCAN_INTERVAL_S = 1.0
RENEWAL_S = 30.0
"""A socket silent for longer is connected anew: ZeroMQ never goes back to a peer that once broke its protocol."""
POLL_MS = 50
MAX_FRAMES_PER_TURN = 200
"""From one endpoint, before the others have their turn."""
_log = logging.getLogger(__name__)


class Receiver:
    """Feeds an intake from the sockets of a directory until closed.

    Args:
        intake: owned by the receiver's thread from `start` on.
        directory: where endpoints appear; need not exist yet.
    """

    def __init__(self, intake: Intake, directory: Path) -> None:
        self._intake = intake
        self._directory = directory
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._heard_s: dict[str, float] = {}
        self._unusable: set[str] = set()
        self._context = zmq.Context()
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
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                if now_s >= scan_s:
                    self._scan()
                    scan_s = now_s + SCAN_INTERVAL_S
                self._poll()
                for endpoint, topic, wanted in self._intake.turn(time.monotonic()):
                    if (subscriber := self._sockets.get(endpoint)) is not None:
                        subscriber.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, topic)
            self._intake.commit(time.monotonic())
        except sqlite3.Error as error:
            self.failure = error

    def _poll(self) -> None:
        if not self._sockets:
            self._stopping.wait(POLL_MS / 1000)
            return
        for subscriber, _ in self._poller.poll(POLL_MS):
            endpoint = next(path for path, known in self._sockets.items() if known is subscriber)
            for _ in range(MAX_FRAMES_PER_TURN):
                try:
                    parts = subscriber.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._heard_s[endpoint] = now_s = time.monotonic()
                self._intake.take(endpoint, parts, now_s)

    def _scan(self) -> None:
        """Connect to new endpoints and let go of those that are gone."""
        try:
            present = {str(path) for path in self._directory.iterdir() if path.suffix == ".sock"}
        except FileNotFoundError:
            present = set()
        except OSError as error:
            self._complain(str(self._directory), f"cannot look for trainers: {error.strerror}")
            return
        for endpoint in present & self._sockets.keys():
            if time.monotonic() >= self._heard_s[endpoint] + RENEWAL_S:
                self._disconnect(endpoint)
        for endpoint in present - self._sockets.keys():
            self._connect(endpoint)
        for endpoint in self._sockets.keys() - present:
            if not self._intake.has_open_session(endpoint):
                self._disconnect(endpoint)

    def _disconnect(self, endpoint: str) -> None:
        subscriber = self._sockets.pop(endpoint)
        self._poller.unregister(subscriber)
        subscriber.close(linger=0)

    def _connect(self, endpoint: str) -> None:
        if len(os.fsencode(endpoint)) > MAX_PATH_BYTES or not endpoint.isprintable():
            self._complain(ascii(endpoint), f"its path is longer than {MAX_PATH_BYTES} bytes, or no plain text")
            return
        try:
            subscriber = self._context.socket(zmq.SUB)
        except zmq.ZMQError as error:
            self._complain(endpoint, f"cannot listen to so many trainers: {error}; remove sockets without an owner")
            return
        subscriber.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        for topic in LIVE_TOPICS:
            subscriber.setsockopt(zmq.SUBSCRIBE, topic)
        subscriber.connect(f"ipc://{endpoint}")
        self._sockets[endpoint] = subscriber
        self._heard_s[endpoint] = time.monotonic()
        self._poller.register(subscriber, zmq.POLLIN)

    def _complain(self, what: str, why: str) -> None:
        if what not in self._unusable:
            self._unusable.add(what)
            _log.warning("%s: %s", what, why)
