"""How much each process subscribes to, and the end of its connections when that is more than anybody needs.

ZeroMQ remembers every topic that somebody subscribes to, a node per byte, for as long as the connection lasts; it has
no bound for that and no way to refuse. But it says which process a subscription comes from, and a socket that is shut
down under it takes its subscriptions along.
"""

import logging
import os
import socket
import struct
import time
from pathlib import Path

import zmq

MAX_SUBSCRIPTIONS = 256
"""A sidecar has five."""
MIN_DISCONNECT_GAP_S = 0.01
MAX_PROCESSES = 1_000
_log = logging.getLogger(__name__)


def address_of(message: zmq.Frame) -> str | None:
    """Where a subscription comes from, the process id last; None when its connection has ended."""
    try:
        return str(message.get("Peer-Address"))
    except zmq.ZMQError:
        return None


class Peers:
    """Counts subscriptions by address. One thread only.

    Args:
        path: the socket that they are connected to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_topics: dict[str, int] = {}
        self._warned: set[str] = set()
        self._next_disconnect_s = 0.0

    def count(self, address: str, *, arrived: bool) -> None:
        """Note that a subscription came or went; a process with too many loses its connections."""
        if len(self._num_topics) > MAX_PROCESSES:
            self._num_topics.clear()  # of processes that are long gone: connections that ended leave their count
        number = self._num_topics[address] = max(self._num_topics.get(address, 0) + (1 if arrived else -1), 0)
        now_s = time.monotonic()
        if number > MAX_SUBSCRIPTIONS and now_s >= self._next_disconnect_s:
            self._next_disconnect_s = now_s + MIN_DISCONNECT_GAP_S
            self._num_topics[address] = 0
            pid = int(address.rpartition(":")[2])  # ZeroMQ writes localhost:UID:GID:PID
            disconnect(self._path, pid)
            if address not in self._warned and len(self._warned) < MAX_PROCESSES:
                self._warned.add(address)
                _log.warning("%s: process %d subscribes to too much and was disconnected", self._path, pid)


def disconnect(path: Path, pid: int) -> int:
    """Shut down the connections that a process has to a socket of ours; returns how many.

    A descriptor may become another file at any moment, so each is duplicated first and then looked at.
    """
    num_ended = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            duplicate = os.dup(int(descriptor.name))
        except OSError:
            continue  # closed since
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)  # no socket
            continue
        with connection:
            if _is_connection(connection, path) and _owner(connection) == pid:
                connection.shutdown(socket.SHUT_RDWR)
                num_ended += 1
    return num_ended


def _is_connection(connection: socket.socket, path: Path) -> bool:
    """Whether somebody connected to that path here; the listening socket itself bears the same name."""
    return (
        connection.family == socket.AF_UNIX
        and connection.getsockname() == str(path)
        and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _owner(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
