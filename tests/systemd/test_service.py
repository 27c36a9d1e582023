"""What systemd does to the sidecar, beside a trainer that must not notice: real units under a real systemd."""

import socket

import pytest
from installed_service import SIDECAR, STATE_DIR, STEPS_PER_SECOND, InstalledService, await_restart
from sidecar_process import wait_for

pytestmark = pytest.mark.slow

METRIC = """
[[metric]]
name = "dflash_twice_the_steps"
help = "Steps, twice."
type = "gauge"
expr = "2 * dflash_steps_total"
"""
WEDGE = """
import os, signal, sys, time
if sys.argv[-1] == "/etc/dflash/sidecar.toml":
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
"""
"""Stops the main thread in the middle of what it does, while all others go on."""


def test_twenty_restarts(service: InstalledService) -> None:
    """`systemctl restart` twenty times over in a row ends every time in a new process that is ready."""
    pids = [service.pid]
    with service.trainer():
        for _ in range(20):
            service.systemctl("restart", SIDECAR)
            pids.append(service.pid)

    assert len(set(pids)) == 21
    assert service.shown("ActiveState") == "active"


def test_trainer_runs_as_another_user_and_hangs_on_nothing(service: InstalledService) -> None:
    """Users and slices differ, and no dependency leads from the sidecar's end to a trainer's."""
    with service.trainer() as unit:
        users = service.shown("User"), service.shown("User", unit)
        slices = service.shown("Slice"), service.shown("Slice", unit)
        service.systemctl("stop", SIDECAR)
        service.systemctl("start", SIDECAR)
        back_edges = [service.shown(name) for name in ("RequiredBy", "BoundBy", "ConsistsOf", "PropagatesStopTo")]

    assert users == ("dflash-sidecar", "dflash-trainer")
    assert slices == ("system.slice", "dflash-trainer.slice")
    assert back_edges == [""] * 4


def test_reload_takes_in_definitions(service: InstalledService) -> None:
    """`systemctl reload` makes a new definition live in the same process, and a bad one is refused with its line."""
    definitions = service.container.root / STATE_DIR.lstrip("/") / "metrics.toml"
    with service.trainer():
        pid = service.pid
        definitions.write_text(METRIC)
        service.systemctl("reload", SIDECAR)
        wait_for(lambda: "\ndflash_twice_the_steps " in service.page(), "the new metric")
        definitions.write_text(METRIC.replace("2 *", "2 **"))
        service.systemctl("reload", SIDECAR)
        wait_for(lambda: bool(service.status()["definitions"]["problem"]), "the refusal")

        assert "metrics.toml:6" in service.status()["definitions"]["problem"]
        assert "\ndflash_twice_the_steps " in service.page()
        assert service.pid == pid


def test_killed_sidecar_comes_back(service: InstalledService) -> None:
    """`kill -9` three times: systemd starts it again each time."""
    with service.trainer():
        for _ in range(3):
            pid = service.pid
            service.systemctl("kill", "--signal=SIGKILL", "--kill-who=main", SIDECAR)
            await_restart(service, pid)


def test_stopped_process_is_ended_by_the_watchdog(service: InstalledService) -> None:
    """A healthy one is left alone; under SIGSTOP it makes no progress, the watchdog ends it and another one starts."""
    service.drop_in("[Service]\nWatchdogSec=2s\n")
    service.systemctl("restart", SIDECAR)
    pid = service.pid
    with service.trainer():
        wait_for(lambda: (service.steps() or 0) > 3 * STEPS_PER_SECOND, "three seconds of health")
        assert service.pid == pid
        service.systemctl("kill", "--signal=SIGSTOP", "--kill-who=main", SIDECAR)
        await_restart(service, pid)
    service.drop_in("")

    assert "Failed with result 'watchdog'" in service.log()


def test_wedged_main_loop_is_ended_by_the_watchdog(service: InstalledService) -> None:
    """HTTP threads still answer, but the main loop stands: the watchdog ends it, and the log says where it stood."""
    service.container.write("/opt/wedge/sitecustomize.py", WEDGE)
    service.drop_in("[Service]\nWatchdogSec=2s\nEnvironment=PYTHONPATH=/opt/wedge\n")
    service.systemctl("restart", SIDECAR)
    with service.trainer():
        pid = service.pid
        service.systemctl("kill", "--signal=SIGUSR1", "--kill-who=main", SIDECAR)
        wait_for(lambda: service.page("/-/healthy") != "", "an answer beside the wedged loop", timeout_s=1.0)
        await_restart(service, pid)
    service.drop_in("")

    log = service.log()
    assert "Fatal Python error: Aborted" in log
    assert "sitecustomize.py" in log.rpartition("Fatal Python error")[2]


def test_key_of_wandb_is_a_credential(service: InstalledService) -> None:
    """Without a key rows wait; with one in /etc/credstore it is used, and is in neither log nor environment."""
    service.drop_in("[Service]\nEnvironment=DFLASH_WANDB_MODE=online WANDB_BASE_URL=http://127.0.0.1:9\n")
    key = service.container.root / "etc/credstore/wandb-api-key"
    with service.trainer():
        service.systemctl("restart", SIDECAR)
        wait_for(lambda: service.wandb_state() == "no-credentials", "the lack of a key to show")
        service.container.write("/etc/credstore/wandb-api-key", "0123456789" * 4)
        key.chmod(0o600)
        service.systemctl("restart", SIDECAR)
        wait_for(lambda: service.wandb_state() in {"starting", "waiting"}, "an attempt with the key")
        environ = service.container.run("cat", f"/proc/{service.pid}/environ")
    key.unlink()
    service.drop_in("")

    assert "CREDENTIALS_DIRECTORY" in environ
    assert "0123456789" not in environ + service.log()


def test_setting_that_cannot_be_read_is_not_tried_for_ever(service: InstalledService) -> None:
    """A mistyped setting fails once, with its name in the log; a restart after the correction is enough."""
    service.container.write("/etc/dflash/sidecar.toml", service.settings + "intervall_s = 1\n")
    assert service.container.attempt("systemctl", "restart", SIDECAR).returncode == 1
    failed = service.shown("ActiveState"), service.shown("NRestarts")
    service.container.write("/etc/dflash/sidecar.toml", service.settings)
    service.systemctl("restart", SIDECAR)

    assert failed == ("failed", "0")
    assert "intervall_s" in service.log()
    assert service.shown("ActiveState") == "active"


def test_taken_port_is_waited_for(service: InstalledService) -> None:
    """A port that another process has may become free, so it is tried until then."""
    service.systemctl("stop", SIDECAR)
    host, port = service.settings.split('"')[1].split(":")
    with socket.create_server((host, int(port))):
        service.systemctl("start", "--no-block", SIDECAR)
        wait_for(lambda: int(service.shown("NRestarts")) >= 2, "a second try")
    await_restart(service, 0)

    assert f"{host}:{port} is in use by another process" in service.log()
