"""What is around the sidecar: its settings, its state directory, the service manager, the sleeping main loop."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.settings import SettingsError
from sidecar import config
from sidecar.config import SidecarConfig, load_config, parse_address, state_dir
from sidecar.state_dir import StateDir, StateDirError, owner_of
from sidecar.systemd import Notifier
from sidecar.wake import Alarm


def test_layers_of_settings_have_their_order(tmp_path: Path) -> None:
    """A flag wins over --set, that over the environment, that over the file, that over the default."""
    file = tmp_path / "sidecar.toml"
    file.write_text('listen = "127.0.0.1:1"\ninterval_s = 2\n[wandb]\nmode = "off"\nproject = "file"\nentity = "e"\n')
    environ = {"DFLASH_WANDB_MODE": "offline", "DFLASH_WANDB_PROJECT": "environment"}

    found = load_config({"listen": "127.0.0.1:4"}, ["listen=127.0.0.1:3", "wandb.project=set"], str(file), environ)

    assert (found.address, found.wandb.project, found.wandb.mode) == (("127.0.0.1", 4), "set", "offline")
    assert (found.wandb.entity, found.interval_s, found.journal.max_bytes) == ("e", 2.0, 2**31)


@pytest.mark.parametrize("listen", ["", "127.0.0.1", ":9477", "host:", "host:x", "host:65536", "[::1]"])
def test_bad_addresses_are_refused(listen: str) -> None:
    """An address that is not HOST:PORT is an error with an example."""
    with pytest.raises(SettingsError, match=r"expected HOST:PORT, for example 127\.0\.0\.1:9477"):
        parse_address(listen)


def test_ipv6_addresses_are_understood() -> None:
    """Brackets around an IPv6 address are not part of it."""
    assert parse_address("[::1]:80") == ("::1", 80)


def test_state_directory_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As set; else systemd's; else the system one if it is there; else the user's."""
    system = tmp_path / "system"
    monkeypatch.setattr(config, "SYSTEM_STATE_DIR", system)
    environ = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "HOME": "/home/u"}

    assert state_dir(SidecarConfig(state_dir="/x"), environ) == Path("/x")
    assert state_dir(SidecarConfig(), environ) == Path("/var/lib/a")
    assert state_dir(SidecarConfig(), {"HOME": "/home/u"}) == Path("/home/u/.local/state/dflash-sidecar")
    assert state_dir(SidecarConfig(), {"XDG_STATE_HOME": "/s"}) == Path("/s/dflash-sidecar")
    system.mkdir()
    assert state_dir(SidecarConfig(), {"XDG_STATE_HOME": "/s"}) == system


def test_owner_is_known_while_it_lives(tmp_path: Path) -> None:
    """The lock says who holds the directory and where it answers, refuses a second, and ends with its holder."""
    state = StateDir(tmp_path / "state")
    state.announce("http://127.0.0.1:1")

    owner = owner_of(tmp_path / "state")
    with pytest.raises(StateDirError, match=f"in use by a sidecar with pid {os.getpid()}; stop it"):
        StateDir(tmp_path / "state")
    state.close()

    assert owner is not None
    assert (owner.pid, owner.url) == (os.getpid(), "http://127.0.0.1:1")
    assert owner_of(tmp_path / "state") is None
    assert owner_of(tmp_path / "absent") is None
    StateDir(tmp_path / "state").close()


def test_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    """The kernel gives the directory back after kill -9."""
    code = "import sys; from sidecar.state_dir import *; s = StateDir(Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert owner_of(tmp_path) is not None
        process.send_signal(signal.SIGKILL)

    assert owner_of(tmp_path) is None
    StateDir(tmp_path).close()


def test_service_manager_is_told(tmp_path: Path) -> None:
    """Ready, alive with the watchdog fed, reloading and stopping arrive at the socket; a missing one is ignored."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}
        notifier = Notifier(environ)
        notifier.ready("up")
        notifier.alive("well")
        notifier.reloading()
        notifier.stopping()
        Notifier(environ | {"WATCHDOG_PID": "1"}).alive("well")
        got = [manager.recv(1000).decode() for _ in range(5)]
    notifier.alive("nobody listens any more")
    Notifier({}).ready("outside systemd")

    assert got[:2] == ["READY=1\nSTATUS=up", "STATUS=well\nWATCHDOG=1"]
    assert got[2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert got[3:] == ["STOPPING=1", "STATUS=well"]


def test_alarm_ends_the_sleep_early() -> None:
    """A ring ends the next sleep at once, however many there were; the sleep after it is whole again."""
    alarm = Alarm()
    for _ in range(100_000):
        alarm.ring()
    started_s = time.monotonic()
    alarm.sleep(10.0)
    rung_s = time.monotonic()
    alarm.sleep(0.05)
    slept_s = time.monotonic() - rung_s
    alarm.close()

    assert rung_s - started_s < 5.0
    assert slept_s >= 0.05
