"""What must hold for a frame before anything believes it. Every breach is a FrameError with a bounded reason."""

import math

from shared.wire import (
    REPLAY_PREFIX,
    TOPIC_EVENT,
    TOPIC_HELLO,
    TOPIC_SNAP,
    TOPIC_STEP,
    Event,
    FrameError,
    Hello,
    Record,
    ReplayChunk,
    Snap,
    Step,
    decode,
)
from sidecar.journal_schema import MAX_SEQ

MAX_TIME_S = 2.0**33
"""The year 2242: a record from later is not one of ours."""
_TOPICS: dict[type[Hello | Record], bytes] = {
    Hello: TOPIC_HELLO,
    Snap: TOPIC_SNAP,
    Step: TOPIC_STEP,
    Event: TOPIC_EVENT,
}


def topic_of(message: Hello | Record) -> bytes:
    """The topic a message belongs on."""
    return _TOPICS[type(message)]


def decode_frame(parts: list[bytes]) -> Hello | Record | ReplayChunk:
    """Decode topic and body, which must agree."""
    if len(parts) != 2:  # noqa: PLR2004 - topic and body
        raise FrameError("parts", f"{len(parts)} parts instead of topic and body")
    topic, body = parts
    message = decode(body)
    right = topic.startswith(REPLAY_PREFIX) if isinstance(message, ReplayChunk) else topic == topic_of(message)
    if not right:
        raise FrameError("topic", f"a {type(message).__name__} on topic {topic[:32]!r}")
    return message


def check_hello(hello: Hello) -> None:
    """Refuse a hello that contradicts itself."""
    if not hello.first_seq <= hello.next_seq < MAX_SEQ:
        raise FrameError("invalid", f"first_seq {hello.first_seq}, next_seq {hello.next_seq}")
    if hello.schema.digest != hello.schema_digest:
        raise FrameError("schema_digest", f"schema is {hello.schema.digest}, hello says {hello.schema_digest}")
    if not (math.isfinite(hello.interval_s) and hello.interval_s > 0.0 and 0.0 <= hello.start_time_s < MAX_TIME_S):
        raise FrameError("time", f"interval_s {hello.interval_s}, start_time_s {hello.start_time_s}")


def check_record(hello: Hello, record: Record) -> None:
    """Refuse a record that contradicts its session."""
    if record.seq >= MAX_SEQ:
        raise FrameError("invalid", f"seq {record.seq} is too large")
    if not 0.0 <= record.time_s < MAX_TIME_S:
        raise FrameError("time", f"time_s {record.time_s}")
    if isinstance(record, Snap) and len(record.values) != 8 * hello.schema.num_cells:
        raise FrameError("values_length", f"{len(record.values)} bytes for {hello.schema.num_cells} cells")
