"""Definitions are swapped under a running sidecar: every page holds exactly one complete set, whatever editors do."""

import contextlib
import http.client
import itertools
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sidecar_process import Place, Sidecar, wait_for

from sidecar.definition_source import digest_of

_DIGEST = re.compile(r'^dflash_definitions_info\{digest="(\w+)"\} 1\.0$', re.MULTILINE)
_SWAPPED = re.compile(r"^(dflash_swap_\w+) (\S+)$", re.MULTILINE)


def file_of(values: dict[str, float]) -> str:
    """Definitions of constants that need a trainer to be there."""
    return "".join(
        f'[[metric]]\nname = "{name}"\nhelp = "X."\ntype = "gauge"\nexpr = "dflash_step * 0 + {value}"\n'
        for name, value in values.items()
    )


SETS = (
    {f"dflash_swap_a{i}": float(i) for i in range(10)} | {"dflash_swap_both": 1.0},
    {f"dflash_swap_b{i}": float(i) for i in range(6)} | {"dflash_swap_both": 2.0},
)
FILES = tuple(map(file_of, SETS))
EXPECTED = {digest_of(text.encode()): values for text, values in zip(FILES, SETS, strict=True)}
BROKEN = (
    FILES[0].replace("dflash_step", "dflash_stop", 1),
    FILES[1] + "[[metric]\n",
    file_of({"dflash_loss": 1.0}),
    "",
    "\x00\x00",
)


class Page(NamedTuple):
    """What one scrape showed of the definitions."""

    digests: tuple[str, ...]
    samples: tuple[tuple[str, str], ...]

    @property
    def is_whole(self) -> bool:
        """Whether it holds one set, complete, once, and says so."""
        values = {name: float(value) for name, value in self.samples}
        return len(self.digests) == 1 and EXPECTED.get(self.digests[0]) == values and len(values) == len(self.samples)


class Scraper(threading.Thread):
    """Scrapes at 50 Hz over one connection until told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._address = urlsplit(url).netloc
        self.should_stop = threading.Event()
        self.pages: list[Page] = []
        self.statuses: set[int] = set()

    def run(self) -> None:
        """Scrape."""
        connection = http.client.HTTPConnection(self._address, timeout=10)
        due_s = time.monotonic()
        while not self.should_stop.is_set():
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            text = response.read().decode()
            self.statuses.add(response.status)
            self.pages.append(Page(tuple(_DIGEST.findall(text)), tuple(_SWAPPED.findall(text))))
            due_s = max(due_s + 0.02, time.monotonic() - 0.1)
            self.should_stop.wait(max(due_s - time.monotonic(), 0.0))
        connection.close()


class Editor:
    """Changes the file and asks for reloads, in every way there is."""

    def __init__(self, sidecar: Sidecar, file: Path, seed: int) -> None:
        self._sidecar = sidecar
        self._file = file
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(4)
        self._posts = [self._pool.submit(int)]
        self.num_edits = self.num_half_written = self.num_reloads_asked = 0

    def edit_for(self, duration_s: float, texts: tuple[str, ...], rate_hz: float = 100.0) -> None:
        """Edit at a rate; a fifth of the edits leaves half a file for a while, and some of them for good."""
        drafts = [(text, self._draft(text)) for text in self._random.choices(texts, k=int(duration_s * rate_hz))]
        time.sleep(0.05)  # as syncing takes some time too, so that a rename shows in the file's times
        started_s = time.monotonic()
        for text, draft in drafts:
            if time.monotonic() > started_s + duration_s:
                return
            if self._random.random() < 0.2:
                self._write_in_place(text)
            else:
                self._rename_into_place(draft)
                self._ask()
            self.num_edits += 1
            time.sleep(max(started_s + self.num_edits / rate_hz - time.monotonic(), 0.0))

    def close(self) -> list[int]:
        """Wait for every answer; returns the status of each POST."""
        self._pool.shutdown()
        return [post.result() for post in self._posts[1:]]

    def settle(self, text: str) -> None:
        """Write a file whole and ask for it."""
        self._rename_into_place(self._draft(text))
        self._sidecar.process.send_signal(signal.SIGHUP)

    def _ask(self) -> None:
        self.num_reloads_asked += 1
        match self._random.randrange(3):
            case 0:
                self._sidecar.process.send_signal(signal.SIGHUP)
            case 1:
                self._posts.append(self._pool.submit(lambda: self._sidecar.post("/-/reload")[0]))
            case _:
                self.num_reloads_asked -= 1  # left to the watch on the file

    def _rename_into_place(self, draft: Path) -> None:
        draft.replace(self._file)

    def _draft(self, text: str) -> Path:
        draft = self._file.with_name(f"{self._file.name}.{next(self._numbers)}")
        draft.write_text(text)
        return draft

    def _write_in_place(self, text: str) -> None:
        """Write a beginning, often one that is a good file by itself, ask in the middle, and write the rest or not."""
        self.num_half_written += 1
        ends = [match.start() for match in re.finditer(r"^\[\[metric", text, re.MULTILINE)] or [0]
        cut = self._random.choice([self._random.choice(ends), self._random.randrange(len(text) + 1)])
        with self._file.open("w") as stream:
            stream.write(text[:cut])
            stream.flush()
            self._ask()
            time.sleep(self._random.choice([0.0, 0.003]))
            if self._random.random() < 0.7:
                stream.write(text[cut:])


def start(place: Place) -> tuple[Sidecar, Path, Scraper]:
    """A trainer, a sidecar with the first set live, and a scraper at work."""
    place.trainer()
    file = place.state_dir.parent / "mine.toml"
    file.write_text(FILES[0])
    sidecar = place.sidecar("--definitions", str(file))
    drain(sidecar)
    wait_for(lambda: sidecar.metrics().get("dflash_swap_a9") == 9.0, "the first set")
    scraper = Scraper(sidecar.url)
    scraper.start()
    return sidecar, file, scraper


def drain(sidecar: Sidecar) -> None:
    """Read away what it logs: a full pipe would stop it."""
    assert sidecar.process.stdout is not None
    fd = sidecar.process.stdout.fileno()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 65_536):
                pass

    threading.Thread(target=read, daemon=True).start()


def reloads(sidecar: Sidecar, outcome: str) -> int:
    """How many reloads had an outcome."""
    return int(sidecar.metrics()[f'dflash_config_reloads_total{{outcome="{outcome}"}}'])


def num_swaps(pages: list[Page]) -> int:
    """How often one page showed another set than the one before."""
    return sum(one.digests != other.digests for one, other in itertools.pairwise(pages))


def assert_whole(scraper: Scraper, at_least: int) -> None:
    """Check that every page of many held exactly one complete set."""
    scraper.should_stop.set()
    scraper.join()
    assert [page for page in scraper.pages if not page.is_whole] == []
    assert len(scraper.pages) >= at_least
    assert scraper.statuses == {200}


def test_a_hundred_reloads_a_second_under_scrapes(place: Place) -> None:
    """For ten seconds two files alternate 100 times a second, a fifth half-written: no page is ever mixed or bare."""
    sidecar, file, scraper = start(place)
    editor = Editor(sidecar, file, seed=1)
    editor.edit_for(10.0, FILES)
    statuses = editor.close()
    editor.settle(FILES[1])
    wait_for(lambda: sidecar.metrics().get("dflash_swap_both") == 2.0, "the last file to be live")
    succeeded, failed = reloads(sidecar, "success"), reloads(sidecar, "failure")

    print(  # noqa: T201 - figures for whoever reads the log
        f"{editor.num_edits} edits, {editor.num_half_written} half-written, {editor.num_reloads_asked} reloads asked, "
        f"{succeeded} succeeded, {failed} refused; {len(scraper.pages)} pages, {num_swaps(scraper.pages)} swaps seen"
    )
    assert_whole(scraper, at_least=300)
    assert num_swaps(scraper.pages) > 30
    assert editor.num_edits > 500
    assert 200 in statuses
    assert set(statuses) <= {200, 500, 503}  # 503: four reloads wait already
    assert sidecar.status()["records"]["lost"] == 0


def test_broken_files_in_between_change_nothing(place: Place) -> None:
    """Broken files among good ones are counted as failures, never shown, and the next good file goes live."""
    sidecar, file, scraper = start(place)
    editor = Editor(sidecar, file, seed=2)
    editor.edit_for(4.0, (FILES[0], *BROKEN, FILES[1], *BROKEN))
    statuses = editor.close()
    editor.settle(BROKEN[0])
    wait_for(lambda: "dflash_stop" in sidecar.status()["definitions"]["problem"], "the refusal")
    live = sidecar.status()["definitions"]["digest"]
    failed = reloads(sidecar, "failure")
    editor.settle(FILES[0])
    wait_for(lambda: sidecar.status()["definitions"]["problem"] == "", "the good file")

    assert_whole(scraper, at_least=100)
    assert live in EXPECTED
    assert failed > 20
    assert 500 in statuses


def test_set_that_looks_further_back_is_swapped_without_a_gap(place: Place) -> None:
    """A set that needs more history makes the past be read again, and no page between lacks a complete set."""
    sidecar, file, scraper = start(place)
    wait_for(lambda: sidecar.status()["records"]["received"] > 500, "some past")
    further = dict(SETS[1])
    text = file_of(further).replace("dflash_step * 0 + 2.0", "max_over_time(dflash_step[50m]) * 0 + 2.0")
    digest = digest_of(text.encode())
    EXPECTED[digest] = further
    file.write_text(text)

    code, _ = sidecar.post("/-/reload")
    after = sidecar.status()["definitions"]["digest"]

    assert (code, after) == (200, digest)
    assert_whole(scraper, at_least=10)


def test_set_that_fails_on_the_live_samples_is_refused(place: Place) -> None:
    """A definition whose sides do not match one to one passes the checks and fails its trial: the old set stays."""
    sidecar, file, scraper = start(place)
    draft = file.with_suffix(".draft")
    bad = file_of({"dflash_swap_bad": 1.0}).replace("dflash_step * 0", "dflash_accuracy_ratio * on () dflash_step")
    draft.write_text(FILES[1] + bad.replace("on () dflash_step", "on () dflash_accuracy_ratio"))
    draft.replace(file)

    code, answer = sidecar.post("/-/reload")
    metrics = sidecar.metrics()

    assert code == 500
    assert f"{file}:36: dflash_swap_bad: fails on the live samples: PromqlError: " in answer
    assert metrics["dflash_swap_a9"] == 9.0
    assert metrics['dflash_config_reloads_total{outcome="failure"}'] == 1.0
    assert_whole(scraper, at_least=1)
    os.kill(sidecar.process.pid, 0)
