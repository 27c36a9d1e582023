"""What must hold for a frame before anything believes it. Every breach is a FrameError with a bounded reason."""

import msgspec

from shared.redaction import without_secrets
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
    encode,
)
from sidecar.journal_schema import MAX_SEQ

MAX_INTERVAL_S = 86_400.0
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


def scrub(hello: Hello, body: bytes) -> tuple[Hello, bytes]:
    """Drop what looks secret among its settings, before anything is kept; trainers of ours do so themselves."""
    config = without_secrets(hello.config)
    if config == hello.config:
        return hello, body
    hello = msgspec.structs.replace(hello, config=config)
    return hello, encode(hello)


def check_hello(hello: Hello) -> None:
    """Refuse a hello that contradicts itself."""
    if not hello.first_seq <= hello.next_seq < MAX_SEQ:
        raise FrameError("invalid", f"first_seq {hello.first_seq}, next_seq {hello.next_seq}")
    if hello.schema.digest != hello.schema_digest:
        raise FrameError("schema_digest", f"schema is {hello.schema.digest}, hello says {hello.schema_digest}")
    if not (0.0 < hello.interval_s <= MAX_INTERVAL_S and 0.0 <= hello.start_time_s < MAX_TIME_S):
        raise FrameError("time", f"interval_s {hello.interval_s}, start_time_s {hello.start_time_s}")
    if hello.rank >= hello.world_size:
        raise FrameError("invalid", f"rank {hello.rank} of {hello.world_size}")


def is_same_trainer(one: Hello, other: Hello) -> bool:
    """Whether two hellos speak for the same session, or for the same part of a run: both at once cannot be."""
    return one.session == other.session or (one.run_id, one.rank) == (other.run_id, other.rank)


def check_continues(earlier: Hello, hello: Hello) -> None:
    """Refuse a hello that takes up the name of an earlier session without being it.

    Its records would be taken for repetitions, or read by the wrong schema.
    """
    if earlier.schema_digest != hello.schema_digest:
        raise FrameError("schema_changed", f"session {hello.session} changed its schema")
    if (earlier.run_id, earlier.rank, earlier.start_time_s) != (hello.run_id, hello.rank, hello.start_time_s):
        raise FrameError("session_conflict", f"session {hello.session} is a name that run {earlier.run_id} has used")


def check_record(record: Record, num_cells: int) -> None:
    """Refuse a record that contradicts its session, whose snapshots have so many cells."""
    if record.seq >= MAX_SEQ:
        raise FrameError("invalid", f"seq {record.seq} is too large")
    if not 0.0 <= record.time_s < MAX_TIME_S:
        raise FrameError("time", f"time_s {record.time_s}")
    if isinstance(record, Snap) and len(record.values) != 8 * num_cells:
        raise FrameError("values_length", f"{len(record.values)} bytes for {num_cells} cells")
