"""The HTTP side: routes, methods, compression, and clients that misbehave."""

import gzip
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from http_side import HttpSide

from sidecar.http import SWEEP_S, HttpServer, ListenError


@pytest.fixture
def sidecar() -> Iterator[HttpSide]:
    """A started server with the default limits."""
    sidecar = HttpSide()
    yield sidecar
    sidecar.server.close()


def test_metrics_in_both_formats(sidecar: HttpSide) -> None:
    """/metrics follows the Accept header."""
    status, headers, body = sidecar.ask("GET", "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert body.endswith(b"dflash_loss 2.5\n")

    status, headers, body = sidecar.ask("GET", "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_gzip_only_when_asked(sidecar: HttpSide) -> None:
    """A body is compressed for a client that takes gzip, and for nobody else."""
    plain = sidecar.ask("GET", "/metrics", Accept_Encoding="identity")
    refused = sidecar.ask("GET", "/metrics", Accept_Encoding="gzip;q=0")
    zipped = sidecar.ask("GET", "/metrics", Accept_Encoding="deflate, gzip;q=0.5")

    assert zipped[1]["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped[2]) == plain[2] == refused[2]
    assert (plain[1]["Content-Encoding"], refused[1]["Content-Encoding"]) == (None, None)


def test_head_is_get_without_a_body(sidecar: HttpSide) -> None:
    """HEAD answers with GET's headers and no body."""
    get, head = sidecar.ask("GET", "/metrics"), sidecar.ask("HEAD", "/metrics")

    assert (head[0], head[2]) == (200, b"")
    assert head[1]["Content-Length"] == get[1]["Content-Length"] == str(len(get[2]))


def test_health_and_readiness(sidecar: HttpSide) -> None:
    """Healthy at once, ready only when the sidecar says so."""
    before = sidecar.ask("GET", "/-/ready")[0]
    sidecar.is_ready = True

    assert (before, sidecar.ask("GET", "/-/ready")[0], sidecar.ask("GET", "/-/healthy")[0]) == (503, 200, 200)


def test_reload_says_what_is_wrong(sidecar: HttpSide) -> None:
    """POST /-/reload answers 200 when the definitions are live, else 500 with the problems."""
    good = sidecar.ask("POST", "/-/reload")
    sidecar.problem = "metrics.toml: metric 'x': unknown series"
    bad = sidecar.ask("POST", "/-/reload")

    assert good[0] == 200
    assert bad[0] == 500
    assert b"metrics.toml: metric 'x': unknown series" in bad[2]


def test_status_document(sidecar: HttpSide) -> None:
    """/api/v1/status is the document as JSON."""
    status, headers, body = sidecar.ask("GET", "/api/v1/status?pretty")

    assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", {"trainers": []})


def test_unknown_path_and_wrong_method(sidecar: HttpSide) -> None:
    """404 lists what there is, 405 names the methods, both as text; an unknown method is refused as text."""
    missing, wrong, wrong_post = (
        sidecar.ask("GET", "/x"),
        sidecar.ask("DELETE", "/metrics"),
        sidecar.ask("GET", "/-/reload"),
    )
    unknown = sidecar.ask("BREW", "/metrics")

    assert missing[0] == 404
    assert b"GET /metrics\n" in missing[2]
    assert (wrong[0], wrong[1]["Allow"], wrong[2]) == (405, "GET, HEAD", b"/metrics takes GET, HEAD\n")
    assert (wrong_post[0], wrong_post[1]["Allow"]) == (405, "POST")
    assert unknown[0] == 501
    assert {answer[1]["Content-Type"] for answer in (missing, wrong, unknown)} == {"text/plain; charset=utf-8"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /metrics HTTP/9.9\r\n\r\n", 505),
        (b"POST /-/reload HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /-/reload HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /-/reload HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
    ],
)
def test_malformed_request_is_refused_in_text(sidecar: HttpSide, request_bytes: bytes, status: int) -> None:
    """A request that cannot be read gets its status as text and the connection is closed."""
    connection = sidecar.connect(request_bytes)
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass  # the rest of what we sent was never read
    connection.close()

    assert f" {status} ".encode() in answer.split(b"\r\n")[0]
    assert b"<html" not in answer.lower()


def test_300_idle_connections_do_not_block_a_scrape(sidecar: HttpSide) -> None:
    """300 connections that say nothing or half a request neither delay a scrape nor pile up threads."""
    threads_before = threading.active_count()
    idle = [sidecar.connect(b"GET /metrics HT" if i % 2 else b"") for i in range(300)]
    started_s = time.monotonic()
    status = sidecar.ask("GET", "/metrics")[0]
    elapsed_s = time.monotonic() - started_s
    num_threads = threading.active_count() - threads_before
    for connection in idle:
        connection.close()

    assert status == 200
    assert elapsed_s < 5.0  # a sixth of what an idle connection may last
    assert num_threads <= 80


def test_silent_connection_is_closed_after_its_timeout() -> None:
    """A connection that stays silent is closed by the server."""
    sidecar = HttpSide(timeout_s=0.1)
    connection = sidecar.connect()
    received = connection.recv(1)
    connection.close()
    sidecar.server.close()

    assert received == b""


def test_close_does_not_wait_for_the_next_sweep() -> None:
    """The thread that accepts connections is woken up to end."""
    for _ in range(5):
        sidecar = HttpSide()
        sidecar.ask("GET", "/metrics")
        started_s = time.monotonic()
        sidecar.server.close()

        assert time.monotonic() - started_s < SWEEP_S / 2


def test_request_being_answered_is_not_cut_for_a_newcomer() -> None:
    """When every connection is being answered, a newcomer is turned away and the answers arrive whole."""
    sidecar = HttpSide(max_connections=1)
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Mapping[str, Any]:
        entered.set()
        leave.wait(5.0)
        return {"slow": True}

    sidecar.status = slow
    answers: list[bytes] = []
    asker = threading.Thread(target=lambda: answers.append(sidecar.ask("GET", "/api/v1/status")[2]))
    asker.start()
    entered.wait(5.0)
    newcomer = sidecar.connect(b"GET /metrics HTTP/1.1\r\n\r\n")
    try:
        turned_away = newcomer.recv(1)
    except ConnectionResetError:
        turned_away = b""
    newcomer.close()
    leave.set()
    asker.join()
    sidecar.server.close()

    assert turned_away == b""
    assert json.loads(answers[0]) == {"slow": True}


def test_keep_alive_serves_many_requests_on_one_connection(sidecar: HttpSide) -> None:
    """One connection is used for many scrapes, without the delay of small packets waiting for each other."""
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.server.port, timeout=5.0)
    started_s = time.monotonic()
    statuses = []
    for _ in range(50):
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    elapsed_s = time.monotonic() - started_s
    connection.close()

    assert statuses == [200] * 50
    assert elapsed_s < 1.5


def test_failing_route_costs_only_its_own_connection(sidecar: HttpSide, caplog: pytest.LogCaptureFixture) -> None:
    """A status that raises is logged, its client sees the connection close, and the next request is served."""

    def broken() -> Mapping[str, Any]:
        raise RuntimeError("no status today")

    sidecar.status = broken
    with pytest.raises(http.client.RemoteDisconnected):
        sidecar.ask("GET", "/api/v1/status")

    assert sidecar.ask("GET", "/metrics")[0] == 200
    assert "no status today" in caplog.text


def test_busy_port_is_one_clear_error(sidecar: HttpSide) -> None:
    """A port that is taken is a ListenError that names it and the remedy."""
    with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{sidecar.server.port} is in use .* --listen HOST:PORT"):
        HttpServer(
            listen=("127.0.0.1", sidecar.server.port),
            sink=sidecar.sink,
            status=dict,
            reload=lambda: None,
            ready=lambda: True,
        )
