"""The sidecar's HTTP side alone, for tests: a real server on a real socket."""

import http.client
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from sidecar.config import HttpConfig
from sidecar.http import HttpServer
from sidecar.samples import ExportedFamily, Result, labels_of
from sidecar.sinks.prometheus import PrometheusSink


class HttpSide:
    """A started server over a real sink, with switches for what it reports.

    Args:
        num_series: how long the page is.
        listen: host and port.
        http: TLS and the like.
        options: of the server.
    """

    def __init__(
        self,
        num_series: int = 0,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        http: HttpConfig = HttpConfig(),  # noqa: B008 - frozen
        **options: Any,
    ) -> None:
        self.sink = PrometheusSink()
        samples = [("dflash_loss", (), 2.5)]
        samples += [("dflash_loss", labels_of(uuid=f"{i:040}"), float(i)) for i in range(num_series)]
        self.sink.publish(Result(1.0, (ExportedFamily("dflash_loss", "gauge", "Loss.", tuple(samples)),)))
        self.host, self.http = "127.0.0.1" if listen[0] == "0.0.0.0" else listen[0], http
        self.problem: str | None = None
        self.is_ready = False
        self.status: Callable[[], Mapping[str, Any]] = lambda: {"trainers": []}
        self.server = HttpServer(
            listen=listen,
            http=http,
            sink=self.sink,
            status=lambda: self.status(),  # noqa: PLW0108 - tests exchange it later
            reload=lambda: self.problem,
            ready=lambda: self.is_ready,
            **options,
        )
        self.server.start()

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request on a connection of its own."""
        connection: http.client.HTTPConnection
        if self.http.tls_cert:
            context = ssl.create_default_context(cafile=self.http.tls_cert)
            connection = http.client.HTTPSConnection(self.host, self.server.port, timeout=10.0, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, self.server.port, timeout=10.0)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def connect(self, sent: bytes = b"", *, tls: bool = False) -> socket.socket:
        """Open a connection, with TLS if asked for, and send some bytes."""
        connection = socket.create_connection((self.host, self.server.port), timeout=10.0)
        if tls:
            context = ssl.create_default_context(cafile=self.http.tls_cert)
            connection = context.wrap_socket(connection, server_hostname=self.host)
        connection.sendall(sent)
        return connection
