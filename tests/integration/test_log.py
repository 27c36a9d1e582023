"""The log: a reader who stops reading costs nobody anything, and a file does not grow without end."""

import fcntl
import os
import subprocess
import sys

import pytest
from sidecar_process import Place

from sidecar.log import MAX_FILE_BYTES, MAX_WAITING_LINES

PIPE_BYTES = 4096
NUM_LINES = MAX_WAITING_LINES + 100
PLACES = ("--listen", "127.0.0.1:0", "--set", "wandb.mode=off")


def full_pipe() -> tuple[int, int]:
    """A pipe in which nothing has room, and nobody reads."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, b"x" * PIPE_BYTES)
    return reader, writer


def test_a_stderr_that_nobody_reads_holds_up_nothing(place: Place) -> None:
    """Start, reloads that fail with a log line each, pages and an orderly end go on while every write to it hangs."""
    reader, writer = full_pipe()
    command = [sys.executable, "-m", "sidecar", "run", "--state-dir", str(place.state_dir), *PLACES]
    with subprocess.Popen(command, env=place.environ, stderr=writer) as process:
        try:
            sidecar = place.attached(process)
            (place.state_dir / "metrics.toml").write_text('[[metric]]\nname = "dflash_x"\n')
            outcomes = {sidecar.post("/-/reload")[0] for _ in range(3)}
            failures = sidecar.metrics()['dflash_config_reloads_total{outcome="failure"}']
            process.terminate()
            code = process.wait(15)
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)

    assert (outcomes, failures >= 1, code) == ({500}, True, 0)


def test_an_error_with_a_stderr_that_nobody_reads_ends_the_command(place: Place) -> None:
    """The exit code is the one of the error, and the process does not hang on its last words."""
    reader, writer = full_pipe()
    place.state_dir.mkdir()
    (place.state_dir / "spool.sqlite").mkdir()
    command = [sys.executable, "-m", "sidecar", "push", "--state-dir", str(place.state_dir)]
    try:
        done = subprocess.run(command, env=place.environ, stderr=writer, timeout=30, check=False)
    finally:
        os.close(reader)
        os.close(writer)

    assert done.returncode == 1


@pytest.mark.parametrize("is_read_on", [True, False])
def test_lines_that_had_no_room_are_counted_in_the_log(place: Place, is_read_on: bool) -> None:
    """Once somebody reads, before the end or at it, the log tells how many lines it lacks; the others are there."""
    reader, writer = full_pipe()
    script = (
        "import logging\nfrom sidecar.log import log_to_stderr\n"
        "with log_to_stderr():\n"
        f"    for number in range({NUM_LINES}): logging.getLogger().info('line %d', number)\n"
        "    print('logged', flush=True)\n    input()\n    logging.getLogger().info('the last words')\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=place.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer
    ) as child:
        os.close(writer)
        assert child.stdout is not None
        logged = child.stdout.readline()
        with os.fdopen(reader, "rb") as log:
            log.read(PIPE_BYTES)
            head = b"".join(log.readline() for _ in range(MAX_WAITING_LINES if is_read_on else 1))
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.close()
            lines = (head + log.read()).decode().splitlines()

    kept = [int(line.split()[-1]) for line in lines if " line " in line]
    told = [line for line in lines if "not in this log" in line]
    assert (logged, len(told), lines[-1].endswith("the last words") or not is_read_on) == (b"logged\n", 1, True)
    assert kept == list(range(len(kept)))
    assert len(kept) + int(told[0].split()[2]) + lines[-1].endswith("the last words") == NUM_LINES + 1


def test_the_log_of_a_sidecar_in_the_background_is_rotated(place: Place) -> None:
    """Two files of bounded size hold all lines of one that is written to for ever, whoever else writes to it."""
    log = place.state_dir / "sidecar.log"
    script = (
        "import logging, os, subprocess, sys\nfrom pathlib import Path\nfrom sidecar import log\n"
        "log.MAX_FILE_BYTES = 10_000\n"
        "with log.log_to_stderr(Path(sys.argv[1])):\n"
        "    for number in range(400): logging.getLogger().info('line %d', number)\n"
        "os.write(2, b'a word of the process itself\\n')\n"
    )
    place.state_dir.mkdir()

    done = subprocess.run(
        [sys.executable, "-c", script, str(log)], env=place.environ, capture_output=True, timeout=30, check=False
    )

    newest, older = log.read_text().splitlines(), (place.state_dir / "sidecar.log.1").read_text().splitlines()
    numbers = [int(line.split()[-1]) for line in (*older, *newest[:-1])]
    assert (done.stdout, done.stderr, newest[-1]) == (b"", b"", "a word of the process itself")
    assert numbers == list(range(400))[-len(numbers) :]
    assert 9_000 < (place.state_dir / "sidecar.log.1").stat().st_size <= 10_100
    assert log.stat().st_size <= 10_100


def test_start_begins_a_new_log_when_the_old_one_is_large(place: Place) -> None:
    """What an earlier version left is moved aside, and the reason why a sidecar does not start is still told."""
    place.state_dir.mkdir()
    log = place.state_dir / "sidecar.log"
    log.write_bytes(bytes(MAX_FILE_BYTES))
    (place.state_dir / "metrics.toml").write_text("[[metric]]")

    refused = place.command(
        "start", "--state-dir", str(place.state_dir), *PLACES, "--definitions", str(place.state_dir / "metrics.toml")
    )
    started = place.command("start", "--state-dir", str(place.state_dir), *PLACES)
    stopped = place.command("stop", "--state-dir", str(place.state_dir))

    assert (refused.returncode, started.returncode, stopped.returncode) == (1, 0, 0), started.stderr
    assert refused.stderr.startswith("dflash-sidecar: the sidecar did not start: ")
    assert "metrics.toml:1: " in refused.stderr
    assert (place.state_dir / "sidecar.log.1").stat().st_size == MAX_FILE_BYTES
    assert "listening on http://127.0.0.1:" in log.read_text()


def test_a_thread_that_fails_is_in_the_log_with_its_traceback(place: Place) -> None:
    """Whatever a thread dies of goes the way of every other line, in full."""
    script = (
        "import threading\nfrom sidecar.log import log_to_stderr\n"
        "with log_to_stderr():\n"
        "    thread = threading.Thread(target=lambda: 1 / 0, name='divider')\n    thread.start()\n    thread.join()\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], env=place.environ, capture_output=True, text=True, timeout=30, check=False
    )

    assert "CRITICAL thread divider failed\nTraceback" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
