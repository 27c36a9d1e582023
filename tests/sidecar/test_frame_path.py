"""From a frame to the pages under hostile input: nothing raises, nothing good is lost, and every page can be read."""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from frame_path import HERE, THERE, FramePath
from hostile_frames import frames, hostile_sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from trainer_frames import event, frame, hello, snap, step

EXAMPLES = settings(max_examples=120, deadline=None)


@contextmanager
def introduced() -> Iterator[FramePath]:
    """A sidecar that knows the honest trainer."""
    with tempfile.TemporaryDirectory() as directory:
        path = FramePath(Path(directory))
        try:
            path.send(hello())
            yield path
        finally:
            path.close()


@EXAMPLES
@given(hostile=st.lists(frames(), min_size=4, max_size=12))
def test_good_records_survive_among_hostile_frames(hostile: list[list[bytes]]) -> None:
    """Between any frames at all, from its own endpoint too, a trainer's records are kept, shown and made into rows."""
    with introduced() as path:
        for seq in range(0, 6, 3):
            path.send(snap(seq), step(seq + 1, seq + 1), event(seq + 2, "checkpoint"))
            for parts in hostile:
                path.suffer(parts)
        path.check()


@EXAMPLES
@given(session=hostile_sessions())
def test_a_lawful_but_hostile_trainer_harms_nobody_else(session: list[list[bytes]]) -> None:
    """Odd names, labels, kinds and numbers of one trainer leave pages, status and rows of another as they should be."""
    with introduced() as path:
        path.send(snap(0), step(1, 1))
        path.turn()
        for parts in session:
            path.intake.take(THERE, parts, 0.0)
            path.turn()
        path.send(snap(2), step(3, 2))
        path.check()

        assert {trainer.run_id for trainer in path.publication.document.trainers} == {"run", "hostile"}


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    """NaN and infinities reach /metrics and the rows as they are; a total of NaN is left out, its family stays."""
    nan, infinity = float("nan"), float("inf")
    odd = msgspec.structs.replace(step(1, 1), loss=nan, grad_norm=infinity, accuracy_ratio=(nan, 0.5))
    with introduced() as path:
        path.intake.take(HERE, frame(snap(0, (nan, nan, 3.0, 1.0, 0.0, 96.0))), 0.0)
        path.intake.take(HERE, frame(odd), 0.0)
        path.turn()
        page = path.sink.render("application/openmetrics-text; version=1.0.0")[0].decode()
        [row] = [row for row in path.rows() if "train/step" in row]
        json.dumps(msgspec.to_builtins(path.publication.document), allow_nan=False)

    shown = {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in read_openmetrics(page)
        for sample in family.samples
    }
    assert math.isnan(shown["dflash_loss"])
    assert math.isnan(shown["dflash_accuracy_ratio1"])
    assert shown["dflash_accuracy_ratio2"] == 0.5
    assert (shown["dflash_grad_norm"], shown["dflash_sequence_length_tokens_count"]) == (infinity, 4.0)
    assert "dflash_steps_total" not in shown
    assert math.isnan(shown["dflash_queue_depthhidden"])
    assert math.isnan(row["train/loss"])
    assert row["train/grad_norm"] == infinity


def test_a_lie_about_how_much_there_is_does_not_stop_the_pipeline() -> None:
    """A trainer that claims 2^40 records and leaves costs nothing but the count: the next one is read at once."""
    with introduced() as path:
        path.send(snap(0), hello(next_seq=2**40 - 1))
        path.turn()
        path.send(hello("s2", run_id="next"))
        path.intake.take(HERE, frame(step(0, 9, session="s2")), 0.0)
        path.turn()
        path.turn()

        assert path.journal.counts()["lost", "trainer_gone"] == 2**40 - 2
        assert [(t.session, t.step) for t in path.publication.document.trainers] == [("s2", 9)]
        assert path.pipeline.is_caught_up
