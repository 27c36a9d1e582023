"""Coverage-guided fuzzing of the wire: `make fuzz`, with options of libFuzzer in ARGS (`ARGS=-max_total_time=3600`).

The first byte of an input says what the rest is: a body for the decoders, a replay topic, or frames for the whole way
from a frame to the pages. Anything but a FrameError ends the run and leaves the input in a file. A sidecar lives for
many inputs, then all it has is checked and a new one begins.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shared", "sidecar"]):
    from frame_path import FramePath
    from hostile_frames import TOPICS, VALID

    from shared.wire import FrameError, ReplayRequest, decode, decode_record, encode
from trainer_frames import event, frame, hello, snap, step

INPUTS_PER_SIDECAR = 1_000
INPUTS_PER_TURN = 50


class Sidecars:
    """One sidecar after the other, each fed with frames and checked at its end."""

    def __init__(self) -> None:
        self._path: FramePath | None = None
        self._directory = ""
        self._num_inputs = 0

    def feed(self, data: bytes) -> None:
        """Cut an input into frames and hand them over, with honest records from time to time."""
        path = self._path or self._begin()
        self._num_inputs += 1
        provider = atheris.FuzzedDataProvider(data)
        while provider.remaining_bytes():
            topic = TOPICS[provider.ConsumeIntInRange(0, len(TOPICS) - 1)]
            length = provider.ConsumeIntInRange(0, 1_024)
            path.suffer([topic, provider.ConsumeBytes(length)])
        if self._num_inputs % INPUTS_PER_TURN == 0:
            seq = len(path.good)
            path.send(snap(seq), step(seq + 1, seq // 3 + 1), event(seq + 2, "checkpoint"))
            path.turn()
        if self._num_inputs % INPUTS_PER_SIDECAR == 0:
            self.end()

    def end(self) -> None:
        """Check everything and forget it."""
        if self._path is not None:
            self._path.check()
            self._path.close()
            shutil.rmtree(self._directory)
            self._path = None

    def _begin(self) -> FramePath:
        self._directory = tempfile.mkdtemp(prefix="dflash-fuzz-")
        path = self._path = FramePath(Path(self._directory))
        path.send(hello())
        path.send(snap(0), step(1, 1), event(2, "checkpoint"))
        return path


SIDECARS = Sidecars()


def one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    kind, rest = data[:1], data[1:]
    if kind == b"f":
        SIDECARS.feed(rest)
    elif kind == b"r":
        with contextlib.suppress(FrameError):
            topic = b"replay/" + rest
            assert ReplayRequest.parse(topic).topic == topic
    else:
        for decoder in (decode, decode_record):
            with contextlib.suppress(FrameError):
                encode(decoder(rest))


def write_seeds(directory: Path) -> None:
    """Valid messages, for a start that knows the format."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, message in enumerate(VALID):
        body = encode(message)
        (directory / f"body-{number}").write_bytes(b"d" + body)
        # FuzzedDataProvider takes numbers from the end: the length in two bytes, before it the index of the topic.
        topic = next((i for i, topic in enumerate(TOPICS) if topic == frame(message)[0]), len(TOPICS) - 1)
        (directory / f"frame-{number}").write_bytes(b"f" + body + len(body).to_bytes(2, "little") + bytes([topic]))
    (directory / "request").write_bytes(b"rs1/0/5000/n-0")


if __name__ == "__main__":
    corpus = Path(tempfile.gettempdir()) / "dflash-fuzz-corpus"
    write_seeds(corpus)
    atheris.Setup([*sys.argv, str(corpus)], one_input)
    atheris.Fuzz()
