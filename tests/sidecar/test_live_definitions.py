"""Which definitions are live, through edits, mistakes and restarts."""

import time
from pathlib import Path

import pytest

from sidecar.catalogue import CATALOGUE
from sidecar.definition_source import DefinitionsError
from sidecar.definitions import SHIPPED_FILE, Failure
from sidecar.live_definitions import LAST_GOOD_NAME, SETTLE_S, LiveDefinitions

GOOD = '[[metric]]\nname = "dflash_{name}"\nhelp = "X."\ntype = "gauge"\nexpr = "dflash_step"\n'
BROKEN = '[[metric]]\nname = "dflash_x"\nhelp = "X."\ntype = "gauge"\nexpr = "rate(dflash_step[1m])"\n'


class Bench:
    """A state directory, a file, and the outcomes that were counted."""

    def __init__(self, path: Path) -> None:
        self.state_dir = path
        self.file = path / "mine.toml"
        self.outcomes: list[str] = []
        self.now_s = 0.0

    def live(self, chosen: Path | None) -> LiveDefinitions:
        """Definitions as a new process would have them."""
        return LiveDefinitions(chosen, self.state_dir, lambda: CATALOGUE, self.outcomes.append, lambda: self.now_s)

    def reload(self, live: LiveDefinitions) -> str | None:
        """Reload when the file has been at rest for long enough."""
        live.is_at_rest()
        self.now_s += SETTLE_S
        return live.reload()

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

    assert bench.reload(live) is None
    assert names(live) == ["dflash_own"]


def test_refused_reload_changes_nothing(bench: Bench) -> None:
    """Broken or missing, the file is refused with its problems, counted, and what was live stays."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.file.write_text(BROKEN)
    broken = bench.reload(live)
    bench.file.unlink()
    missing = bench.reload(live)

    assert names(live) == ["dflash_a"]
    assert broken is not None
    assert "mine.toml:5:9: dflash_x" in broken
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

    with pytest.raises(DefinitionsError, match=r"mine\.toml:5:9: dflash_x"):
        bench.live(bench.file)


def test_broken_file_in_a_fresh_state_directory_falls_back_to_the_shipped_one(bench: Bench) -> None:
    """A broken STATE_DIR/metrics.toml that nobody named on the command line does not stop the sidecar."""
    (bench.state_dir / "metrics.toml").write_text(BROKEN)

    live = bench.live(None)

    assert live.current.file == SHIPPED_FILE
    assert live.problem is not None


def test_change_is_seen_once_and_only_when_at_rest(bench: Bench) -> None:
    """A file that is written in place is reported once it has been at rest for a while, and not again once tried."""
    bench.write("a")
    live = bench.live(bench.file)
    assert not live.has_changed()
    bench.write("longer_name")
    seen = [live.has_changed()]
    bench.now_s = SETTLE_S * 0.9
    seen += [live.has_changed()]
    bench.write("still_longer_name")
    bench.now_s = SETTLE_S * 1.8
    seen += [live.has_changed()]
    bench.now_s = SETTLE_S * 2.9
    seen += [live.has_changed()]

    bench.reload(live)

    assert seen == [False, False, False, True]
    assert not live.has_changed()


def test_replaced_file_is_seen_at_once(bench: Bench) -> None:
    """A file that was renamed into place is whole, so nobody waits for it."""
    bench.write("a")
    live = bench.live(bench.file)
    draft = bench.file.with_suffix(".draft")
    draft.write_text(GOOD.format(name="b"))
    time.sleep(0.02)
    draft.replace(bench.file)

    assert live.has_changed()


def test_set_that_fails_on_the_live_samples_is_refused(bench: Bench) -> None:
    """What the trial finds is reported with file, line and metric, counted, and nothing is swapped."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.write("b")

    live.is_at_rest()
    bench.now_s += SETTLE_S
    problem = live.reload(lambda candidate: [Failure(candidate.definitions[0].name, "PromqlError: too many")])

    assert problem == f"{bench.file}:1: dflash_b: fails on the live samples: PromqlError: too many"
    assert (names(live), bench.outcomes) == (["dflash_a"], ["failure"])
    assert live.tried_digest not in {"", live.current.digest}


def test_file_that_is_being_written_is_refused(bench: Bench) -> None:
    """Asked for at once after a write in place, half a file could be read: it is refused, and taken when at rest."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.write("half")

    problem = live.reload()

    assert problem is not None
    assert "somebody is writing the file" in problem
    assert names(live) == ["dflash_a"]
    assert bench.reload(live) is None
    assert names(live) == ["dflash_half"]


def test_truncated_file_changes_nothing(bench: Bench) -> None:
    """What an editor leaves between emptying a file and filling it is no wish to have no definitions."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.file.write_text("")

    problem = bench.reload(live)

    assert problem is not None
    assert "the file is empty" in problem
    assert names(live) == ["dflash_a"]


def test_number_too_long_for_python_is_a_problem_of_the_file(bench: Bench) -> None:
    """An integer of 5,000 digits is refused like any other mistake."""
    bench.write("a")
    live = bench.live(bench.file)
    bench.file.write_text(f"x = {'1' * 5000}\n")

    assert "the file is not TOML" in (bench.reload(live) or "")
