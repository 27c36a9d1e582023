"""A piece of network that can be cut: passes tcp connections on to a port of this machine until told not to."""

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536


class Relay:
    """Listens on `port` and passes on to another one.

    Args:
        target: the port behind it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._passes = threading.Event()
        self._passes.set()
        self._lock = threading.Lock()
        self._stopping = self._is_cut = False
        self.num_connections = 0
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._pass_on)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._passes.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._close_all()

    def cut(self) -> None:
        """Break every connection, and each new one at once."""
        self._is_cut = True
        self._passes.clear()
        self._close_all()

    def swallow(self) -> None:
        """Let connections stand and be made, but pass nothing on, as a dead router does."""
        self._passes.clear()

    def mend(self) -> None:
        """Pass on again; what was swallowed on a connection that still stands goes on where it was."""
        self._is_cut = False
        self._passes.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # nobody listens behind us
                near.close()
                continue
            self.num_connections += 1
            with self._lock:
                self._pairs[near], self._pairs[far] = far, near

    def _pass_on(self) -> None:
        while not self._stopping:
            self._passes.wait()
            with self._lock, selectors.DefaultSelector() as selector:
                for connection in self._pairs:
                    selector.register(connection, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select(0.01)] if self._pairs else []
                for connection in ready:
                    assert isinstance(connection, socket.socket)
                    if connection in self._pairs and not self._copy(connection):
                        self._drop(connection)
            threading.Event().wait(0.002)

    def _copy(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(CHUNK_BYTES)
            self._pairs[connection].sendall(data)
        except OSError:
            return False
        return bool(data)

    def _drop(self, connection: socket.socket) -> None:
        other = self._pairs.pop(connection)
        self._pairs.pop(other, None)
        for end in (connection, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _close_all(self) -> None:
        with self._lock:
            while self._pairs:
                self._drop(next(iter(self._pairs)))
