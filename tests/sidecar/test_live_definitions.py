"""Which definitions are live, through edits, mistakes and restarts."""

from pathlib import Path

import pytest

from sidecar.definitions import SHIPPED_FILE, DefinitionsError
from sidecar.live_definitions import LAST_GOOD_NAME, LiveDefinitions
from sidecar.publication import CATALOGUE

GOOD = '[[metric]]\nname = "dflash_{name}"\nhelp = "X."\ntype = "gauge"\nexpr = "dflash_step"\n'
BROKEN = '[[metric]]\nname = "dflash_x"\nhelp = "X."\ntype = "gauge"\nexpr = "rate(dflash_step[1m])"\n'


class Bench:
    """A state directory, a file, and the outcomes that were counted."""

    def __init__(self, path: Path) -> None:
        self.state_dir = path
        self.file = path / "mine.toml"
        self.outcomes: list[str] = []

    def live(self, chosen: Path | None) -> LiveDefinitions:
        """Definitions as a new process would have them."""
        return LiveDefinitions(chosen, self.state_dir, CATALOGUE, self.outcomes.append)

    def write(self, name: str) -> None:
        """Write a good file with one metric."""
        self.file.write_text(GOOD.format(name=name))


def names(live: LiveDefinitions) -> list[str]:
    """Names of the live metrics."""
    return [definition.name for definition in live.current.definitions]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Nothing written yet."""
    return Bench(tmp_path)


def test_shipped_definitions_are_live_by_default(bench: Bench) -> None:
    """Without a file of the user's the shipped set is live; one put into the state directory is, at the next reload."""
    live = bench.live(None)
    assert (live.current.file, live.problem) == (SHIPPED_FILE, None)

    (bench.state_dir / "metrics.toml").write_text(GOOD.format(name="own"))

    assert live.reload() is None
    assert names(live) == ["dflash_own"]


def test_refused_reload_changes_nothing(bench: Bench) -> None:
    """Broken or missing, the file is refused with its problems, counted, and what was live stays."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.file.write_text(BROKEN)
    broken = live.reload()
    bench.file.unlink()
    missing = live.reload()

    assert names(live) == ["dflash_a"]
    assert broken is not None
    assert "mine.toml:5: dflash_x" in broken
    assert missing is not None
    assert "cannot be read" in missing
    assert bench.outcomes == ["failure", "failure"]


def test_restart_over_a_broken_file_takes_the_last_good_one(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The last accepted text serves on, and the log says so."""
    bench.write("a")
    digest = bench.live(bench.file).current.digest
    bench.file.write_text(BROKEN)

    live = bench.live(bench.file)

    assert (names(live), live.current.digest) == (["dflash_a"], digest)
    assert live.problem is not None
    assert LAST_GOOD_NAME in caplog.text


def test_first_start_with_a_broken_file_is_an_error(bench: Bench) -> None:
    """Where nothing was ever live, a broken file that was named is refused."""
    bench.file.write_text(BROKEN)

    with pytest.raises(DefinitionsError, match=r"mine\.toml:5: dflash_x"):
        bench.live(bench.file)


def test_broken_file_in_a_fresh_state_directory_falls_back_to_the_shipped_one(bench: Bench) -> None:
    """A broken STATE_DIR/metrics.toml that nobody named on the command line does not stop the sidecar."""
    (bench.state_dir / "metrics.toml").write_text(BROKEN)

    live = bench.live(None)

    assert live.current.file == SHIPPED_FILE
    assert live.problem is not None


def test_change_is_seen_once_and_only_when_at_rest(bench: Bench) -> None:
    """A changed file is reported after it stayed the same for one look, and not again once it was tried."""
    bench.write("a")
    live = bench.live(bench.file)
    assert not live.has_changed()
    bench.write("longer_name")
    assert [live.has_changed(), live.has_changed()] == [False, True]

    live.reload()

    assert [live.has_changed(), live.has_changed()] == [False, False]
