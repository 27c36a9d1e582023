"""A page holds one set of definitions with what it gave, also while the past is read again."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from frame_path import FramePath
from trainer_frames import hello, snap, step

from sidecar.catalogue import CATALOGUE
from sidecar.live_definitions import LiveDefinitions
from sidecar.publication import Publication


class Bench:
    """A sidecar that is handed frames of a few seconds ago, and a file of definitions."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "mine.toml"
        self.write("1.0")
        self.definitions = LiveDefinitions(self.file, directory, lambda: CATALOGUE, lambda _outcome: None)
        self.path = FramePath(directory)
        path = self.path
        self.publication = Publication(path.journal, path.pipeline, self.definitions, path.outlet, "")
        self.publication.introduce("http://127.0.0.1:1", directory, directory)
        now_s = time.time()
        old = [step(seq, seq) if seq % 2 else snap(seq) for seq in range(20)]
        records = [msgspec.structs.replace(record, time_s=now_s - 20 + record.seq) for record in old]
        path.send(hello(next_seq=20), *records)
        path.turn()
        self.show()

    def write(self, value: str, more: str = "") -> None:
        """Rename a file of one definition into place."""
        draft = self.file.with_suffix(".draft")
        expr = f"dflash_queue_depth * 0 + {value}"
        head = '[[metric]]\nname = "dflash_x"\nhelp = "X."\ntype = "gauge"\n'
        draft.write_text(f'{head}expr = "{expr}"\n{more}')
        time.sleep(0.02)
        draft.replace(self.file)

    def show(self) -> None:
        """Publish what is true now."""
        self.publication.publish(self.path.sink, ())

    def page(self) -> str:
        """The lines about definitions."""
        text = self.path.sink.render("text/plain")[0].decode()
        return "\n".join(line for line in text.splitlines() if line.startswith(("dflash_x", "dflash_definitions_info")))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Twenty records shown."""
    bench = Bench(tmp_path)
    yield bench
    bench.path.close()


def test_while_the_past_is_read_again_the_set_before_stays(bench: Bench) -> None:
    """Old digest and old values stay together until the new set can be evaluated over all it needs."""
    before = bench.page()
    bench.write("2.0")
    assert bench.definitions.reload(bench.publication.try_out) is None
    bench.path.pipeline.open(3600.0)

    bench.show()
    held = bench.page()
    shown_held = bench.publication.shows_current
    bench.path.pipeline.turn(5.0)
    bench.show()

    assert 'dflash_x{queue="hidden"} 1.0' in before
    assert (held, shown_held) == (before, False)
    assert bench.publication.document.definitions.digest == bench.definitions.current.digest
    assert 'dflash_x{queue="hidden"} 2.0' in bench.page()
    assert bench.publication.shows_current


def test_trial_refuses_what_gets_worse_and_nothing_else(bench: Bench) -> None:
    """A definition that fails since long is no reason to refuse a set; a new one that fails is, and shows nothing."""
    failing = (
        '[[metric]]\nname = "dflash_{name}"\nhelp = "X."\ntype = "gauge"\n'
        'expr = "dflash_accuracy_ratio * on () dflash_accuracy_ratio"\n'
    )
    bench.write("1.0", failing.format(name="bad"))
    first = bench.definitions.reload(bench.publication.try_out)
    page = bench.page()
    bench.definitions.reload()  # as a restart would take it
    bench.show()
    bench.write("3.0", failing.format(name="bad"))
    unchanged = bench.definitions.reload(bench.publication.try_out)
    bench.show()
    bench.write("4.0", failing.format(name="bad") + failing.format(name="worse"))
    added = bench.definitions.reload(bench.publication.try_out)

    assert first is not None
    assert "dflash_bad: fails on the live samples: PromqlError" in first
    assert 'dflash_x{queue="hidden"} 1.0' in page
    assert unchanged is None
    assert 'dflash_x{queue="hidden"} 3.0' in bench.page()
    assert added is not None
    assert "dflash_worse: fails" in added
    assert "dflash_bad" not in added
