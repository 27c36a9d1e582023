"""The status document: what `/api/v1/status` serves and `dflash-sidecar status` prints.

Scripts read it: fields are added, never renamed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shared.remote import is_remote
from sidecar.backfill import BackfillStatus
from sidecar.exposition import LOSS_REASONS
from sidecar.session_feed import SessionFeed


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer. `records_behind` are known to exist and not yet here; `endpoint` is a path or `tcp://`."""

    pid: int
    run_id: str
    session: str
    up: bool
    step: int
    steps_per_second: float
    rank: int
    last_message_age_s: float
    records_behind: int
    endpoint: str = ""


class RecordStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over the life of the journal."""

    received: int
    replayed: int
    lost: int
    rejected: int
    lost_by_reason: dict[str, int]


class SinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One sink; `lag` counts records that wait for it."""

    state: str
    lag: int
    detail: str = ""


class JournalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where records go: disk, or memory and why."""

    state: str
    detail: str = ""


class DefinitionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is live; `problem` says why the file is not, `failing` which definitions cannot be evaluated.

    `chosen` is the file given with --definitions, if one was; `tried_digest` is that of the file tried last, and
    `num_tried` how often one was tried since the start.
    """

    file: str
    digest: str
    problem: str = ""
    failing: dict[str, str] = {}
    chosen: str = ""
    tried_digest: str = ""
    num_tried: int = 0


class SidecarStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The sidecar process itself."""

    pid: int
    version: str
    uptime_s: float
    url: str
    state_dir: str
    runtime_dir: str


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    trainers: tuple[TrainerStatus, ...]
    records: RecordStatus
    sinks: dict[str, SinkStatus]
    definitions: DefinitionStatus
    sidecar: SidecarStatus
    journal: JournalStatus = JournalStatus(state="disk")
    backfill: BackfillStatus | None = None


def trainer_status(feed: SessionFeed, now_s: float) -> TrainerStatus:
    """What is known of one trainer at a Unix time."""
    hello = feed.stored.hello
    return TrainerStatus(
        pid=hello.pid,
        run_id=hello.run_id,
        session=hello.session,
        up=feed.stored.ended_s is None,
        step=feed.newest_step.step if feed.newest_step is not None else 0,
        steps_per_second=round(feed.steps_per_second, 4),
        rank=hello.rank,
        last_message_age_s=round(max(now_s - feed.last_time_s, 0.0), 3),
        records_behind=max(feed.stored.end_seq - feed.next_seq, 0),
        endpoint=feed.stored.endpoint,
    )


def record_status(counts: Mapping[tuple[str, str], int] | None) -> RecordStatus:
    """Totals out of the journal's counts; zeros when they cannot be read."""
    counts = counts or {}
    lost = dict.fromkeys(LOSS_REASONS, 0) | {label: n for (name, label), n in counts.items() if name == "lost"}
    return RecordStatus(
        received=counts.get(("received", ""), 0),
        replayed=counts.get(("replayed", ""), 0),
        lost=sum(lost.values()),
        rejected=sum(n for (name, _), n in counts.items() if name == "rejected"),
        lost_by_reason=lost,
    )


def table(document: StatusDocument) -> str:
    """The document as a person reads it."""
    own, records, definitions = document.sidecar, document.records, document.definitions
    lines = [f"sidecar      pid {own.pid}, up {_duration(own.uptime_s)}, {own.url}, version {own.version}"]
    lines += [f"trainer      {_trainer(trainer)}" for trainer in document.trainers]
    if not document.trainers:
        lines.append(
            f"trainer      none; watching {own.runtime_dir} (set DFLASH_RUNTIME_DIR for both sides to change it)"
        )
    reasons = ", ".join(f"{n} {reason}" for reason, n in records.lost_by_reason.items() if n)
    lines.append(
        f"records      {records.received} received, {records.replayed} of them replayed, {records.lost} lost"
        + (f" ({reasons})" if reasons else "")
        + (f", {records.rejected} frames rejected" if records.rejected else "")
    )
    if document.journal.detail:
        lines.append(f"journal      in {document.journal.state}: {document.journal.detail}")
    for name, sink in document.sinks.items():
        detail = f" ({sink.detail})" if sink.detail else ""
        lines.append(f"{name:12} {sink.state}, {sink.lag} records waiting{detail}")
    lines.append(f"definitions  {definitions.file}, digest {definitions.digest}")
    lines += [f"  refused    {line}" for line in definitions.problem.splitlines()]
    lines += [f"  failing    {metric}: {why}" for metric, why in definitions.failing.items()]
    lines.append(f"state        {own.state_dir}")
    return "\n".join(lines)


def _trainer(trainer: TrainerStatus) -> str:
    parts: Sequence[str] = (
        f"pid {trainer.pid}, {'up' if trainer.up else 'gone'}, run {trainer.run_id}"
        + (f", rank {trainer.rank}" if trainer.rank else "")
        + (f", at {trainer.endpoint}" if is_remote(trainer.endpoint) else ""),
        f"step {trainer.step}, {trainer.steps_per_second:.2f} steps/s",
        f"last message {trainer.last_message_age_s:.1f} s ago",
        *([f"{trainer.records_behind} records behind"] if trainer.records_behind else []),
    )
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
