"""Telemetry over tcp: who has the right key gets it, and nobody else gets anything."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from sidecar_process import wait_for

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.curve import HANDSHAKE_TIMEOUT_MS, CurveClient, CurveError, CurveServer, make_keys
from shared.publisher import Identity, Publisher
from shared.remote import check_remote
from shared.settings import SettingsError

Secure = Callable[["zmq.Socket[bytes]"], None]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Fresh keys of both sides."""
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def publisher_at(port: int, keys: Path) -> Publisher:
    """A publisher that is not started."""
    identity = Identity(run_id="run", session="s1", pid=1, start_time_s=time.time())
    curve = CurveServer(f"tcp://127.0.0.1:{port}", keys / "trainer")
    return Publisher(cells=Cells(TRAINER_FAMILIES), identity=identity, curve=curve, interval_s=0.05, linger_s=0.0)


class Trainer:
    """A publisher on a port."""

    def __init__(self, keys: Path) -> None:
        self.port = free_port()
        self.publisher = publisher_at(self.port, keys)
        self.publisher.start()


@pytest.fixture
def trainer(keys: Path) -> Iterator[Trainer]:
    """A started publisher."""
    trainer = Trainer(keys)
    yield trainer
    trainer.publisher.close(0)


class Listener:
    """A SUB socket of somebody."""

    def __init__(self, port: int, secure: Secure) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        secure(self._socket)
        self._socket.subscribe(b"")
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def hears(self, timeout_s: float) -> bool:
        """Whether anything arrives."""
        return bool(self._socket.poll(round(timeout_s * 1000)))

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)


def authorised(keys: Path) -> Secure:
    """What the sidecar does with its socket."""
    return CurveClient.load(keys / "sidecar").secure


def plain(socket: "zmq.Socket[bytes]") -> None:
    """Offer a user name and a password."""
    socket.setsockopt(zmq.PLAIN_USERNAME, b"sidecar")
    socket.setsockopt(zmq.PLAIN_PASSWORD, b"sidecar")


def stranger(keys: Path) -> Secure:
    """Know the trainer's public key, but have a key of one's own making."""
    client = CurveClient.load(keys / "sidecar")
    public_key, secret_key = zmq.curve_keypair()
    return CurveClient(public_key, secret_key, client.server_key).secure


def borrower(keys: Path) -> Secure:
    """Show the sidecar's public key without having its secret one."""
    client = CurveClient.load(keys / "sidecar")
    return CurveClient(client.public_key, zmq.curve_keypair()[1], client.server_key).secure


def misled(keys: Path) -> Secure:
    """Have the sidecar's keys, but expect another trainer."""
    client = CurveClient.load(keys / "sidecar")
    return CurveClient(client.public_key, client.secret_key, zmq.curve_keypair()[0]).secure


INTRUDERS: dict[str, Callable[[Path], Secure]] = {
    "no security": lambda _keys: lambda _socket: None,
    "name and password": lambda _keys: plain,
    "unknown key": stranger,
    "known key without its secret": borrower,
    "wrong trainer": misled,
}


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_only_the_authorised_key_gets_anything(trainer: Trainer, keys: Path, intruder: str) -> None:
    """A sidecar hears the trainer at once; whoever lacks the key hears nothing, before and after."""
    outsider = Listener(trainer.port, INTRUDERS[intruder](keys))
    sidecar = Listener(trainer.port, authorised(keys))
    heard = sidecar.hears(5.0)
    overheard = outsider.hears(1.0)
    outsider.close()
    sidecar.close()

    assert (heard, overheard) == (True, False)


def test_nobody_gets_in_when_the_check_of_keys_is_gone(trainer: Trainer, keys: Path) -> None:
    """Without the thread that checks keys not even the right one is let in; who is in already goes on hearing."""
    before = Listener(trainer.port, authorised(keys))
    assert before.hears(5.0)
    assert trainer.publisher._curve is not None
    trainer.publisher._curve.close()
    after = [Listener(trainer.port, authorised(keys)), Listener(trainer.port, stranger(keys))]
    heard = [before.hears(2.0), *(listener.hears(1.0) for listener in after)]
    for listener in (before, *after):
        listener.close()

    assert heard == [True, False, False]


def test_idle_and_babbling_connections_are_closed(trainer: Trainer, keys: Path) -> None:
    """Connections that never show a key cost the trainer no file descriptor for longer than the handshake may take."""
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))
    peers = [socket.create_connection(("127.0.0.1", trainer.port)) for _ in range(200)]
    for peer in peers[::2]:
        # A ZMTP greeting for CURVE, then a frame that claims to be 2**62 bytes long.
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\0") + b"\x02\x40" + bytes(7) + b"x" * 100)
    sidecar = Listener(trainer.port, authorised(keys))
    heard = sidecar.hears(5.0)
    deadline_s = time.monotonic() + 2 * HANDSHAKE_TIMEOUT_MS / 1000
    for peer in peers:
        peer.settimeout(max(deadline_s - time.monotonic(), 0.1))
        with contextlib.suppress(ConnectionError):
            while peer.recv(4096):
                pass
        peer.close()
    sidecar.close()
    wait_for(lambda: len(list(fds.iterdir())) <= before + 2, "the descriptors to come back", 5.0)

    assert heard


def test_keys_are_private_and_never_overwritten(keys: Path) -> None:
    """Directories are 0700 and secrets 0600 whatever the umask; a second call changes nothing."""
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    with pytest.raises(CurveError, match="exists; give another directory"):
        make_keys(keys)
    previous = os.umask(0)
    make_keys(keys / "more" / "keys")
    os.umask(previous)
    made = [keys / "trainer", keys / "sidecar", keys / "more" / "keys", keys / "more" / "keys" / "trainer"]

    assert {path: path.read_bytes() for path in before} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*.key_secret")} == {0o600}
    assert sorted(path.name for path in (keys / "trainer").iterdir()) == ["sidecar.key", "trainer.key_secret"]
    assert sorted(path.name for path in (keys / "sidecar").iterdir()) == ["sidecar.key_secret", "trainer.key"]


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "group may read": (lambda d: (d / "trainer.key_secret").chmod(0o640), r"key_secret is a secret .* chmod 600 it"),
    "all may read": (lambda d: (d / "trainer.key_secret").chmod(0o604), r"key_secret is a secret .* chmod 600 it"),
    "others may add keys": (lambda d: d.chmod(0o770), r"others can put keys into .*/trainer; chmod 700 it"),
    "no secret": (
        lambda d: (d / "trainer.key_secret").unlink(),
        r"trainer\.key_secret.*give the directory trainer/ that",
    ),
    "nobody authorised": (lambda d: (d / "sidecar.key").unlink(), r"no public key of a sidecar; give the directory"),
    "damaged": (lambda d: (d / "sidecar.key").write_text('public-key = "abc"'), r"sidecar\.key holds no whole key"),
    "rubbish": (lambda d: (d / "trainer.key_secret").write_bytes(b"\xff\x00\n"), r"key_secret holds no whole key"),
    "public in place of secret": (
        lambda d: (d / "trainer.key_secret").write_text((d / "sidecar.key").read_text()),
        r"trainer\.key_secret holds no secret key",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_keys_that_are_no_good_are_refused_with_the_remedy(keys: Path, case: str) -> None:
    """Secrets that others can read, and files that are missing or damaged, are one clear error each."""
    spoil, message = SPOILED[case]
    spoil(keys / "trainer")

    with pytest.raises(CurveError, match=message):
        CurveServer("tcp://127.0.0.1:1", keys / "trainer")


@pytest.mark.parametrize("endpoint", ["", "ipc:///x", "tcp://", "tcp://host", "tcp://host:0", "tcp://h:70000", "h:1"])
def test_address_that_is_none_is_refused(endpoint: str) -> None:
    """The error names the setting and shows what is expected."""
    with pytest.raises(SettingsError, match=r"telemetry\.endpoint='.*': expected tcp://HOST:PORT"):
        check_remote("telemetry.endpoint", endpoint, "telemetry.keys", "keys")


def test_address_without_keys_is_refused() -> None:
    """The error says how to make keys and which setting takes them."""
    with pytest.raises(SettingsError, match=r"`dflash-sidecar keys DIR` and set telemetry\.keys"):
        check_remote("telemetry.endpoint", "tcp://[::1]:9478", "telemetry.keys", "")


def test_busy_port_is_one_clear_error(trainer: Trainer, keys: Path) -> None:
    """A second trainer on one port is refused and can still be closed; the first goes on."""
    second = publisher_at(trainer.port, keys)
    with pytest.raises(CurveError, match=r"telemetry\.endpoint=tcp://.*: Address already in use; give an address"):
        second.start()
    second.close(1)
    sidecar = Listener(trainer.port, authorised(keys))
    heard = sidecar.hears(5.0)
    sidecar.close()

    assert heard
