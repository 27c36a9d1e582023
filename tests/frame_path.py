"""The sidecar's whole way from a frame to its pages, without sockets: intake, journal, pipeline, rows, pages.

All of it is the real thing over files on disk; only time is the test's own.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import msgspec
from hostile_frames import FIRST_FREE_SEQ
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from trainer_frames import frame, hello

from shared.wire import Event, FrameError, Hello, Record, Snap, Step
from sidecar.catalogue import CATALOGUE
from sidecar.config import WandbConfig
from sidecar.exposition import merged
from sidecar.frames import decode_frame
from sidecar.intake import Intake
from sidecar.journal import Journal
from sidecar.live_definitions import LiveDefinitions
from sidecar.outlet import WandbOutlet
from sidecar.pipeline import Pipeline
from sidecar.publication import Publication
from sidecar.sinks.prometheus import PrometheusSink

HERE, THERE = "/run/dflash/run-0.sock", "/run/dflash/other-0.sock"
REASONS = frozenset(
    (
        *("parts", "oversized", "malformed", "invalid", "version", "topic", "schema_digest", "time", "values_length"),
        *("no_hello", "session_conflict", "schema_changed", "journal"),
    )
)
"""Everything that `dflash_frames_rejected_total` may be labelled with."""
WINDOW_S = 300.0


@functools.cache
def _definitions() -> LiveDefinitions:
    return LiveDefinitions(None, Path("/nonexistent"), lambda: CATALOGUE, lambda _outcome: None)


class FramePath:
    """A sidecar that is handed frames. Trainers at both endpoints are alive."""

    def __init__(self, directory: Path) -> None:
        self.journal = Journal(directory / "journal.sqlite")
        self._now_s = time.monotonic()
        self.intake = Intake(self.journal, "n", self._now_s, owner_pid=lambda _path: 1)
        self.outlet = WandbOutlet(WandbConfig(mode="offline"), directory, self.journal, self._evaluate, {})
        self.pipeline = Pipeline(self.journal, self.outlet.row_feed)
        self.pipeline.open(WINDOW_S)
        self.sink = PrometheusSink(merged)
        self.publication = Publication(self.journal, self.pipeline, _definitions(), self.outlet, "")
        self.publication.introduce("http://127.0.0.1:1", directory, directory)
        self.good: list[Record] = []
        self.num_refused = 0

    def close(self) -> None:
        """Close the files."""
        self.outlet.close()
        self.journal.close()

    def send(self, *messages: Hello | Snap | Step | Event) -> None:
        """Take in what an honest trainer says."""
        for message in messages:
            if not isinstance(message, Hello):
                self.good.append(message)
            self.intake.take(HERE, frame(message), self._now_s)

    def suffer(self, parts: list[bytes]) -> None:
        """Take in a frame as it is, from the honest trainer's endpoint unless it would rightly be believed there."""
        try:
            message = decode_frame(parts)
        except FrameError:
            self.num_refused += 1
            self.intake.take(HERE, parts, self._now_s)
            return
        changes_the_truth = isinstance(message, Hello) or (isinstance(message, Event) and message.kind == "goodbye")
        in_the_way = isinstance(message, Record) and message.seq < FIRST_FREE_SEQ
        self.intake.take(THERE if changes_the_truth or in_the_way else HERE, parts, self._now_s)

    def turn(self) -> None:
        """Commit, read, and publish."""
        self._now_s += 1.0
        self.intake.turn(self._now_s)
        self.pipeline.turn(5.0)
        self.publication.publish(self.sink, ())

    def check(self) -> None:
        """Everything good is there, what was refused is counted, and every page can be read."""
        self.turn()
        stored = next(s for s in self.journal.sessions() if s.name == "s1")
        held = {record.seq: record for record in self.journal.records(stored, 0, stored.next_seq)}
        assert [held.get(record.seq) for record in self.good] == self.good
        counts = self.journal.counts()
        rejected = {label: number for (name, label), number in counts.items() if name == "rejected"}
        assert rejected.keys() <= REASONS
        assert sum(rejected.values()) >= self.num_refused
        self.check_pages()
        self.check_rows()

    def check_pages(self) -> None:
        """Text, OpenMetrics and status are what their readers accept, and the trainer's own figures are on them."""
        text = self.sink.render("text/plain")[0].decode()
        openmetrics = self.sink.render("application/openmetrics-text; version=1.0.0")[0].decode()
        names = {sample.name for family in read_text(text) for sample in family.samples}
        assert {sample.name for family in read_openmetrics(openmetrics) for sample in family.samples} == names
        assert {"dflash_trainer_up", "dflash_steps_total", "dflash_loss"} <= names
        document = json.dumps(msgspec.to_builtins(self.publication.document), allow_nan=False)
        assert json.loads(document)["trainers"]

    def check_rows(self) -> None:
        """Rows of the honest run are dense, whole, and have every step once."""
        steps = [row["train/step"] for row in self.rows() if "train/step" in row]
        wanted = [record.step for record in self.good if isinstance(record, Step)]
        assert steps[: len(wanted)] == wanted

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the honest run in the spool."""
        assert self.outlet._spool is not None
        numbered = self.outlet._spool.rows("run", 0, 10**6)
        assert [number for number, _ in numbered] == list(range(len(numbered)))
        return [row for _, row in numbered]

    def _evaluate(self, run: str, at: str, time_s: float) -> Any:
        live = _definitions().current
        return live.evaluate(self.pipeline.store, time_s, "step" if at == "step" else "tick", run).wandb


def introduced(directory: Path) -> FramePath:
    """A sidecar that knows the honest trainer."""
    path = FramePath(directory)
    path.send(hello())
    return path
