"""Messages of a made-up trainer with one counter, one histogram and a queue gauge, for tests of the receiving side."""

from array import array

from shared.schema import Family, Schema, Series
from shared.wire import PROTOCOL_VERSION, Event, Hello, Scalar, Snap, Step, encode

SCHEMA = Schema(
    families=(
        Family("dflash_steps_total", "counter", "Steps."),
        Family("dflash_queue_depth", "gauge", "Depth.", ("queue",)),
        Family("dflash_sequence_length_tokens", "histogram", "Lengths.", (), (32.0, 64.0)),
    ),
    series=(Series(0), Series(1, ("hidden",)), Series(2)),
)
START_S = 1_700_000_000.0


def hello(session: str = "s1", *, run_id: str = "run", first_seq: int = 0, next_seq: int = 0, **more: int) -> Hello:
    """A hello; `more` may set pid, rank and world_size."""
    return Hello(
        version=PROTOCOL_VERSION,
        run_id=run_id,
        session=session,
        pid=more.get("pid", 4242),
        start_time_s=START_S,
        interval_s=1.0,
        topology=(),
        config={},
        schema=SCHEMA,
        schema_digest=SCHEMA.digest,
        first_seq=first_seq,
        next_seq=next_seq,
        rank=more.get("rank", 0),
        world_size=more.get("world_size", 1),
    )


def snap(seq: int, values: tuple[float, ...] = (1.0, 2.0, 3.0, 1.0, 0.0, 96.0), session: str = "s1") -> Snap:
    """A snapshot at `seq` seconds after the start: steps, depth, three buckets and the sum of lengths."""
    return Snap(
        session=session, seq=seq, time_s=START_S + seq, monotonic_s=float(seq), values=array("d", values).tobytes()
    )


def step(seq: int, number: int, session: str = "s1") -> Step:
    """A step record at `seq` seconds after the start."""
    return Step(
        session=session,
        seq=seq,
        time_s=START_S + seq,
        step=number,
        loss=2.0,
        accuracy_ratio=(0.5, 0.25),
        accept_length_simulated=1.75,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens_real=100,
        tokens_padding=28,
        sequence_lengths_tokens=(60, 40),
        queue_wait_s=0.1,
    )


def event(seq: int, kind: str, session: str = "s1", **detail: Scalar) -> Event:
    """An event at `seq` seconds after the start."""
    return Event(session=session, seq=seq, time_s=START_S + seq, kind=kind, detail=detail)


def frame(message: Hello | Snap | Step | Event) -> list[bytes]:
    """The two parts in which a message travels."""
    return [type(message).__name__.lower().encode(), encode(message)]
