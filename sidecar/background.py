"""Find the sidecar of a state directory, start one in the background, stop it."""

import http.client
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from sidecar.config import SidecarConfig
from sidecar.log import MAX_FILE_BYTES, move_aside
from sidecar.state_dir import LOG_NAME, Owner, StateDirError, keep_files_private, owner_of
from sidecar.status import SidecarStatus, StatusDocument

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 5.0
POLL_S = 0.02


class BackgroundError(ValueError):
    """No sidecar where one was expected, or one that does not do as told; the message is meant for the user."""


def fetch_status(config: SidecarConfig, path: Path) -> tuple[str, StatusDocument]:
    """The status as JSON and decoded: of the sidecar that holds the state directory, else of the one that listens."""
    owner = owner_of(path)
    host, port = config.address
    scheme = "https" if config.http.tls_cert else "http"
    url = owner.url if owner is not None and owner.url else f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        text = _get(url, "/api/v1/status", config.http.tls_cert)
        return text, msgspec.json.decode(text, type=StatusDocument)
    except ssl.SSLError as error:
        raise BackgroundError(f"what answers at {url} does not speak TLS with us ({error.reason})") from error
    except OSError as error:
        raise BackgroundError(
            f"no sidecar answers at {url} ({error.strerror or error}); start one with `dflash-sidecar start`, "
            "or say where it is with --listen or --state-dir"
        ) from error
    except (http.client.HTTPException, msgspec.DecodeError) as error:
        raise BackgroundError(
            f"what answers at {url} is no sidecar ({error}); give its address with --listen"
        ) from error


def start(config: SidecarConfig, path: Path, options: Sequence[str]) -> str:
    """Start a sidecar of its own life unless one is there already; returns who it is, once it answers."""
    if (running := _running(config, path)) is not None:
        return _already(running)
    keep_files_private()
    log = path / LOG_NAME
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > MAX_FILE_BYTES / 2:  # so that no new one begins while we look at it
            move_aside(log)
        with log.open("ab") as stream:
            began = stream.tell()
            child = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "sidecar", "run", *options, "--log", str(log)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,  # what it says before it has its log
                start_new_session=True,
            )
    except OSError as error:
        raise StateDirError(
            f"{path}: {error.strerror}; give a writable directory with --state-dir or DFLASH_STATE_DIR"
        ) from error
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        owner = _holder(config, path)
        if owner is not None and owner.pid == child.pid and owner.url and _is_ready(owner.url, config.http.tls_cert):
            return f"sidecar started: pid {owner.pid}, {owner.url}, log {log}{_refusal(config, path)}"
        if child.poll() is not None:
            if owner is not None and owner.pid != child.pid:  # another start was faster
                return _already(owner)
            lines = log.read_bytes()[began:].decode(errors="replace").strip().splitlines()
            raise BackgroundError(f"the sidecar did not start: {lines[-1] if lines else 'no word'} (log: {log})")
        time.sleep(POLL_S)
    raise BackgroundError(f"the sidecar (pid {child.pid}) does not answer after {START_TIMEOUT_S:g} s; look at {log}")


def _already(running: Owner) -> str:
    return f"sidecar already running: pid {running.pid}, {running.url or 'about to answer'}"


def _refusal(config: SidecarConfig, path: Path) -> str:
    """What to add about definitions that a new sidecar could not take, if so."""
    _, document = fetch_status(config, path)
    definitions = document.definitions
    if not definitions.problem:
        return ""
    return f"\ndefinitions refused, {definitions.file} is live instead; correct them:\n{definitions.problem}"


def stop(config: SidecarConfig, path: Path) -> str:
    """Stop the sidecar that holds the state directory, and wait until it is gone."""
    owner = _holder(config, path)
    if owner is None:
        return f"no sidecar runs on {path}"
    os.kill(owner.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (now := _holder(config, path)) is None or now.pid != owner.pid:
            return f"sidecar stopped: pid {owner.pid}"
        time.sleep(POLL_S)
    raise BackgroundError(f"sidecar {owner.pid} still runs after {STOP_TIMEOUT_S:g} s; kill -9 {owner.pid} is safe")


def _holder(config: SidecarConfig, path: Path) -> Owner | None:
    """The sidecar that holds the state directory. On a full disk the lock file cannot tell, but it does itself."""
    if (owner := owner_of(path)) is not None:
        return owner
    found = _at_address(config, path)
    return Owner(found.pid, found.url) if found and Path(found.state_dir).resolve() == path.resolve() else None


def _running(config: SidecarConfig, path: Path) -> Owner | None:
    """The sidecar that holds the state directory, else the one that answers at the address."""
    if (owner := owner_of(path)) is not None:
        return owner
    found = _at_address(config, path)
    return Owner(found.pid, found.url) if found else None


def _at_address(config: SidecarConfig, path: Path) -> SidecarStatus | None:
    """What the sidecar says of itself that answers at the address."""
    try:
        return fetch_status(config, path)[1].sidecar
    except BackgroundError:
        return None


def _is_ready(url: str, tls_cert: str) -> bool:
    try:
        _get(url, "/-/ready", tls_cert)
    except (OSError, http.client.HTTPException):
        return False
    return True


def _get(url: str, path: str, tls_cert: str) -> str:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = _PinnedConnection(host, port, tls_cert)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{response.status} {response.reason}")
    return body


class _PinnedConnection(http.client.HTTPSConnection):
    """Believes the one certificate that is configured: which name it is for, and who signed it, does not matter then.

    Raises:
        BackgroundError: no certificate is configured, or another one is shown.
    """

    def __init__(self, host: str, port: int | None, tls_cert: str) -> None:
        if not tls_cert:
            raise BackgroundError(
                f"the sidecar at https://{host}:{port} speaks TLS: give its http.tls_cert and http.tls_key, "
                "with the same --config or --set as for `run`"
            )
        self._tls_cert = tls_cert
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # `connect` compares the whole certificate instead
        super().__init__(host, port, timeout=REQUEST_TIMEOUT_S, context=context)

    def connect(self) -> None:
        """Connect, and look at the certificate before anything is sent."""
        super().connect()
        shown = self.sock.getpeercert(binary_form=True)
        if shown != _first_certificate(self._tls_cert):
            raise BackgroundError(
                f"what answers at https://{self.host}:{self.port} does not show the certificate in "
                f"http.tls_cert={self._tls_cert}; if that was renewed, restart the sidecar"
            )


def _first_certificate(path: str) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = Path(path).read_text()
        return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)])
    except OSError as error:
        raise BackgroundError(f"http.tls_cert={path}: {error.strerror}") from error
    except ValueError as error:
        raise BackgroundError(f"http.tls_cert={path} holds no certificate in PEM") from error
