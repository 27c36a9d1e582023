"""The HTTP side of the stand-in for the W&B server: requests in, answers or ordered faults out."""

import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple, Protocol


class Fault(NamedTuple):
    """What goes wrong with a request.

    An HTTP status, silence, a reset, a reset after the request took effect, a page of something else with status 200 (a
    captive portal), or an answer that breaks off in the middle although the request took effect.
    """

    kind: Literal["status", "hang", "reset", "lost answer", "garbage", "truncated"]
    status: int = 500
    hang_s: float = 30.0
    retry_after_s: int | None = None


class Refusal(Exception):  # noqa: N818 - what the server answers
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Answering(Protocol):
    """What answers requests."""

    fault: Callable[[str], Fault | None]
    arrivals: list[tuple[float, str]]

    def answer(self, operation: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Apply a request and return its answer."""

    def summary(self) -> dict[str, Any]:
        """What has arrived."""


class Server(ThreadingHTTPServer):
    """One thread per connection, none of which holds up the end."""

    daemon_threads = True
    block_on_close = False
    fake: Answering
    is_down = False
    """Connections that outlive the server's end are reset at their next request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that were killed."""


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP with wandb."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Say nothing."""

    def do_GET(self) -> None:
        """Show what has arrived."""
        self._send(200, self.server.fake.summary() if self.path == "/runs" else {"paths": ["/runs"]}, {})

    def do_POST(self) -> None:
        """Take a request of wandb, or fail it as ordered."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        operation, request = self._operation(body)
        if self.server.is_down:
            self._reset()
            return
        self.server.fake.arrivals.append((time.monotonic(), operation))
        fault = self.server.fake.fault(operation)
        if fault is None:
            self._answer(operation, request)
        elif fault.kind == "status":
            headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
            self._send(fault.status, {"errors": [{"message": "injected"}]}, headers)
        elif fault.kind == "garbage":
            self._send_page(200, "text/html", b"<html><body>Welcome to the hotel. Please log in.</body></html>", {})
        else:
            if fault.kind in {"lost answer", "truncated"}:
                document = self.server.fake.answer(operation, self.path, request)
            if fault.kind == "truncated":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n")
                self.wfile.write(json.dumps(document).encode()[:10])
            time.sleep(fault.hang_s if fault.kind == "hang" else 0.0)
            self._reset()

    def _reset(self) -> None:
        # Closing with a zero linger time sends a reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    do_PUT = do_POST  # noqa: N815 - the base class names it

    def _operation(self, body: bytes) -> tuple[str, dict[str, Any]]:
        if self.path.startswith("/upload/"):
            return "upload", {}
        request = json.loads(body or b"{}")
        if self.path.endswith("/file_stream"):
            return "file_stream", request
        return request.get("operationName") or request["query"].split("(")[0].split("{")[0].split()[-1], request

    def _answer(self, operation: str, request: dict[str, Any]) -> None:
        try:
            self._send(200, self.server.fake.answer(operation, self.path, request), {})
        except Refusal as refusal:
            self._send(refusal.status, {"errors": [{"message": str(refusal)}]}, {})

    def _send(self, status: int, document: dict[str, Any], headers: Mapping[str, str]) -> None:
        self._send_page(status, "application/json", json.dumps(document).encode(), headers)

    def _send_page(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({**headers} | {"Content-Type": content_type, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
