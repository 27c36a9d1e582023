"""Clients that mean ill: idle, dripping, never reading, in every state of a connection, in the clear and over TLS."""

import contextlib
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from certificate import needs_openssl, self_signed
from http_side import HttpSide
from sidecar_process import wait_for

from sidecar.config import HttpConfig
from sidecar.http import MAX_CONNECTIONS, MAX_RELOADS

MAX_SCRAPE_S = 2.0
"""Far above what is measured; a scrape that is kept out takes its whole timeout of 10 s."""
LONG_PAGE = 5_000
"""Series; a few hundred kB."""
MANY_ASKED = b"GET /metrics HTTP/1.1\r\n\r\n" * 50
"""More than the kernel buffers for a connection on loopback."""


@pytest.fixture(params=["http", pytest.param("https", marks=needs_openssl)])
def http(request: pytest.FixtureRequest, tmp_path: Path) -> HttpConfig:
    """In the clear, and with TLS."""
    return self_signed(tmp_path) if request.param == "https" else HttpConfig()


class Crowd:
    """Connections of attackers, some of which drip a byte a second."""

    def __init__(self, side: HttpSide) -> None:
        self.side = side
        self.connections: list[socket.socket] = []
        self._dripping: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._thread.start()

    def join(self, sent: bytes = b"", *, tls: bool = False, drips: bool = False) -> None:
        """Add one; the server may turn it away."""
        with contextlib.suppress(OSError):
            connection = self.side.connect(sent, tls=tls)
            self.connections.append(connection)
            if drips:
                self._dripping.append(connection)

    def num_standing(self) -> int:
        """How many the server has not hung up on."""
        standing = 0
        for connection in self.connections:
            try:
                socket.socket.setblocking(connection, False)
                while socket.socket.recv(connection, 65536):  # past TLS, whose first words need no answer
                    pass
            except BlockingIOError:
                standing += 1
            except OSError:
                pass
        return standing

    def close(self) -> None:
        """Hang up."""
        self._stop.set()
        self._thread.join()
        for connection in self.connections:
            connection.close()

    def _drip(self) -> None:
        while not self._stop.wait(1.0):
            for connection in list(self._dripping):
                with contextlib.suppress(OSError):
                    connection.send(b"a")


class Usage(NamedTuple):
    """What a process has open."""

    threads: int
    fds: int


def usage() -> Usage:
    """Threads and file descriptors of this process, in which the server runs."""
    return Usage(threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))


@contextlib.contextmanager
def attacked(http: HttpConfig, num_series: int = 0, **options: float) -> Iterator[tuple[HttpSide, Crowd]]:
    """A server and a crowd; when both are gone, nothing of them is left."""
    before = usage()
    side = HttpSide(num_series, http=http, **options)
    crowd = Crowd(side)
    try:
        yield side, crowd
    finally:
        crowd.close()
        side.server.close()
    wait_for(lambda: usage() <= before, "threads and descriptors to be as before", 10.0)


def scrapes(side: HttpSide, number: int = 20) -> list[float]:
    """Scrape so many times, each on a connection of its own; returns how long each took."""
    took_s = []
    for _ in range(number):
        started_s = time.monotonic()
        status, _, body = side.ask("GET", "/metrics")
        took_s.append(time.monotonic() - started_s)
        assert (status, b"dflash_loss" in body) == (200, True)
    return took_s


def stuck(side: HttpSide) -> list[float]:
    """For how long answers have been on their way that have been so for a while."""
    now_s = time.monotonic()
    return [now_s - since_s for since_s in list(side.server._server._sending.values()) if since_s < now_s - 0.3]


def test_idle_and_dripping_connections_keep_no_scrape_out(
    http: HttpConfig, record_property: Callable[..., None]
) -> None:
    """Beside 300 idle connections and 30 that drip a header, a handshake or a body, every scrape is answered soon."""
    tls = bool(http.tls_cert)
    with attacked(http) as (side, crowd):
        before = usage()
        for i in range(300):
            crowd.join(b"GET /metrics HT" if i % 2 and not tls else b"", tls=tls and i % 3 == 0)
        for _ in range(10):
            crowd.join(b"GET /metrics HTTP/1.1\r\nX: ", tls=tls, drips=True)
            crowd.join(b"POST /-/reload HTTP/1.1\r\nContent-Length: 60000\r\n\r\n", tls=tls, drips=True)
            crowd.join(b"\x16\x03\x01\x02\x00" if tls else b"G", drips=True)
        took_s = scrapes(side)
        during = usage()

        for name, value in (("median_s", statistics.median(took_s)), ("max_s", max(took_s))):
            record_property(name, value)
        assert max(took_s) < MAX_SCRAPE_S
        assert during.threads - before.threads <= MAX_CONNECTIONS + 4
        # On this side every connection is one more, also where the server has closed its end.
        assert during.fds - before.fds - len(crowd.connections) <= MAX_CONNECTIONS + 4


def test_clients_that_never_read_keep_no_scrape_out(http: HttpConfig) -> None:
    """With every slot taken by clients that asked for long pages and do not take them, a scrape is answered."""
    with attacked(http, LONG_PAGE) as (side, crowd):
        for _ in range(MAX_CONNECTIONS + 10):
            crowd.join(MANY_ASKED, tls=bool(http.tls_cert))
        wait_for(lambda: len(stuck(side)) > MAX_CONNECTIONS // 2, "the answers to be stuck")
        took_s = scrapes(side, 5)

        assert max(took_s) < MAX_SCRAPE_S


def test_slow_bodies_keep_no_scrape_out(http: HttpConfig) -> None:
    """With every slot taken by requests whose body never comes, a scrape is answered."""
    with attacked(http) as (side, crowd):
        for _ in range(MAX_CONNECTIONS + 10):
            crowd.join(
                b"POST /-/reload HTTP/1.1\r\nContent-Length: 60000\r\n\r\nx", tls=bool(http.tls_cert), drips=True
            )
        took_s = scrapes(side, 5)

        assert max(took_s) < MAX_SCRAPE_S


def test_reloads_that_hang_keep_no_scrape_out() -> None:
    """When the main loop does not answer, a few reloads wait for it and the others are told so at once."""
    answered = threading.Event()
    with attacked(HttpConfig()) as (side, crowd):
        side.server._reload = lambda: None if answered.wait(30.0) else "no answer"
        for _ in range(MAX_CONNECTIONS + 10):
            crowd.join(b"POST /-/reload HTTP/1.1\r\n\r\n")
        wait_for(lambda: len(side.server._server._working) == MAX_RELOADS, "reloads to wait")
        status, _, body = side.ask("POST", "/-/reload")
        took_s = scrapes(side, 5)
        answered.set()

        assert (status, body) == (503, b"reloads are under way already\n")
        assert max(took_s) < MAX_SCRAPE_S


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"POST /-/reload HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"],
    ids=["handshake or request line", "header", "body"],
)
def test_dripping_does_not_buy_time(http: HttpConfig, sent: bytes) -> None:
    """A request has to be whole within its time, however steadily its bytes come; the same for a handshake."""
    with attacked(http, timeout_s=2.5) as (_, crowd):
        crowd.join(sent or b"\x16\x03\x01\x02\x00", tls=bool(http.tls_cert and sent), drips=True)
        started_s = time.monotonic()
        wait_for(lambda: crowd.num_standing() == 0, "the connection to be closed", 10.0)

        assert 2.0 < time.monotonic() - started_s < 5.0


def test_answer_has_to_be_taken_in_time(http: HttpConfig) -> None:
    """Who takes a byte now and then of a long page is hung up on, and its thread is free again."""
    with attacked(http, LONG_PAGE, timeout_s=1.0) as (side, crowd):
        crowd.join(MANY_ASKED, tls=bool(http.tls_cert))
        wait_for(lambda: len(stuck(side)) == 1, "the answer to be stuck")
        started_s = time.monotonic()
        while side.server._server._sending and time.monotonic() < started_s + 10.0:
            crowd.connections[0].recv(1)
            time.sleep(0.05)
        wait_for(
            lambda: not any(t.name.endswith("(process_request_thread)") for t in threading.enumerate()), "its thread"
        )

        assert time.monotonic() - started_s < 3.0


@needs_openssl
def test_plain_http_and_rubbish_against_tls_are_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever speaks no TLS, an old one, or leaves in the middle is dropped without a word in the log."""
    with attacked(self_signed(tmp_path)) as (side, crowd):
        for sent in (b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff" * 500, b"\x16\x03\x01", b""):
            crowd.join(sent)
        for connection in crowd.connections[2:]:
            connection.close()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError, match=r"(?i)protocol|alert|eof|reset"), side.connect() as plain:
            old.wrap_socket(plain).close()
        scrapes(side, 1)

        assert caplog.text == ""
