"""What the supervisor and its uploading child say to each other: one task down stdin, JSON lines up stdout.

Every line of the child is also its heartbeat. They are written by the loop that uploads, not by a thread beside it: a
child that hangs in a call falls silent.
"""

from typing import Literal

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Upload one run until it is drained, or close it on the server when `exit_code` is given."""

    spool: str
    run_id: str
    project: str
    entity: str
    directory: str
    exit_code: int | None
    stopped_at_row: int | None
    """How many rows had been handed over when the run's last child was stopped."""
    parent_pid: int
    until_drained: bool
    transmit_interval_s: int
    rows_per_second: float
    init_timeout_s: float
    finish_timeout_s: float
    max_life_s: float
    max_rows: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The run is open; the server expects this step next. Nothing is sent before its base step is in the spool."""

    starting_step: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Rows before `next_row` were handed to W&B."""

    next_row: int
    stop_requested: bool


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The server has every row and the exit code."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why the child gives up."""

    reason: Literal["unreachable", "refused", "stopped", "busy", "incomplete"]
    detail: str


Message = Attached | Progress | Closed | Failed
encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Attached | Progress | Closed | Failed).decode
