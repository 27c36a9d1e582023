"""Tell systemd how the service is doing; does nothing when it is not there to ask."""

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends sd_notify messages to $NOTIFY_SOCKET. Never raises: a deaf service manager must not stop the service."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog = ours and bool(environ.get("WATCHDOG_USEC"))

    def ready(self, status: str) -> None:
        """Start-up is done."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self, status: str) -> None:
        """The main loop turned; feeds the watchdog when there is one."""
        self._send(f"STATUS={status}" + ("\nWATCHDOG=1" if self._watchdog else ""))

    def reloading(self) -> None:
        """A reload began; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Shutdown began."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel:
            try:
                channel.sendto(message.encode(), address)
            except OSError:
                return
