"""Addresses of trainers elsewhere, as settings and as names of endpoints; ZeroMQ is not needed to read them."""

import re

from shared.settings import SettingsError

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+|\*):([0-9]{1,5})")
_MAX_PORT = 65_535


def is_remote(endpoint: str) -> bool:
    """Whether an endpoint is an address of the network rather than a path on this machine."""
    return endpoint.startswith("tcp://")


def check_remote(key: str, endpoint: str, keys_key: str, keys: str) -> None:
    """Refuse an address that is none, or one without keys; raises SettingsError naming the setting and the remedy."""
    found = _TCP.fullmatch(endpoint)
    if found is None or not 0 < int(found[2]) <= _MAX_PORT:
        raise SettingsError(f"{key}={endpoint!r}: expected tcp://HOST:PORT, for example tcp://10.0.0.7:9478")
    if not keys:
        raise SettingsError(
            f"{key}={endpoint} needs keys, without them anybody could listen: make them with "
            f"`dflash-sidecar keys DIR` and set {keys_key}"
        )
