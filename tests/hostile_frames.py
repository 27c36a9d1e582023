"""Strategies for frames that nobody should send: valid ones with a field, a bit or the end changed, and pure noise."""

import functools
from typing import Any

import msgspec
from hypothesis import strategies as st
from trainer_frames import event, frame, hello, snap, step

from shared.schema import Family, Schema, Series
from shared.wire import Event, Hello, ReplayChunk, Snap, Step, encode

Message = Hello | Snap | Step | Event | ReplayChunk
TOPICS = (b"hello", b"snap", b"step", b"event", b"replay/s1/0/5/n-0")
FIRST_FREE_SEQ = 1_000
"""Hostile records are made from valid ones with sequence numbers from here on."""

VALID: tuple[Message, ...] = (
    hello(),
    hello("s2", run_id="other", rank=1, world_size=2),
    snap(FIRST_FREE_SEQ),
    step(FIRST_FREE_SEQ + 1, 7),
    event(FIRST_FREE_SEQ + 2, "evaluation", accept_length=2.5, lossless=True, note="x", nothing=None),
    event(FIRST_FREE_SEQ + 3, "checkpoint", step=7),
    ReplayChunk(session="s1", first_seq=FIRST_FREE_SEQ, bodies=(encode(snap(FIRST_FREE_SEQ)), b"\xc1"), done=True),
)
_NUMBERS = (
    *(-1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**40 - 1, 2**40, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 2.0**33, 1.7e9),
)
_TEXTS = (
    *(
        "",
        "a",
        "A" * 64,
        "A" * 65,
        "A" * 5_000,
        "s1",
        "s1\n",
        "../..",
        "a/b",
        'a"b\\c',
        "a\nb\r\x85\u2028",
        "\x00",
        "é",
    ),
    *(
        "le",
        "run",
        "rank",
        "__name__",
        "dflash_loss",
        "dflash_trainer_up",
        "dflash_steps_total",
        "dflash_x_sum",
        "hello",
    ),
    *("goodbye", "evaluation", "counter", "gauge", "histogram", "# EOF\n", "exit_code", "accept_length"),
)
_NAMES = (
    *("dflash_steps_total", "dflash_queue_depth", "dflash_sequence_length_tokens", "dflash_loss", "dflash_trainer_up"),
    *("dflash_x", "dflash_x_total", "dflash_x_sum", "dflash_x_count", "dflash_x_bucket", "dflash_x_info", "x_created"),
    *("dflash_frames_rejected_total", "dflash_run_info", "dflash_steps_per_second", "a", "A" * 128, "_"),
)
_BYTES = (b"", b"\x00" * 48, b"\xff" * 48, b"\x00" * 47, b"\x00" * 4_096, b"\xc1")


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def scalars() -> st.SearchStrategy[Any]:
    """A value that some field will not like."""
    texts = st.sampled_from(_TEXTS) | st.text(max_size=20)
    numbers = st.sampled_from(_NUMBERS) | st.integers(-(2**63), 2**64 - 1) | st.floats()
    return st.none() | st.booleans() | numbers | texts | st.sampled_from(_BYTES)


def values() -> st.SearchStrategy[Any]:
    """The same, or a list or map of such."""
    maps = st.dictionaries(st.sampled_from(_TEXTS), scalars(), max_size=3)
    return scalars() | st.lists(scalars(), max_size=6) | maps | st.sampled_from((_nested(3), _nested(50)))


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside lists and maps, as the keys that lead there."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else []
    return [place for key in keys for place in ((*path, key), *_places(value[key], (*path, key)))]


@st.composite
def changed_messages(draw: st.DrawFn) -> bytes:
    """A valid message in which up to three places hold something else, or are gone, or have company."""
    plain = msgspec.msgpack.decode(encode(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(_places(plain)))
        parent = functools.reduce(lambda value, key: value[key], above, plain)
        change = draw(st.sampled_from(("replace", "replace", "replace", "remove", "append")))
        if change == "remove":
            del parent[last]
        elif change == "append" and isinstance(parent, list):
            parent.append(draw(values()))
        else:
            parent[last] = draw(values())
        if not plain:
            break
    return msgspec.msgpack.encode(plain)


@st.composite
def damaged_messages(draw: st.DrawFn) -> bytes:
    """A valid message with flipped bits, cut off, or with something behind it."""
    body = bytearray(encode(draw(st.sampled_from(VALID))))
    for position in draw(st.lists(st.integers(0, 8 * len(body) - 1), max_size=4)):
        body[position // 8] ^= 1 << position % 8
    end = draw(st.integers(0, len(body)) | st.just(len(body)))
    return bytes(body[:end]) + draw(st.binary(max_size=4))


def bodies() -> st.SearchStrategy[bytes]:
    """A message body of any kind of wrongness; some are right."""
    return changed_messages() | damaged_messages() | st.binary(max_size=200)


@st.composite
def frames(draw: st.DrawFn) -> list[bytes]:
    """A frame around such a body, mostly on the topic that its tag asks for."""
    body = draw(bodies())
    tags = [tag for tag in TOPICS if tag in body[:12]]
    topic = tags[0] if tags and draw(st.integers(0, 9)) else draw(st.sampled_from(TOPICS) | st.binary(max_size=8))
    return [topic, body] if draw(st.integers(0, 19)) else [topic, body, b""]


@st.composite
def hostile_sessions(draw: st.DrawFn, session: str = "hostile") -> list[list[bytes]]:
    """A trainer that breaks no rule of the wire and yet means no good: its hello, and records full of odd numbers."""
    families = draw(st.lists(_families(), min_size=1, max_size=4, unique_by=lambda family: family.name))
    series = {
        (index, tuple(draw(st.sampled_from(_TEXTS) | st.text(max_size=9))[:256] for _ in family.labels))
        for index, family in enumerate(families)
        for _ in range(draw(st.integers(0, 2)))
    }
    schema = Schema(families=tuple(families), series=tuple(Series(*one) for one in sorted(series)))
    odd = st.sampled_from([float(number) for number in _NUMBERS]) | st.floats()
    introduction = msgspec.structs.replace(
        hello(session, run_id=session),
        schema=schema,
        schema_digest=schema.digest,
        config={"x": draw(scalars_of_json())},
    )
    records = [
        snap(seq, tuple(draw(odd) for _ in range(schema.num_cells)), session=session) for seq in range(draw(_FEW))
    ]
    odd_step = msgspec.structs.replace(
        step(len(records), 2**53 - 1, session=session),
        **{name: draw(odd) for name in ("loss", "grad_norm", "learning_rate", "queue_wait_s")},
        accuracy_ratio=tuple(draw(st.lists(odd, max_size=3))),
    )
    evaluation = event(len(records) + 1, "evaluation", session=session, accept_length=draw(scalars_of_json()))
    return [frame(message) for message in (introduction, *records, odd_step, evaluation)]


def scalars_of_json() -> st.SearchStrategy[Any]:
    """Whatever may stand in a configuration or the detail of an event."""
    return scalars().filter(lambda value: not isinstance(value, bytes))


_FEW = st.integers(0, 3)


@st.composite
def _families(draw: st.DrawFn) -> Family:
    kind = draw(st.sampled_from(("counter", "gauge", "histogram")))
    bounds = draw(st.lists(st.floats(min_value=0.0, allow_nan=False, allow_infinity=False), unique=True, max_size=3))
    return Family(
        name=draw(st.sampled_from(_NAMES)),
        kind=kind,
        help=draw(st.sampled_from(_TEXTS) | st.text(max_size=20))[:1_000],
        labels=draw(st.sampled_from(((), ("a",), ("a", "position"), ("reason",), ("self", "name")))),
        buckets=tuple(sorted(bounds)) if kind == "histogram" else (),
    )
