"""The sidecar's receiving half alone in a process: `python -m bench.receiving STATE_DIR RUNTIME_DIR NUM_RECORDS`.

Receiver, intake and journal as the daemon has them. It reports, as JSON, the wall time and the CPU time of all its
threads from the first record in the journal to the last one, and how many records that were.
"""

import sys
import time
from pathlib import Path

import msgspec

from sidecar.intake import Intake
from sidecar.journal import Journal
from sidecar.receiver import Receiver

POLL_S = 0.02


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken in, and what it cost."""

    num_records: int
    num_lost: int
    wall_s: float
    cpu_s: float


def main(state_dir: str, runtime_dir: str, num_records: str) -> None:
    """Receive until the first session has so many records."""
    journal = Journal(Path(state_dir) / "journal.sqlite")
    receiver = Receiver(Intake(journal, "bench", time.monotonic()), Path(runtime_dir))
    receiver.start()

    def position() -> int:
        return next((stored.next_seq for stored in journal.sessions()), 0)

    while (first := position()) == 0:
        time.sleep(POLL_S)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    while (last := position()) < int(num_records):
        time.sleep(POLL_S)
    received = Received(
        num_records=last - first,
        num_lost=sum(lost.end_seq - lost.first_seq for lost in journal.lost_ranges()),
        wall_s=time.monotonic() - start_s,
        cpu_s=time.process_time() - start_cpu_s,
    )
    sys.stdout.write(msgspec.json.encode(received).decode() + "\n")
    receiver.close()
    journal.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
