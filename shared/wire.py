"""The records that cross from trainer to sidecar, and their limits.

Every message is two ZeroMQ parts: a topic and a MessagePack body. `hello` describes the session; `snap`, `step` and
`event` carry one dense sequence number per session, so a gap in any of them is seen and can be asked for again.
A `replay/...` subscription is such a request: the trainer answers on exactly that topic with `ReplayChunk`s that hold
the original bodies.

Structs are array-like: a newer sender may append fields, an older one may lack those that have defaults. Whatever does
not decode raises `FrameError` with a reason that is used as a metric label; nothing else escapes from `decode`.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.schema import Schema

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_TOPIC_BYTES = 200
MAX_SEQ = 2**53
MAX_POSITIONS = 1_024
"""Block positions in a step record: each is a series."""

TOPIC_HELLO = b"hello"
TOPIC_SNAP = b"snap"
TOPIC_STEP = b"step"
TOPIC_EVENT = b"event"
LIVE_TOPICS = (TOPIC_HELLO, TOPIC_SNAP, TOPIC_STEP, TOPIC_EVENT)
REPLAY_PREFIX = b"replay/"

# `\Z` and not `$`, which would let a line break through at the end.
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Seq = Annotated[int, Meta(ge=0, lt=MAX_SEQ)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A whole number that float64 and JSON keep exactly."""
Small = Annotated[int, Meta(ge=0, lt=2**31)]
Scalar = str | int | float | bool | None


class FrameError(ValueError):
    """A frame that cannot be used; `reason` is short, bounded and fit for a label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Device(msgspec.Struct, frozen=True, array_like=True):
    """One worker and the device it runs on; `uuid` is empty on a CPU."""

    role: Literal["target", "drafter"]
    worker: Text
    device: Text
    uuid: Text = ""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who a session is and what its snapshots mean.

    `first_seq` is the oldest record the ring still holds, `next_seq` the one that will be sent next: a sidecar that
    has less knows what to ask for, and what it can no longer get.
    """

    version: int
    run_id: Identifier
    session: Identifier
    pid: Small
    start_time_s: float
    interval_s: float
    topology: Annotated[tuple[Device, ...], Meta(max_length=4096)]
    config: dict[str, Scalar]
    schema: Schema
    schema_digest: str
    first_seq: Seq
    next_seq: Seq
    rank: Small = 0
    world_size: Small = 1


class Snap(msgspec.Struct, frozen=True, array_like=True, tag="snap"):
    """All cells at one moment: little-endian float64 in schema order."""

    session: Identifier
    seq: Seq
    time_s: float
    monotonic_s: float
    values: bytes


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One optimizer step. `accuracy_ratio[k]` belongs to block position k + 1; times are Unix seconds."""

    session: Identifier
    seq: Seq
    time_s: float
    step: Count
    loss: float
    accuracy_ratio: Annotated[tuple[float, ...], Meta(max_length=MAX_POSITIONS)]
    accept_length_simulated: float
    learning_rate: float
    grad_norm: float
    tokens_real: Count
    tokens_padding: Count
    sequence_lengths_tokens: tuple[Count, ...]
    queue_wait_s: float


class Event(msgspec.Struct, frozen=True, array_like=True, tag="event"):
    """Something that happened once: checkpoint, evaluation, sample skipped, error, goodbye."""

    session: Identifier
    seq: Seq
    time_s: float
    kind: Identifier
    detail: dict[str, Scalar] = {}


Record = Snap | Step | Event
T = TypeVar("T")


class ReplayChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Part of an answer to a replay request: record bodies in order, and whether it was the last part."""

    session: Identifier
    first_seq: Seq
    bodies: tuple[bytes, ...]
    done: bool


class ReplayRequest(msgspec.Struct, frozen=True):
    """The records [first, end) of one session, asked for by one sidecar; `nonce` keeps answers apart."""

    session: str
    first: int
    end: int
    nonce: str

    @property
    def topic(self) -> bytes:
        """The topic to subscribe to, on which the answer will arrive."""
        return f"replay/{self.session}/{self.first}/{self.end}/{self.nonce}".encode()

    @classmethod
    def parse(cls, topic: bytes) -> "ReplayRequest":
        """Read a request from a subscription; raises FrameError when it is not one."""
        parts = topic.split(b"/")
        if len(topic) > MAX_TOPIC_BYTES or len(parts) != 5:  # noqa: PLR2004 - the five parts of `topic`
            raise FrameError("bad_topic", "not replay/SESSION/FIRST/END/NONCE")
        try:
            session, nonce = parts[1].decode("ascii"), parts[4].decode("ascii")
            first, end = int(parts[2]), int(parts[3])
        except ValueError as error:
            raise FrameError("bad_topic", str(error)) from error
        if not 0 <= first <= end < MAX_SEQ:
            raise FrameError("bad_topic", f"no such range: {first} to {end}")
        request = cls(session=session, first=first, end=end, nonce=nonce)
        if request.topic != topic:  # `int` also reads " 1" and "1_0"; the answer would go to a topic nobody listens to
            raise FrameError("bad_topic", "a range is two plain numbers")
        return request


_ENCODER = msgspec.msgpack.Encoder()
_RECORD_DECODER = msgspec.msgpack.Decoder(Record)
_MESSAGE_DECODER: msgspec.msgpack.Decoder[Hello | Record | ReplayChunk] = msgspec.msgpack.Decoder(
    Hello | Snap | Step | Event | ReplayChunk
)


def encode(message: Hello | Record | ReplayChunk) -> bytes:
    """Encode one message body."""
    return _ENCODER.encode(message)


def decode(body: bytes) -> Hello | Record | ReplayChunk:
    """Decode one message body; raises FrameError, and nothing else, on anything malformed."""
    try:
        message = _decode(_MESSAGE_DECODER, body)
    except FrameError as error:
        if error.reason == "invalid" and (version := _version(body)) not in {None, PROTOCOL_VERSION}:
            raise _other_version(version) from error  # its hello may well look different
        raise
    if isinstance(message, Hello) and message.version != PROTOCOL_VERSION:
        raise _other_version(message.version)
    return message


def decode_record(body: bytes) -> Record:
    """Decode a snap, step or event body; raises FrameError, and nothing else, on anything malformed."""
    return _decode(_RECORD_DECODER, body)


class _AnyHello(msgspec.Struct, array_like=True, tag="hello"):
    version: int


_VERSION_DECODER = msgspec.msgpack.Decoder(_AnyHello)


def _version(body: bytes) -> int | None:
    """The version of a hello of any version; None for anything else."""
    try:
        return _decode(_VERSION_DECODER, body).version
    except FrameError:
        return None


def _other_version(version: int | None) -> FrameError:
    return FrameError("version", f"trainer speaks version {version}, this sidecar {PROTOCOL_VERSION}")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", body: bytes) -> T:
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError("oversized", f"{len(body)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise FrameError("invalid", str(error)) from error
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise FrameError("malformed", str(error)) from error
