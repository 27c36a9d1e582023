"""The whole sidecar as a process, beside a real publisher in another: killed, restarted, misused."""

import itertools
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import zmq
from sidecar_process import Place, Sidecar, wait_for

from shared.wire import Step
from sidecar.definitions import SHIPPED_FILE
from sidecar.journal import Journal
from sidecar.sinks.wandb_spool import Spool


def records_are(sidecar: Sidecar, at_least: int) -> bool:
    """Whether the sidecar has received so many records."""
    received: int = sidecar.status()["records"]["received"]
    return received >= at_least


def counters(metrics: dict[str, float]) -> dict[str, float]:
    """The cumulative samples of a page, but for CPU times of host and processes."""
    suffixes = ("_total", "_bucket", "_count", "_sum")
    return {
        name: value
        for name, value in metrics.items()
        if name.split("{")[0].endswith(suffixes) and not name.startswith(("dflash_host", "dflash_process"))
    }


def test_kill_and_restart_lose_nothing_and_repeat_nothing(place: Place) -> None:
    """Killed again and again mid-run, the sidecar ends with every record once, in order, and no counter ever fell."""
    trainer = place.trainer()
    seen: list[dict[str, float]] = []
    for num_records in (60, 120, 180, 240):
        sidecar = place.sidecar()
        wait_for(lambda s=sidecar, n=num_records: records_are(s, n), "more records")
        seen.append(counters(sidecar.metrics()))
        sidecar.kill()
        time.sleep(0.2)
    sidecar = place.sidecar()
    seen.append(counters(sidecar.metrics()))
    num_steps, num_records = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    last = sidecar.status()
    sidecar.terminate()

    for before, after in itertools.pairwise(seen):
        assert {name: (value, after.get(name)) for name, value in before.items() if after.get(name, -1) < value} == {}
    assert last["records"] | {"replayed": 0} == {
        "received": num_records,
        "replayed": 0,
        "lost": 0,
        "rejected": 0,
        "lost_by_reason": {"ring_overrun": 0, "trainer_gone": 0, "unreadable": 0, "damaged": 0},
    }
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    records = list(journal.records(session, 0, session.next_seq))
    journal.close()
    assert [record.seq for record in records] == list(range(num_records))
    assert (session.exit_code, session.consumed) == (0, True)
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    rows = spool.rows("run", 0, 10**6)
    spool.close()
    assert [index for index, _ in rows] == list(range(len(rows)))
    assert [row["train/step"] for _, row in rows if "train/step" in row] == list(range(1, num_steps + 1))
    assert [r.step for r in records if isinstance(r, Step)] == list(range(1, num_steps + 1))


def test_trainer_keeps_its_pid_and_rates_survive_a_restart(place: Place) -> None:
    """After a restart the first page has derived rates again, from the journal, about the same trainer."""
    trainer = place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.metrics().get("dflash_steps_per_second", 0.0) > 0.0, "a rate")
    wait_for(lambda: records_are(sidecar, 150), "some history")
    before = sidecar.metrics()
    sidecar.kill()

    sidecar = place.sidecar()
    first = sidecar.metrics()

    assert first["dflash_steps_per_second"] >= before["dflash_steps_per_second"] * 0.8
    assert [t["pid"] for t in sidecar.status()["trainers"]] == [trainer.pid]


def test_overrun_of_a_small_ring_is_counted_exactly(place: Place) -> None:
    """What fell out of the trainer's ring while the sidecar was down is lost, and every record is accounted for."""
    trainer = place.trainer(ring_bytes=20_000)
    sidecar = place.sidecar()
    wait_for(lambda: records_are(sidecar, 20), "records")
    sidecar.kill()
    time.sleep(4.0)
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["lost"] > 0, "the loss to be seen")
    _, num_records = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    found = sidecar.status()["records"]
    page = sidecar.metrics()
    _, output = sidecar.terminate()

    assert found["received"] + found["lost"] == num_records
    assert found["lost_by_reason"] == {"ring_overrun": found["lost"], "trainer_gone": 0, "unreadable": 0, "damaged": 0}
    assert page['dflash_records_lost_total{reason="ring_overrun"}'] == found["lost"]
    assert "lost records " in output
    journal = Journal(place.state_dir / "journal.sqlite")
    assert sum(lost.end_seq - lost.first_seq for lost in journal.lost_ranges()) == found["lost"]
    journal.close()


def test_termination_is_quick_and_quiet(place: Place) -> None:
    """SIGTERM ends a busy sidecar within three seconds, with exit code 0 and no traceback."""
    place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: records_are(sidecar, 20), "records")

    took_s, output = sidecar.terminate()

    assert took_s < 3.0
    assert sidecar.process.returncode == 0
    assert "Traceback" not in output


def test_garbage_is_counted_and_harmless(place: Place) -> None:
    """A rogue socket that sends rubbish is counted; the trainer's records keep coming."""
    place.trainer()
    context = zmq.Context()
    rogue = context.socket(zmq.PUB)
    rogue.bind(f"ipc://{place.runtime_dir}/rogue.sock")
    sidecar = place.sidecar()

    def is_counted() -> bool:
        for body in (b"", b"\xc1\xc1", b"\x93\x01\x02", b"\xff" * 10_000):
            rogue.send_multipart([b"step", body])
        return sidecar.metrics().get('dflash_frames_rejected_total{reason="malformed"}', 0.0) > 10

    wait_for(is_counted, "rejections")
    context.destroy(linger=0)
    before = sidecar.status()["records"]
    wait_for(lambda: records_are(sidecar, before["received"] + 50), "more records")

    assert sidecar.status()["records"]["lost"] == 0


def test_definitions_change_under_a_running_sidecar(place: Place) -> None:
    """An edited file is live at once; a broken one is refused by line, and what was live stays, also over a restart."""
    place.trainer()
    file = place.state_dir.parent / "metrics.toml"
    good = '[[metric]]\nname = "dflash_x"\nhelp = "X."\ntype = "gauge"\nexpr = "dflash_step * 0 + 7"\n'
    file.write_text(good.replace("7", "6"))
    sidecar = place.sidecar("--definitions", str(file))
    wait_for(lambda: sidecar.metrics().get("dflash_x") == 6.0, "the first definition")
    digest = sidecar.status()["definitions"]["digest"]

    file.write_text(good)
    wait_for(lambda: sidecar.metrics().get("dflash_x") == 7.0, "the edit to be seen")
    file.write_text(good.replace("dflash_step *", "dflash_stop *"))
    code, answer = sidecar.post("/-/reload")
    page = sidecar.metrics()
    sidecar.kill()
    restarted = place.sidecar("--definitions", str(file))
    wait_for(lambda: restarted.metrics().get("dflash_x") == 7.0, "the last good definitions")

    assert code == 500
    assert "metrics.toml:5:9: dflash_x" in answer
    assert page["dflash_x"] == 7.0
    assert page['dflash_config_reloads_total{outcome="failure"}'] >= 1.0
    assert restarted.status()["definitions"]["digest"] != digest
    assert "dflash_stop" in restarted.status()["definitions"]["problem"]


def test_without_a_trainer_it_waits_and_says_where(place: Place) -> None:
    """A sidecar without a trainer serves its page and says where it looks; a trainer that comes later is found."""
    sidecar = place.sidecar()
    assert sidecar.status()["trainers"] == []
    assert "dflash_trainer_up" not in sidecar.metrics()
    table = place.command("status", "--state-dir", str(place.state_dir)).stdout
    assert f"none; watching {place.runtime_dir}" in table

    trainer = place.trainer()
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 1.0, "the trainer to be found")
    trainer.stop()
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 0.0, "the trainer to be down")

    assert "dflash_step" not in sidecar.metrics()


def test_storm_of_reloads_never_ends_it(place: Place) -> None:
    """SIGHUP all the time, before it answers, while it serves and while it stops: each is heeded or passed over."""
    sidecar = place.starting_sidecar()
    lock = place.state_dir / "sidecar.lock"
    wait_for(lambda: lock.exists() and lock.read_bytes() != b"", "the state directory to be taken")
    is_over = threading.Event()

    def storm() -> None:
        while not is_over.is_set():
            sidecar.process.send_signal(signal.SIGHUP)
            time.sleep(0.001)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        sidecar.wait_until_ready()
        pages = [sidecar.metrics() for _ in range(20)]
        _, output = sidecar.terminate()
    finally:
        is_over.set()
        thread.join()

    assert sidecar.process.returncode == 0, output[-2000:]
    assert all("dflash_sidecar_start_time_seconds" in page for page in pages)
    assert "Traceback" not in output


def test_second_sidecar_on_one_state_directory_is_refused(place: Place) -> None:
    """The error names the owner's pid and the remedy; nothing is touched."""
    sidecar = place.sidecar()

    second = place.command("run", "--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")

    assert second.returncode == 1
    owner = f"a sidecar with pid {sidecar.process.pid}"
    remedy = "stop it or give another --state-dir"
    assert second.stderr == f"dflash-sidecar: {place.state_dir} is in use by {owner}; {remedy}\n"


def test_user_errors_are_one_line_with_the_remedy(place: Place) -> None:
    """Busy port, unwritable directory, unknown key, broken definitions, newer journal: one line each, no traceback."""
    state = ("--state-dir", str(place.state_dir))
    file = place.state_dir.parent / "broken.toml"
    file.write_text('[[metric]]\nname = "dflash_x"\n')
    newer = place.state_dir.parent / "newer"
    newer.mkdir()
    with sqlite3.connect(newer / "journal.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        cases = [
            (("run", *state, "--listen", f"127.0.0.1:{port}"), 1, f"127.0.0.1:{port} is in use"),
            (("run", "--state-dir", "/proc/nowhere", "--listen", "127.0.0.1:0"), 1, "give a writable directory"),
            (("run", *state, "--set", "wandb.mod=off"), 2, "did you mean 'wandb.mode'?"),
            (("run", *state, "--set", "interval_s=fast"), 2, "interval_s='fast'"),
            (("run", *state, "--set", "wandb.mode=maybe"), 2, "; it must be online or offline or off"),
            (("push", *state, "--listen", "127.0.0.1:0"), 2, "unrecognized arguments: --listen"),
            (("run", *state, "--listen", "nowhere"), 2, "expected HOST:PORT"),
            (("run", *state, "--listen", "127.0.0.1:0", "--definitions", str(file)), 1, "broken.toml:1: dflash_x"),
            (("run", "--state-dir", str(newer), "--listen", "127.0.0.1:0"), 1, "written by a newer one"),
            (("check", str(file)), 1, "broken.toml:1: dflash_x"),
            (("check", "absent.toml"), 1, "absent.toml"),
            (("status", *state, "--listen", "127.0.0.1:9"), 1, "no sidecar answers at http://127.0.0.1:9"),
        ]
        results = [(place.command(*arguments), code, text) for arguments, code, text in cases]

    for result, code, text in results:
        assert (result.returncode, text in result.stderr, "Traceback" in result.stderr) == (code, True, False), result
    assert not (place.state_dir / "journal.sqlite-wal").exists()


def test_start_status_and_stop_in_the_background(place: Place) -> None:
    """`start` returns when the sidecar answers, does nothing when one runs, and `stop` ends it."""
    places = ("--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")
    place.environ["DFLASH_WANDB_MODE"] = "off"

    first = place.command("start", *places)
    second = place.command("start", *places)
    status = place.command("status", "--json", *places)
    stopped = place.command("stop", *places)
    again = place.command("stop", *places)

    assert first.stdout.startswith("sidecar started: pid ")
    assert str(place.state_dir / "sidecar.log") in first.stdout
    assert second.stdout.startswith("sidecar already running: pid ")
    assert '"wandb": {"state": "off"' in status.stdout
    assert status.stdout.endswith("}\n")
    assert stopped.stdout.startswith("sidecar stopped: pid ")
    assert again.stdout == f"no sidecar runs on {place.state_dir}\n"
    assert [r.returncode for r in (first, second, status, stopped, again)] == [0, 0, 0, 0, 0]


def test_starts_at_the_same_moment_agree_on_one(place: Place) -> None:
    """Of several that start a sidecar one does; the others say which one runs, and none fails."""
    command = ("-m", "sidecar", "start", "--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")
    place.environ["DFLASH_WANDB_MODE"] = "off"
    started = [place.popen(*command) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in started]
    stopped = place.command("stop", "--state-dir", str(place.state_dir))

    assert [process.returncode for process in started] == [0, 0, 0], said
    assert sorted(line.split(":")[0] for line in said) == [*["sidecar already running"] * 2, "sidecar started"]
    assert len({line.split("pid ")[1].split(",")[0] for line in (*said, f"{stopped.stdout.strip()},")}) == 1


def test_start_over_refused_definitions_says_so(place: Place) -> None:
    """A sidecar that goes on with other definitions than those in its directory says which and why."""
    place.environ["DFLASH_WANDB_MODE"] = "off"
    place.state_dir.mkdir()
    (place.state_dir / "metrics.toml").write_text('[[metric]]\nname = "dflash_x"\n')
    places = ("--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")

    started = place.command("start", *places)
    place.command("stop", *places)

    first, second, *problems = started.stdout.splitlines()
    assert (started.returncode, first.startswith("sidecar started: pid ")) == (0, True)
    assert second == f"definitions refused, {SHIPPED_FILE} is live instead; correct them:"
    assert problems[0] == f"{place.state_dir}/metrics.toml:1: dflash_x: help is missing; add it"


def test_output_may_be_cut_off(place: Place) -> None:
    """`dflash-sidecar status | head -1` shows one line and no traceback."""
    sidecar = place.sidecar()
    command = f"'{sys.executable}' -m sidecar status --state-dir '{place.state_dir}' | true"
    done = subprocess.run(["sh", "-c", command], env=place.environ, capture_output=True, text=True, check=False)
    sidecar.terminate()

    assert done.stderr == ""
