"""The telemetry thread over real sockets: hello on arrival, dense records, replay, goodbye."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.endpoint import EndpointClaim, EndpointError, live_owner_pid, socket_path
from shared.publisher import Identity, Publisher
from shared.ring import Ring
from shared.wire import (
    LIVE_TOPICS,
    Event,
    Hello,
    Record,
    ReplayChunk,
    ReplayRequest,
    Snap,
    decode,
    decode_record,
)


class Subscriber:
    """A SUB socket that gathers decoded messages."""

    def __init__(self, path: Path, topics: tuple[bytes, ...] = LIVE_TOPICS) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.connect(f"ipc://{path}")
        for topic in topics:
            self.socket.setsockopt(zmq.SUBSCRIBE, topic)

    def until(self, wanted: type, timeout_s: float = 5.0) -> list[object]:
        """Receive until a message of the wanted type arrives, and return all that came."""
        got: list[object] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.socket.poll(50):
                got.append(decode(self.socket.recv_multipart()[1]))
                if isinstance(got[-1], wanted):
                    return got
        raise AssertionError(f"no {wanted.__name__} in {timeout_s} s, got {got}")

    def close(self) -> None:
        """Drop the socket."""
        self._context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[tuple[Publisher, Cells, Path]]:
    """A started publisher with one counter that the test owns."""
    cells = Cells(TRAINER_FAMILIES)
    cells.counter("dflash_steps_total").add(3)
    path = socket_path(tmp_path, "run", 0)
    with EndpointClaim(path):
        identity = Identity(run_id="run", session="s1", pid=1, start_time_s=1.0)
        publisher = Publisher(cells=cells, identity=identity, path=path, interval_s=0.02, linger_s=0.3)
        publisher.start()
        yield publisher, cells, path
        publisher.close(0)


def test_hello_comes_first_to_a_late_subscriber(publisher: tuple[Publisher, Cells, Path]) -> None:
    """A subscriber that arrives after the start gets a hello without asking, then snapshots."""
    time.sleep(0.2)
    subscriber = Subscriber(publisher[2])

    hello = subscriber.until(Hello)[-1]
    snap = subscriber.until(Snap)[-1]
    subscriber.close()

    assert isinstance(hello, Hello)
    assert isinstance(snap, Snap)
    assert len(snap.values) == 8 * hello.schema.num_cells


def test_replay_returns_exactly_what_was_asked_for(publisher: tuple[Publisher, Cells, Path]) -> None:
    """A replay subscription is answered with the records from its first to before its end, and nobody else hears it."""
    time.sleep(0.3)
    request = ReplayRequest(session="s1", first=2, end=7, nonce="n1")
    asker, bystander = Subscriber(publisher[2], (request.topic,)), Subscriber(publisher[2])

    chunk = asker.until(ReplayChunk)[-1]
    heard = bystander.until(Snap)
    asker.close()
    bystander.close()

    assert isinstance(chunk, ReplayChunk)
    assert [decode_record(body).seq for body in chunk.bodies] == [2, 3, 4, 5, 6]
    assert chunk.done
    assert not any(isinstance(message, ReplayChunk) for message in heard)


@pytest.mark.parametrize(
    "topic",
    [
        b"replay/s1/99999999999999999999999/99999999999999999999999/n",
        b"replay/s1/5/2/n",
        b"replay/s1/-1/4/n",
        b"replay/s1/x/4/n",
        b"replay/other/0/4/n",
        b"replay/\xff\xfe/0/4/n",
        b"replay/" + b"9" * 500,
        b"\x00\x01\x02",
    ],
)
def test_senseless_requests_change_nothing(publisher: tuple[Publisher, Cells, Path], topic: bytes) -> None:
    """A subscription that is no request is not answered, and snapshots go on."""
    asker, bystander = Subscriber(publisher[2], (topic,)), Subscriber(publisher[2])
    bystander.until(Snap)
    time.sleep(0.1)

    later = [message for _ in range(3) for message in bystander.until(Snap)]
    answers = asker.socket.poll(50)
    asker.close()
    bystander.close()

    assert any(isinstance(message, Snap) for message in later)
    assert answers == 0


def test_absent_subscriber_delays_the_end_by_the_linger_at_most(tmp_path: Path) -> None:
    """1. A subscriber comes and goes like a restarting sidecar. 2. The run ends. Result: a wait, but a short one."""
    path = socket_path(tmp_path, "run", 0)
    with EndpointClaim(path):
        identity = Identity(run_id="run", session="s1", pid=1, start_time_s=1.0)
        publisher = Publisher(cells=Cells(()), identity=identity, path=path, interval_s=0.05, linger_s=1.0)
        publisher.start()
        for _ in range(3):
            subscriber = Subscriber(path)
            subscriber.until(Hello)
            subscriber.close()
        time.sleep(0.3)
        started_s = time.monotonic()
        publisher.close(0)

    assert 0.9 < time.monotonic() - started_s < 2.0


def test_goodbye_is_the_last_record(tmp_path: Path) -> None:
    """Closing sends the queued events, a goodbye with the exit code, a last snapshot, and a hello that counts them."""
    cells = Cells(TRAINER_FAMILIES)
    path = socket_path(tmp_path, "run", 0)
    with EndpointClaim(path):
        identity = Identity(run_id="run", session="s1", pid=1, start_time_s=1.0)
        publisher = Publisher(cells=cells, identity=identity, path=path, interval_s=60.0)
        publisher.start()
        subscriber = Subscriber(path)
        subscriber.until(Hello)
        publisher.event("checkpoint", step=7)
        publisher.close(3)
        messages = subscriber.until(Event) + subscriber.until(Event) + subscriber.until(Snap) + subscriber.until(Hello)
        subscriber.close()

    records = [m for m in messages if isinstance(m, Record)]
    events = [m for m in messages if isinstance(m, Event)]
    hello = messages[-1]
    assert [(e.kind, e.detail) for e in events] == [("checkpoint", {"step": 7}), ("goodbye", {"exit_code": 3})]
    assert isinstance(hello, Hello)
    assert hello.next_seq == records[-1].seq + 1


def test_ring_forgets_the_oldest_and_says_so() -> None:
    """Over its bound the ring drops the oldest bodies; a chunk then starts at the first one it still has."""
    ring = Ring(max_bytes=100)
    for _ in range(20):
        ring.append(b"x" * 10)

    assert (ring.first_seq, ring.next_seq, ring.num_bytes) == (10, 20, 100)
    assert ring.chunk(0, 12) == (10, (b"x" * 10, b"x" * 10))


def test_second_claim_is_refused_with_the_owner(tmp_path: Path) -> None:
    """A live owner keeps its path; the error names the path and the remedy."""
    path = socket_path(tmp_path, "run", 0)
    with EndpointClaim(path), pytest.raises(EndpointError, match=r"run-0\.sock is in use .* another run\.id"):
        EndpointClaim(path).__enter__()


def test_stale_socket_is_taken_over(tmp_path: Path) -> None:
    """A socket file left by a killed trainer does not stop the next one."""
    path = socket_path(tmp_path, "run", 0)
    path.touch()

    with EndpointClaim(path) as claim:
        assert claim.path == path


def test_an_owner_that_accepts_nobody_is_seen_without_waiting(tmp_path: Path) -> None:
    """A stopped trainer's backlog fills up: whoever looks for it must not wait for a place in it."""
    path = tmp_path / "run-0.sock"
    with socket.socket(socket.AF_UNIX) as stopped, ExitStack() as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            one.connect_ex(str(path))
        started_s = time.monotonic()

        owner = live_owner_pid(path)

        assert owner is not None
        assert time.monotonic() - started_s < 0.5
