"""The sidecar's HTTP side: metrics, health, reload and status, all of it plain text or JSON.

Everything may be read by whoever can connect; `POST /-/reload`, which makes the sidecar do something, is for this
machine alone.
"""

import contextlib
import gzip
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from sidecar.bounded_server import BoundedServer
from sidecar.config import HttpConfig
from sidecar.listen import ListenError, is_loopback, listen_message, resolve, tls_context

_TEXT = "text/plain; charset=utf-8"
MAX_CONNECTIONS = 64
TIMEOUT_S = 30.0
"""How long a request may take to arrive; longer than a usual scrape interval, so that a connection can be kept."""
SWEEP_S = 0.5
"""How often connections whose time is over are looked for."""
MAX_RELOADS = 4
"""How many may wait for the main loop at once."""
MAX_BODY_BYTES = 64 * 1024
_LOCAL = HttpConfig()


class Page(Protocol):
    """What `/metrics` serves."""

    def render(self, accept_header: str) -> tuple[bytes, str]:
        """The page and its content type."""


class Answer(NamedTuple):
    """What goes back to the client."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    allow: str = ""


def _text(status: HTTPStatus, text: str, allow: str = "") -> Answer:
    return Answer(status, text.encode(), allow=allow)


Route = Callable[[str], Answer]
"""From the Accept header to an answer."""


class HttpServer:
    """Serve `/metrics`, `/-/healthy`, `/-/ready`, `POST /-/reload` and `/api/v1/status`.

    Args:
        listen: host and port; port 0 takes a free one.
        sink: renders `/metrics`.
        status: the document of `/api/v1/status`; called on a server thread.
        reload: reloads the definitions; returns what is wrong with them, None when they are live.
        ready: whether the sidecar has started up.
        http: TLS, and whether other machines may connect without.

    Raises:
        ListenError: the address cannot be bound, or is open to others without protection.
    """

    def __init__(  # noqa: PLR0913 - a composition root calls it once, by keyword
        self,
        *,
        listen: tuple[str, int],
        sink: Page,
        status: Callable[[], Mapping[str, Any]],
        reload: Callable[[], str | None],
        ready: Callable[[], bool],
        http: HttpConfig = _LOCAL,
        timeout_s: float = TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._sink, self._status, self._reload, self._ready = sink, status, reload, ready
        routes: dict[str, dict[str, Route]] = {
            "/metrics": {"GET": self._metrics},
            "/-/healthy": {"GET": lambda _: _text(HTTPStatus.OK, "healthy\n")},
            "/-/ready": {"GET": self._readiness},
            "/-/reload": {"POST": self._reloading},
            "/api/v1/status": {"GET": self._document},
        }
        try:
            self._server = _Server(
                resolve(listen, http),
                _Handler,
                timeout_s=timeout_s,
                max_connections=max_connections,
                tls=tls_context(http),
            )
        except (OSError, OverflowError) as error:
            raise ListenError(listen_message(listen, error)) from error
        self._server.routes = routes
        host = f"[{listen[0]}]" if ":" in listen[0] else listen[0]
        self.url = f"{'https' if http.tls_cert else 'http'}://{host}:{self.port}"
        self._reloads = threading.BoundedSemaphore(MAX_RELOADS)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(SWEEP_S,), name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and drop every connection."""
        if self._thread.is_alive():
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which then sees that it is to stop
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.drop_all()

    def _metrics(self, accept: str) -> Answer:
        body, content_type = self._sink.render(accept)
        return Answer(HTTPStatus.OK, body, content_type)

    def _readiness(self, _accept: str) -> Answer:
        if self._ready():
            return _text(HTTPStatus.OK, "ready\n")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, "starting\n")

    def _reloading(self, _accept: str) -> Answer:
        if not self._reloads.acquire(blocking=False):
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "reloads are under way already\n")
        try:
            problem = self._reload()
        finally:
            self._reloads.release()
        if problem is None:
            return _text(HTTPStatus.OK, "reloaded\n")
        return _text(HTTPStatus.INTERNAL_SERVER_ERROR, f"not reloaded, the previous definitions stay:\n{problem}\n")

    def _document(self, _accept: str) -> Answer:
        return Answer(HTTPStatus.OK, (json.dumps(self._status()) + "\n").encode(), "application/json")


class _Server(BoundedServer):
    routes: Mapping[str, Mapping[str, Route]]


_LEFT = (ConnectionError, ssl.SSLError)
"""The client left, or was hung up, in the middle; nothing is to be done or said."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dflash-sidecar"
    sys_version = ""
    default_request_version = "HTTP/1.0"
    """So that a request line that makes no sense is still answered with a status."""
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(*_LEFT):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(*_LEFT):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - the base class names them
        """Say nothing: scrapes come every few seconds."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what the base class refuses (a bad request line, an unknown method) in plain text."""
        self.close_connection = True
        body = f"{message or HTTPStatus(code).phrase}\n".encode()
        self.send_response(code)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _serve(self) -> None:
        refusal = self._take_body()
        if not self.server.begin(self.connection):
            self.close_connection = True
            return
        try:
            answer = refusal or self._answer()
            self.server.send(self.connection)
            self._send(answer)
        finally:
            self.server.end(self.connection)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _serve  # noqa: N815 - the base class's names

    def _take_body(self) -> Answer | None:
        """Read what no path looks at, so that the next request can follow; returns what is wrong with it."""
        length = self.headers.get("Content-Length", "0")
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return _text(HTTPStatus.BAD_REQUEST, "a body needs a Content-Length\n")
        if int(length[:12]) > MAX_BODY_BYTES:
            self.close_connection = True
            return _text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no path takes a body of that size\n")
        self.rfile.read(int(length))
        return None

    def _answer(self) -> Answer:
        path = urlsplit(self.path).path
        methods = self.server.routes.get(path)
        if methods is None:
            known = "".join(f"{method} {path}\n" for path, m in self.server.routes.items() for method in m)
            return _text(HTTPStatus.NOT_FOUND, f"no such path; there are:\n{known}")
        route = methods.get("GET" if self.command == "HEAD" else self.command)
        if route is None:
            allow = ", ".join((*methods, *(("HEAD",) if "GET" in methods else ())))
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allow}\n", allow=allow)
        # Browsers add an Origin: no page that somebody looks at here is to make the sidecar do something.
        if self.command == "POST" and ("Origin" in self.headers or not is_loopback(self.client_address[0])):
            return _text(
                HTTPStatus.FORBIDDEN,
                f"{path} is for this machine alone, not for browsers; `systemctl reload` does the same\n",
            )
        return route(self.headers.get("Accept", ""))

    def _send(self, answer: Answer) -> None:
        body = answer.body
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Vary", "Accept, Accept-Encoding")
        if answer.allow:
            self.send_header("Allow", answer.allow)
        if answer.status == HTTPStatus.OK and _takes_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, compresslevel=1, mtime=0)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _takes_gzip(accept_encoding: str) -> bool:
    for token in accept_encoding.split(","):
        coding, _, weight = token.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
