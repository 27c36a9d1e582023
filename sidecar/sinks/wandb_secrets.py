"""The API key: where it comes from, and what becomes of it in texts that are not ours.

A server may repeat a key in an error, and wandb writes down what servers say. So texts for people are redacted, and so
are wandb's own logs once the process that wrote them has ended.
"""

import base64
import contextlib
import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

CREDENTIAL_NAME = "wandb-api-key"
DEFAULT_BASE_URL = "https://api.wandb.ai"
_HIDDEN = "***"


def api_key(environ: Mapping[str, str]) -> str:
    """The key that is to be used: of the environment, a systemd credential, or netrc; empty when there is none."""
    return environ.get("WANDB_API_KEY") or _systemd_credential(environ) or _netrc_key(environ)


def redacted(text: str, key: str) -> str:
    """Text without the key, as it is and as it travels in a header."""
    for form in _forms(key):
        text = text.replace(form, _HIDDEN)
    return text


def redact_logs(directory: Path, key: str) -> None:
    """Take the key out of every log below a directory; nobody may be writing there."""
    forms = [form.encode() for form in _forms(key)]
    for path in directory.rglob("*.log"):
        with contextlib.suppress(OSError):  # a full disk, or gone meanwhile
            before = after = path.read_bytes()
            for form in forms:
                after = after.replace(form, _HIDDEN.encode())
            if after != before and not path.is_symlink():
                path.write_bytes(after)


def _forms(key: str) -> list[str]:
    # The three alignments of base64 matter to none but "api:KEY", which is what wandb sends.
    return [key, base64.b64encode(f"api:{key}".encode()).decode().rstrip("=")] if key else []


def _systemd_credential(environ: Mapping[str, str]) -> str:
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return ""
    try:
        return (Path(directory) / CREDENTIAL_NAME).read_text().strip()
    except OSError:
        return ""


def _netrc_key(environ: Mapping[str, str]) -> str:
    # With the port where there is one: so wandb looks it up, and so `wandb login` writes it.
    host = urlsplit(environ.get("WANDB_BASE_URL") or DEFAULT_BASE_URL).netloc
    home = Path(environ.get("HOME", "/nonexistent"))
    for path in [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if (found := netrc.netrc(path).authenticators(host)) is not None and found[2]:
                return found[2]
    return ""
