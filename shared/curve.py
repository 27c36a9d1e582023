"""Telemetry between machines: tcp, and only with CURVE, so that whoever lacks the right key gets nothing.

There are two directories of keys, one for each side, made together by `dflash-sidecar keys`. Each holds the secret key
of its side and the public key of the other. A trainer answers only those whose public key lies in its directory; a
sidecar believes only the holder of the secret key that belongs to the public one it has.

The check runs on a thread of pyzmq's own, which wakes only when somebody connects. ZeroMQ would let everybody in if
that thread were gone; the domain is enforced, so nobody gets in then.
"""

import os
import stat
import struct
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

TRAINER = "trainer"
SIDECAR = "sidecar"
HANDSHAKE_TIMEOUT_MS = 5_000
"""A connection that has not shown its key by then is closed."""
_DOMAIN = "telemetry"
_KEY_BYTES = 32


class CurveError(ValueError):
    """Keys that cannot be used, or an address that cannot be listened on; the message is meant for the user."""


def make_keys(directory: Path) -> tuple[Path, Path]:
    """Make the keys of a trainer and of its sidecar; returns both directories. Nothing is overwritten.

    Raises:
        CurveError: there are keys already, or the directory cannot be written.
    """
    sides = directory / TRAINER, directory / SIDECAR
    if taken := [side for side in sides if side.exists()]:
        raise CurveError(f"{taken[0]} exists; give another directory, or remove it if nothing uses its keys")
    previous = os.umask(0o077)
    try:
        for side in sides:
            side.mkdir(parents=True)
            zmq.auth.create_certificates(side, side.name)
        for owner, other in (sides, sides[::-1]):
            (owner / f"{owner.name}.key").rename(other / f"{owner.name}.key")
    except OSError as error:
        raise CurveError(f"{directory}: {error.strerror}; give a directory that can be written") from error
    finally:
        os.umask(previous)
    return sides


class CurveServer:
    """A trainer's endpoint on the network.

    Args:
        endpoint: `tcp://HOST:PORT`; HOST is an address of this machine, or `*` for all of them.
        keys: the trainer's directory of keys.

    Raises:
        CurveError: the keys cannot be used.
    """

    def __init__(self, endpoint: str, keys: Path) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._public_key, self._secret_key = _secret(keys, TRAINER)
        if not list(keys.glob("*.key")):
            raise CurveError(f"{keys} holds no public key of a sidecar; {_remedy(TRAINER)}")
        for path in keys.glob("*.key"):
            _load(path, TRAINER)
        self._authenticator: ThreadAuthenticator | None = None

    def bind(self, socket: "zmq.Socket[bytes]") -> None:
        """Listen, with the check of keys in place before the first connection; raises CurveError."""
        self._authenticator = ThreadAuthenticator(socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain=_DOMAIN, location=self._keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise CurveError(
                f"telemetry.endpoint={self._endpoint}: {os.strerror(error.errno or 0)}; "
                "give an address of this machine and a port that is free"
            ) from error

    def close(self) -> None:
        """Stop the check of keys; nobody else gets in from here on."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class CurveClient(msgspec.Struct, frozen=True):
    """What a sidecar shows to trainers, and what it expects of them."""

    public_key: bytes
    secret_key: bytes
    server_key: bytes

    @classmethod
    def load(cls, keys: Path) -> "CurveClient":
        """Read the sidecar's directory of keys; raises CurveError."""
        public_key, secret_key = _secret(keys, SIDECAR)
        return cls(public_key, secret_key, _load(keys / f"{TRAINER}.key", SIDECAR)[0])

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket show its key, and talk to the holder of the trainer's key alone; call it before `connect`."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)


def _secret(keys: Path, side: str) -> tuple[bytes, bytes]:
    path = keys / f"{side}.key_secret"
    public_key, secret_key = _load(path, side)
    if secret_key is None:
        raise CurveError(f"{path} holds no secret key; {_remedy(side)}")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CurveError(
            f"{path} is a secret that others can read; chmod 600 it, and make new keys if somebody may have"
        )
    if keys.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CurveError(f"others can put keys into {keys}; chmod 700 it")
    return public_key, secret_key


def _load(path: Path, side: str) -> tuple[bytes, bytes | None]:
    try:
        public_key, secret_key = zmq.auth.load_certificate(path)
        is_whole = all(len(z85.decode(key)) == _KEY_BYTES for key in (public_key, secret_key) if key is not None)
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror or 'no such file'}; {_remedy(side)}") from error
    except (ValueError, LookupError, struct.error):  # of pyzmq, for text that is no key
        is_whole = False
    if not is_whole:
        raise CurveError(f"{path} holds no whole key; {_remedy(side)}")
    return public_key, secret_key


def _remedy(side: str) -> str:
    return f"give the directory {side}/ that `dflash-sidecar keys DIR` made"
