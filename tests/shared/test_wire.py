"""The decoder under hostile input: it returns a message or raises FrameError, whatever the bytes."""

import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
from hostile_frames import VALID, Message, bodies, values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainer_frames import SCHEMA, event, hello, snap, step

from shared.schema import MAX_BUCKETS, Family, Schema, Series
from shared.wire import (
    MAX_FRAME_BYTES,
    Event,
    FrameError,
    Hello,
    Record,
    ReplayChunk,
    ReplayRequest,
    Snap,
    Step,
    decode,
    decode_record,
    encode,
)

REASONS = {"invalid", "malformed", "oversized", "version"}
T = TypeVar("T")
EXAMPLES = settings(max_examples=600, deadline=None)
pack = msgspec.msgpack.encode


def fields(message: Message) -> list[object]:
    """The fields of a message as they travel, its tag first."""
    plain: list[object] = msgspec.msgpack.decode(encode(message))
    return plain


def attempt(reader: Callable[[bytes], T], data: bytes) -> T | FrameError:
    """What a reader makes of bytes; whatever else it raises fails the test."""
    try:
        return reader(data)
    except FrameError as error:
        return error


def reason(body: bytes) -> str:
    """Why a body is refused."""
    with pytest.raises(FrameError) as refusal:
        decode(body)
    return refusal.value.reason


@EXAMPLES
@given(body=bodies())
@example(body=b"\xdd\xff\xff\xff\xff")
@example(body=b"\x96" + b"".join(map(pack, ("event", "s1", 0, 1.0, "k"))) + b"\x81\xa1a\xa3\xed\xa0\x80")
def test_nothing_but_a_frame_error_escapes(body: bytes) -> None:
    """Whatever the bytes, the decoders return a message of a known kind or refuse it for one of four reasons."""
    for decoder, kinds in ((decode, Hello | Record | ReplayChunk), (decode_record, Record)):
        outcome = attempt(decoder, body)
        if isinstance(outcome, FrameError):
            assert outcome.reason in REASONS
        else:
            assert isinstance(outcome, kinds)
            assert decoder(encode(outcome)) == outcome or "nan" in str(outcome)


@pytest.mark.parametrize("opening", [b"\x91", b"\xdd\x00\x00\x00\x01", b"\x81\xa1a", b"\x81\x91"])
@pytest.mark.parametrize("start", [b"", b"\x9f" + b"".join(map(pack, ("event", "s1", 0, 1.0, "k", {})))])
def test_deep_nesting_is_refused(opening: bytes, start: bytes) -> None:
    """A hundred thousand arrays or maps inside each other, in a field or where a field may be appended, are refused."""
    assert reason(start + opening * 100_000 + b"\x01") in REASONS


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
@settings(max_examples=30, deadline=None)
@given(more=st.lists(values(), min_size=1, max_size=3))
def test_appended_fields_are_accepted(message: Message, more: list[object]) -> None:
    """A newer sender may say more at the end, whatever it is."""
    assert decode(pack([*fields(message), *more])) == message


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
def test_every_truncation_is_refused(message: Message) -> None:
    """No prefix of a frame passes for a frame."""
    body = encode(message)

    assert {reason(body[:end]) for end in range(len(body))} <= REASONS


@pytest.mark.parametrize("tag", ["", "unknown", "Hello", "snap\x00", 1, None, ["hello"]])
def test_unknown_tags_are_invalid(tag: object) -> None:
    """A message of a kind that does not exist is refused."""
    assert reason(pack([tag, *fields(snap(0))[1:]])) == "invalid"


@pytest.mark.parametrize("version", [0, 2, 2**63])
@pytest.mark.parametrize("num_fields", [1, 2, 14, 40])
def test_another_version_is_called_so(version: int, num_fields: int) -> None:
    """A hello of another version is refused as such, also when it looks altogether different."""
    body = pack(["hello", version, *[None] * num_fields])

    assert reason(body) == "version"
    assert reason(pack(["hello", version, *fields(hello())[2:]])) == "version"


def test_a_frame_over_the_limit_is_oversized() -> None:
    """One byte over the limit is too much, before anything is decoded."""
    assert reason(b"\x00" * (MAX_FRAME_BYTES + 1)) == "oversized"
    assert reason(b"\x00" * MAX_FRAME_BYTES) != "oversized"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -0.0])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate", "accept_length_simulated", "queue_wait_s"])
def test_any_float_is_a_value(name: str, number: float) -> None:
    """A loss of NaN is a fact about the training and arrives as it is."""
    decoded = decode(encode(msgspec.structs.replace(step(0, 1), **{name: number})))

    assert isinstance(decoded, Step)
    assert struct.pack("d", getattr(decoded, name)) == struct.pack("d", number)


@pytest.mark.parametrize("name", ["seq", "step", "tokens_real", "tokens_padding"])
def test_counts_stay_where_float64_is_exact(name: str) -> None:
    """The largest count arrives, one more or a negative one does not."""
    largest = msgspec.structs.replace(step(0, 1), **{name: 2**53 - 1})

    assert decode(encode(largest)) == largest
    assert {reason(encode(msgspec.structs.replace(largest, **{name: wrong}))) for wrong in (-1, 2**53)} == {"invalid"}


@pytest.mark.parametrize("name", ["s1\n", "", "a b", "a/b", "é", "\x00", "-a", "a" * 65])
def test_names_are_plain(name: str) -> None:
    """Session, run and kind are identifiers, without so much as a line break at the end."""
    assert reason(encode(snap(0, session=name))) == "invalid"
    assert reason(encode(hello(run_id=name))) == "invalid"
    assert reason(encode(event(0, name))) == "invalid"


def hostile_schema(*families: Family, series: int = 1) -> bytes:
    """A hello with a schema that its own class would not let us build."""
    labels = [["v"] * len(family.labels) for family in families]
    schema = [[*families], [[index, labels[index]] for index in range(len(families)) for _ in range(series)]]
    plain = fields(hello())
    plain[9] = schema
    return pack(plain)


def unchecked(**values: object) -> Family:
    """A family as a hostile sender would send it."""
    family = Family("dflash_x", "histogram", "X.")
    for name, value in values.items():
        msgspec.structs.force_setattr(family, name, value)
    return family


@pytest.mark.parametrize(
    "family",
    [
        unchecked(labels=("le",)),
        unchecked(labels=("run",)),
        unchecked(labels=("__name__",)),
        unchecked(labels=("a", "a")),
        unchecked(labels=("a\n",)),
        unchecked(labels=("é",)),
        unchecked(labels=tuple(f"l{i}" for i in range(17))),
        unchecked(name="dflash x"),
        unchecked(name="dflash_x\n"),
        unchecked(name=""),
        unchecked(kind="summary"),
        unchecked(help="x" * 1_001),
        unchecked(buckets=(1.0, 1.0)),
        unchecked(buckets=(2.0, 1.0)),
        unchecked(buckets=(-1.0, 1.0)),
        unchecked(buckets=(float("nan"),)),
        unchecked(buckets=(float("inf"),)),
        unchecked(buckets=tuple(map(float, range(MAX_BUCKETS + 1)))),
    ],
)
def test_schemas_that_nobody_could_show_are_refused(family: Family) -> None:
    """Label names that Prometheus or the sidecar uses itself, broken names and bucket bounds end at the door."""
    assert reason(hostile_schema(family)) == "invalid"


def test_schemas_are_bounded() -> None:
    """50,000 series, a family or a series twice, and a few series with so many buckets are all too much."""
    one = Family("dflash_x", "gauge", "X.")
    wide = Family("dflash_y", "histogram", "Y.", ("a",), tuple(map(float, range(MAX_BUCKETS))))
    plain = fields(hello())
    plain[9] = [[wide], [[0, [str(index)]] for index in range(1_000)]]

    assert reason(hostile_schema(one, series=50_000)) == "invalid"
    assert reason(hostile_schema(one, one)) == "invalid"
    assert reason(hostile_schema(one, series=2)) == "invalid"
    assert reason(pack(plain)) == "invalid"


def test_label_values_may_be_anything_short() -> None:
    """Quotes, line breaks and control characters are values like any other; a lone surrogate is no text."""
    series = tuple(Series(0, (value,)) for value in ('a"b\\', "a\nb\r", "\x00\u2028", "", "é" * 256))
    schema = Schema(families=(Family("dflash_x", "gauge", "X.", ("a",)),), series=series)
    sent = msgspec.structs.replace(hello(), schema=schema, schema_digest=schema.digest)

    assert decode(encode(sent)) == sent
    assert reason(encode(sent).replace(b'a"b\\', b"\xed\xa0\x80\\")) == "malformed"


@EXAMPLES
@given(
    topic=st.binary(max_size=40).map(lambda tail: b"replay/" + tail)
    | st.lists(st.sampled_from([b"s1", b"0", b"5", b"-1", b"+5", b"1_0", b" 5", b"05", b"9" * 30, b"\xb2", b""])).map(
        lambda parts: b"/".join((b"replay", *parts))
    )
)
@example(topic=b"replay/s1/1_0/2_0/n")
@example(topic=b"replay/s1/0/" + b"9" * 180 + b"/n")
def test_a_request_is_its_topic_or_nothing(topic: bytes) -> None:
    """A topic that parses is exactly the topic on which the answer will be sent; else it is a bad topic."""
    outcome = attempt(ReplayRequest.parse, topic)

    if isinstance(outcome, FrameError):
        assert outcome.reason == "bad_topic"
    else:
        assert outcome.topic == topic
        assert 0 <= outcome.first <= outcome.end


def test_the_fixture_is_sound() -> None:
    """The messages that all others are made from are accepted."""
    assert [decode(encode(message)) for message in VALID] == list(VALID)
    assert SCHEMA.num_cells * 8 == len(snap(0).values)
    assert {type(message) for message in VALID} == {Hello, Snap, Step, Event, ReplayChunk}
