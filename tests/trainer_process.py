"""A trainer's telemetry without a trainer: the real publisher in a process of its own, at a steady pace of steps.

Run as a script: `trainer_process.py RUN_ID STEPS_PER_SECOND RING_BYTES`; it publishes until SIGTERM, then says goodbye
with exit code 0 and prints how many steps and records there were. Every record is also in `RUN_ID.audit`. Settings of
`telemetry.` come from the environment as for the real one; `TRAINER_CONFIG` is JSON for its hello.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.curve import CurveServer
from shared.endpoint import EndpointClaim, EndpointError, runtime_dir, socket_path
from shared.publisher import Identity, Publisher
from shared.wire import Step
from trainer.audit import AuditTrail
from trainer.config import load_config


class Pace:
    """Takes steps at the pace of the clock, counting them in cells."""

    def __init__(self, steps_per_second: float) -> None:
        self.cells = Cells(TRAINER_FAMILIES)
        self._steps = self.cells.counter("dflash_steps_total")
        self._tokens = self.cells.counter("dflash_tokens_total", role="drafter", worker="0", kind="real")
        self._lengths = self.cells.histogram("dflash_sequence_length_tokens")
        self._interval_s = 1.0 / steps_per_second
        self._last_s = time.monotonic()
        self.num_steps = 0

    def steps(self) -> Iterator[Step]:
        """The steps that are due."""
        while time.monotonic() >= self._last_s + self._interval_s:
            self._last_s += self._interval_s
            self.num_steps += 1
            self._steps.add()
            self._tokens.add(100)
            self._lengths.observe(50 + self.num_steps % 50)
            yield Step(
                session="",
                seq=0,
                time_s=time.time() - (time.monotonic() - self._last_s),
                step=self.num_steps,
                loss=10.0 / self.num_steps,
                accuracy_ratio=(0.5, 0.25),
                accept_length_simulated=1.75,
                learning_rate=1e-3,
                grad_norm=1.0,
                tokens_real=100,
                tokens_padding=28,
                sequence_lengths_tokens=(60, 40),
                queue_wait_s=0.0,
            )


def main(run_id: str, steps_per_second: str, ring_bytes: str) -> None:
    """Publish until told to stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pace = Pace(float(steps_per_second))
    config = json.loads(os.environ.get("TRAINER_CONFIG", "{}"))
    session = f"{run_id}-{os.getpid()}"
    identity = Identity(run_id=run_id, session=session, pid=os.getpid(), start_time_s=time.time(), config=config)
    telemetry = load_config(preset=None, assignments=(), environ=os.environ).telemetry
    with ExitStack() as stack:
        path = curve = None
        if telemetry.endpoint:
            curve = CurveServer(telemetry.endpoint, Path(telemetry.keys))
        else:
            path = stack.enter_context(EndpointClaim(socket_path(runtime_dir(os.environ), run_id, 0))).path
        publisher = Publisher(
            cells=pace.cells,
            identity=identity,
            path=path,
            curve=curve,
            interval_s=0.1,
            ring_bytes=int(ring_bytes),
            collect=lambda: list(pace.steps()),
            audit=AuditTrail(Path(f"{run_id}.audit")).write,
        )
        publisher.start()
        signal.sigwait({signal.SIGTERM})
        publisher.close(0)
        sys.stdout.write(f"{pace.num_steps} {publisher.ring.next_seq}\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EndpointError as error:
        sys.exit(str(error))
