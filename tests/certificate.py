"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sidecar.config import HttpConfig

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def self_signed(directory: Path, name: str = "tls") -> HttpConfig:
    """Settings with a fresh certificate for localhost that signs itself, and its key."""
    cert, key = directory / f"{name}.crt", directory / f"{name}.key"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=dflash", "-addext", names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return HttpConfig(tls_cert=str(cert), tls_key=str(key))
