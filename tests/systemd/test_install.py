"""Install, boot, upgrade, go back and uninstall, beside a trainer that must not notice, under a real systemd."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from booted_container import BootedContainer
from installed_service import SIDECAR, STATE_DIR, InstalledService, older_checkout
from sidecar_process import wait_for

pytestmark = pytest.mark.slow

COMMAND = "/usr/local/bin/dflash-sidecar"
UNITS = "/etc/systemd/system"
TO_VERSION_1 = """
ALTER TABLE records DROP COLUMN crc;
ALTER TABLE sessions DROP COLUMN first_seq;
PRAGMA user_version = 1;
"""


def files(container: BootedContainer) -> dict[str, tuple[int, int]]:
    """Every file of the places that an installation writes to: inode and time of the last change."""
    places = ("etc", "usr/local", "var/lib/dflash-sidecar", "opt/dflash")
    paths = [path for place in places for path in (container.root / place).rglob("*")]
    ours = [path for path in paths if "dflash" in str(path.relative_to(container.root))]
    stats = {str(path): path.lstat() for path in ours if path.suffix not in {".sqlite-wal", ".sqlite-shm", ".sqlite"}}
    return {name: (info.st_ino, info.st_mtime_ns) for name, info in stats.items()}


def environment(service: InstalledService) -> Path:
    """The environment that is the system's."""
    return Path(service.container.run("readlink", COMMAND).strip()).parent.parent


def version(service: InstalledService) -> str:
    """Version of the running sidecar."""
    text: str = service.status()["sidecar"]["version"]
    return text


@contextmanager
def stopped(service: InstalledService) -> Iterator[Path]:
    """The journal, while no sidecar runs."""
    service.systemctl("stop", SIDECAR)
    yield service.container.root / STATE_DIR.lstrip("/") / "journal.sqlite"


def test_environment_has_no_torch(service: InstalledService) -> None:
    """What is installed is what the sidecar needs; torch, transformers and the checkout are not in there."""
    python = str(environment(service) / "bin/python3")
    script = (
        "import importlib.util as u, sidecar; print(*map(u.find_spec, ('torch', 'transformers')), sidecar.__file__)"
    )

    assert service.container.run(python, "-c", script).startswith(f"None None {environment(service)}/lib/")
    assert service.shown("UnitFileState") == "enabled"


def test_anybody_may_ask_for_the_status(service: InstalledService) -> None:
    """The command is on the path, and a user without rights can use it; the journal is closed to him."""
    listen = ("--listen", service.url.removeprefix("http://"))
    told = service.container.run("setpriv", "--reuid=nobody", "--clear-groups", COMMAND, "status", *listen)
    denied = service.container.attempt("setpriv", "--reuid=nobody", "--clear-groups", "ls", STATE_DIR)

    assert "trainer      none" in told
    assert "Permission denied" in denied.stderr


def test_second_install_changes_nothing(service: InstalledService) -> None:
    """The same version again: no file is touched and the process stays."""
    before, pid = files(service.container), service.pid
    said = service.install()

    assert {line.split()[0] for line in said} == {"unchanged", "keep", "run"}
    assert (files(service.container), service.pid) == (before, pid)


def test_dry_run_only_says_what_it_would_do(service: InstalledService) -> None:
    """`--dry-run` of install and uninstall, by a user without rights too, names every file and changes none."""
    (service.container.root / UNITS.lstrip("/") / "dflash-trainer.slice").unlink()
    before, pid = files(service.container), service.pid
    install = service.container.run("setpriv", "--reuid=nobody", "--clear-groups", COMMAND, "install", "--dry-run")
    uninstall = service.container.run("setpriv", "--reuid=nobody", "--clear-groups", COMMAND, "uninstall", "--dry-run")
    after = files(service.container), service.pid
    service.install()

    assert after == (before, pid)
    assert f"would write {UNITS}/dflash-trainer.slice" in install
    assert f"unchanged  {UNITS}/{SIDECAR}" in install
    assert f"would remove {UNITS}/{SIDECAR}" in uninstall


def test_python_in_a_home_is_refused(service: InstalledService) -> None:
    """The unit cannot see homes, so an environment there is refused before anything is written."""
    service.container.run("/usr/bin/python3", "-m", "venv", "--without-pip", "/root/environment")
    service.container.run("cp", f"{environment(service)}/bin/dflash-sidecar", "/root/environment/bin/")
    packages = next((service.container.root / str(environment(service)).lstrip("/")).glob("lib/*/site-packages"))
    path = f"PYTHONPATH=/{packages.relative_to(service.container.root)}"
    before = files(service.container)
    refused = service.container.attempt("env", path, "/root/environment/bin/python", "-m", "sidecar", "install")

    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "dflash-sidecar: this environment, /root/environment, is out of the service's reach"
    )
    assert files(service.container) == before


def test_install_says_why_the_service_does_not_start(service: InstalledService) -> None:
    """A port that another process has is named, with exit code 1; the next install is enough."""
    service.systemctl("stop", SIDECAR)
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):
        failed = service.container.attempt(COMMAND, "install")
    service.install()

    assert failed.returncode == 1
    assert f"{host}:{port} is in use by another process" in failed.stderr
    assert service.shown("ActiveState") == "active"


def test_image_is_prepared_without_being_started(service: InstalledService) -> None:
    """`--root` installs into another root directory, users and directories too, and uninstalls from it."""
    image = service.container.root / "opt/image"
    pid = service.pid
    service.container.run(COMMAND, "install", "--root", "/opt/image")
    unit = image / UNITS.lstrip("/") / SIDECAR
    wanted = image / UNITS.lstrip("/") / "multi-user.target.wants" / SIDECAR
    found = unit.is_file(), wanted.is_symlink(), (image / "run/dflash").is_dir()
    users = (image / "etc/passwd").read_text()
    service.container.run(COMMAND, "uninstall", "--root", "/opt/image")

    assert found == (True, True, True)
    assert "dflash-sidecar:" in users
    assert "dflash-trainer:" in users
    assert not unit.exists()
    assert not wanted.is_symlink()
    assert service.pid == pid


def test_boot_without_a_trainer(service: InstalledService) -> None:
    """The sidecar starts with the machine, waits, and takes in a trainer that comes last."""
    wants = service.container.root / UNITS.lstrip("/") / "multi-user.target.wants"
    for other in wants.iterdir():
        if other.name != SIDECAR:
            other.unlink()  # this machine's own services
    service.container.shut_down()
    service.container.boot("multi-user.target")
    wait_for(lambda: service.shown("ActiveState") == "active", "the service")

    assert service.shown("StatusText") == "no trainer; 0 records, 0 lost"
    with service.trainer():
        wait_for(lambda: (service.steps() or 0) > 10, "steps")


def test_trainer_starts_first(service: InstalledService) -> None:
    """A trainer starts and trains where no sidecar can run; all of it is there when one comes."""
    service.systemctl("stop", SIDECAR)
    with service.no_sidecar_possible(), service.trainer() as unit:
        wait_for(lambda: service.audited("run") > 100, "steps without a sidecar")
        assert service.shown("ActiveState", unit) == "active"
        service.allow_sidecar()
        service.systemctl("start", SIDECAR)
        wait_for(lambda: (service.steps() or 0) > 50, "the steps from before")


def test_upgrade_takes_over_the_journal(service: InstalledService) -> None:
    """A newer version takes over a journal of version 1, and going back is one command; no record is lost by either."""
    service.install(checkout=older_checkout(service.container))
    versions = [version(service)]
    older = environment(service)
    service.begin_afresh()
    with service.trainer():
        wait_for(lambda: (service.steps() or 0) > 50, "steps")
        with stopped(service) as journal, closing(sqlite3.connect(journal)) as connection:
            connection.executescript(TO_VERSION_1)
        service.install()
        versions.append(version(service))
        wait_for(lambda: (service.steps() or 0) > 100, "more steps")
        with stopped(service) as journal, closing(sqlite3.connect(journal)) as connection:
            layout = connection.execute("PRAGMA user_version").fetchone()
        service.container.run(str(older / "bin/dflash-sidecar"), "install")
        versions.append(version(service))
    service.install()

    assert versions == ["0.0.9", "0.1.0", "0.0.9"]
    assert layout == (2,)


def test_uninstall_leaves_the_trainer_alone(service: InstalledService) -> None:
    """Uninstalling under a live trainer takes the sidecar away; installed again, it has everything."""
    with service.trainer("kept") as unit:
        wait_for(lambda: (service.steps() or 0) > 20, "steps")
        said = service.container.run(COMMAND, "uninstall")
        gone = service.shown("LoadState"), service.shown("ActiveState"), service.steps()
        trainer = service.shown("ActiveState", unit)
        assert (service.container.root / STATE_DIR.lstrip("/") / "journal.sqlite").exists()
        service.install()
    command = str(environment(service) / "bin/dflash-sidecar")
    service.container.run(command, "uninstall")
    again = service.container.run(command, "uninstall").splitlines()
    left = sorted(path.name for path in (service.container.root / UNITS.lstrip("/")).glob("dflash*"))
    service.install()

    assert f"leave      {UNITS}/dflash-trainer@.service: {unit} is running" in said
    assert gone == ("not-found", "inactive", None)
    assert trainer == "active"
    assert [line.split()[0] for line in again] == ["run", "left"]  # nothing is there to be removed
    assert left == ["dflash-trainer@.service.d"]  # this test's own
