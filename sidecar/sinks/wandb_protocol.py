"""What the supervisor and its uploading child say to each other: one task down stdin, JSON lines up stdout.

Every line of the child is also its heartbeat. They are written by the loop that uploads, not by a thread beside it: a
child that hangs in a call falls silent.
"""

from typing import Literal, NamedTuple

import msgspec


class Sighting(NamedTuple):
    """How a child found a run on the server: whose spool it says it comes from, and its number of rows."""

    owner: str
    num_lines: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Upload one run until it is drained, or close it on the server when `exit_code` is given."""

    spool: str
    run_id: str
    owner: str
    """What this spool calls itself on the server."""
    project: str
    entity: str
    directory: str
    exit_code: int | None
    stopped_at_row: int | None
    """How many rows had been handed over when the run's last child was stopped."""
    settled: Sighting | None
    """What was unexpected on the server, and has not changed for long enough to be taken for good."""
    parent_pid: int
    until_drained: bool
    transmit_interval_s: int
    rows_per_second: float
    init_timeout_s: float
    finish_timeout_s: float
    look_interval_s: float
    look_timeout_s: float
    lease_s: float
    stall_s: float
    max_life_s: float
    max_rows: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The run is open and the next row is known. Nothing is sent before `base_step` is in the spool."""

    base_step: int
    next_row: int
    num_lines: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Rows before `next_row` were handed to W&B; it confirmed those before `num_confirmed`, and has `num_lines`."""

    next_row: int
    num_confirmed: int
    num_lines: int
    stop_requested: bool


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The server has the exit code, and every row but so many."""

    num_missing: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why the child gives up."""

    reason: Literal["unreachable", "refused", "stopped", "busy", "incomplete", "behind", "contested", "damaged"]
    detail: str
    sighting: Sighting | None = None
    """With "behind" and "contested": what has to stay as it is before it is taken for good."""


class GiveUp(Exception):  # noqa: N818 - carries the reason to the end of the child's `main`, which reports it
    """The child cannot go on."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure)
        self.failure = failure


Message = Attached | Progress | Closed | Failed
encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Attached | Progress | Closed | Failed).decode
