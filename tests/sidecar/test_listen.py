"""Where HTTP may listen, with what protection, and who may make it do something."""

import socket
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from certificate import needs_openssl, self_signed
from http_side import HttpSide

from sidecar.config import HttpConfig
from sidecar.listen import ListenError, resolve, tls_context


def own_address() -> str:
    """An address at which other machines could reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the way out
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


PUBLIC: dict[str, Callable[[], str]] = {
    "all of IPv4": lambda: "0.0.0.0",
    "all of IPv6": lambda: "::",
    "an address": own_address,
    "a mapped address": lambda: f"::ffff:{own_address()}",
    "short for all": lambda: "0",
}


@pytest.mark.parametrize("case", PUBLIC)
def test_public_address_is_refused_unless_protected_or_wanted(case: str) -> None:
    """The error names the settings that help; with TLS, or on demand, the address is taken."""
    host = PUBLIC[case]()
    with pytest.raises(
        ListenError, match=r"listen=.* set http\.tls_cert .* or http\.allow_public=true .* 127\.0\.0\.1"
    ):
        HttpSide(listen=(host, 0))

    assert resolve((host, 9477), HttpConfig(allow_public=True)).sockaddr[1] == 9477
    assert resolve((host, 9477), HttpConfig(tls_cert="cert")).sockaddr[1] == 9477


@pytest.mark.parametrize("addresses", [("192.0.2.1",), ("127.0.0.1", "192.0.2.1")])
def test_name_is_judged_by_every_address_it_has(monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]) -> None:
    """A name is refused if any address that the name service knows for it is open to other machines."""

    def name_service(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "node7.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", name_service)

    with pytest.raises(ListenError, match=r"listen=node7\.example:9477 is open to other machines"):
        resolve(("node7.example", 9477), HttpConfig())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_nothing(host: str) -> None:
    """Whatever only this machine can reach is taken as it is."""
    try:
        side = HttpSide(listen=(host, 0))
    except ListenError as error:
        if ":" in host and "cannot listen" in str(error):
            pytest.skip("no IPv6 here")
        raise
    side.server.close()

    assert side.server.url.startswith("http://")


def test_reload_is_for_this_machine_alone() -> None:
    """At a public address everything may be read, but only a peer on loopback, no web page, may have a reload."""
    address = own_address()
    side = HttpSide(listen=("0.0.0.0", 0), http=HttpConfig(allow_public=True))
    near, page = side.ask("POST", "/-/reload")[0], side.ask("POST", "/-/reload", Origin="https://example.org")[0]
    side.host = address
    read, far = side.ask("GET", "/metrics")[0], side.ask("POST", "/-/reload")
    side.server.close()

    assert (near, page, read, far[0]) == (200, 403, 200, 403)
    assert far[2] == b"/-/reload is for this machine alone, not for browsers; `systemctl reload` does the same\n"


def encrypt(http: HttpConfig) -> None:
    """Put a passphrase on the key."""
    command = ["openssl", "pkey", "-in", http.tls_key, "-aes256", "-passout", "pass:x"]
    Path(http.tls_key).write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)


SPOILED: dict[str, tuple[Callable[[HttpConfig], object], str]] = {
    "no certificate": (lambda h: Path(h.tls_cert).unlink(), r"http\.tls_cert=.*: No such file .* give a file in PEM"),
    "no key": (lambda h: Path(h.tls_key).unlink(), r"http\.tls_key=.*: No such file .* give a file in PEM"),
    "everybody reads the key": (
        lambda h: Path(h.tls_key).chmod(0o644),
        r"is a secret that everybody .* chmod o-rwx it",
    ),
    "key of another": (
        lambda h: Path(h.tls_key).write_text(Path(self_signed(Path(h.tls_key).parent, "b").tls_key).read_text()),
        r"KEY_VALUES_MISMATCH; give a certificate and the key that belongs to it",
    ),
    "passphrase": (encrypt, r"give a certificate and the key that belongs to it in PEM, without a passphrase"),
    "rubbish": (
        lambda h: Path(h.tls_cert).write_text("x"),
        r"give a certificate and the key that belongs to it in PEM",
    ),
}


@needs_openssl
@pytest.mark.parametrize("case", SPOILED)
def test_certificate_that_is_no_good_is_refused_with_the_remedy(tmp_path: Path, case: str) -> None:
    """Missing, mismatched, encrypted and unprotected files are one clear error each."""
    http = self_signed(tmp_path)
    assert stat.S_IMODE(Path(http.tls_key).stat().st_mode) == 0o600
    assert isinstance(tls_context(http), ssl.SSLContext)
    spoil, message = SPOILED[case]
    spoil(http)

    with pytest.raises(ListenError, match=message):
        tls_context(http)
