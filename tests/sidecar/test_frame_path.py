"""From a frame to the pages under hostile input: nothing raises, nothing good is lost, and every page can be read."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frame_path import THERE, FramePath
from hostile_frames import frames, hostile_sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_frames import event, hello, snap, step

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
