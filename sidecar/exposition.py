"""What one evaluation shows beside derived metrics: who is alive, the sidecar about itself, all merged by name."""

from collections.abc import Iterable, Mapping

from shared.schema import Family
from sidecar.collectors.reading import export
from sidecar.samples import ExportedFamily, Labels, Point, labels_of
from sidecar.session_feed import SessionFeed
from sidecar.stored import StoredSession

LOSS_REASONS = ("ring_overrun", "trainer_gone", "unreadable", "damaged")
RELOAD_OUTCOMES = ("success", "failure")

LIVENESS_FAMILIES = (
    Family("dflash_trainer_up", "gauge", "1 while a trainer is there, 0 for five minutes after the last one left."),
    Family("dflash_trainer_last_message_timestamp_seconds", "gauge", "Time of the newest record of a trainer."),
    Family("dflash_trainer_start_time_seconds", "gauge", "When a trainer started."),
    Family(
        "dflash_run_info",
        "gauge",
        "Always 1; says which run this is.",
        ("run_id", "session", "pid", "rank", "world_size"),
    ),
)

SIDECAR_FAMILIES = (
    Family("dflash_sidecar_info", "gauge", "Always 1; says which sidecar this is.", ("version",)),
    Family("dflash_sidecar_start_time_seconds", "gauge", "When this sidecar process started."),
    Family("dflash_journal_up", "gauge", "1 while records go to the disk, 0 while the sidecar serves from memory."),
    Family("dflash_records_received_total", "counter", "Records stored, each once."),
    Family("dflash_records_replayed_total", "counter", "Records that came by replay."),
    Family("dflash_records_lost_total", "counter", "Records that nobody can bring back, by reason.", ("reason",)),
    Family("dflash_frames_rejected_total", "counter", "Frames that could not be used, by reason.", ("reason",)),
    Family("dflash_sink_lag_records", "gauge", "Rows that the sink was not yet seen to have.", ("sink",)),
    Family("dflash_sink_dropped_total", "counter", "What a sink had to leave out.", ("sink",)),
    Family("dflash_definitions_info", "gauge", "Always 1; says which definitions are live.", ("digest",)),
    Family("dflash_definition_success", "gauge", "Whether a definition could be evaluated.", ("metric",)),
    Family("dflash_config_last_reload_success", "gauge", "0 if the file of definitions was refused when read last."),
    Family("dflash_config_reloads_total", "counter", "Reloads of the definitions, by outcome.", ("outcome",)),
)


def liveness(feeds: Iterable[SessionFeed], gone: StoredSession | None) -> tuple[ExportedFamily, ...]:
    """Who is alive, and who was until a moment ago when nobody is."""
    values: list[Point] = []
    live = [feed for feed in feeds if feed.stored.ended_s is None]
    for feed in live:
        labels, hello = feed.stored.labels, feed.stored.hello
        info = {
            "run_id": hello.run_id,
            "session": hello.session,
            "pid": str(hello.pid),
            "rank": str(hello.rank),
            "world_size": str(hello.world_size),
        }
        values += [
            ("dflash_trainer_up", labels, 1.0),
            ("dflash_trainer_last_message_timestamp_seconds", labels, feed.last_time_s),
            ("dflash_trainer_start_time_seconds", labels, hello.start_time_s),
            ("dflash_run_info", labels_of(**{**info, **dict(labels)}), 1.0),
        ]
    if not live and gone is not None:
        values.append(("dflash_trainer_up", gone.labels, 0.0))
    return export(LIVENESS_FAMILIES, values)


def counted(counts: Mapping[tuple[str, str], int] | None) -> list[Point]:
    """The journal's counts under their public names; known reasons that never occurred are shown as 0."""
    if counts is None:
        return []
    values: list[Point] = [
        ("dflash_records_received_total", (), float(counts.get(("received", ""), 0))),
        ("dflash_records_replayed_total", (), float(counts.get(("replayed", ""), 0))),
    ]
    for name, family, label, known in (
        ("lost", "dflash_records_lost_total", "reason", LOSS_REASONS),
        ("rejected", "dflash_frames_rejected_total", "reason", ()),
        ("reloads", "dflash_config_reloads_total", "outcome", RELOAD_OUTCOMES),
    ):
        found = {value: count for (counted_name, value), count in counts.items() if counted_name == name}
        for value, count in {**dict.fromkeys(known, 0), **found}.items():
            values.append((family, labels_of(**{label: value}), float(count)))
    return values


def merged(families: Iterable[ExportedFamily]) -> tuple[ExportedFamily, ...]:
    """One family per name, with the points of all that bear it.

    The first says of what kind it is and has each point that it has: one trainer that gives a name another meaning
    must not take it from the rest.
    """
    first: dict[str, ExportedFamily] = {}
    points: dict[str, dict[tuple[str, Labels], Point]] = {}
    for family in families:
        if first.setdefault(family.name, family).kind == family.kind:
            known = points.setdefault(family.name, {})
            for point in family.points:
                known.setdefault(point[:2], point)
    return tuple(
        ExportedFamily(family.name, family.kind, family.help, tuple(points[name].values()))
        for name, family in first.items()
    )
