"""Remote write, the one way to give a Prometheus samples and the ends of series at chosen times.

A request is a protobuf message under snappy; both are simple enough to write by hand: three kinds of field, and a
block that is one literal.
"""

import struct
import urllib.request
from collections.abc import Iterable

from sidecar.samples import Labels, Sample
from sidecar.store import NAME_LABEL

STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
"""The NaN by which Prometheus knows that a series ended."""
_FIXED_64, _BYTES = 1, 2


def write(port: int, samples: Iterable[Sample], ends: Iterable[tuple[str, Labels, float]]) -> None:
    """Send samples, and the Unix times at which series end, to the server on a port of this machine."""
    by_series: dict[tuple[str, Labels], list[tuple[float, float]]] = {}
    for name, labels, time_s, value in [*samples, *(Sample(*end, STALE) for end in ends)]:
        by_series.setdefault((name, labels), []).append((time_s, value))
    body = b"".join(_field(1, _series(*key, sorted(points, key=lambda p: p[0]))) for key, points in by_series.items())
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1/write",
        data=_varint(len(body)) + b"\xfc" + struct.pack("<I", len(body) - 1) + body,
        headers={"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"},
    )
    with urllib.request.urlopen(request):
        pass


def _series(name: str, labels: Labels, points: list[tuple[float, float]]) -> bytes:
    pairs = sorted(((NAME_LABEL, name), *labels))
    message = b"".join(_field(1, _field(1, key.encode()) + _field(2, value.encode())) for key, value in pairs)
    for time_s, value in points:
        time_ms = _varint(round(time_s * 1000))
        message += _field(2, bytes([1 << 3 | _FIXED_64]) + struct.pack("<d", value) + bytes([2 << 3]) + time_ms)
    return message


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
