"""A trainer elsewhere: real processes on both sides of a real tcp connection with CURVE, killed and cut off."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sidecar_process import Place, Sidecar, Trainer, wait_for
from tcp_relay import Relay
from training_run import trainer_arguments

from shared.curve import make_keys
from shared.wire import Step
from sidecar.journal import Journal
from sidecar.sinks.wandb_spool import Spool

SILENCE_LIMIT_S = 10.0


class RemotePlace(Place):
    """A place whose trainer publishes over tcp, reached by the sidecar through a relay."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys = path / "keys"
        make_keys(self.keys)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.environ["DFLASH_TELEMETRY_ENDPOINT"] = f"tcp://127.0.0.1:{self.port}"
        self.environ["DFLASH_TELEMETRY_KEYS"] = str(self.keys / "trainer")

    def listen(self, relay: Relay, keys: Path | None = None) -> Sidecar:
        """Start a sidecar that knows the trainer's address."""
        endpoints = json.dumps([f"tcp://127.0.0.1:{relay.port}"])
        keys = keys or self.keys / "sidecar"
        return self.sidecar("--set", f"remote.endpoints={endpoints}", "--set", f"remote.keys={keys}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[RemotePlace]:
    """An empty place with keys."""
    place = RemotePlace(tmp_path)
    yield place
    place.close()


@pytest.fixture
def relay(place: RemotePlace) -> Iterator[Relay]:
    """The network between the two."""
    with Relay(place.port) as relay:
        yield relay


def received(sidecar: Sidecar) -> int:
    """How many records the sidecar has."""
    number: int = sidecar.status()["records"]["received"]
    return number


def wait_for_records(sidecar: Sidecar, at_least: int) -> None:
    """Wait until the sidecar has so many records."""
    wait_for(lambda: received(sidecar) >= at_least, f"{at_least} records")


def assert_nothing_lost(place: Place, sidecar: Sidecar, trainer: Trainer) -> None:
    """End the trainer, then compare what it says it did with journal and spool, record by record."""
    num_steps, num_records = trainer.stop()
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    wait_for(lambda: spool.run("run").exit_code is not None, "the last row")
    rows = [row for _, row in spool.rows("run", 0, 10**6)]
    exit_code = spool.run("run").exit_code
    spool.close()
    # The status is made anew after that, in the same turn.
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    found = sidecar.status()["records"]
    sidecar.terminate()
    assert (found["received"], found["lost"]) == (num_records, 0)
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    records = list(journal.records(session, 0, session.next_seq))
    journal.close()
    assert [record.seq for record in records] == list(range(num_records))
    assert [record.step for record in records if isinstance(record, Step)] == list(range(1, num_steps + 1))
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(1, num_steps + 1))
    assert (session.exit_code, exit_code) == (0, 0)


def test_sidecar_killed_again_and_again_loses_nothing(place: RemotePlace, relay: Relay) -> None:
    """Over tcp as over a local socket: after each kill -9 the next sidecar goes on where the last one stopped."""
    trainer = place.trainer()
    for num_records in (60, 120, 180, 240):
        sidecar = place.listen(relay)
        wait_for_records(sidecar, num_records)
        sidecar.kill()
        time.sleep(0.2)
    sidecar = place.listen(relay)
    status = sidecar.status()["trainers"]
    page = sidecar.metrics()

    assert [(t["pid"], t["up"], t["endpoint"]) for t in status] == [
        (trainer.pid, True, f"tcp://127.0.0.1:{relay.port}")
    ]
    # Its process id means nothing on this machine, so no process of that number here is taken for it.
    assert not any(name.startswith("dflash_process_cpu_seconds_total") for name in page)
    assert_nothing_lost(place, sidecar, trainer)


@pytest.mark.parametrize("longer", [False, True], ids=["shorter than the silence limit", "longer"])
@pytest.mark.parametrize("fault", ["cut", "swallow"])
def test_network_cut_loses_nothing_within_the_ring(place: RemotePlace, relay: Relay, fault: str, longer: bool) -> None:
    """Cut off by a reset or by silence, a trainer is down after its limit, and whole again when the network is."""
    trainer = place.trainer()
    sidecar = place.listen(relay)
    wait_for_records(sidecar, 60)
    started_s = time.monotonic()
    getattr(relay, fault)()
    if longer:
        wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 0.0, "the trainer to be shown as down")
        assert time.monotonic() - started_s > SILENCE_LIMIT_S - 1.0
    else:
        time.sleep(3.0)
    before = received(sidecar)
    relay.mend()
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 1.0, "the trainer to be up")
    wait_for_records(sidecar, before + 100)
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    wait_for(lambda: spool.run("run").exit_code is None, "the W&B run to go on")
    spool.close()

    assert_nothing_lost(place, sidecar, trainer)


def test_cut_in_the_middle_of_catching_up_loses_nothing(place: RemotePlace, relay: Relay) -> None:
    """A trainer that falls silent while it owes records is down, and still owes them: they come when it is back."""
    trainer = place.trainer(steps_per_second=2_000.0)
    time.sleep(3.0)
    sidecar = place.listen(relay)
    wait_for(lambda: received(sidecar) > 100, "the first records")
    relay.cut()
    behind = sidecar.status()["trainers"][0]["records_behind"]
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 0.0, "the trainer to be shown as down")
    lost = sidecar.status()["records"]["lost"]
    relay.mend()
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 1.0, "the trainer to be up")

    assert (behind > 0, lost) == (True, 0)
    assert_nothing_lost(place, sidecar, trainer)


def test_killed_trainer_is_down_after_its_silence_and_its_successor_is_found(place: RemotePlace, relay: Relay) -> None:
    """After kill -9 a trainer is down once it has been silent for its limit; one started at its address is heard."""
    trainer = place.trainer()
    sidecar = place.listen(relay)
    wait_for_records(sidecar, 60)
    trainer.process.kill()
    started_s = time.monotonic()
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 0.0, "the trainer to be shown as down")
    took_s = time.monotonic() - started_s
    successor = place.trainer()
    wait_for(lambda: [t["pid"] for t in sidecar.status()["trainers"]] == [successor.pid], "the successor")
    successor.stop()
    _, output = sidecar.terminate()

    assert SILENCE_LIMIT_S - 1.0 < took_s < SILENCE_LIMIT_S + 3.0
    assert "without a goodbye" in output


def test_local_trainers_come_and_go_beside_a_remote_one(place: RemotePlace, relay: Relay) -> None:
    """A trainer that starts on this machine ends nobody elsewhere, and the other way round."""
    remote = place.trainer()
    sidecar = place.listen(relay)
    wait_for_records(sidecar, 30)
    for name in ("DFLASH_TELEMETRY_ENDPOINT", "DFLASH_TELEMETRY_KEYS"):
        del place.environ[name]
    local = place.trainer("local")
    pids = {remote.pid, local.pid}
    wait_for(lambda: {t["pid"] for t in sidecar.status()["trainers"]} == pids, "both trainers")
    local.stop()
    wait_for(lambda: {t["pid"] for t in sidecar.status()["trainers"]} == {remote.pid}, "the local one to leave")
    _, output = sidecar.terminate()

    assert output.count("trainer left") == 1


@pytest.mark.parametrize("case", ["keys of another pair", "right client, wrong trainer"])
def test_sidecar_with_wrong_keys_gets_nothing_and_says_where_to_look(
    place: RemotePlace, relay: Relay, case: str
) -> None:
    """A sidecar whose keys do not belong hears nothing; ten seconds later its log says what to check."""
    make_keys(place.keys / "other")
    wrong = place.keys / "other" / "sidecar"
    if case == "right client, wrong trainer":
        (wrong / "sidecar.key_secret").write_bytes((place.keys / "sidecar" / "sidecar.key_secret").read_bytes())
    place.trainer()
    sidecar = place.listen(relay, wrong)
    time.sleep(11.0)
    status = sidecar.status()
    _, output = sidecar.terminate()

    assert relay.num_connections > 1
    assert (status["trainers"], status["records"]["received"]) == ([], 0)
    assert f"nothing heard from tcp://127.0.0.1:{relay.port}" in output


def test_training_elsewhere_is_followed_to_its_end(place: RemotePlace, relay: Relay, small_target: Path) -> None:
    """A real training run over tcp arrives whole; of its keys only the path is told, and no file holds more."""
    out_dir = place.state_dir.parent / "out"
    process = place.popen(*trainer_arguments(small_target, out_dir, train__steps=20, checkpoint__every_steps=1000))
    sidecar = place.listen(relay)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    wait_for(lambda: sidecar.metrics().get("dflash_trainer_up") == 0.0, "the trainer to leave")
    records = sidecar.status()["records"]
    sidecar.terminate()
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    steps = [r.step for r in journal.records(session, 0, session.next_seq) if isinstance(r, Step)]
    journal.close()

    assert f"telemetry: tcp://127.0.0.1:{place.port}, every" in output
    assert (steps, session.exit_code, records["lost"]) == (list(range(1, 21)), 0, 0)
    assert session.hello.config["telemetry.keys"] == str(place.keys / "trainer")
    secrets = [re.findall(rb'secret-key = "(.*)"', path.read_bytes())[0] for path in place.keys.rglob("*.key_secret")]
    written = b"".join(path.read_bytes() for folder in (place.state_dir, out_dir) for path in files_in(folder))
    assert len(secrets) == 2
    assert not any(secret in written for secret in secrets)


def files_in(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_mistakes_are_one_line_with_the_remedy(place: RemotePlace) -> None:
    """No keys, keys that others can read, an address that is none, keys that exist: one line each, on both sides."""
    loose = place.keys / "sidecar" / "sidecar.key_secret"
    loose.chmod(0o644)
    run = ("run", "--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")
    remote = ("--set", 'remote.endpoints=["tcp://10.0.0.7:9478"]')
    cases: list[tuple[Callable[[], subprocess.CompletedProcess[str]], str]] = [
        (lambda: place.command(*run, *remote), "`dflash-sidecar keys DIR` and set remote.keys"),
        (lambda: place.command(*run, *remote, "--set", f"remote.keys={loose.parent}"), f"{loose} is a secret"),
        (lambda: place.command(*run, "--set", 'remote.endpoints=["10.0.0.7"]'), "expected tcp://HOST:PORT"),
        (lambda: place.command("keys", str(place.keys)), f"{place.keys}/trainer exists; give another directory"),
        (lambda: train("telemetry.keys="), "`dflash-sidecar keys DIR` and set telemetry.keys"),
        (lambda: train("telemetry.endpoint=ipc:///x"), "expected tcp://HOST:PORT"),
    ]

    def train(setting: str) -> subprocess.CompletedProcess[str]:
        process = place.popen("-m", "trainer.app", "--set", setting)
        output, _ = process.communicate(timeout=60)
        return subprocess.CompletedProcess((), process.returncode, "", output)

    for attempt, text in cases:
        done = attempt()
        assert done.returncode in {1, 2}
        assert text in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_keys_command_says_what_goes_where(place: RemotePlace) -> None:
    """`dflash-sidecar keys DIR` prints the settings of both sides, and they work as printed."""
    fresh = place.keys.parent / "fresh"
    done = place.command("keys", str(fresh))

    assert done.returncode == 0
    assert f"--set telemetry.keys={fresh}/trainer" in done.stdout
    assert f"--set remote.keys={fresh}/sidecar" in done.stdout
    assert "tcp://HOST:PORT" in done.stdout
