"""What is published: an sdist, and a wheel that is the same whether built from it or from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel built from the checkout, and one built from its sdist, outside of it."""
    place = tmp_path_factory.mktemp("packages")
    ignored = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, place / "checkout", ignore=ignored)
    python = place / "tools/bin/python"
    run(sys.executable, "-m", "venv", str(place / "tools"))
    run(str(python), "-m", "pip", "install", "--quiet", "hatchling")
    run(str(python), "-m", "hatchling", "build", "--directory", str(place), "--target", "sdist", cwd=place / "checkout")
    (sdist,) = place.glob("*.tar.gz")
    built = []
    for name, source in (("direct", place / "checkout"), ("from_sdist", sdist)):
        run(str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place / name), str(source))
        built += list((place / name).glob("*.whl"))
    return built[0], built[1]


@pytest.fixture(scope="module")
def installed(wheels: tuple[Path, Path]) -> Path:
    """An environment with the wheel, and what it depends on out of the environment of the tests."""
    place = wheels[0].parent / "environment"
    run(sys.executable, "-m", "venv", str(place))
    run(str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", str(wheels[0]))
    (packages,) = place.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    return place


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command to its end, without a path to the checkout."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_from_the_sdist_is_the_same(wheels: tuple[Path, Path]) -> None:
    """Nothing that a wheel needs is missing in the sdist."""
    contents = [{item.filename: item.CRC for item in zipfile.ZipFile(wheel).infolist()} for wheel in wheels]

    assert contents[0] == contents[1]


def test_wheel_holds_every_module_and_its_data(wheels: tuple[Path, Path]) -> None:
    """All files of the three packages and all unit files are in the wheel."""
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    expected = {f"sidecar/units/{path.relative_to(ROOT / 'systemd')}" for path in files(ROOT / "systemd")}
    for package in ("trainer", "sidecar", "shared"):
        expected |= {str(path.relative_to(ROOT)) for path in files(ROOT / package)}

    assert expected - names == set()


def files(directory: Path) -> list[Path]:
    """Every file below a directory that is no cache."""
    return [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_commands_run_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Shipped definitions, presets and unit files are found where the wheel was installed."""
    (definitions,) = installed.glob("lib/*/site-packages/sidecar/metrics.toml")
    sidecar = str(installed / "bin/dflash-sidecar")
    checked = run(sidecar, "check", str(definitions), "--state-dir", str(tmp_path), cwd=tmp_path)
    presets = run(str(installed / "bin/dflash-train"), "presets", cwd=tmp_path)
    script = (
        "from pathlib import Path; from sidecar.service import SERVICE, _shipped; print(_shipped(SERVICE, Path('/x')))"
    )
    unit = run(str(installed / "bin/python"), "-c", script, cwd=tmp_path)

    assert ": good" in checked
    assert "embedded" in presets
    assert "ExecStart=/x/bin/dflash-sidecar run" in unit
