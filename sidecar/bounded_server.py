"""A threading HTTP server with a bound on its connections.

Python's own one takes as many connections as come and waits for each without end. Here every connection has a timeout,
and when the bound is reached the one that has been idle longest makes room. So a few hundred connections that never
say a word neither pile up threads nor keep a scrape waiting; a request that is being answered is never cut.
"""

import contextlib
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LOG = logging.getLogger(__name__)


class BoundedServer(ThreadingHTTPServer):
    """Serve each connection in a thread, a bounded number of them.

    Args:
        listen: host and port.
        handler: serves one connection; it calls `begin` and `end` around each answer.
        timeout_s: how long a connection may stay silent.
        max_connections: how many may be open.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        listen: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        timeout_s: float,
        max_connections: int,
    ) -> None:
        self.timeout_s = timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._idle: dict[Any, None] = {}
        self._busy: set[Any] = set()
        if ":" in listen[0]:
            self.address_family = socket.AF_INET6
        super().__init__(listen, handler)

    def server_bind(self) -> None:
        """Bind without asking the name service who we are, as HTTPServer would."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Make room, then serve the connection in a thread of its own."""
        with self._lock:
            full = len(self._idle) + len(self._busy) >= self._max_connections
            oldest = next(iter(self._idle), None) if full else None
            if oldest is not None:
                del self._idle[oldest]
                _hang_up(oldest)  # its thread wakes up and closes it
            admitted = not full or oldest is not None
            if admitted:
                self._idle[request] = None
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Forget the connection and close it."""
        with self._lock:
            self._idle.pop(request, None)
            self._busy.discard(request)
        super().shutdown_request(request)

    def begin(self, request: Any) -> bool:  # noqa: ANN401 - socketserver's types
        """Protect a connection whose request has arrived; False when it was just hung up."""
        with self._lock:
            if request not in self._idle:
                return False
            del self._idle[request]
            self._busy.add(request)
            return True

    def end(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Note that a connection waits for its next request."""
        with self._lock:
            self._busy.discard(request)
            self._idle[request] = None

    def drop_all(self) -> None:
        """Hang up on everybody."""
        with self._lock:
            for request in (*self._idle, *self._busy):
                _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's types
        """Log a failing route; called inside the except clause that caught it."""
        _LOG.exception("a request failed")


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side may have been faster
        connection.shutdown(socket.SHUT_RDWR)
