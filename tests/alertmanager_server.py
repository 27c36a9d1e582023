"""A real Alertmanager on loopback, and whoever it tells.

The binary is that in the folder PROMETHEUS_DIR if it is there, else the one on PATH, under Debian's name or its own.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

READY_TIMEOUT_S = 30.0
DEBIAN_NAME = "prometheus-alertmanager"
DEBIAN_TEMPLATES = Path("/usr/share/prometheus/alertmanager")
"""Debian's binary does not start without them, so it must be installed and not just unpacked."""


def alertmanager_binary() -> str | None:
    """Return the path of Alertmanager, None when it is not installed."""
    names = (DEBIAN_NAME, "alertmanager") if DEBIAN_TEMPLATES.is_dir() else ("alertmanager",)
    folders = (os.environ.get("PROMETHEUS_DIR"), None)
    found = (shutil.which(name, path=folder) for folder in folders for name in names)
    return next((path for path in found if path), None)


class Recipient:
    """A webhook that keeps what it is told."""

    def __init__(self) -> None:
        told: list[tuple[str, dict[str, str]]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.extend((alert["status"], alert["labels"] | alert["annotations"]) for alert in document["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._told = told
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def messages(self, status: str) -> list[dict[str, str]]:
        """Labels and annotations of the alerts told as firing or as resolved."""
        return [alert for its_status, alert in self._told if its_status == status]

    def names(self, status: str) -> set[str]:
        """Names of the alerts told as firing or as resolved."""
        return {alert["alertname"] for alert in self.messages(status)}

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def alertmanager_telling(recipient: Recipient, folder: Path) -> Iterator[str]:
    """Run an Alertmanager that tells everything at once; yields its address."""
    route = {"receiver": "owner", "group_by": ["..."], "group_wait": "100ms", "group_interval": "1s"}
    receiver = {"name": "owner", "webhook_configs": [{"url": recipient.url}]}
    (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": [receiver]}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        alertmanager_binary() or "alertmanager",
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with (folder / "alertmanager.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not _is_ready(address):
                assert process.poll() is None, (folder / "alertmanager.log").read_text()
                assert time.monotonic() < deadline_s, "Alertmanager does not become ready"
                time.sleep(0.05)
            yield address
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready"):
            return True
    except OSError:
        return False
