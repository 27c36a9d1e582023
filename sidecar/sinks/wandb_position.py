"""Where an upload goes on: which row the server needs next, and which W&B step row 0 has.

Usually the step that the server expects says it all, because rows are numbered densely. When the spool or the server is
not what it was, the last row on the server says where it came from (`_record`), and that record is found again in the
spool: rows are made anew from the same journal in the same order, so what follows it is what the server lacks.
"""

from typing import NamedTuple

from sidecar.sinks.wandb_lookup import ServerRun
from sidecar.sinks.wandb_protocol import Failed, GiveUp
from sidecar.sinks.wandb_spool import Spool


class Position(NamedTuple):
    """Row `next_row` is sent with step `base_step + next_row`."""

    base_step: int
    next_row: int


def position(spool: Spool, run_id: str, server: ServerRun | None, starting_step: int, owner: str) -> Position:
    """Where to go on.

    Args:
        spool: the rows.
        run_id: the run.
        server: what the server had of the run before it was attached to, None for nothing.
        starting_step: what wandb takes for the next step.
        owner: what this spool calls itself on the server.

    Raises:
        GiveUp: the spool does not have the rows yet that would tell.
    """
    run = spool.run(run_id)
    if server is None:
        next_row = 0
    elif (
        run.base_step is None
        or server.owner not in {"", owner}
        or starting_step - run.base_step > run.num_rows  # the spool forgot rows: a power cut, or an old copy
    ):
        next_row = _after_last_record(spool, run_id, server, starting_step)
    elif server.num_lines < run.num_lines:
        # The server forgot the last rows, or does not show them yet. They are sent again to the same lines.
        next_row = run.num_confirmed - (run.num_lines - server.num_lines)
    else:
        next_row = starting_step - run.base_step
    next_row = max(next_row, spool.first_row(run_id))
    return Position(starting_step - next_row, next_row)


def _after_last_record(spool: Spool, run_id: str, server: ServerRun, starting_step: int) -> int:
    run = spool.run(run_id)
    session, _, seq = server.last_record.rpartition(":")
    progress = spool.session_progress(run_id, session)
    if server.last_step is None or progress is None or not seq.isdecimal():
        return run.num_confirmed  # rows of other sessions: ours come behind them
    if not progress.has_ended and progress.seq < int(seq):
        raise GiveUp(Failed("incomplete", "the spool is being made anew from the journal"))
    # The row after the record has the step after its step; this holds too when the server shows an old last row.
    next_row = starting_step - server.last_step + spool.row_of_record(run_id, session, int(seq))
    return min(max(next_row, 0), run.num_rows)
