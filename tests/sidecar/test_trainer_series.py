"""Records become samples with the schema's names, and histograms become cumulative."""

from trainer_frames import SCHEMA, START_S, event, snap, step

from sidecar.trainer_series import TrainerSeries


def test_snapshot_follows_the_layout_and_cumulates_histograms() -> None:
    """Counters and gauges are copied; buckets are running totals with le, beside sum and count."""
    series = TrainerSeries(SCHEMA, ())

    found = {(s.name, s.labels): s.value for s in series.samples(snap(5, (7.0, 2.0, 3.0, 4.0, 5.0, 999.0)))}

    assert found == {
        ("dflash_steps_total", ()): 7.0,
        ("dflash_queue_depth", (("queue", "hidden"),)): 2.0,
        ("dflash_sequence_length_tokens_bucket", (("le", "32.0"),)): 3.0,
        ("dflash_sequence_length_tokens_bucket", (("le", "64.0"),)): 7.0,
        ("dflash_sequence_length_tokens_bucket", (("le", "+Inf"),)): 12.0,
        ("dflash_sequence_length_tokens_sum", ()): 999.0,
        ("dflash_sequence_length_tokens_count", ()): 12.0,
    }


def test_session_labels_are_on_every_series() -> None:
    """Labels that tell sessions apart are added to each series, sorted in."""
    series = TrainerSeries(SCHEMA, (("rank", "1"), ("run", "b")))
    records = [snap(0), step(1, 1), event(2, "evaluation", accept_length=2.5)]

    samples = [sample for record in records for sample in series.samples(record)]

    assert all({("rank", "1"), ("run", "b")} <= set(s.labels) for s in samples)
    assert all(list(s.labels) == sorted(s.labels) for s in samples)


def test_steps_and_evaluations_are_samples_at_their_own_time() -> None:
    """A step record gives the training gauges, accuracy once per position; an evaluation the real acceptance length."""
    series = TrainerSeries(SCHEMA, ())

    found = [(s.name, s.labels, s.value) for s in series.samples(step(3, 17))]
    evaluation = series.samples(event(9, "evaluation", accept_length=3))

    assert ("dflash_step", (), 17.0) in found
    assert ("dflash_accuracy_ratio", (("position", "2"),), 0.25) in found
    assert ("dflash_accept_length", (), START_S + 9, 3.0) in [tuple(s) for s in evaluation]


def test_checkpoints_evaluations_and_errors_leave_their_time() -> None:
    """An event of a kind that is shown becomes its time, by kind; an event of any other kind makes no series."""
    series = TrainerSeries(SCHEMA, ())
    kinds = ("checkpoint", "evaluation", "error", "skipped", "made up")

    found = [(s.labels, s.value) for kind in kinds for s in series.samples(event(9, kind))]

    assert found == [((("kind", kind),), START_S + 9) for kind in ("checkpoint", "evaluation", "error")]


def test_families_group_points_with_kind_and_help() -> None:
    """Samples of one family come out together, with the schema's kind and help."""
    series = TrainerSeries(SCHEMA, ())

    families = {family.name: family for family in series.families(series.samples(snap(0)))}

    assert {name: (family.kind, len(family.points)) for name, family in families.items()} == {
        "dflash_steps_total": ("counter", 1),
        "dflash_queue_depth": ("gauge", 1),
        "dflash_sequence_length_tokens": ("histogram", 5),
    }
