"""The trainer's telemetry thread: reads the cells, keeps a ring, sends, and answers replays.

Workers never come here. They add to cells and append to a bounded mailbox; this thread copies the cells once per
interval, numbers and encodes what the mailbox holds, keeps the bodies in a ring bounded in bytes, and sends without
ever waiting. Why a thread of its own: pyzmq gives up the GIL inside `send`, so beside busy Python threads a send costs
its caller milliseconds, and this thread is the only one that may afford that.

The socket is an XPUB. A new subscription to a live topic is answered with a hello; a `replay/...` subscription is a
request, served from the ring in small chunks between ticks (`shared.wire`). Nothing here raises into the trainer: the
thread owns its socket alone and dies with the process.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from shared.cells import Cells
from shared.curve import CurveServer
from shared.endpoint import bind_group_writable
from shared.peers import Peers, address_of
from shared.replays import Replays
from shared.ring import CHUNK_BYTES, Ring
from shared.thread_name import name_this_thread
from shared.wire import (
    PROTOCOL_VERSION,
    REPLAY_PREFIX,
    TOPIC_EVENT,
    TOPIC_HELLO,
    TOPIC_SNAP,
    TOPIC_STEP,
    Device,
    Event,
    FrameError,
    Hello,
    Record,
    ReplayRequest,
    Scalar,
    Snap,
    Step,
    encode,
)

SEND_HIGH_WATER_MARK = 500
MAX_UNSENT_BYTES = 32 * 1024 * 1024
"""About how much may wait for one subscriber that does not read; more is dropped, and asked for again by replay."""
RECEIVE_HIGH_WATER_MARK = 10
"""Subscriptions taken off a connection at once: more wait in the socket, at the cost of who sends them."""
MAX_SUBSCRIPTION_BYTES = 1024
HANDSHAKE_MS = 2_000
"""A connection that does not speak ZeroMQ by then is closed and its descriptor freed."""
MAILBOX_RECORDS = 100_000
HELLO_INTERVAL_S = 10.0
MIN_HELLO_GAP_S = 0.05
"""However fast subscribers come and go, a hello is not built more often than this."""
MAX_SUBSCRIPTIONS_PER_TURN = 500
SERVICE_PAUSE_S = 0.001
"""After each chunk and each handful of subscriptions, so that no asker can keep this thread busy."""
CLOSE_QUIET_S = 0.3
REMOTE_CLOSE_QUIET_S = 2.0
"""Over a network a question takes longer to come."""
MAX_SLEEP_S = 0.1
"""How long `close` may have to wait for the thread to notice."""
_TOPICS: dict[type[Record], bytes] = {Snap: TOPIC_SNAP, Step: TOPIC_STEP, Event: TOPIC_EVENT}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the hello says about a session besides its schema and sequence numbers."""

    run_id: str
    session: str
    pid: int
    start_time_s: float
    topology: tuple[Device, ...] = ()
    config: dict[str, Scalar] = {}
    rank: int = 0
    world_size: int = 1


class Publisher:
    """Publish snapshots, step records and events of one session.

    Args:
        cells: the counters; all declared before `start`.
        identity: what the hello says.
        path: socket path, claimed by the caller (`EndpointClaim`), unless there is `curve`.
        curve: listens on the network instead of on a path.
        interval_s: seconds between snapshots.
        ring_bytes: how much history can be replayed.
        on_tick: called on the telemetry thread before each snapshot, to mirror pulled values into cells.
        collect: called on the telemetry thread; returns step records that have become readable, in order, with
            `session` and `seq` left blank.
        linger_s: longest wait in `close` for a sidecar that is being restarted.
        audit: called on the telemetry thread with every record before it is sent; for tests.
    """

    def __init__(  # noqa: PLR0913 - a composition root calls it once, by keyword
        self,
        *,
        cells: Cells,
        identity: Identity,
        path: Path | None = None,
        curve: CurveServer | None = None,
        interval_s: float = 1.0,
        ring_bytes: int = 64 * 1024 * 1024,
        on_tick: Callable[[], None] = lambda: None,
        collect: Callable[[], Iterable[Step]] = lambda: (),
        linger_s: float = 5.0,
        audit: Callable[[Record], None] | None = None,
    ) -> None:
        self._identity = identity
        self._cells = cells
        self._schema = cells.schema()
        self._path = path
        self._curve = curve
        self._interval_s = interval_s
        self._linger_s = linger_s
        self._on_tick = on_tick
        self._collect = collect
        self._audit = audit
        self._ring = Ring(ring_bytes)
        self._events: deque[Event] = deque(maxlen=MAILBOX_RECORDS)
        self._replays = Replays()
        self._peers = Peers(path) if path is not None else None  # elsewhere there are only holders of a key
        self._subscribers = 0
        self._ever_subscribed = False
        self._last_hello_s = 0.0
        self._next_hello_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)

    @property
    def ring(self) -> Ring:
        """The ring, for its figures; only `on_tick` may read it."""
        return self._ring

    def start(self) -> None:
        """Bind and start the thread; call it before other threads exist, since binding sets the umask."""
        largest_bytes = max(8 * self._schema.num_cells, CHUNK_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, min(MAX_UNSENT_BYTES // largest_bytes, SEND_HIGH_WATER_MARK))
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # Refuses old protocols, in which any bytes pass for a peer; nobody answers for the domain, so all others may.
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"dflash")
        self._socket.setsockopt(zmq.LINGER, 0)
        # Every subscription and every end of one is reported, not only the first and the last of a topic.
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        if self._curve is not None:
            self._curve.bind(self._socket)
        else:
            assert self._path is not None
            bind_group_writable(self._socket, self._path)
        self._thread.start()

    def event(self, kind: str, **detail: Scalar) -> None:
        """Queue an event; never blocks, safe from any thread."""
        self._events.append(Event(session="", seq=0, time_s=time.time(), kind=kind, detail=detail))

    def close(self, exit_code: int) -> None:
        """Send what is left and a goodbye; waits at most the linger time for a sidecar that is being restarted."""
        self.event("goodbye", exit_code=exit_code)
        self._stopping.set()
        if self._thread.ident is not None:  # else `start` failed
            self._thread.join(timeout=self._linger_s + 5.0)
        if not self._thread.is_alive():
            # Else the thread still uses the socket, and both die with the process.
            if self._curve is not None:
                self._curve.close()
            self._context.destroy(linger=0)

    def _run(self) -> None:
        name_this_thread("telemetry")
        next_tick_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= self._next_hello_s:
                self._send_hello()
            if now_s >= next_tick_s:
                self._tick()
                # A late tick is not made up for: two snapshots in one interval would say nothing new.
                next_tick_s = max(next_tick_s + self._interval_s, time.monotonic())
            wake_s = min(next_tick_s, self._next_hello_s, now_s + MAX_SLEEP_S)
            self._serve(0.0 if self._replays else max(wake_s - time.monotonic(), 0.0))
        self._tick()
        self._say_goodbye()

    def _tick(self) -> None:
        """Number and send everything that is ready, then one snapshot."""
        self._on_tick()
        for step in self._collect():
            self._publish(step)
        while self._events:
            self._publish(self._events.popleft())
        self._publish(
            Snap(session="", seq=0, time_s=time.time(), monotonic_s=time.monotonic(), values=self._cells.snapshot())
        )

    def _publish(self, record: Record) -> None:
        record = msgspec.structs.replace(record, session=self._identity.session, seq=self._ring.next_seq)
        if self._audit is not None:
            self._audit(record)
        body = encode(record)
        self._ring.append(body)
        self._send(_TOPICS[type(record)], body)

    def _send(self, topic: bytes, body: bytes) -> None:
        # XPUB never reports a full pipe: it drops, and the sidecar sees the gap by sequence number.
        self._socket.send_multipart((topic, body), flags=zmq.NOBLOCK)

    def _send_hello(self) -> None:
        self._last_hello_s = time.monotonic()
        self._next_hello_s = self._last_hello_s + HELLO_INTERVAL_S
        who = self._identity
        hello = Hello(
            version=PROTOCOL_VERSION,
            run_id=who.run_id,
            session=who.session,
            pid=who.pid,
            start_time_s=who.start_time_s,
            interval_s=self._interval_s,
            topology=who.topology,
            config=who.config,
            schema=self._schema,
            schema_digest=self._schema.digest,
            first_seq=self._ring.first_seq,
            next_seq=self._ring.next_seq,
            rank=who.rank,
            world_size=who.world_size,
        )
        self._send(TOPIC_HELLO, encode(hello))

    def _serve(self, timeout_s: float) -> None:
        """Wait for subscriptions until the timeout, take in those that came, send one chunk of one replay."""
        # Rounded up: the last fraction of a millisecond would otherwise be spent spinning.
        came = self._socket.poll(math.ceil(timeout_s * 1000))
        if came:
            for _ in range(MAX_SUBSCRIPTIONS_PER_TURN):
                try:
                    self._take_subscription(self._socket.recv(zmq.NOBLOCK, copy=False))
                except zmq.Again:
                    break
        if (answer := self._replays.next_chunk(self._ring)) is not None:
            topic, chunk = answer
            self._send(topic, encode(chunk))
        if came or answer is not None:
            time.sleep(SERVICE_PAUSE_S)

    def _take_subscription(self, message: zmq.Frame) -> None:
        kind, topic, address = message.bytes[:1], message.bytes[1:], address_of(message)
        if kind not in {b"\x00", b"\x01"}:
            return
        arrived = kind == b"\x01"
        if address is not None and self._peers is not None:
            self._peers.count(address, arrived=arrived)
        if topic == TOPIC_HELLO:
            self._subscribers += 1 if arrived else -1
            self._ever_subscribed = True
            if arrived:
                self._next_hello_s = min(self._next_hello_s, self._last_hello_s + MIN_HELLO_GAP_S)
        elif topic.startswith(REPLAY_PREFIX) and arrived and address is not None:
            with suppress(FrameError):
                request = ReplayRequest.parse(topic)
                if request.session == self._identity.session:
                    self._replays.add(address, request)
        elif topic.startswith(REPLAY_PREFIX):
            self._replays.cancel(address, topic)

    def _say_goodbye(self) -> None:
        """Repeat the hello, whose `next_seq` shows a lost tail, and stay until nobody asks for more."""
        deadline_s = time.monotonic() + self._linger_s
        quiet_s = CLOSE_QUIET_S if self._curve is None else REMOTE_CLOSE_QUIET_S
        self._send_hello()
        quiet_since_s = time.monotonic()
        while time.monotonic() < deadline_s:
            self._serve(0.02)
            waiting = self._ever_subscribed and self._subscribers <= 0
            if self._replays or waiting:
                quiet_since_s = time.monotonic()
            elif time.monotonic() - quiet_since_s > quiet_s:
                return
