"""`dflash-sidecar apply` on real sidecars: what it shows, what becomes live, what it puts back."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from sidecar_process import Place, Sidecar, wait_for

from sidecar.definition_source import digest_of
from sidecar.definitions import SHIPPED_FILE

SHIPPED = SHIPPED_FILE.read_text()
NUM_SHIPPED = SHIPPED.count("[[metric]]")
OWN = """
[[metric]]
name = "dflash_tokens_per_step"
help = "Real tokens the drafter learns from in one step."
type = "gauge"
expr = 'sum(dflash_tokens_total{role="drafter",kind="real"}) / dflash_steps_total'
wandb = "custom/tokens_per_step"
"""


def write(place: Place, text: str) -> Path:
    """The user's file."""
    file = place.state_dir.parent / "mine.toml"
    file.write_text(text)
    return file


def apply(place: Place, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `apply` on the place's state directory."""
    return place.command("apply", *arguments, "--state-dir", str(place.state_dir))


def running(place: Place) -> Sidecar:
    """A sidecar that has some steps of a trainer."""
    place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 30, "records")
    return sidecar


def digest(sidecar: Sidecar) -> str:
    """What is live."""
    live: str = sidecar.status()["definitions"]["digest"]
    return live


def test_a_metric_is_applied_and_rolled_back_under_a_run(place: Place) -> None:
    """It shows what is added with its value, what is live then, and the trainer that goes on; twice back is forth."""
    sidecar = running(place)
    [trainer] = sidecar.status()["trainers"]
    file = write(place, SHIPPED + OWN)

    tried = apply(place, str(file), "--dry-run")
    untouched = sidecar.metrics()
    applied = apply(place, str(file))
    metrics = sidecar.metrics()
    rolled_back = apply(place, "--rollback")
    gone = sidecar.metrics()
    again = apply(place, "--rollback")

    added = "added      dflash_tokens_per_step (gauge, at each tick, W&B custom/tokens_per_step)\n             100\n"
    for done, last in ((tried, "good; nothing was replaced\n"), (applied, "goes on\n")):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(added + f"unchanged  {NUM_SHIPPED}\nvalues are those at ")
        assert done.stdout.endswith(last)
    old, new = digest_of(SHIPPED.encode()), digest_of((SHIPPED + OWN).encode())
    live = f"live: {NUM_SHIPPED + 1} metrics, digest {new} (before: {old}), sidecar {sidecar.process.pid}, "
    assert live + f"trainer {trainer['pid']} goes on\n" in applied.stdout
    assert "dflash_tokens_per_step" not in untouched
    assert metrics["dflash_tokens_per_step"] == 100.0
    assert "removed    dflash_tokens_per_step: it ends here" in rolled_back.stdout
    assert "dflash_tokens_per_step" not in gone
    assert gone[f'dflash_definitions_info{{digest="{old}"}}'] == 1.0
    assert (again.returncode, digest(sidecar)) == (0, new)
    assert sidecar.status()["trainers"][0]["session"] == trainer["session"]


def test_without_a_sidecar_it_is_installed_for_the_next_start(place: Place) -> None:
    """It says that nothing runs; the next sidecar has it; there is nothing to roll back to before the first time."""
    file = write(place, OWN)

    nothing = apply(place, "--rollback")
    installed = apply(place, str(file))
    sidecar = place.sidecar()

    assert (nothing.returncode, "there is nothing to go back to" in nothing.stderr) == (1, True)
    assert installed.returncode == 0
    assert "there is no record yet, so no values to show" in installed.stdout
    assert installed.stdout.count("removed ") == NUM_SHIPPED
    assert f"no sidecar runs on {place.state_dir}, so it is live at the next start\n" in installed.stdout
    assert digest(sidecar) == digest_of(OWN.encode())
    assert apply(place, "--rollback").returncode == 0
    assert digest(sidecar) == digest_of(SHIPPED.encode())


def test_mistakes_change_nothing(place: Place) -> None:
    """What the checks find and what fails over the journal is told by file and line, with exit code 1."""
    sidecar = running(place)
    before = digest(sidecar)
    unknown = apply(place, str(write(place, OWN.replace("dflash_steps_total", "dflash_stepz_total"))))
    ambiguous = "on () dflash_accuracy_ratio"
    failing = apply(place, str(write(place, OWN.replace("dflash_steps_total", ambiguous))))

    assert (unknown.returncode, failing.returncode) == (1, 1)
    assert "mine.toml:6:64: dflash_tokens_per_step: unknown series dflash_stepz_total; did you mean" in unknown.stderr
    assert "mine.toml:2: dflash_tokens_per_step: fails on the newest samples of the journal: Promql" in failing.stderr
    assert unknown.stderr.endswith("nothing was replaced\n")
    assert not (place.state_dir / "metrics.toml").exists()
    assert digest(sidecar) == before


def test_what_the_running_sidecar_refuses_is_put_back(place: Place) -> None:
    """A set that fails on samples that only the sidecar has is refused by it, and the file before is back."""
    sidecar = running(place)
    assert apply(place, str(write(place, OWN))).returncode == 0
    own = "on () dflash_config_reloads_total"
    refused = apply(place, str(write(place, OWN.replace("dflash_steps_total", own).replace("per_step", "per_reload"))))
    wait_for(lambda: sidecar.status()["definitions"]["problem"] == "", "the file before to be live")

    assert refused.returncode == 1
    assert f"the sidecar {sidecar.process.pid} refuses it:\n" in refused.stderr
    assert "dflash_tokens_per_reload: fails on the live samples" in refused.stderr
    assert refused.stderr.endswith("the file before is back in place, nothing has changed\n")
    assert (place.state_dir / "metrics.toml").read_text() == OWN
    assert digest(sidecar) == digest_of(OWN.encode())


def test_file_that_was_edited_in_its_place_can_be_rolled_back(place: Place) -> None:
    """Applied where it lies, the file is left as it is, and what was live before it is the one to go back to."""
    place.state_dir.mkdir()
    own = place.state_dir / "metrics.toml"
    own.write_text(OWN)
    sidecar = place.sidecar()
    own.write_text(OWN + "# edited\n")

    applied = apply(place, str(own))
    back = apply(place, "--rollback")

    assert (applied.returncode, back.returncode) == (0, 0)
    assert digest(sidecar) == digest_of(OWN.encode())
    assert own.read_text() == OWN


def test_sidecar_that_reads_another_file_is_left_alone(place: Place) -> None:
    """Where --definitions names a file, that is what to change: it says which is live and how."""
    file = write(place, OWN)
    sidecar = place.sidecar("--definitions", str(file))

    refused = apply(place, str(file))

    assert refused.returncode == 1
    assert f"the sidecar {sidecar.process.pid} was started with the definitions {file}" in refused.stderr
    assert f"digest {digest_of(OWN.encode())}, is live; replace {file} instead" in refused.stderr
    assert not (place.state_dir / "metrics.toml").exists()


def test_sidecar_that_hangs_changes_nothing(place: Place) -> None:
    """A stopped sidecar cannot say what is live: nothing is replaced, and it does not take for ever to tell."""
    sidecar = place.sidecar()
    sidecar.process.send_signal(signal.SIGSTOP)
    started_s = time.monotonic()
    try:
        refused = apply(place, str(write(place, OWN)))
    finally:
        sidecar.process.send_signal(signal.SIGCONT)

    assert (refused.returncode, "no sidecar answers" in refused.stderr) == (1, True)
    assert time.monotonic() - started_s < 15
    assert not (place.state_dir / "metrics.toml").exists()


def test_killed_at_any_moment_it_leaves_a_whole_file(place: Place) -> None:
    """Killed again and again in the middle, the file is the old or the new one, and so is the one before it."""
    texts = [OWN + f"# {'x' * 200_000}\n", SHIPPED]
    file = place.state_dir.parent / "mine.toml"
    rng = random.Random(1)
    assert apply(place, str(write(place, texts[0]))).returncode == 0
    num_killed = 0
    found = set()
    for attempt in range(24):
        file.write_text(texts[(attempt + 1) % 2])
        litter = set(place.state_dir.glob(".apply.*"))
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "apply", str(file), "--state-dir", str(place.state_dir)],
            env=place.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # From the first file it writes on, so that kills fall among the writes and not into the imports.
        deadline_s = time.monotonic() + 20
        while process.poll() is None and not (set(place.state_dir.glob(".apply.*")) - litter):
            assert time.monotonic() < deadline_s
            time.sleep(0.0002)
        # Now and then late, because on a busy disk none of those killed early would have come to an end.
        time.sleep(rng.uniform(0, 0.003 if attempt % 3 else 0.3))
        num_killed += process.poll() is None
        process.kill()
        process.wait()
        installed = (place.state_dir / "metrics.toml").read_text()
        found.add(installed == texts[0])
        assert installed in texts
        assert (place.state_dir / "metrics.previous.toml").read_text() in texts
    print(f"killed {num_killed} of 24 in the middle")  # noqa: T201 - a figure for whoever reads the log

    assert found == {True, False}
    assert num_killed > 5
    assert apply(place, str(write(place, OWN))).returncode == 0
    assert (place.state_dir / "metrics.toml").read_text() == OWN
    assert list(place.state_dir.glob(".apply.*")) == []


def test_one_apply_at_a_time(place: Place) -> None:
    """Of several at once each either applies its file or says that another is at work; what is left is one of them."""
    sidecar = running(place)
    texts = [OWN + f"# {number}\n" for number in range(4)]
    processes = []
    for number, text in enumerate(texts):
        file = place.state_dir.parent / f"{number}.toml"
        file.write_text(text)
        processes.append(place.popen("-m", "sidecar", "apply", str(file), "--state-dir", str(place.state_dir)))
    answers = [(process.communicate(timeout=60)[0], process.returncode) for process in processes]

    for output, code in answers:
        assert ("live: 1 metrics" in output, code) in {(True, 0), (False, 1)}, output
        assert code == 0 or "another apply is at work" in output
    assert 0 in {code for _, code in answers}
    installed = (place.state_dir / "metrics.toml").read_text()
    assert installed in texts
    assert digest(sidecar) == digest_of(installed.encode())
