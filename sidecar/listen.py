"""Where HTTP may listen: on this machine at will, where others can reach it only with TLS or on demand.

Whoever reaches `/metrics` and the status document may read them; nobody is asked who he is.
"""

import errno
import ipaddress
import socket
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from sidecar.config import HttpConfig


class ListenError(ValueError):
    """An address that cannot be listened on; the message is meant for the user."""


class Address(NamedTuple):
    """What a socket is bound to."""

    family: socket.AddressFamily
    sockaddr: tuple[str, int]


def is_loopback(host: str) -> bool:
    """Whether a numeric address can be reached, and be a peer's, from this machine alone."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def resolve(listen: tuple[str, int], http: HttpConfig) -> Address:
    """Look up where to listen, IPv4 first; raises ListenError, also where others could read along unasked."""
    host, port = listen
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(listen_message(listen, error)) from error
    is_public = not all(is_loopback(str(sockaddr[0])) for *_, sockaddr in found)
    if is_public and not http.tls_cert and not http.allow_public:
        raise ListenError(
            f"listen={host}:{port} is open to other machines, to be read by anybody: set http.tls_cert and "
            "http.tls_key, or http.allow_public=true if the network is trusted, or listen on 127.0.0.1"
        )
    family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return Address(family, (str(sockaddr[0]), int(sockaddr[1])))


def tls_context(http: HttpConfig) -> ssl.SSLContext | None:
    """What TLS is spoken with, None for plain HTTP; raises ListenError."""
    if not http.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    for key, value in (("http.tls_cert", http.tls_cert), ("http.tls_key", http.tls_key)):
        try:
            Path(value).read_bytes()
        except OSError as error:
            raise ListenError(
                f"{key}={value}: {error.strerror}; give a file in PEM that the sidecar can read"
            ) from error
    if Path(http.tls_key).stat().st_mode & stat.S_IRWXO:
        raise ListenError(f"http.tls_key={http.tls_key} is a secret that everybody can read; chmod o-rwx it")
    try:
        # Without a passphrase of ours OpenSSL would ask for one at the terminal.
        context.load_cert_chain(http.tls_cert, http.tls_key, password="")
    except ssl.SSLError as error:
        raise ListenError(
            f"http.tls_cert={http.tls_cert}, http.tls_key={http.tls_key}: {error.reason or 'cannot be used'}; "
            "give a certificate and the key that belongs to it in PEM, without a passphrase"
        ) from error
    return context


def listen_message(listen: tuple[str, int], error: OSError | OverflowError) -> str:
    """Say why an address cannot be listened on, and what to do."""
    address = f"{listen[0]}:{listen[1]}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another process; stop it or choose another address with --listen HOST:PORT"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot listen on {address}: {reason}; choose another address with --listen HOST:PORT"
