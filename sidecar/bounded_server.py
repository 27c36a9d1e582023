"""A threading HTTP server with a bound on its connections.

Python's own one takes as many connections as come and waits for each without end. Here a connection either waits (for
its handshake, or for a whole request), is worked for, or takes its answer. Waiting and taking last a bounded time in
all, however slowly bytes drip; and when the bound on connections is reached, the one that has waited longest makes
room, else the one that has been taking its answer longest. So neither silent clients nor slow ones, of whatever kind
and number, pile up threads or keep a scrape out. A request that is being worked for is never cut.
"""

import contextlib
import itertools
import logging
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sidecar.listen import Address

_LOG = logging.getLogger(__name__)


class BoundedServer(ThreadingHTTPServer):
    """Serve each connection in a thread, a bounded number of them.

    Args:
        address: where to listen.
        handler: serves one connection; it calls `begin`, `send` and `end` around each answer.
        timeout_s: how long a request may take to arrive, and how long an answer to be taken.
        max_connections: how many may be open.
        tls: what TLS is spoken with, None for plain HTTP.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: Address,
        handler: type[BaseHTTPRequestHandler],
        *,
        timeout_s: float,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._tls = tls
        self._lock = threading.Lock()
        self._waiting: dict[Any, float] = {}
        """Since when, the oldest first."""
        self._working: set[Any] = set()
        self._sending: dict[Any, float] = {}
        """The same."""
        self.address_family = address.family
        super().__init__(address.sockaddr, handler)

    def server_bind(self) -> None:
        """Bind without asking the name service who we are, as HTTPServer would."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its handshake comes later, in its own thread."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Make room, then serve the connection in a thread of its own."""
        with self._lock:
            has_room = len(self._waiting) + len(self._working) + len(self._sending) < self._max_connections
            if not has_room and (oldest := next(itertools.chain(self._waiting, self._sending), None)) is not None:
                self._drop(oldest)
                has_room = True
            if has_room:
                self._waiting[request] = time.monotonic()
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Shake hands if need be, and serve."""
        if self._tls is not None:
            try:
                request.do_handshake()
            except OSError:  # whoever speaks no TLS, or left; nothing is to be done or said
                self.shutdown_request(request)
                return
        super().process_request_thread(request, client_address)

    def service_actions(self) -> None:
        """Hang up on those whose time is over."""
        oldest_s = time.monotonic() - self._timeout_s
        with self._lock:
            for connections in (self._waiting, self._sending):
                for connection in [c for c, since_s in connections.items() if since_s < oldest_s]:
                    self._drop(connection)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Forget the connection and close it."""
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def begin(self, request: Any) -> bool:  # noqa: ANN401 - socketserver's types
        """Protect a connection whose request has arrived in full; False when it was just hung up."""
        with self._lock:
            if self._waiting.pop(request, None) is None:
                return False
            self._working.add(request)
            return True

    def send(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Note that the answer is ready and on its way."""
        with self._lock:
            self._working.discard(request)
            self._sending[request] = time.monotonic()

    def end(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Note that a connection waits for its next request, unless it was hung up meanwhile."""
        with self._lock:
            if request in self._working or request in self._sending:
                self._forget(request)
                self._waiting[request] = time.monotonic()

    def drop_all(self) -> None:
        """Hang up on everybody."""
        with self._lock:
            for request in (*self._waiting, *self._working, *self._sending):
                self._drop(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's types
        """Log a failing route; called inside the except clause that caught it."""
        _LOG.exception("a request failed")

    def _forget(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        self._waiting.pop(request, None)
        self._working.discard(request)
        self._sending.pop(request, None)

    def _drop(self, request: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Forget a connection and hang up; its thread wakes up and closes it."""
        self._forget(request)
        with contextlib.suppress(OSError):  # the other side may have been faster
            # Past the TLS layer, which belongs to the connection's own thread.
            socket.socket.shutdown(request, socket.SHUT_RDWR)
