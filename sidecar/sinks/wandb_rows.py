"""Turns records into W&B rows: a pure function of the ordered records and the definitions.

Training rows and telemetry rows live on two axes, `train/step` and `time/elapsed_s`, in one dense sequence. A telemetry
row is due when a snapshot's own time says so, never by a clock of the sidecar, so a restart neither loses nor repeats
one. The axis of time starts with the first session of the run and goes on when the run is resumed.
"""

from collections.abc import Callable, Mapping

from shared.wire import Event, Hello, Record, Scalar, Snap, Step
from sidecar.sinks.wandb_run import STEP_AXIS, TIME_AXIS, Cursor, Row

Evaluate = Callable[[str, float], Mapping[str, float]]
"""Values of the definitions by W&B key, for "step" or "tick", at a time."""


def is_due(time_s: float, last_time_s: float, interval_s: float) -> bool:
    """Whether a telemetry row is due; where the trainer's clock was set back, the interval begins anew."""
    return not 0.0 <= time_s - last_time_s < interval_s


def axes(time_s: float, run_start_s: float) -> Row:
    """What places a row in time: seconds since the run's first session started, and Unix time."""
    return {TIME_AXIS: time_s - run_start_s, "_timestamp": time_s}


class RowBuilder:
    """Make the rows of one session.

    Args:
        interval_s: least time between telemetry rows.
        run_start_s: Unix time at which the run's first session started (`Spool.open_run`).
    """

    def __init__(self, interval_s: float, run_start_s: float) -> None:
        self._interval_s = interval_s
        self._run_start_s = run_start_s

    def rows_for(self, record: Record, hello: Hello, evaluate: Evaluate, cursor: Cursor) -> tuple[list[Row], Cursor]:
        """The rows of the next record, and the cursor behind it; a run has one writer, rank 0."""
        cursor = cursor._replace(seq=record.seq)
        if hello.rank > 0:
            return [], cursor
        if isinstance(record, Step):
            return [self._step_row(record) | dict(evaluate("step", record.time_s))], cursor
        if isinstance(record, Event):
            return self._evaluation_rows(record), cursor
        return self._telemetry_rows(record, evaluate, cursor)

    def _step_row(self, step: Step) -> Row:
        row: Row = {
            STEP_AXIS: step.step,
            "train/loss": step.loss,
            "train/accept_length_simulated": step.accept_length_simulated,
            "train/learning_rate": step.learning_rate,
            "train/grad_norm": step.grad_norm,
            "train/tokens_real": step.tokens_real,
            "train/tokens_padding": step.tokens_padding,
            "train/queue_wait_s": step.queue_wait_s,
        }
        row |= {f"train/accuracy/{k}": ratio for k, ratio in enumerate(step.accuracy_ratio, start=1)}
        return row | axes(step.time_s, self._run_start_s)

    def _evaluation_rows(self, event: Event) -> list[Row]:
        if event.kind != "evaluation":
            return []
        values: dict[str, Scalar] = {f"eval/{key}": value for key, value in event.detail.items()}
        return [values | axes(event.time_s, self._run_start_s)]

    def _telemetry_rows(self, snap: Snap, evaluate: Evaluate, cursor: Cursor) -> tuple[list[Row], Cursor]:
        if not is_due(snap.time_s, cursor.last_telemetry_time_s, self._interval_s):
            return [], cursor
        values = evaluate("tick", snap.time_s)
        if not values:
            return [], cursor
        return [dict(values) | axes(snap.time_s, self._run_start_s)], cursor._replace(last_telemetry_time_s=snap.time_s)
