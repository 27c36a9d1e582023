"""What may be kept and shown of a run's settings: all but what is secret by its name, and passwords in addresses."""

import re
from collections.abc import Mapping

from shared.wire import Scalar

_SECRET = re.compile(
    r"(^|[._-])(secrets?|passwords?|passwd|passphrase|credentials?|bearer|auth(orization)?"
    r"|(api|access|private|secret)[_-]?key|\w*token)($|[._-](key|value)$)",
    re.IGNORECASE,
)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")


def without_secrets(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings without those that look secret, and without users and passwords in addresses.

    Args:
        config: dotted key to value.
    """
    return {key: _without_user(value) for key, value in config.items() if not _SECRET.search(key)}


def _without_user(value: Scalar) -> Scalar:
    return _USER_IN_ADDRESS.sub("***@", value) if isinstance(value, str) else value
