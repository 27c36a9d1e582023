"""Trainers without training, for the receiving side: real sockets, real frames, as many as wanted.

Run as a script, `python -m bench.made_up_trainers MODE RUNTIME_DIR ...`, until killed:

* `frames DIR NUM`: one session whose NUM step frames are sent as fast as a subscriber takes them.
* `ring DIR NUM`: a real publisher that took NUM steps while nobody listened, and holds them in its ring.
* `fleet DIR NUM FIRST RATE_HZ`: NUM real publishers that take steps and snapshots at a steady rate.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells, Counter
from shared.endpoint import EndpointClaim, socket_path
from shared.publisher import Identity, Publisher
from shared.wire import PROTOCOL_VERSION, TOPIC_HELLO, TOPIC_STEP, Hello, Step, encode

LABEL_VALUES = {
    "role": ("target", "drafter"),
    "worker": ("0",),
    "kind": ("real", "padding"),
    "reason": ("unsupervised", "truncated"),
    "phase": ("load", "forward", "backward", "put", "get", "optimizer"),
    "queue": ("hidden",),
    "side": ("put", "get"),
    "device": ("0",),
}
"""What a trainer with one target worker and one drafter worker has."""


def declare_everything(cells: Cells) -> list[Counter]:
    """Declare every family of the catalogue over `LABEL_VALUES`; returns the counters."""
    counters = []
    for family in TRAINER_FAMILIES:
        combinations: list[dict[str, str]] = [{}]
        for label in family.labels:
            combinations = [{**pairs, label: value} for pairs in combinations for value in LABEL_VALUES[label]]
        for pairs in combinations:
            if family.kind == "counter":
                counters.append(cells.counter(family.name, **pairs))
            elif family.kind == "gauge":
                cells.gauge(family.name, **pairs)
            else:
                cells.histogram(family.name)
    return counters


def step(number: int, time_s: float) -> Step:
    """A step record of the usual size, still without session and sequence number."""
    return Step(
        session="",
        seq=0,
        time_s=time_s,
        step=number,
        loss=2.5,
        accuracy_ratio=(0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1),
        accept_length_simulated=2.75,
        learning_rate=6e-4,
        grad_norm=1.0,
        tokens_real=1000,
        tokens_padding=24,
        sequence_lengths_tokens=(128,) * 8,
        queue_wait_s=0.001,
    )


def send_frames(directory: Path, num_frames: int) -> None:
    """Send a hello and then every frame, without a bound on what may wait: the reader sets the pace."""
    schema = Cells(TRAINER_FAMILIES).schema()
    hello = Hello(
        version=PROTOCOL_VERSION,
        run_id="frames",
        session="frames",
        pid=os.getpid(),
        start_time_s=time.time(),
        interval_s=1.0,
        topology=(),
        config={},
        schema=schema,
        schema_digest=schema.digest,
        first_seq=0,
        next_seq=0,
    )
    now_s = time.time()
    bodies = [encode(msgspec.structs.replace(step(i + 1, now_s), session="frames", seq=i)) for i in range(num_frames)]
    socket = zmq.Context().socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, 0)
    path = socket_path(directory, "frames", 0)
    with EndpointClaim(path):
        socket.bind(f"ipc://{path}")
        say_ready()
        wanted = {TOPIC_HELLO, TOPIC_STEP}
        while wanted:
            wanted -= {socket.recv()[1:]}
        socket.send_multipart((TOPIC_HELLO, encode(hello)))
        for body in bodies:
            socket.send_multipart((TOPIC_STEP, body))
        signal.pause()


def fill_ring(directory: Path, num_steps: int) -> None:
    """Publish every step to nobody, then stay to answer replays."""
    waiting = iter([[step(i + 1, time.time()) for i in range(num_steps)]])
    cells = Cells(TRAINER_FAMILIES)
    path = socket_path(directory, "ring", 0)
    with EndpointClaim(path):
        identity = Identity(run_id="ring", session="ring", pid=os.getpid(), start_time_s=time.time())
        publisher = Publisher(cells=cells, identity=identity, path=path, collect=lambda: next(waiting, []))
        publisher.start()
        while publisher.ring.next_seq < num_steps:
            time.sleep(0.01)
        say_ready()
        signal.pause()


class Pace:
    """Steps at a steady rate, each counted in every counter of the catalogue."""

    def __init__(self, rate_hz: float) -> None:
        self.cells = Cells(TRAINER_FAMILIES)
        self._counters = declare_everything(self.cells)
        self._interval_s = 1.0 / rate_hz
        self._last_s = time.time()
        self._num_steps = 0

    def steps(self) -> Iterator[Step]:
        """The steps that are due."""
        while time.time() >= self._last_s + self._interval_s:
            self._last_s += self._interval_s
            self._num_steps += 1
            for counter in self._counters:
                counter.add()
            yield step(self._num_steps, self._last_s)


def run_fleet(directory: Path, num_trainers: int, first: int, rate_hz: float) -> None:
    """Run publishers that each send a step and a snapshot per interval."""
    with ExitStack() as stack:
        for index in range(first, first + num_trainers):
            pace, name = Pace(rate_hz), f"trainer-{index}"
            path = socket_path(directory, name, 0)
            stack.enter_context(EndpointClaim(path))
            publisher = Publisher(
                cells=pace.cells,
                # The pid tells processes apart, and here one process is many trainers.
                identity=Identity(run_id=name, session=name, pid=os.getpid(), start_time_s=time.time()),
                path=path,
                interval_s=1.0 / rate_hz,
                collect=pace.steps,
            )
            publisher.start()
        say_ready()
        signal.pause()


def say_ready() -> None:
    """Tell who reads our output that the sidecar may come."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main(mode: str, directory: str, num: str, *more: str) -> None:
    """Do what the mode says until killed."""
    if mode == "frames":
        send_frames(Path(directory), int(num))
    elif mode == "ring":
        fill_ring(Path(directory), int(num))
    else:
        run_fleet(Path(directory), int(num), int(more[0]), float(more[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
