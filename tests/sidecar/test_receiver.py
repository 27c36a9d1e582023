"""The receiver over real sockets, against the trainer's real publisher."""

import itertools
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.curve import CurveClient, CurveServer, make_keys
from shared.endpoint import EndpointClaim, socket_path
from shared.publisher import Identity, Publisher
from sidecar.intake import Intake
from sidecar.journal import Journal
from sidecar.receiver import Receiver


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition never held"
        time.sleep(0.01)


class Listening:
    """A journal and receivers that come and go over it."""

    def __init__(self, tmp_path: Path) -> None:
        self.runtime_dir = tmp_path / "run"
        self.journal = Journal(tmp_path / "journal.sqlite")
        self._receivers: list[Receiver] = []

    def start(self) -> Receiver:
        """Start a receiver with a nonce of its own."""
        intake = Intake(self.journal, f"n{len(self._receivers)}", time.monotonic())
        receiver = Receiver(intake, self.runtime_dir)
        receiver.start()
        self._receivers.append(receiver)
        return receiver

    def close(self) -> None:
        """Stop everything."""
        for receiver in self._receivers:
            receiver.close()
        self.journal.close()

    def watermark(self, session: str = "s1") -> int:
        """How far a session is complete."""
        return next((s.next_seq for s in self.journal.sessions() if s.name == session), 0)

    def is_dense(self, session: str = "s1") -> bool:
        """Whether every record below the watermark is there, once and in order."""
        stored = next(s for s in self.journal.sessions() if s.name == session)
        seqs = [record.seq for record in self.journal.records(stored, 0, stored.next_seq)]
        return seqs == list(range(stored.next_seq))


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    """Nothing started yet."""
    listening = Listening(tmp_path)
    yield listening
    listening.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Publisher]:
    """A publisher that takes a snapshot every 5 ms."""
    runtime_dir = tmp_path / "run"
    path = socket_path(runtime_dir, "run", 0)
    cells = Cells(TRAINER_FAMILIES)
    cells.counter("dflash_steps_total")
    with EndpointClaim(path):
        identity = Identity(run_id="run", session="s1", pid=1, start_time_s=time.time())
        publisher = Publisher(cells=cells, identity=identity, path=path, interval_s=0.005, linger_s=0.5)
        publisher.start()
        yield publisher
        publisher.close(0)


@pytest.mark.usefixtures("trainer")
def test_late_receiver_gets_everything_from_the_start(listening: Listening) -> None:
    """What was published before the receiver came is replayed."""
    time.sleep(0.5)
    listening.start()

    wait_for(lambda: listening.watermark() > 150)

    assert listening.is_dense()
    assert listening.journal.counts()["replayed", ""] > 0
    assert listening.journal.lost_ranges() == []


@pytest.mark.usefixtures("trainer")
def test_receivers_that_come_and_go_lose_nothing(listening: Listening) -> None:
    """Each receiver continues where the one before it stopped."""
    for _ in range(4):
        before = listening.watermark()
        receiver = listening.start()
        wait_for(lambda before=before: listening.watermark() > before + 50)
        receiver.close()
        time.sleep(0.1)

    assert listening.is_dense()
    assert listening.journal.lost_ranges() == []


def test_goodbye_arrives_with_everything_before_it(listening: Listening, trainer: Publisher) -> None:
    """A trainer that leaves is complete and ended with its exit code."""
    listening.start()
    wait_for(lambda: listening.watermark() > 10)
    trainer.close(3)

    wait_for(lambda: listening.journal.sessions()[0].ended_s is not None)

    assert listening.journal.sessions()[0].exit_code == 3
    assert listening.is_dense()


@pytest.mark.usefixtures("trainer")
def test_rogue_endpoint_harms_nobody(listening: Listening) -> None:
    """Garbage from another socket is counted, and the trainer's records keep flowing."""
    context = zmq.Context()
    rogue = context.socket(zmq.PUB)
    rogue.setsockopt(zmq.LINGER, 0)
    rogue.bind(f"ipc://{listening.runtime_dir}/rogue.sock")
    listening.start()

    def garbage_was_counted() -> bool:
        for body in (b"", b"\xc1", b"\xff" * 1000, b"\x93\x01\x02\x03"):
            rogue.send_multipart([b"snap", body])
            rogue.send_multipart([b"hello", body, body])
        return sum(v for (name, _), v in listening.journal.counts().items() if name == "rejected") > 100

    wait_for(garbage_was_counted)
    before = listening.watermark()
    wait_for(lambda: listening.watermark() > before + 20)
    context.destroy(linger=0)

    assert listening.is_dense()
    assert {label for name, label in listening.journal.counts() if name == "rejected"} == {
        "parts",
        "malformed",
        "invalid",
    }


@pytest.mark.usefixtures("trainer")
def test_odd_names_in_the_directory_harm_nobody(listening: Listening) -> None:
    """A socket whose name is no text, a directory and a plain file that are called like one are passed over."""
    (listening.runtime_dir / os.fsdecode(b"\xff\xfe.sock")).touch()
    (listening.runtime_dir / "plain.sock").touch()
    (listening.runtime_dir / "directory.sock").mkdir()
    receiver = listening.start()

    wait_for(lambda: listening.watermark() > 50)

    assert receiver.is_alive
    assert listening.is_dense()


class _Babbler(socketserver.BaseRequestHandler):
    """Speaks to whoever connects, but not ZeroMQ; or ZeroMQ up to a frame without end."""

    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
    speeches = itertools.cycle(
        (
            b"",
            b"\x00" * 100,
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            greeting[:40],
            greeting + b"\x04\xff",
            greeting + ready + b"\x03" + b"\x7f" + b"\xff" * 7 + b"x" * 100,
            greeting + ready + b"\x02" + (2**40).to_bytes(8, "big") + b"x" * 100,
            greeting + ready + b"\x01\x04snap\x00\x02\xc1\xc1" * 50,
        )
    )
    num_calls = 0

    def handle(self) -> None:
        """Say one of these things and leave."""
        type(self).num_calls += 1
        self.request.sendall(next(self.speeches))


def test_a_trainer_is_found_where_another_program_spoke_before(
    listening: Listening, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. What listens at a path speaks no ZeroMQ, or endless frames. 2. A trainer takes it over, and is heard."""
    monkeypatch.setattr("sidecar.receiver.SCAN_INTERVAL_S", 0.1)
    monkeypatch.setattr("sidecar.receiver.RENEWAL_S", 0.3)
    listening.runtime_dir.mkdir(mode=0o700)
    path = listening.runtime_dir / "run-0.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), _Babbler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        receiver = listening.start()
        wait_for(lambda: _Babbler.num_calls > 16, 30.0)
        server.shutdown()
        thread.join()
    assert path.exists()
    request.getfixturevalue("trainer")

    wait_for(lambda: listening.watermark() > 50)

    assert receiver.is_alive
    assert listening.is_dense()


@pytest.mark.usefixtures("trainer")
def test_directory_that_everybody_may_write_is_not_looked_at(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    """Where anybody could plant a socket no trainer is looked for until that is mended, and the log says so once."""
    listening.runtime_dir.chmod(0o777)
    listening.start()
    wait_for(lambda: "not looking for trainers there" in caplog.text)
    time.sleep(1.5)
    before = listening.journal.sessions()
    listening.runtime_dir.chmod(0o700)
    wait_for(lambda: listening.watermark() > 10)

    assert before == []
    assert caplog.text.count("writable by everybody; chmod o-w it") == 1


def test_trainer_elsewhere_is_found_where_something_else_answered_before(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port where something that is no trainer answered first is tried again, and a trainer there is heard."""
    monkeypatch.setattr("sidecar.receiver.RENEWAL_S", 1.0)
    make_keys(tmp_path / "keys")
    context = zmq.Context()
    stranger = context.socket(zmq.XPUB)  # speaks ZeroMQ, but not CURVE
    port = stranger.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    curve = CurveClient.load(tmp_path / "keys" / "sidecar")
    intake = Intake(listening.journal, "n", time.monotonic())
    receiver = Receiver(intake, listening.runtime_dir, [endpoint], curve)
    receiver.start()
    time.sleep(1.0)
    context.destroy(linger=0)
    identity = Identity(run_id="run", session="s1", pid=1, start_time_s=time.time())
    server = CurveServer(endpoint, tmp_path / "keys" / "trainer")
    publisher = Publisher(cells=Cells(TRAINER_FAMILIES), identity=identity, curve=server, interval_s=0.05, linger_s=0.0)
    publisher.start()
    wait_for(lambda: listening.watermark() > 10)
    publisher.close(0)
    receiver.close()

    assert listening.is_dense()
